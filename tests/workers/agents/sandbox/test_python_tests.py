"""The reward function `python_tests`: right and wrong programs, forms of test cases, and forged verdicts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from troupe.workers.agents.sandbox import python_tests as module
from troupe.workers.agents.sandbox.assertions import parse_assertions
from troupe.workers.agents.sandbox.python_tests import extract_code, python_tests, same_output
from troupe.workers.agents.sandbox.run import SandboxLimits, SandboxResult, SandboxStarter
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.runner import RewardProcess, Sample

DOUBLE = {"inputs": ["1\n", "2\n", "21\n"], "outputs": ["2\n", "4\n", "42\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]], ["a", "b"]], "outputs": [3, [1, 2], "ab"]}
ASSERTS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]


def score(code: str, tests: Any, **args: Any) -> float:
    """The reward of a response that is this program."""
    return python_tests(f"Here it is:\n```python\n{code}\n```\nDone.", json.dumps(tests), {}, **args)


# The program


@pytest.mark.parametrize(
    "end", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()", "raise SystemExit", "copyright"]
)
def test_a_program_may_end_with_what_site_defines(end: str) -> None:
    stdin = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    assert score(f"print(sum(map(int, input().split())))\n{end}", stdin) == 1.0
    calls = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert score(f"def add(a, b):\n    return a + b\n{end}", calls) == 1.0
    assert score(f"{end}\ndef subtract(a, b):\n    return a - b", calls) == 0.0


def test_the_sandbox_defines_what_site_does() -> None:
    given = {"inputs": [""], "outputs": ["True __main__ /program/main.py"]}
    names = "exit", "quit", "copyright", "credits", "license", "help"
    program = f"import builtins, sys\nprint(all(hasattr(builtins, name) for name in {names}), __name__, sys.argv[0])"
    assert score(program, given) == 1.0


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first\n```python\na\n```\nthen\n```py\nb\n```\nend", "b\n"),
        ("```python\na\n```\n```text\noutput\n```", "a\n"),
        ("```python\nprint('```')\nb", "print('```')\nb"),
        ("<think>```python\nx\n```</think>\n  ```Python3 \r\n  y\r\n  ```", "  y\r\n"),
        ("", ""),
        ("Here:\n```\nprint(1)\n```\nDone", "print(1)\n"),
        ("Here: ```python\nprint(1)\n```", "print(1)\n"),
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("I use ```python ... ``` fences:\n\n```python\na\n```", "a\n"),
        ("```x``` prints:\n```\na\n```", "a\n"),
        ("Use a ``` fence, as said:\n```python\na\n```", "a\n"),
        ("I end blocks with ```\n\n```python\na\n```", "a\n"),
        ("from a ~~~ b\n```python\na\n```\nDone ``` now", "a\n"),
        ("```python\na = '``` b'\nc\n```", "a = '``` b'\nc\n"),
    ],
)
def test_the_program_is_the_last_python_block_or_the_whole_response(response: str, code: str) -> None:
    assert extract_code(response) == code


# Standard input and output


def test_a_program_that_prints_what_is_expected_gets_1() -> None:
    assert score("print(int(input()) * 2)", DOUBLE) == 1.0


@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("print(int(input()) + 1)", 1 / 3),
        ("print(2 * int(input()) if input else 0); raise SystemExit(1)", 0.0),
        ("print('no')", 0.0),
        ("n = int(input())\nprint(2 * n)\n1 / (n - 2)", 2 / 3),
        ("n = int(input())\nwhile n == 1: pass\nprint(2 * n)", 2 / 3),
        ("this is not Python", 0.0),
        ("", 0.0),
    ],
)
def test_a_wrong_program_gets_0_or_its_share(code: str, share: float) -> None:
    timeout_s = 1.5 if "while" in code else 30.0
    assert score(code, DOUBLE, timeout_s=timeout_s) == 0.0
    assert score(code, DOUBLE, timeout_s=timeout_s, partial=True) == pytest.approx(share)


def test_lines_may_be_given_as_lists_and_white_space_at_ends_does_not_count() -> None:
    tests = {"inputs": [["2", "3"]], "outputs": [["5 ", "6"]]}
    assert score("a, b = int(input()), int(input())\nprint(a + b)\nprint(a * b, end='   \\n\\n')", tests) == 1.0


def test_unicode_passes_through() -> None:
    assert score("print(input()[::-1])", {"inputs": ["äß\u4f60\U0001f600"], "outputs": ["\U0001f600\u4f60ßä"]}) == 1.0


SLEEPS = "import time\ntime.sleep(int(input()))\nprint(1)"


def test_all_cases_share_one_time_limit() -> None:
    """The second case fails for itself; it and the third take the time of those that are left."""
    tests = {"inputs": ["0"] + ["60"] * 49, "outputs": ["1"] * 50}
    assert score(SLEEPS, tests, timeout_s=1.0, total_s=2.0, partial=True) == pytest.approx(1 / 50)
    assert score("print(1)", {"inputs": ["1"] * 50, "outputs": ["1"] * 50}, max_cases=2) == 1.0


def test_a_program_that_no_case_failed_when_the_time_was_up_has_no_reward() -> None:
    """It may be right: 0 would be a verdict that nobody reached."""
    message = r"time for 1 of 3 cases, none of which failed: raise total_s"
    with pytest.raises(TimeoutError, match=message):
        score(SLEEPS, {"inputs": ["0", "60", "0"], "outputs": ["1"] * 3}, total_s=1.2)
    calls = {"fn_name": "f", "inputs": [[0], [60], [0]], "outputs": [1] * 3}
    with pytest.raises(TimeoutError, match=message):
        score("import time\ndef f(x): return time.sleep(x) or 1", calls, total_s=1.2, partial=True)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",  # as the program, and when it is imported
        "def f(x):\n    while True:\n        try:\n            while x: pass\n            return 1\n"
        "        except BaseException: pass\nf(1)",
    ],
)
def test_a_program_that_hangs_for_as_long_as_a_case_may_take_is_wrong(code: str) -> None:
    assert score(code, {"inputs": ["1"] * 9, "outputs": ["1"] * 9}, timeout_s=0.5, total_s=1.0) == 0.0
    calls = {"fn_name": "f", "inputs": [[0], [1], [0]], "outputs": [1] * 3}
    assert score(code, calls, timeout_s=0.4, total_s=0.9) == 0.0


def test_only_the_programs_own_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes that take 10 times as long to start as their programs to run, and longer than `total_s` together."""
    run, allowed = module.run_python, []

    def start_slowly(code: str, stdin: str, *, limits: SandboxLimits, starter: SandboxStarter) -> SandboxResult:
        time.sleep(0.05)
        allowed.append(limits.timeout_s)
        return replace(run(code, stdin, limits=limits, starter=starter), program_s=0.03125)

    monkeypatch.setattr(module, "run_python", start_slowly)
    tests = {"inputs": [str(number) for number in range(12)], "outputs": [str(number) for number in range(12)]}
    assert score("print(input())", tests, total_s=0.5, timeout_s=0.5) == 1.0
    assert allowed == [0.5 - 0.03125 * number for number in range(12)]


def test_a_case_finds_nothing_of_an_earlier_one() -> None:
    code = """
import os, subprocess
print(sorted(os.listdir("/tmp")), len([name for name in os.listdir("/proc") if name.isdigit()]))
open("/tmp/left", "w").write(input())
subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
    assert score(code, {"inputs": ["1"] * 3, "outputs": ["[] 1"] * 3}, timeout_s=20.0, total_s=60.0) == 1.0


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "same"),
    [
        ("1\n2\n", "1\n2", 0.0, True),
        ("1 2", "1\n2", 0.0, False),
        ("1\n\n2", "1\n2", 0.0, False),
        ("0.3333333", "0.33333333", 0.0, False),
        ("x 0.3333333", "x 0.33333333", 1e-6, True),
        ("0.34", "0.33", 1e-6, False),
        ("1", "1 1", 1e-6, False),
        ("1", "1\n1", 1e-6, False),
        ("nan", "1", 1e-6, False),
        ("yes", "YES", 1e-6, False),
    ],
)
def test_outputs_are_compared_by_line(ours: str, theirs: str, tolerance: float, same: bool) -> None:
    assert same_output(ours, theirs, tolerance) is same


# Functions


@pytest.mark.parametrize("tests", [ADD, ASSERTS, "\n".join(ASSERTS)])
def test_a_function_that_returns_what_is_expected_gets_1(tests: Any) -> None:
    assert score("def add(a, b):\n    print('noise')\n    return a + b", tests) == 1.0
    wrong = "def add(a, b):\n    return a + b if isinstance(a, int) else a"
    assert score(wrong, tests) == 0.0
    assert score(wrong, tests, partial=True) == pytest.approx(1 / 3)


def test_a_method_of_a_class_solution_is_a_function() -> None:
    code = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert score(code, ADD) == 1.0


def test_arguments_of_livecodebench_are_lines_of_json() -> None:
    tests = {"fn_name": "add", "inputs": ["[1]\n[2]", "1\n2"], "outputs": ["[1, 2]", "3"]}
    assert score("def add(a, b): return a + b", tests) == 1.0


def test_results_that_json_does_not_have_are_compared() -> None:
    code = """
import collections, math
def f(x): return x
def pair(): return (1, {2, 3}, {4: b'x'}, 2**100, 1 + 2j, None, True)
def counts(): return collections.Counter('aab')
"""
    tests = """
assert pair() == (1, {2, 3}, {4: b'x'}, 1267650600228229401496703205376, 1 + 2j, None, True)
assert counts() == {'a': 2, 'b': 1}
assert f((1, [2])) == (1, [2])
assert f(1.5) == 1.5 and not f(0) and f('x')
assert f('inf') != 1
"""
    assert score(code, tests) == 1.0
    assert score("def f(x): return list(x)", ["assert f((1, 2)) == (1, 2)"]) == 0.0
    assert score("def f(x): return tuple(x)", {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[1, 2]]}) == 1.0


def test_what_the_assertions_iterate_may_be_any_iterable() -> None:
    code = """
import collections
class Chain:
    def __iter__(self): return iter((1, 2))
def each(n): yield from range(n)
def doubled(x): return map(lambda one: 2 * one, x)
def queue(x): return collections.deque(x)
def counts(x): return collections.Counter(x)
def pairs(x): return enumerate(x)
def chain(): return Chain()
def whole(x): return x
list = sum = items = _items = None
"""
    tests = """
assert list(each(3)) == [0, 1, 2] and tuple(each(2)) == (0, 1) and set(doubled([1, 2])) == {2, 4}
assert list(queue('ab')) == ['a', 'b'] and len(queue('ab')) == 2
assert sum(each(4)) == 6 and sum(each(4), 1) == 7 and max(each(4)) == 3 and not any(each(1)) and all(doubled([1]))
assert sorted(counts('aab').values()) == [1, 2] and list(counts('aab').keys()) == ['a', 'b']
assert counts('ab').keys() == {'a', 'b'} and sorted(counts('aab').items()) == [('a', 2), ('b', 1)]
assert dict(pairs('ab')) == {0: 'a', 1: 'b'} and list(chain()) == [1, 2]
assert 2 in each(3) and 3 not in each(3) and 'a' in counts('a') and 'bc' in whole('abcd')
assert list(whole('ab')) == ['a', 'b'] and list(whole({1: 2})) == [1] and len(whole('ab')) == 2
assert not list(each(0)) and len(set(each(5))) == 5 and min(whole(3), whole(2)) == 2
"""
    assert score(code, tests) == 1.0


@pytest.mark.parametrize(
    "test",
    [
        "assert len(f(3)) == 3",  # an iterator has no length
        "assert f(3) == [0, 1, 2]",
        "assert list(f(10**9)) != [0]",
        "assert list(f(None)) != []",
        "assert f(3)",
    ],
)
def test_an_iterator_is_what_it_is_in_python(test: str) -> None:
    """Its length, its equality and its end are not made up; its truth value is."""
    value = score("def f(n): return iter(range(n))", [test])
    assert value == (1.0 if test == "assert f(3)" else 0.0)


def test_one_case_that_hangs_or_fails_costs_only_itself() -> None:
    code = """
def add(a, b):
    while a == 1: pass
    if a == [1]: raise SystemExit
    return a + b
"""
    assert score(code, ADD, timeout_s=1.5, partial=True) == pytest.approx(1 / 3)


def test_humaneval_checks_are_understood() -> None:
    check = """
METADATA = {'author': 'x'}
def check(candidate):
    "The checks."
    expected = [3, 4]
    assert candidate(1, 2) == 3, "message"
    assert candidate([1], [2]) == [1, 2]
    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6
    assert candidate([3], [4]) == expected
    assert True
"""
    code = "def add(a, b):\n    return a + b"
    response = f"```python\n{code}\n```"
    assert python_tests(response, check, {"entry_point": "add"}) == 1.0
    assert python_tests(response, "", {"cases": {"test": check, "entry_point": "add"}}, tests="cases") == 1.0
    assert python_tests(response, check + "\ncheck(add)", {}) == 1.0
    assert python_tests(response.replace("+", "-"), check, {"entry_point": "add"}) == 0.0
    with pytest.raises(ValueError, match="entry_point"):
        python_tests(response, check, {})


def test_objects_of_the_solution_can_be_arguments() -> None:
    code = "class Pair:\n    def __init__(self, a, b): self.sum = a + b\ndef total(all): return sum(p.sum for p in all)"
    assert score(code, ["assert total([Pair(1, 2), Pair(3, 4)]) == 10"]) == 1.0
    assert score(code, ["pairs = [Pair(1, 2)]", "assert total(pairs) == 3"]) == 1.0


def test_a_prelude_comes_before_the_program() -> None:
    code = "def f(x: List[int]) -> float: return math.sqrt(x[0])"
    assert score(code, ["assert f([4]) == 2.0"]) == 0.0
    assert score(code, ["assert f([4]) == 2.0"], prelude="import math\nfrom typing import List") == 1.0


CHECKED_ADD = "def add(a, b):\n    if a is None: raise ValueError('none')\n    return a + b"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
def make(*items):
    stack = Stack()
    for item in items: stack.push(item)
    return stack
"""
KODCODE = """
import pytest
from solution import add

def test_add():
    "Adds."
    expected = 3
    result = add(1, 2)
    assert result == expected
    result = add(-1, 1)
    assert result == 0

def test_sequences():
    result = add([1], [2])
    assert len(result) == 2
    assert result[1] == 2
    with pytest.raises(ValueError):
        add(None, 1)
"""
OBJECTS = """
from solution import make

def test_order():
    stack = make(1, 2)
    assert stack.pop() == 2
    stack.push(7)
    last = stack.pop()
    assert last == 7
    assert stack.items == [1]

def test_names_belong_to_a_test():
    stack = 5
    assert make(1).pop() == stack - 4
"""
STDIN = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "4 5\n", "output": "9", "testtype": "stdin"},
]
CALLS = [{"input": "1\n2", "output": "3", "testtype": "functional"}, {"input": "[1]\n[2]", "output": "[1, 2]"}]
SUM = "a, b = map(int, input().split())\nprint(a + b)"
NAMED = {"metadata": json.dumps({"func_name": "add"})}


@pytest.mark.parametrize(
    ("code", "wrong", "tests", "metadata"),
    [
        (CHECKED_ADD, ("+", "-"), KODCODE, {}),
        (CHECKED_ADD, ("ValueError", "KeyError"), KODCODE, {}),
        (CHECKED_ADD, ("raise", "return"), KODCODE, {}),
        (STACK, ("self.items.pop()", "self.items[-1]"), OBJECTS, {}),
        (STACK, ("self.items.pop()", "self.items.pop(0)"), OBJECTS, {}),
        (SUM, ("+", "-"), json.dumps(STDIN), {}),
        (SUM, ("+", "-"), STDIN, {}),
        (SUM, ("+", "-"), {"language": "python", "test_cases": STDIN}, {}),
        (CHECKED_ADD, ("+", "-"), json.dumps(CALLS), NAMED),
        (CHECKED_ADD, ("+", "-"), [{**case, "fn_name": "add"} for case in CALLS], {}),
        (CHECKED_ADD, ("+", "-"), ["assert add(1, sqrt(4)) == 3"], {"test_setup_code": "from math import sqrt"}),
        (CHECKED_ADD, ("+", "-"), ["assert add(1, m.sqrt(4)) == 3"], {"test_imports": ["import math as m"]}),
    ],
)
def test_published_forms_of_tests_are_read(
    code: str, wrong: tuple[str, str], tests: Any, metadata: dict[str, Any]
) -> None:
    given = {"cases": tests, **metadata}
    assert module.has_tests(tests, given)
    assert python_tests(f"```python\n{code}\n```", "", given, tests="cases") == 1.0
    assert python_tests(f"```python\n{code.replace(*wrong)}\n```", "", given, tests="cases") == 0.0


# Test cases that cannot be used


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("", "no test cases"),
        ({}, "no test cases"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": [], "outputs": []}, "at least 1"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "fn_name"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "list of arguments"),
        ("assert f(1) ==", "not Python"),
        ("x = 1", "no assertion"),
        ("assert True", "no assertion"),
        ("for x in y: assert f(x) == 1", "line 1"),
        ("assert f(1) == g(1)", "computed in the sandbox"),
        ("import numpy as np\nassert np.allclose(f(1), [2])", "cannot be evaluated"),
        ("assert math.fsum(f(1)) == 3", "cannot be evaluated"),
        ("assert [x for x in f(1)] == [1]", "cannot be evaluated"),
        ("assert print(f(1), 3) == 3", "cannot be evaluated"),
        ("assert (lambda x: x == 3)(f(1))", "cannot be evaluated"),
        ("assert f(1) == f'{3}'", "cannot be evaluated"),
        ("import pytest\nwith pytest.raises(ValueError): f(1) + 1", "something else than a call"),
        ("import pytest\nwith pytest.raises(ValueError, match='x'): f(1)", "line 2"),
        ("x = [1]\nf(x)\nassert x == f(1)", "line 2"),
        ([{"input": "1"}], "`input` and `output`"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "func_name"),
    ],
)
def test_cases_that_cannot_be_judged_raise_and_are_no_reward(tests: Any, message: str) -> None:
    assert not module.has_tests(tests, {})
    with pytest.raises(ValueError, match=message):
        python_tests("def f(x): return x", tests if isinstance(tests, str) else json.dumps(tests), {})


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="style"):
        score("", DOUBLE, style="other")
    with pytest.raises(ValueError, match="timeout_s"):
        score("", DOUBLE, timeout_s=0)
    with pytest.raises(ValueError, match="style stdin"):
        score("", ASSERTS, style="stdin")


def test_assertions_are_split_into_calls_and_comparisons() -> None:
    found = parse_assertions("import math\nlimit = 7\nassert abs(f(limit) - 42) < 1 and not g([limit])")
    assert found.setup == ["import math"]
    assert found.cases[0].calls == ("f(7)", "bool(g([7]))")
    assert found.cases[0].holds([42.5, False])
    assert not found.cases[0].holds([44, False])
    assert not found.cases[0].holds([42, True])
    assert not found.cases[0].holds(["text", False])


@pytest.mark.parametrize("test", ["f() == 100000**2", "1e5**2 >= f()", "f() ** 3 == 1000000007**0 * 10**30"])
def test_powers_of_large_numbers_are_compared(test: str) -> None:
    [case] = parse_assertions(f"assert {test}").cases
    assert case.holds([10**10])
    assert not case.holds([10**10 + 1])


def test_an_expression_in_the_cases_cannot_use_up_the_worker() -> None:
    [case] = parse_assertions("assert f(1) * 10**10 == 'x'").cases
    assert not case.holds(["x" * 1000])
    [case] = parse_assertions("assert f(1) ** 10**6 == 1").cases
    assert not case.holds([3])


@pytest.mark.parametrize(
    "test",
    ["f() == 9**9**9**9", "f() == [0] * 10**7", "f() == 1 // 0", "isclose(f(), 1, rel_tol='1' - 1)", "f() == '%d' % 3"],
)
def test_an_expected_result_without_a_value_is_refused_and_is_no_wrong_answer(test: str) -> None:
    with pytest.raises(ValueError, match="cannot be evaluated"):
        parse_assertions(f"assert {test}")


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("f() == [0] * 3", [0, 0, 0], [0, 0]),
        ("f() == 2 * (1, 'ab' * 2)", (1, "abab", 1, "abab"), (1, "abab")),
        ("f() - {1} == {2}", {1, 2}, {1, 3}),
        ("len(f() + [1]) == 3", [1, 2], [1]),
    ],
)
def test_expected_results_may_be_computed_of_sequences_and_sets(test: str, right: Any, wrong: Any) -> None:
    [case] = parse_assertions(f"assert {test}").cases
    assert case.holds([right])
    assert not case.holds([wrong])


# Forged verdicts

SECRET = 982451653


def forge(code: str, **args: Any) -> list[float]:
    """The rewards of a program that does not know the answer, for each form of test cases."""
    cases = {"inputs": ["1\n", "2\n"], "outputs": [str(SECRET), str(SECRET + 1)]}
    calls = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [SECRET, SECRET + 1]}
    asserts = [f"assert f(1) == {SECRET}", f"assert f(2) == {SECRET + 1}"]
    return [score(code, tests, **args) for tests in (cases, calls, asserts)]


ALWAYS_EQUAL = """
class Always(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 982451653
    def __bool__(self): return True
    def __repr__(self): return str(self.__class__)
def f(x): return Always(5)
print(f(1))
"""
REPLACES_BUILTINS = """
import builtins, json, sys
builtins.print = lambda *a, **k: None
json.dumps = lambda *a, **k: '[0, [true]]'
sys.exit = lambda *a: None
builtins.all = builtins.any = lambda x: True
def f(x): return x
"""
WRITES_TO_EVERY_DESCRIPTOR = """
import os
for descriptor in range(1, 64):
    for text in (b'[0, [true]]\\n[1, [true]]\\n', b'{"wait_status": 0}\\n'):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
os._exit(0)
"""
REPLACES_THE_DRIVER = """
import sys
main = sys.modules['__main__']
main.plain = lambda value: True
if 'cases' in sys.modules:
    sys.modules['cases'].CASES = ()
def f(x): return x
"""
SEARCHES_MEMORY_AND_FILES = """
import os, re
found = []
def search(data):
    found.extend(number for number in re.findall(rb'9824[0-9]{5}', data))
for folder in ('/program', '/tmp', '/proc/self', '/dev/shm'):
    for name in os.listdir(folder):
        try:
            search(open(os.path.join(folder, name), 'rb').read(10**6))
        except OSError:
            pass
for line in open('/proc/self/maps'):
    area, rights = line.split()[:2]
    start, end = (int(part, 16) for part in area.split('-'))
    if rights[0] == 'r' and end - start < 2**26:
        try:
            with open('/proc/self/mem', 'rb') as memory:
                memory.seek(start)
                search(memory.read(end - start))
        except (OSError, ValueError, OverflowError):
            pass
guess = int(found[0]) if found else 0
def f(x): return guess + x - 1
print(guess + int(input()) - 1)
"""
READS_THE_STACK = """
import sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        values = list(frame.f_locals.values()) + list(frame.f_globals.values())
        seen += [value for value in values if type(value) is int]
        frame = frame.f_back
    return max(seen, default=0)
print(f(1))
"""
FORGED = {
    "exits_before_the_tests": "import os\nos._exit(0)",
    "exits_politely": "raise SystemExit(0)",
    "exits_in_the_function": "import os, sys\ndef f(x): os._exit(0)",
    "prints_a_verdict": "print('PASSED')\nprint('1.0')\nprint(True)\nprint('[0, [true]]')\ndef f(x): return True",
    "returns_an_object_that_equals_everything": ALWAYS_EQUAL,
    "returns_not_a_number": "def f(x): return float('nan')\nprint(f(1))",
    "replaces_builtins": REPLACES_BUILTINS,
    "writes_to_every_descriptor": WRITES_TO_EVERY_DESCRIPTOR,
    "replaces_the_driver": REPLACES_THE_DRIVER,
    "searches_memory_and_files": SEARCHES_MEMORY_AND_FILES,
    "reads_the_stack": READS_THE_STACK,
    "deep_data": "def f(x):\n    v = []\n    for _ in range(9000): v = [v]\n    return v\nprint('[' * 9000)",
    "endless_data": "def f(x): return 'x' * 10**7\nprint('x' * 10**7)",
}


@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED)
def test_a_verdict_cannot_be_forged(code: str) -> None:
    assert forge(code) == [0.0, 0.0, 0.0]
    assert forge(code, partial=True) == [0.0, 0.0, 0.0]


def test_the_expected_results_are_never_in_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    from troupe.workers.agents.sandbox import run

    request = run._request

    def record(sources: Any, limits: Any) -> Any:
        sent.append(json.dumps(dict(sources)))
        return request(sources, limits)

    monkeypatch.setattr(run, "_request", record)
    assert forge("def f(x): return x") == [0.0, 0.0, 0.0]
    assert len(sent) >= 3
    assert not any(str(SECRET) in text for text in sent)


def test_a_right_answer_counts_even_in_a_program_that_plays_tricks() -> None:
    """What is judged is data: an honest result passes, whatever surrounds it."""
    code = "import builtins\nbuiltins.print = None\ndef add(a, b): return a + b"
    assert score(code, ADD) == 1.0


# As a worker calls it


@pytest.fixture(scope="module")
def process() -> Any:
    """The process of the reward function, with its memory limit."""
    child = RewardProcess(RewardFunctionConfig(name="python_tests", timeout_s=60.0, args={"total_s": 3.0}), 1024)
    child.start()
    yield child
    child.close()


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("```python\nprint(int(input()) * 2)\n```", 1.0),
        ("```python\nprint(int(input()) * 3)\n```", 0.0),
        ("```python\nx = bytearray(10**10)\n```", 0.0),
        ("```python\nwhile True: pass\n```", 0.0),
        ("```python\nimport os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(0, signal.SIGKILL)\n```", 0.0),
    ],
)
def test_a_reward_process_scores_responses(process: RewardProcess, response: str, value: float) -> None:
    pid = process.pid
    [outcome] = process.score([Sample(response, json.dumps(DOUBLE), "{}", 1, "stop")])
    assert (outcome.value, outcome.status) == (value, "ok")
    assert process.pid == pid


def test_cases_that_cannot_be_judged_fail_the_sample(process: RewardProcess) -> None:
    [outcome] = process.score([Sample("print(1)", "no tests at all", "{}", 1, "stop")])
    assert outcome.value is None
    assert "not Python" in outcome.status


def test_a_memory_limit_above_that_of_the_process_fails_the_sample_and_not_the_program() -> None:
    config = RewardFunctionConfig(name="python_tests", timeout_s=60.0, args={"memory_mib": 65536})
    child = RewardProcess(config, 1024)
    try:
        [outcome] = child.score([Sample("print(2)", json.dumps(DOUBLE), "{}", 1, "stop")])
    finally:
        child.close()
    # Root may raise the limit, with CAP_SYS_RESOURCE.
    assert outcome.status == "ok" or (outcome.value is None and "roles.reward.memory_limit_mib" in outcome.status)


def test_a_program_inside_of_a_thought_earns_nothing() -> None:
    program, tests = "```python\nprint(5)\n```", '{"inputs": [""], "outputs": ["5"]}'
    assert python_tests(f"<think>{program}", tests, {}) == 0.0
    assert python_tests(f"so {program}", tests, {}, opens_thought=True) == 0.0
    assert python_tests(f"no</think>{program}", tests, {}, opens_thought=True) == 1.0
