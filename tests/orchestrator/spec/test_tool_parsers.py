"""The tool parsers that `validate` accepts are those that vLLM can read a turn with (tests/real/test_tool_calls.py)."""

from __future__ import annotations

import pytest

from tests.real.call_forms import FORMS, OTHERS, READ_NO_TEXT
from troupe.orchestrator.spec import tool_parsers
from troupe.orchestrator.spec.tool_parsers import parser_problem


@pytest.mark.parametrize("name", sorted(FORMS.keys() | OTHERS))
def test_a_parser_of_vllm_is_accepted(name: str) -> None:
    assert parser_problem(name) == ""


@pytest.mark.parametrize("name", sorted(READ_NO_TEXT))
def test_a_parser_that_reads_no_text_is_refused(name: str) -> None:
    assert parser_problem(name) == f"vLLM's tool parser {name} does not read the text of a turn; choose another one"


def test_an_unknown_parser_is_refused_where_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parser_problem("nothing").startswith("vLLM has no tool parser 'nothing' (apertus, cohere_command3, ")
    monkeypatch.setattr(tool_parsers, "_parsers", dict)
    assert parser_problem("nothing") == ""
