"""The tool `python`: what the model reads as its answer."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from troupe.workers.agents.environments import functions
from troupe.workers.agents.environments.functions import LONGEST_ANSWER, describe_result, python
from troupe.workers.agents.sandbox.run import SandboxLimits, SandboxResult


def test_the_answer_is_what_the_program_prints() -> None:
    assert python("print(6 * 7)") == "42"


def test_a_failure_shows_the_output_and_the_end_of_the_traceback() -> None:
    answer = python("print('so far')\ndef f(n):\n    return 1 / n if n == 0 else f(n - 1)\nf(30)")
    assert answer.startswith("so far\n")
    assert answer.endswith("ZeroDivisionError: division by zero")
    assert len(answer.splitlines()) <= 9


def test_a_program_that_prints_nothing_is_told_so() -> None:
    assert python("x = 1") == "[no output: print the result]"


def test_the_answer_has_a_longest_length() -> None:
    answer = python("print('x' * 10**6)\nraise ValueError('y' * 10**5)")
    assert len(answer) == LONGEST_ANSWER
    assert answer.startswith("xxx") and "[output cut: 1000001 characters]" in answer and answer.endswith("yyy")


def test_calls_share_nothing() -> None:
    assert python("open('note', 'w').write('x'); print('written')") == "written"
    assert python("import os; print(os.listdir())") == "[]"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("while True: pass", "[stopped after 0.5 seconds]"),
        ("import ctypes; ctypes.string_at(0)", "[ended by signal 11]"),
        ("import os; os._exit(3)", "[exit code 3]"),
    ],
)
def test_the_answer_says_why_a_program_ended(code: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LIMITS", SandboxLimits(timeout_s=0.5 if "while" in code else 30.0))
    assert python(code) == answer


def test_memory_that_ran_out_is_named() -> None:
    result = SandboxResult("", "Traceback\nMemoryError\n", exit_code=1, out_of_memory=True)
    assert describe_result(result) == "Traceback\nMemoryError\n[out of memory: the limit is 512 MiB]"
    assert describe_result(replace(result, stdout="x" * 50, stderr="e" * 90), longest=60).endswith("512 MiB]")


def test_its_schema_can_be_read_from_signature_and_docstring() -> None:
    signature = inspect.signature(python, eval_str=True)
    assert {name: parameter.annotation for name, parameter in signature.parameters.items()} == {"code": str}
    assert signature.return_annotation is str
    assert "Args:\n    code: " in inspect.getdoc(python)  # type: ignore[operator]
