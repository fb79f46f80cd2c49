"""Reward functions in the forms people write them: asynchronous, batched, with numpy and torch scalars, with several
right answers; and how their faults are told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.workers.test_reward import rollouts
from troupe.orchestrator.data.prompts import load_pool
from troupe.orchestrator.rollouts.reward_pool import FaultLog
from troupe.orchestrator.spec.sources import DataSource
from troupe.workers.contract.messages import Fault
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig
from troupe.workers.reward import RewardWorker, find_faults
from troupe.workers.rewards.functions import exact_match, last_number
from troupe.workers.rewards.loading import RewardFunctionError
from troupe.workers.rewards.numeric import numeric
from troupe.workers.rewards.runner import RewardProcess, RewardResult, Sample

FAR_OFF = 120.0  # seconds: no test but those of timeouts may depend on how busy the machine is

FORMS = '''
import asyncio, json, os, sys, time
from troupe.workers.rewards.results import Steps

waiting = []
calls = 0


async def judged_together(response, answer, metadata):
    """Returns only when all samples of the group have arrived; in which order they came."""
    waiting.append(response)
    while len(waiting) % 3:
        await asyncio.sleep(0.001)
    return float(waiting.index(response))


async def asynchronous(response, answer, metadata):
    await asyncio.sleep(1000 if response == "slow" else 0)
    if response == "block": time.sleep(1000)
    if response == "raise": raise ValueError("bad thing")
    if response == "late": raise TimeoutError("of its own")
    if response == "quit": sys.exit(4)
    return None if response == "none" else len(response)


def returns_a_coroutine(response, answer, metadata):
    return asynchronous(response, answer, metadata)


def batched(responses, answers, metadata, *, bonus=0.0):
    """The first response says what is returned."""
    global calls
    calls += 1
    assert len(responses) == len(answers) == len(metadata) == len([one["sample"]["finish_reason"] for one in metadata])
    match responses[0]:
        case "short": return [1.0]
        case "number": return 1.0
        case "text": return "11"
        case "raise": raise ValueError("bad thing")
        case "exit": os._exit(3)
        case "sleep": time.sleep(1000)
        case "array":
            import numpy
            return numpy.arange(len(responses), dtype=numpy.float32)
        case "mixed": return [1, None, "x", float("nan"), 10**400, True][: len(responses)]
        case "steps": return [Steps([(len(r), 1.0)]) for r in responses]
        case "calls": return [calls] * len(responses)
        case "table": return [[1.0]] * len(responses)
    return [len(response) + bonus for response in responses]


async def batched_and_asynchronous(responses, answers, metadata):
    await asyncio.sleep(0)
    return batched(responses, answers, metadata)


def prompt_size(response, answer, metadata):
    return len(metadata["sample"]["messages"][0]["content"]) + metadata["level"]


def helper(text):
    return json.loads(text)


def fails(response, answer, metadata):
    if response.startswith("{"):
        return helper(response)
    if response == "index":
        return [][1]
    raise KeyError(response)


def scalar(response, answer, metadata):
    import numpy as np
    import torch
    return eval(response)
'''


def line(part: str) -> int:
    """Number of the line of `forms.py` that has this text."""
    return next(number for number, text in enumerate(FORMS.splitlines(), 1) if part in text)


SINGLE, BATCH = line('"raise": raise'), line('case "raise"')


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "forms.py"
    path.write_text(FORMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def scored(name: str, *responses: str, timeout_s: float = FAR_OFF, **fields: object) -> list[RewardResult]:
    """The outcomes of one group, in a separate process."""
    config = RewardFunctionConfig.model_validate({"name": f"forms:{name}", "timeout_s": timeout_s, **fields})
    process = RewardProcess(config, memory_limit_mib=4096)  # torch with CUDA takes 3 GiB of addresses
    try:
        return process.score(group(*responses))
    finally:
        process.close()


def group(*responses: str) -> list[Sample]:
    messages = json.dumps([{"role": "user", "content": "2 + 3"}])
    return [Sample(response, "5", '{"level": 2}', 3, "stop", messages) for response in responses]


@pytest.fixture
def worker(module: Path) -> Iterator[RewardWorker]:
    functions = (RewardFunctionConfig(name="forms:fails", timeout_s=FAR_OFF, label="judge"),)
    built = RewardWorker(RewardConfig(functions=functions), "reward-0")
    built.start()
    yield built
    built.close()


# Asynchronous functions


@pytest.mark.usefixtures("module")
def test_an_asynchronous_function_judges_the_samples_of_a_group_at_the_same_time() -> None:
    assert scored("judged_together", "a", "b", "c") == [RewardResult(0.0), RewardResult(1.0), RewardResult(2.0)]


@pytest.mark.usefixtures("module")
def test_a_fault_of_an_asynchronous_function_costs_one_sample() -> None:
    outcomes = scored("asynchronous", "abc", "raise", "late", "quit", "none", "ab")
    assert outcomes == [
        RewardResult(3.0),
        RewardResult(None, f"error: ValueError: bad thing (forms.py:{SINGLE})"),
        RewardResult(None, f"error: TimeoutError: of its own (forms.py:{SINGLE + 1})"),
        RewardResult(None, f"error: SystemExit: 4 (forms.py:{SINGLE + 2})"),
        RewardResult(None, "not a number: None (NoneType)"),
        RewardResult(2.0),
    ]


@pytest.mark.usefixtures("module")
def test_a_slow_sample_of_an_asynchronous_function_times_out_alone() -> None:
    assert scored("asynchronous", "abc", "slow", timeout_s=2) == [
        RewardResult(3.0),
        RewardResult(None, "timeout after 2 s"),
    ]


@pytest.mark.usefixtures("module")
def test_an_asynchronous_function_that_blocks_is_ended_and_the_statuses_say_that_all_lost_their_call() -> None:
    status = "timeout after 1 s (one call for 2 samples)"
    assert scored("asynchronous", "abc", "block", timeout_s=1) == [RewardResult(None, status)] * 2


@pytest.mark.usefixtures("module")
def test_a_function_that_returns_a_coroutine_is_awaited() -> None:
    assert scored("returns_a_coroutine", "abc", "raise") == [
        RewardResult(3.0),
        RewardResult(None, f"error: ValueError: bad thing (forms.py:{SINGLE})"),
    ]


# Batched functions


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", ["batched", "batched_and_asynchronous"])
def test_a_batched_function_is_called_once_for_a_group(name: str) -> None:
    assert scored(name, "a", "bb", "ccc", batched=True) == [RewardResult(1.0), RewardResult(2.0), RewardResult(3.0)]
    assert scored(name, "calls", "", "", batched=True) == [RewardResult(1.0)] * 3


@pytest.mark.usefixtures("module")
def test_a_batched_function_takes_its_arguments_and_may_return_arrays_and_steps() -> None:
    assert scored("batched", "a", "bb", batched=True, args={"bonus": 0.5}) == [RewardResult(1.5), RewardResult(2.5)]
    assert scored("batched", "array", "", "", batched=True) == [RewardResult(0.0), RewardResult(1.0), RewardResult(2.0)]
    steps = scored("batched", "steps", "ab", batched=True, process=True)
    assert steps == [RewardResult(1.0, steps=((5, 1.0),)), RewardResult(1.0, steps=((2, 1.0),))]


@pytest.mark.usefixtures("module")
def test_a_result_that_is_no_number_costs_its_own_sample_only() -> None:
    assert scored("batched", "mixed", "", "", "", "", "", batched=True) == [
        RewardResult(1.0),
        RewardResult(None, "no result: the function returned None for this sample"),
        RewardResult(None, "not a number: 'x' (str)"),
        RewardResult(None, "not a finite number: nan"),
        RewardResult(None, "error: OverflowError: int too large to convert to float"),
        RewardResult(1.0),
    ]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("short", "wrong length: 1 results for 3 samples"),
        ("number", "not a list: 1.0 (float)"),
        ("text", "not a list: '11' (str)"),
        ("table", "not a number: [1.0] (list)"),
        ("raise", f"error: ValueError: bad thing (forms.py:{BATCH}) (one call for 3 samples)"),
        ("exit", "died with exit code 3 (one call for 3 samples)"),
    ],
)
def test_a_fault_of_the_whole_call_fails_all_samples_and_says_so(fault: str, status: str) -> None:
    assert scored("batched", fault, "", "", batched=True) == [RewardResult(None, status)] * 3


@pytest.mark.usefixtures("module")
def test_a_batched_function_that_hangs_times_out_and_the_next_group_is_scored() -> None:
    config = RewardFunctionConfig(name="forms:batched", timeout_s=2.0, batched=True)
    process = RewardProcess(config, memory_limit_mib=4096)  # torch with CUDA takes 3 GiB of addresses
    try:
        assert (
            process.score(group("sleep", "")) == [RewardResult(None, "timeout after 2 s (one call for 2 samples)")] * 2
        )
        assert process.score(group("a", "bb")) == [RewardResult(1.0), RewardResult(2.0)]
    finally:
        process.close()


def test_a_batched_function_with_other_parameters_is_refused_with_the_form_it_needs() -> None:
    process = RewardProcess(RewardFunctionConfig(name="json:dumps", batched=True), memory_limit_mib=256)
    with pytest.raises(RewardFunctionError, match=r"cannot be called as f\(responses, answers, metadata, \*\*args\)"):
        process.start()


# What a function may return, and what it gets


@pytest.mark.usefixtures("module")
def test_scalars_of_numpy_and_torch_are_numbers_and_other_values_are_a_failure() -> None:
    numbers = {
        "np.float32(0.5)": 0.5,
        "np.int64(2)": 2.0,
        "np.bool_(True)": 1.0,
        "np.array(0.25)": 0.25,
        "True": 1.0,
        "torch.tensor(0.5)": 0.5,
        "torch.tensor(True)": 1.0,
        "torch.ones((), requires_grad=True)": 1.0,
        "Steps([(1, torch.tensor(0.5))], outcome=np.array(2))": 2.0,
    }
    failures = {
        "np.float64('nan')": "not a finite number: nan",
        "torch.tensor(float('inf'))": "not a finite number: inf",
        "np.array('x')": "not a number: array('x', dtype='<U1') (ndarray)",
        "np.ones(1)": "not a number: array([1.]) (ndarray)",
        "torch.ones(1)": "not a number: tensor([1.]) (Tensor)",
        "np.complex64(1)": "not a number: np.complex64(1+0j) (complex64)",
    }
    expected = [RewardResult(value) for value in numbers.values()] + [
        RewardResult(None, why) for why in failures.values()
    ]
    assert scored("scalar", *numbers, *failures) == expected


@pytest.mark.usefixtures("module")
def test_the_prompt_reaches_the_function() -> None:
    assert scored("prompt_size", "") == [RewardResult(7.0)]


# Several right answers


def test_any_of_several_answers_is_right() -> None:
    several = {"right_answers": [" Paris", "Lutetia", "5", "1/2"]}
    assert [exact_match(text, " Paris", several) for text in ("Paris", "Lutetia ", "Rome")] == [1.0, 1.0, 0.0]
    assert exact_match("lutetia", "Paris", several, ignore_case=True) == 1.0
    assert [last_number(text, " Paris", several) for text in ("it is 5.0", "it is 6", "Paris")] == [1.0, 0.0, 0.0]
    assert [numeric(text, " Paris", several) for text in ("0.5", "5", "7")] == [1.0, 1.0, 0.0]


def test_answers_of_which_none_is_a_number_are_refused() -> None:
    several = {"right_answers": ["five", "cinq"]}
    with pytest.raises(ValueError, match="not a number: 'five'"):
        last_number("5", "five", several)


def jsonl(file: Path, **fields: Any) -> DataSource:
    return TypeAdapter(DataSource).validate_python({"kind": "jsonl", "path": str(file)} | fields)


def test_a_list_in_the_answer_column_reaches_the_functions(tmp_path: Path) -> None:
    rows: Sequence[object] = [["Paris", "Lutetia"], ["Paris"], [5, 5.5], "Paris"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", "answer": row}) + "\n" for row in rows))
    pool = load_pool(jsonl(file))
    assert pool.table["answer"].to_pylist() == ["Paris", "Paris", "5", "Paris"]
    metadata = [json.loads(text) for text in pool.table["metadata"].to_pylist()]
    assert metadata == [{"right_answers": ["Paris", "Lutetia"]}, {}, {"right_answers": ["5", "5.5"]}, {}]
    assert exact_match("Lutetia", "Paris", metadata[0]) == 1.0
    assert numeric("5.5", "5", metadata[2]) == 1.0


def test_a_metadata_column_is_not_overwritten_by_several_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "answer": ["x", "y"]}, {"prompt": "b", "answer": "x"}]
    file.write_text("".join(json.dumps({"right_answers": 2} | row) + "\n" for row in rows))
    pool = load_pool(jsonl(file, metadata=("right_answers",)))
    assert pool.rows == 1
    assert "also a metadata column 'right_answers'" in pool.problems[0]


# Faults


def test_a_fault_names_the_line_of_the_user_even_where_a_library_raised(
    module: Path, worker: RewardWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.close()  # the next process is started while this test's capture is on
    summary, _ = worker.score(rollouts(["{", "{{", "index", "other"]))
    parse, index, key = line("return json.loads"), line("[][1]"), line("raise KeyError")
    assert [status.rpartition(" (")[2] for status in summary.statuses] == [
        f"forms.py:{number})" for number in (parse, parse, index, key)
    ]
    assert [(fault.cause, fault.samples) for fault in summary.faults] == [
        (f"judge: JSONDecodeError at {module}:{parse}", 2),
        (f"judge: IndexError at {module}:{index}", 1),
        (f"judge: KeyError at {module}:{key}", 1),
    ]
    assert summary.faults[0].example in summary.statuses[0]
    printed = capfd.readouterr().err
    assert printed.count("JSONDecodeError") == 1, "the second failure of a cause prints no traceback"
    assert "workers/rewards" not in printed, "the traceback starts in the user's function"


def test_failures_of_one_cause_are_one_fault_whatever_their_values() -> None:
    outcomes = [RewardResult(None, f"not a number: {n} (str)", cause="not a number") for n in "ab"]
    died = RewardResult(None, "died with exit code 3")
    assert find_faults(["one", "two"], [[*outcomes, RewardResult(1.0)], [died, RewardResult(1.0), died]]) == (
        Fault("one: not a number", "not a number: a (str)", 2),
        Fault("two: died with exit code 3", "died with exit code 3", 2),
    )


def test_a_cause_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog("reward function")
    for _ in range(60):
        log.note([Fault("judge: KeyError at a.py:3", "error: KeyError: 'x' (a.py:3)", 2)])
    log.note([Fault("judge: timeout", "timeout after 5 s", 1)])
    assert [record.message for record in caplog.records] == [
        "reward function judge: KeyError at a.py:3: a sample has no reward: error: KeyError: 'x' (a.py:3)",
        "reward function judge: KeyError at a.py:3: 10 samples so far",
        "reward function judge: KeyError at a.py:3: 100 samples so far",
        "reward function judge: timeout: a sample has no reward: timeout after 5 s",
    ]


def test_messages_that_differ_for_every_sample_are_one_cause(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog("reward function")
    for n in range(9):
        log.note([Fault(f"environment: error: KeyError: 'room {n}' (env.py:3)", f"room {n}", 1)])
    assert [record.message for record in caplog.records] == [
        "reward function environment: error: KeyError: 'room 0' (env.py:3): a sample has no reward: room 0"
    ]
