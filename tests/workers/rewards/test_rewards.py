"""Reward functions, how they are found, and the processes they run in (F11: a failure is a status, never a number)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest
import reasoning_gym as rg
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from docs.tooling.task_page import CREDIT, WITHOUT_ANSWERS, WITHOUT_TASKS
from troupe.orchestrator.data.readers import json_safe
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import SHIPPED
from troupe.workers.rewards import functions, gym
from troupe.workers.rewards.loading import RewardFunctionError, load, locate
from troupe.workers.rewards.numeric import numeric
from troupe.workers.rewards.runner import RewardProcess, RewardResult, Sample

ROOT = Path(__file__).resolve().parents[3]


# Functions


def test_exact_match_options() -> None:
    assert functions.exact_match(" Yes\n", "Yes", {}) == 1.0
    assert functions.exact_match(" Yes\n", "Yes", {}, strip=False) == 0.0
    assert functions.exact_match("yes", "Yes", {}) == 0.0
    assert functions.exact_match("yes", "Yes", {}, ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5", "5"),
        ("it is 2.50.", "2.5"),
        ("x = -4", "-4"),
        ("9-5", "5"),
        ("(-5)", "-5"),
        ("\u22127 degrees", "-7"),
        ("1,234,567 people", "1234567"),
        ("1,23", "23"),
        ("3, 4", "4"),
        ("none", None),
        ("", None),
        ("٣", "3"),
    ],
)
def test_last_number_of_a_text(text: str, number: str | None) -> None:
    assert functions.find_last_number(text) == (None if number is None else Decimal(number))


@given(st.text(), st.integers(-(10**12), 10**12))
def test_last_number_finds_a_number_at_the_end_of_any_text(text: str, number: int) -> None:
    assert functions.last_number(f"{text} {number}", f"{number:,}", {}) == 1.0
    assert functions.last_number(f"{text} {number}", str(number + 1), {}) == 0.0


def test_last_number_refuses_an_answer_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="not a number: 'five'"):
        functions.last_number("5", "five", {})


def test_regex_full_and_partial() -> None:
    assert functions.regex("<a>1</a>", "", {}, pattern=r"<a>\d</a>") == 1.0
    assert functions.regex("so <a>1</a>", "", {}, pattern=r"<a>\d</a>") == 0.0
    assert functions.regex("so <a>1</a>", "", {}, pattern=r"<a>\d</a>", full=False) == 1.0


def test_length_is_one_at_the_target_and_falls_on_both_sides() -> None:
    scores = [functions.length("x" * n, "", {}, target=10, tolerance=4) for n in (0, 6, 8, 10, 12, 14, 99)]
    assert scores == [0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert functions.length("a b  c", "", {}, target=3, tolerance=1, unit="words") == 1.0
    tokens = {"sample": {"response_tokens": 7}}
    assert functions.length("whatever", "", tokens, target=7, tolerance=1, unit="tokens") == 1.0


def test_overlong_is_the_soft_punishment_of_dapo() -> None:
    def score(tokens: int) -> float:
        return functions.overlong("", "", {"sample": {"response_tokens": tokens}}, limit=100, buffer=20)

    assert [score(n) for n in (0, 80, 85, 90, 100, 120)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_letter_share() -> None:
    assert functions.letter_share("abca", "", {}, letters="a") == 0.5
    assert functions.letter_share("ABca", "", {}, letters="a", ignore_case=True) == 0.5
    assert functions.letter_share("", "", {}, letters="a") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("5", "5", 1.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{7} no, \boxed{9}", "9", 1.0),
        (r"\boxed{9} no, \boxed{7}", "9", 0.0),
        ("It is 3, then 4", "4", 1.0),
        ("It is 4, then 3", "4", 0.0),
        ("50%", "1/2", 1.0),
        (r"$\sqrt{2}$", r"\sqrt{2}", 1.0),
        ("I do not know", "5", 0.0),
        ("", "5", 0.0),
        (f"{'1' * 5000} 1/2", "5", 0.0),  # more digits than Python makes a number of
        (f"1 1/{'2' * 5000}", "5", 0.0),
    ],
)
def test_numeric(response: str, answer: str, score: float) -> None:
    assert numeric(response, answer, {}) == score


def test_numeric_refuses_an_answer_that_is_no_expression() -> None:
    with pytest.raises(ValueError, match="not a mathematical expression"):
        numeric("5", "", {})


# reasoning-gym


def task(family: str, index: int = 0) -> dict[str, Any]:
    entry = rg.create_dataset(family, size=index + 1, seed=5)[index]
    return {"recipe": family, "entry": json.loads(json.dumps(entry))}


FORMS = [
    *("{}", "I think.\n\nThe answer is: {}", "6 or <answer>{}</answer>", "so \\boxed{{{}}}", "so \\fbox{{{}}}"),
    *("<answer>\\boxed{{{}}}</answer>", "so <answer>{}"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "family", ["chain_sum", "countdown", "spiral_matrix", "sudoku", "word_sorting", "knights_knaves"]
)
def test_reasoning_gym_accepts_the_right_answer_in_every_form(family: str, form: str) -> None:
    metadata = task(family)
    assert gym.reasoning_gym(form.format(metadata["entry"]["answer"]), "", metadata) == 1.0


@pytest.mark.parametrize("family", ["chain_sum", "gcd", "count_bits", "letter_counting"])
def test_reasoning_gym_gives_no_credit_for_containing_the_answer(family: str) -> None:
    metadata = task(family)
    metadata["entry"]["answer"] = "5"
    raw = get_score_answer_fn(family)
    assert raw("0123456789", metadata["entry"]) > 0  # pyright: ignore[reportCallIssue]  (what is guarded against)
    scores = [gym.reasoning_gym(text, "5", metadata) for text in ("0123456789", "15", "5 or 6", "", "2 + 3 = 5.")]
    assert scores == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_reasoning_gym_refuses_a_scorer_that_accepts_anything_or_not_its_own_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = task("chain_sum")
    for value, message in ((1.0, "accepts any answer"), (0.0, "does not accept the answer that its entry names")):
        monkeypatch.setattr(gym, "_TRUSTED", set())
        monkeypatch.setattr(gym, "_scorer", lambda family, value=value: lambda given, entry: value)
        with pytest.raises(ValueError, match=message):
            gym.reasoning_gym("5", "", metadata)


@pytest.mark.parametrize("family", sorted(set(DATASETS) - {WITHOUT_TASKS}))
def test_every_family_pays_fully_for_right_answers_alone(family: str) -> None:
    """A right answer, also in a code fence; what nonsense, nothing and answers of other tasks earn is on the page."""
    entries = [json.loads(json.dumps(json_safe(entry))) for entry in rg.create_dataset(family, size=4, seed=11)]

    def score(text: str, entry: dict[str, Any]) -> float:
        return gym.reasoning_gym(text, "", {"recipe": family, "entry": entry})

    named = [entry["answer"] for entry in entries if entry["answer"] is not None]
    assert len(named) == (0 if family in WITHOUT_ANSWERS else len(entries))
    earned = [0.0]
    for entry in entries:
        right = str(entry["answer"])
        fences = (f"Here it is:\n```\n{right}\n```", f"```text\n{right}\n```\nThat is all.")
        texts = (right, *fences, f"Within ``` as asked:\n```\n{right}\n```")
        assert [score(text, entry) for text in texts] == [1.0] * 4 or not named
        wrong = {"banana", "0", "True", "I do not know.", "", *map(str, named)} - {right}
        earned += [score(text, entry) for text in wrong]
    assert max(earned) <= CREDIT.get(family, 0.0)


@pytest.mark.parametrize(
    ("family", "answer", "changes", "wrong"),
    [
        ("coin_flip", "0.03125", {}, ["0", "0.0312", "0.04"]),
        ("game_of_life_halting", "False", {}, ["True", "banana", "0"]),
        ("puzzle24", "4*(7 - 1)*1", {"metadata": {"numbers": [4, 7, 1, 1]}}, ["1*2*3*4", "24", "6*4"]),
    ],
)
def test_families_whose_scorers_pay_for_wrong_answers_are_compared_here(
    family: str, answer: str, changes: dict[str, Any], wrong: list[str]
) -> None:
    metadata = task(family)
    metadata["entry"].update({"answer": answer, **changes})
    assert gym.reasoning_gym(answer, "", metadata) == 1.0
    assert all(gym.reasoning_gym(text, "", metadata) < 1.0 for text in wrong)


@pytest.mark.parametrize("family", sorted(gym.EVALUATED))
def test_model_text_is_never_executed(family: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attack = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    metadata = task(family)
    for text in (
        attack,
        f"<answer>{attack}</answer>",
        f"<answer>[{attack}]</answer>",
        f"<answer>{attack} + 3!</answer>",
    ):
        gym.reasoning_gym(text, "", metadata)
    assert not canary.exists()
    get_score_answer_fn(family)(attack, metadata["entry"])  # pyright: ignore[reportCallIssue]
    assert canary.exists(), "the scorer itself no longer runs answers: the guard can go"


@pytest.mark.parametrize("text", ["1 + 2*(3 - x)**2", "sin(x) + C", "[1, 2]", "-3.5", "a", "2 % 3"])
def test_formulas_pass(text: str) -> None:
    assert gym.is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "f(1)",
        "x.y",
        "x[0]",
        "lambda: 1",
        "'a'",
        "sin('x')",
        "sin(x=1)",
        "f'{x}'",
        "(x := 1)",
        "3!",
        "",
        "[i for i in x]",
    ],
)
def test_code_does_not_pass_for_a_formula(text: str) -> None:
    assert not gym.is_formula(text)


# Finding functions


def test_every_built_in_name_loads() -> None:
    required: dict[str, dict[str, Any]] = {
        "regex": {"pattern": "x"},
        "length": {"target": 1, "tolerance": 1},
        "letter_share": {"letters": "a"},
        "overlong": {"limit": 1, "buffer": 1},
    }
    for name in SHIPPED:
        assert load(name, required.get(name, {})).__name__ == name


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("exact_mach", {}, "did you mean 'exact_match'"),
        ("../evil:f", {}, "no reward function"),
        ("no_such_module:f", {}, "cannot import no_such_module: ModuleNotFoundError"),
        ("json:nope", {}, "module json has no 'nope'"),
        ("os:path", {}, "not callable, got module"),
        ("exact_match", {"stripp": True}, "unexpected keyword argument 'stripp'"),
        ("regex", {}, "missing a required .*argument: 'pattern'"),
    ],
)
def test_an_unusable_function_is_refused_by_name(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardFunctionError, match=message.replace("(", r"\(")):
        load(name, args)


def test_locating_imports_nothing() -> None:
    assert locate("surely.not.there:f") == ("surely.not.there", "f")


# Processes

BEHAVIOURS = """
import os, re, sys, time
kept = []

def behave(response, answer, metadata):
    word, _, rest = response.partition(" ")
    if word == "raise": raise ValueError("bad\\nthing")
    if word == "exit": os._exit(int(rest))
    if word == "abort": os.abort()
    if word == "quit": sys.exit(4)
    if word == "sleep": time.sleep(1000)
    if word == "allocate":
        while True: kept.append(bytearray(2**24))
    if word == "refuse": raise MemoryError("full")
    if word == "orphan":
        os.posix_spawn("/bin/sleep", ["sleep", rest], {}); os._exit(1)
    if word == "print": print("hello from user code"); return 1
    if word == "noise":
        for fd in range(3, 4096):
            try: os.write(fd, rest.encode() + b"\\n")
            except OSError: pass
        return 1
    if word == "regex":
        open(rest, "w").close()
        re.match("(a+)+$", "a" * 60 + "b")
    if word == "metadata": return metadata[rest]
    if word == "complain": print("no table", rest, file=sys.stderr); os._exit(5)
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "list": [1.0, 2.0], "true": True,
            "huge": 10**400, "one": 1, "half": 0.5}[word]
"""


@pytest.fixture
def behaviours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "behaviours.py").write_text(BEHAVIOURS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)  # of an engine in this process: a signal would write lines
    return "behaviours:behave"


@pytest.fixture
def process(behaviours: str) -> Iterator[RewardProcess]:
    # The time-out is far off: no test but the one of time-outs may depend on how busy the machine is.
    running = RewardProcess(RewardFunctionConfig(name=behaviours, timeout_s=120), memory_limit_mib=128)
    running.start()
    yield running
    running.close()


def samples(*responses: str, metadata: str = "{}") -> list[Sample]:
    return [Sample(response, "", metadata, 3, "stop") for response in responses]


FAULTS = {
    "raise": "error: ValueError: bad thing (behaviours.py:7)",
    "exit 3": "died with exit code 3",
    "exit 0": "died with exit code 0",
    "complain orders": "died with exit code 5: no table orders",
    "abort": "died with signal 6 (Aborted)",
    "quit": "error: SystemExit: 4 (behaviours.py:10)",
    "allocate": "behaviours:behave: out of memory (limit 128 MiB): error: MemoryError (behaviours.py:13)",
    "refuse": "behaviours:behave: out of memory (limit 128 MiB): error: MemoryError: full (behaviours.py:14)",
    "nan": "not a finite number: nan",
    "inf": "not a finite number: inf",
    "huge": "error: OverflowError: int too large to convert to float",
    "text": "not a number: '1.0' (str)",
    "none": "not a number: None (NoneType)",
    "list": "not a number: [1.0, 2.0] (list)",
    "unknown": "error: KeyError: 'unknown' (behaviours.py:28)",
}


@pytest.mark.parametrize(("fault", "status"), FAULTS.items())
def test_a_fault_is_a_status_and_costs_one_sample(process: RewardProcess, fault: str, status: str) -> None:
    assert process.score(samples("one", fault, "half")) == [
        RewardResult(1.0),
        RewardResult(None, status),
        RewardResult(0.5),
    ]


def test_the_process_is_healthy_after_every_fault_twice(process: RewardProcess) -> None:
    faults = [fault for fault in FAULTS for _ in range(2)]
    descriptors = len(os.listdir("/proc/self/fd"))
    assert [outcome.status for outcome in process.score(samples(*faults))] == [FAULTS[fault] for fault in faults]
    assert process.score(samples("one", "true", "half")) == [RewardResult(1.0), RewardResult(1.0), RewardResult(0.5)]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_hang_times_out_and_the_next_sample_is_scored(behaviours: str) -> None:
    process = RewardProcess(RewardFunctionConfig(name=behaviours, timeout_s=1.5), memory_limit_mib=128)
    try:
        hung = process.score(samples("sleep"))
        assert hung == [RewardResult(None, "timeout after 1.5 s")]
        assert process.pid is None
        assert process.score(samples("one")) == [RewardResult(1.0)]
    finally:
        process.close()


def test_a_stopped_process_times_out(behaviours: str) -> None:
    process = RewardProcess(RewardFunctionConfig(name=behaviours, timeout_s=1), memory_limit_mib=128)
    process.start()
    stopped = process.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    assert process.score([Sample("x" * 4_000_000, "", "{}", 1, "stop")]) == [RewardResult(None, "timeout after 1 s")]
    assert not Path(f"/proc/{stopped}").exists()


def test_a_killed_process_is_replaced(process: RewardProcess) -> None:
    first = process.pid
    assert first is not None
    guard = psutil.Process(first).ppid()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, guard, os.WEXITED | os.WNOWAIT)
    assert process.score(samples("one")) == [RewardResult(1.0)]
    assert process.pid != first


def test_output_of_user_code_goes_to_the_log(process: RewardProcess, capfd: pytest.CaptureFixture[str]) -> None:
    process.close()  # the next one is started while this test's capture is on
    assert process.score(samples("print", "one")) == [RewardResult(1.0), RewardResult(1.0)]
    process.close()
    captured = capfd.readouterr()
    assert "hello from user code" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "noise",
    [
        *("garbage", "[]", '{"id": 1}', '{"id": 1, "results": []}', '{"id": 1, "results": [7]}'),
        *('{"id": 1, "results": [{"value": NaN}]}', '{"id": 9, "results": [{"value": 1.0}]}'),
        '{"id": 1, "results": [{}]}',
    ],
)
def test_replies_of_the_child_are_checked(process: RewardProcess, noise: str) -> None:
    [outcome] = process.score(samples(f"noise {noise}"))
    assert outcome.value is None
    assert outcome.status.startswith("error: the reward process replied")
    assert process.score(samples("one")) == [RewardResult(1.0)]


def test_metadata_and_what_is_known_of_the_sample_reach_the_function(process: RewardProcess) -> None:
    assert process.score(samples("metadata level", metadata='{"level": 2}')) == [RewardResult(2.0)]
    [outcome] = process.score(samples("metadata sample"))
    facts = "{'finish_reason': 'stop', 'messages': [], 'response_tokens': 3}"
    assert outcome.status == f"not a number: {facts} (dict)"
    for bad, error in [("[1]", "TypeError: metadata is not a JSON object"), ("{", "JSONDecodeError")]:
        [outcome] = process.score(samples("one", metadata=bad))
        assert outcome.status.startswith(f"error: {error}")


def test_lone_surrogates_and_newlines_pass(process: RewardProcess) -> None:
    [outcome] = process.score(samples("\ud800\n\u2028x"))
    assert outcome.status.startswith("error: KeyError: ")


def gone(pid: int, wait_s: float = 20.0) -> bool:
    """Whether a process ends (or is a zombie) within the bound."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def running(command: str) -> list[int]:
    wanted = command.encode().split()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().split(b"\0")[: len(wanted)] == wanted:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_processes_that_a_function_started_end_with_it(process: RewardProcess) -> None:
    seconds = 10**6 + os.getpid()  # an argument that only this test's process has
    assert process.score(samples(f"orphan {seconds}")) == [RewardResult(None, "died with exit code 1")]
    assert all(gone(pid) for pid in running(f"sleep {seconds}"))


def test_the_child_dies_with_its_parent_even_while_it_holds_the_interpreter_lock(
    behaviours: str, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.runner import RewardProcess, Sample
process = RewardProcess(RewardFunctionConfig(name={behaviours!r}, timeout_s=600), 256)
process.start()
print(process.pid, flush=True)
process.score([Sample("regex {reached}", "", "{{}}", 1, "stop")])
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            while not reached.exists() and parent.poll() is None:
                time.sleep(0.01)
            assert not gone(child, wait_s=0.1)
        finally:
            parent.kill()
    assert gone(child)
