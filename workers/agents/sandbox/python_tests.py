"""Reward for Python programs: the share of test cases that they pass, or whether they pass all.

The program runs in a sandbox (`run.py`). Expected results never enter it: the sandbox gets inputs and returns results,
and the comparison happens here. A program that prints a result, exits early or replaces `print` or `__eq__` changes
its own results, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from troupe.workers.agents.sandbox.assertions import ITEMS, RAISED, Assertions, parse_assertions
from troupe.workers.agents.sandbox.run import SandboxLimits, SandboxStarter, run_python
from troupe.workers.rewards.answer_text import visible

Style = Literal["auto", "stdin", "function"]

_FENCED = re.compile(
    r"(?P<alone>^[ \t]*)?(?P<fence>```|~~~)(?:[^\n]*?(?P=fence)"
    r"|(?(alone)[ \t]*)(?P<language>[\w+#.-]*)(?(alone)[^\n`]*|[ \t\r]*)\n(?P<code>.*?)"
    r"(?:^[ \t]*(?P=fence)(?!\w)|(?=^[ \t]*(?P=fence)\w)|\Z))",
    re.S | re.M,
)
"""A block, or code within a line, which has no group `code`. Within a line, only a language may follow what opens a
block; a fence with a language opens one, and closes none."""
_PYTHON = ("python", "python3", "py")
_RESULTS_KIB = 4096
"""Results of a response that are read, for all cases together."""

_DRIVER = '''
import importlib.util, json, os, signal, sys
from collections.abc import ItemsView, KeysView
from itertools import islice
from time import monotonic

channel = open(os.dup(1), "wb")
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)


class OutOfTime(BaseException):
    pass


def interrupt(number, frame):
    raise OutOfTime


def plain(value):
    """The value as JSON, with a tag where JSON has no such type."""
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**53 else {"int": hex(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind, tag in ((tuple, "tuple"), (set, "set"), (frozenset, "set"), (KeysView, "set"), (ItemsView, "set")):
        if isinstance(value, kind):
            return {tag: [plain(item) for item in value]}
    raise TypeError(f"a result is neither data nor made of data: {type(value).__name__}")


def items(value, sized):
    """A list of what an iterator, a view or another iterable has; data as they are, and what Python cannot iterate."""
    data = (str, list, tuple, dict, set, frozenset, bytes, bytearray)
    if isinstance(value, data) or hasattr(value, "tolist"):
        return value
    if not hasattr(type(value), "__len__" if sized else "__iter__"):
        return value
    found = list(islice(value, 2**20 + 1))
    if len(found) > 2**20:
        raise ValueError("a result has too many items, or no end")
    return found


def raised(call):
    """Names of the classes of what a call raises."""
    try:
        call()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def main(seconds):
    began = monotonic()
    spec = importlib.util.find_spec("solution")
    sys.modules["solution"] = solution = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(solution)
    except SystemExit:  # what it defined before may be right
        pass
    cases = importlib.import_module("cases").CASES
    signal.signal(signal.SIGALRM, interrupt)
    for number, calls in enumerate(cases):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            results = [plain(call()) for call in calls]
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            results = None
        channel.write(json.dumps([number, results, monotonic() - began]).encode() + b"\\n")
        channel.flush()


sys.setrecursionlimit(10000)
'''
"""The program that runs in the sandbox; the response is the module `solution`, the calls are in the module `cases`."""


@dataclass(frozen=True)
class _Case:
    """Calls for the sandbox, and whether their results pass."""

    calls: tuple[str, ...]
    passes: Callable[[Sequence[Any]], bool]


def python_tests(
    response: str,
    answer: str,
    metadata: dict[str, Any],
    *,
    style: Style = "auto",
    tests: str = "answer",
    timeout_s: float = 2.0,
    total_s: float = 4.0,
    memory_mib: int = 512,
    partial: bool = False,
    max_cases: int = 0,
    tolerance: float = 0.0,
    prelude: str = "",
    packages: bool = False,
    opens_thought: bool = False,
) -> float:
    """1 if the response's program passes all test cases, else 0; with `partial`, the share of the cases that pass.

    The program is the last ```python block behind the thought, else the last block of no language, else all of it.
    `docs/guides/reward.md` describes the forms of test cases.

    Args:
        style: `stdin`: each case runs the program and compares what it prints; `function`: each case calls a function;
            `auto`: `function` if the cases name a function or are assertions.
        tests: Where the cases are: `answer`, or a key of the metadata.
        timeout_s: Seconds of one case. A case that takes longer fails.
        total_s: Seconds of all cases. If they are used up and a case failed, the remaining cases fail as well. The
            component's own `timeout_s` must be longer. Neither time counts the start of sandboxes.
        memory_mib: Memory of the program.
        partial: Whether some of the cases count for a part of the reward.
        max_cases: Number of cases that are run, the first ones; 0: all.
        tolerance: Largest relative or absolute difference of numbers that count as equal.
        prelude: Code before the program, such as imports that the prompt promises.
        packages: Whether the program may import installed packages.
        opens_thought: Whether the chat template opens the thought: a response without its end was cut inside.

    Raises:
        ValueError: the test cases cannot be used.
        TimeoutError: `total_s` was used up, though no case had failed.
        SandboxError: the sandbox failed.
    """
    if style not in ("auto", "stdin", "function"):
        raise ValueError(f"style must be auto, stdin or function, not {style!r}")
    if min(timeout_s, total_s) <= 0 or tolerance < 0 or max_cases < 0:
        raise ValueError("timeout_s and total_s must be positive, tolerance and max_cases not negative")
    given = _read_tests(metadata.get("right_answers") or answer if tests == "answer" else metadata[tests], metadata)
    program = extract_code(visible(response, opens_thought=opens_thought))
    code = f"{prelude}\n{program}" if prelude else program
    limits = SandboxLimits(timeout_s, memory_mib, output_kib=_RESULTS_KIB, packages=packages)
    if _is_function_style(given, style):
        setup, cases = _function_cases(given, metadata, tolerance)
        cases = cases[: max_cases or None]
        verdicts = _run_calls(code, setup, cases, replace(limits, timeout_s=total_s), timeout_s)
        return _judge(verdicts, len(cases), partial)
    # Input and expected output; both may be given as lists of lines.
    pairs = [(_as_text(entered), _as_text(expected)) for entered, expected in _pairs(given)][: max_cases or None]
    return _judge(_run_programs(code, pairs, limits, total_s, tolerance, partial), len(pairs), partial)


def has_tests(given: Any, metadata: dict[str, Any]) -> bool:
    """Whether a value of the data has one of the forms of test cases, and can be used."""
    try:
        cases = _read_tests(given, metadata)
        return bool(_function_cases(cases, metadata, 0.0)[1] if _is_function_style(cases, "auto") else _pairs(cases))
    except (ValueError, RecursionError):
        return False


def extract_code(response: str) -> str:
    """The last ```python block of a response, which may lack its end; else the last block of no language, else all."""
    found = [one for one in _FENCED.finditer(response) if one["code"] is not None]
    blocks = [(one["language"].lower(), one["code"]) for one in found]
    codes = [code for language, code in blocks if language in _PYTHON]
    codes = codes or [code for language, code in blocks if not language]
    return codes[-1] if codes else response


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs agree, line by line, but for white space at the ends of lines and of the text. With a
    tolerance, words that are numbers may differ by it."""
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (output, expected))
    if ours == theirs or not tolerance:
        return ours == theirs
    words = [[line.split() for line in lines] for lines in (ours, theirs)]
    return all(
        a is not None and b is not None and len(a) == len(b) and all(map(_same_word, a, b, [tolerance] * len(a)))
        for a, b in zip_longest(*words)
    )


def _same_word(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def _judge(verdicts: Sequence[bool], cases: int, partial: bool) -> float:
    """The reward by the verdicts on the cases that were run. Raises TimeoutError if the program may be right."""
    if len(verdicts) < cases and all(verdicts):
        raise TimeoutError(
            f"time for {len(verdicts)} of {cases} cases, none of which failed: raise total_s and the timeout_s of the "
            "function, or set max_cases"
        )
    passed = sum(verdicts)
    return passed / cases if partial else float(passed == cases)


def _parsed(given: Any) -> Any:
    """What a text says as JSON; other values, and texts that are no JSON, as they are."""
    with contextlib.suppress(ValueError):
        return json.loads(given) if isinstance(given, str) else given
    return given


def _read_tests(given: Any, metadata: dict[str, Any]) -> Any:
    """Test cases as an object with inputs and outputs, as a list of assertions, or as text with assertions."""
    given = _parsed(given)
    given = given.get("test_cases") or given if isinstance(given, dict) else given
    if not isinstance(given, (str, list, dict)) or not given:
        raise ValueError(f"no test cases: expected an object, a list of assertions or their text, got {given!r:.80}")
    if isinstance(given, list) and all(isinstance(case, dict) for case in given):
        if not all({"input", "output"} <= case.keys() for case in given):
            raise ValueError(f"test cases need `input` and `output`, got {given[0]!r:.80}")
        function = given[0].get("fn_name")
        if not function and given[0].get("testtype") == "functional":  # LiveCodeBench has the name in `metadata`
            own = _parsed(metadata.get("metadata"))
            function = own.get("func_name") if isinstance(own, dict) else None
            if not function:
                raise ValueError("test cases of the style function need `func_name` in the metadata's `metadata`")
        named = {"fn_name": function} if function else {}
        return {name: [case[name[:-1]] for case in given] for name in ("inputs", "outputs")} | named
    return given


def _is_function_style(given: Any, style: Style) -> bool:
    has_function = not isinstance(given, dict) or bool(given.get("fn_name")) or "test" in given
    if style == "stdin" and not isinstance(given, dict):
        raise ValueError("test cases of the style stdin are an object with inputs and outputs")
    return has_function if style == "auto" else style == "function"


def _pairs(given: dict[str, Any]) -> list[tuple[Any, Any]]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("test cases need `inputs` and `outputs`, two lists of the same length, at least 1")
    return list(zip(inputs, outputs, strict=True))


def _as_text(value: Any) -> str:
    """A text, which may be given as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _function_cases(given: Any, metadata: dict[str, Any], tolerance: float) -> tuple[list[str], list[_Case]]:
    """Statements that come first, and the cases."""
    if isinstance(given, dict) and "test" not in given:
        return _call_cases(given, tolerance)
    source, function = given, str(metadata.get("entry_point") or "")
    if isinstance(given, dict):
        source, function = given["test"], str(given.get("entry_point") or given.get("fn_name") or function)
    first = (metadata.get("test_imports"), metadata.get("test_setup_code"))  # MBPP
    text = "\n".join(_as_text(part) for part in (*first, source) if part)
    found: Assertions = parse_assertions(text, function)
    return found.setup, [_Case(assertion.calls, assertion.holds) for assertion in found.cases]


def _call_cases(given: dict[str, Any], tolerance: float) -> tuple[list[str], list[_Case]]:
    """Cases that call `fn_name`, which may be a method of a class `Solution`."""
    name = given.get("fn_name")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"test cases of the style function need `fn_name`, the name of a function, got {name!r:.80}")
    setup = [
        "import json as _json",
        f"_function = getattr(solution if hasattr(solution, {name!r}) else solution.Solution(), {name!r})",
    ]
    cases = []
    for entered, expected in _pairs(given):
        if isinstance(entered, str):  # LiveCodeBench: one argument in each line, as JSON
            entered = [json.loads(line) for line in entered.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        if not isinstance(entered, list):
            raise ValueError(f"an input of the style function is a list of arguments, got {entered!r:.80}")
        call = f"_function(*_json.loads({json.dumps(entered)!r}))"
        cases.append(_Case((call,), _returns(expected, tolerance)))
    return setup, cases


def _returns(expected: Any, tolerance: float) -> Callable[[Sequence[Any]], bool]:
    """Whether a function returned what is expected. As in APPS, [x] stands for x."""

    def returned_expected(results: Sequence[Any]) -> bool:
        alternatives = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ())]
        return any(_same_value(results[0], one, tolerance) for one in alternatives)

    return returned_expected


def _same_value(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Whether two values agree as JSON: a tuple is a list, and the keys of objects are texts."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same_value, ours, theirs, [tolerance] * len(ours)))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        named = {str(key): value for key, value in ours.items()}
        return named.keys() == theirs.keys() and all(_same_value(named[key], theirs[key], tolerance) for key in theirs)
    if tolerance and isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
    return bool(ours == theirs)


def _run_programs(
    code: str, pairs: list[tuple[str, str]], limits: SandboxLimits, total_s: float, tolerance: float, partial: bool
) -> list[bool]:
    """Whether the cases pass, each in a separate sandbox, until time is up, or one fails and not `partial`."""
    verdicts: list[bool] = []
    left, longest = total_s, min(limits.timeout_s, total_s)
    with SandboxStarter() as starter:
        for stdin, expected in pairs:
            allowed = min(longest, left)
            result = run_python(code, stdin, limits=replace(limits, timeout_s=allowed), starter=starter)
            if result.timed_out and allowed < longest:
                break  # it had less than a case may take
            right = result.ok and not result.stdout_discarded and same_output(result.stdout, expected, tolerance)
            verdicts.append(right)
            left -= result.program_s
            if left <= 0 or not (right or partial):
                break
    return verdicts


def _run_calls(code: str, setup: list[str], cases: list[_Case], limits: SandboxLimits, timeout_s: float) -> list[bool]:
    """Whether the cases pass that were run until time was up. All run in one sandbox, one after the other."""
    calls = ["(" + "".join(f"lambda: ({call}), " for call in case.calls) + ")," for case in cases]
    helpers = f"from __main__ import items as {ITEMS}, raised as {RAISED}"
    lines = ["import solution", "globals().update(vars(solution))", helpers, *setup, "CASES = (", *calls, ")"]
    modules = {"solution": code, "cases": "\n".join(lines)}
    result = run_python(f"{_DRIVER}\nmain({timeout_s!r})\n", limits=limits, modules=modules)
    found = _read_results(result.stdout)
    verdicts = [
        len(results := found[number][0]) == len(case.calls) and case.passes(results)
        for number, case in enumerate(cases)
        if number in found
    ]
    last_s = limits.timeout_s - max((ended_s for _, ended_s in found.values()), default=0.0)
    if len(verdicts) < len(cases) and (not result.timed_out or last_s >= min(timeout_s, limits.timeout_s)):
        verdicts.append(False)  # the program ended early, or a case swallowed the end of its time
    return verdicts


def _read_results(text: str) -> dict[int, tuple[list[Any], float]]:
    """The results of each case, none if it failed, and its end in seconds; what is no result is skipped."""
    found: dict[int, tuple[list[Any], float]] = {}
    for line in text.splitlines():
        try:
            number, results, ended_s = json.loads(line)
            found.setdefault(int(number), ([_restore(result) for result in results or ()], float(ended_s)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            continue
    return found


def _restore(value: Any) -> Any:
    """The value that `plain` in the driver wrote."""
    if isinstance(value, list):
        return [_restore(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    restore: dict[str, Callable[[Any], Any]] = {
        "int": lambda text: int(text, 16),
        "bytes": bytes.fromhex,
        "complex": lambda parts: complex(*parts),
        "tuple": lambda items: tuple(map(_restore, items)),
        "set": lambda items: set(map(_restore, items)),
        "dict": lambda items: {_restore(key): _restore(item) for key, item in items},
    }
    return restore[tag](content)
