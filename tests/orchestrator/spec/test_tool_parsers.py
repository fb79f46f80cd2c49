"""The tool parsers that `validate` accepts are those that vLLM can read a turn with (tests/real/test_tool_calls.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.spec.test_engine_options import load
from tests.real.call_forms import FORMS, OTHERS, READ_NO_TEXT
from troupe.orchestrator.spec import installed_vllm
from troupe.orchestrator.spec.checks.machine import missing

PATH = "roles.environment.tool_parser"


def parser_problem(name: str) -> str:
    return dict(installed_vllm.unusable_parsers({PATH: name})).get(PATH, "")


@pytest.mark.parametrize("name", sorted(FORMS.keys() | OTHERS))
def test_a_parser_of_vllm_is_accepted(name: str) -> None:
    assert parser_problem(name) == ""


@pytest.mark.parametrize("name", sorted(READ_NO_TEXT))
def test_a_parser_that_reads_no_text_is_refused(name: str) -> None:
    assert parser_problem(name) == f"vLLM's tool parser {name} does not read the text of a turn; choose another one"


def test_an_unknown_parser_is_refused_where_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parser_problem("nothing").startswith("vLLM has no tool parser 'nothing' (apertus, cohere_command3, ")
    monkeypatch.setattr(installed_vllm, "_offers", lambda: None)
    assert parser_problem("nothing") == ""


def test_the_files_check_of_a_spec_includes_its_parsers(tmp_path: Path) -> None:
    spec = load(tmp_path, "roles.environment={name: tools, args: {tools: [calculator]}, tool_parser: hermess}")
    assert dict(missing(spec))[PATH] == "vLLM has no tool parser 'hermess' (did you mean 'hermes'?)"
