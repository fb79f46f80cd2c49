"""A run on two sources in two environments with three held-out sets, killed and resumed, on the real stack."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, ledger_balances, run_troupe, running, trajectories
from troupe.orchestrator.data.mixture import prompt_order
from troupe.orchestrator.data.prompts import load_train_pool
from troupe.orchestrator.live.run_state import run_state
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.telemetry.event_log import EVENTS
from troupe.orchestrator.telemetry.run_folder import RunFolder

pytestmark = pytest.mark.long

TINY = ROOT / "deploy" / "specs" / "tiny-mixture.yaml"
SPEC = load_rollout_spec(TINY)
SIZES = {"sums": 8, "games": 4}
SETS = {"vowels": (8, 4, False), "second-try": (6, 2, True), "guessing": (4, 1, True)}
"""Prompts, samples of each, and whether they are episodes."""


@dataclass
class Killed:
    """What the run had written when its driver was killed."""

    evaluations: list[dict[str, Any]]
    output: str


@pytest.fixture(scope="module")
def killed() -> Killed:
    return Killed([], "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, killed: Killed) -> Iterator[Run]:
    """The shipped spec, which is killed and resumed.

    A worker of one environment gets SIGKILL after step 1, and the driver at step 3, one after a checkpoint.
    """
    folder = tmp_path_factory.mktemp("runs")
    with running(Run(folder, TINY, name="mixture")) as first:
        first.wait_for_step(1)
        psutil.Process(pid_of(first.out, "environment.retry-0")).kill()
        first.wait_for_step(3)
        assert run_state(RunFolder(first.out)).name == "running"
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        assert run_state(RunFolder(first.out)).name == "died"
        assert first.leftover_processes() == []
        killed.evaluations, killed.output = evaluations(first), first.output
    with running(Run(folder, TINY, name="mixture", resume=True)) as second:
        assert second.wait() == 0, second.output
        assert run_state(RunFolder(second.out)).name == "finished"
        assert second.leftover_processes() == []
        yield second


def pid_of(out: Path, worker: str) -> int:
    """Process of a worker, from the events of its run."""
    events = [json.loads(line) for line in (out / EVENTS).read_text().splitlines()]
    return next(int(event["detail"].rpartition("pid ")[2]) for event in events if event.get("worker") == worker)


def evaluations(run: Run) -> list[dict[str, Any]]:
    """The evaluations so far."""
    return json.loads((run.out / EVALUATIONS).read_text())["evaluations"]


def groups(run: Run) -> list[list[str]]:
    """Groups that each step trained on, in order."""
    tables = [trajectories(run.out, step) for step in range(1, SPEC.schedule.steps + 1)]
    return [list(dict.fromkeys(table["prompt_uid"].to_pylist())) for table in tables]


@pytest.mark.real
def test_a_killed_and_resumed_mixture_draws_each_prompt_of_its_order_once(run: Run) -> None:
    order = prompt_order(SPEC, load_train_pool(SPEC.data))
    size = SPEC.schedule.prompts_per_step
    expected = [[order.next().prompt_uid for _ in range(size)] for _ in range(SPEC.schedule.steps)]
    assert groups(run) == expected
    assert run.steps() == list(range(SPEC.schedule.steps + 1)), "step 0 has the evaluation at the start"


@pytest.mark.real
def test_each_source_is_sampled_and_rewarded_as_it_says(run: Run) -> None:
    """Both sources are episodes: sums get a second try and the share of vowels, games are of guessing."""
    for step in run.steps()[1:]:
        for row in trajectories(run.out, step).to_pylist():
            assert row["prompt_uid"].startswith(f"{row['source']}-")
            (component,) = row["components"]
            assert component["name"] == "environment"
            said = json.loads(row["conversation"])
            turns = [turn["end"] - turn["start"] for turn in row["turns"] if turn["name"] == "assistant"]
            texts = [message["content"] for message in said if message["role"] == "assistant"]
            assert len(texts) == len(turns) <= 2
            if row["source"] == "sums":
                *wrong, last = map(vowels, texts)
                assert row["reward"] == pytest.approx(0.5 ** len(wrong) * last)
                assert all(share < 0.4 for share in wrong) and (wrong or last >= 0.4)
                assert said[0]["role"] == "user" and max(turns) <= 6
            else:
                assert said[0] == {"role": "system", "content": "Answer with one number."}
                assert row["reward"] in (0.0, 0.9, 1.0) and max(turns) <= 4
    for line in run.metrics[1:]:
        for name in ("guess", "retry"):
            assert line[f"episodes/{name}/turns"] <= 2 and line[f"episodes/{name}/failed"] == 0
            assert line[f"workers/environment.{name}"] == 1
        assert 0 <= line["environment/retry/solved"] <= 1


def vowels(text: str) -> float:
    """Share of vowels, as `letter_share` counts it."""
    return sum(letter in "aeiou" for letter in text) / len(text) if text else 0.0


@pytest.mark.real
def test_a_lost_worker_of_one_environment_is_replaced_alone(run: Run, killed: Killed) -> None:
    assert "environment.retry-0 is lost" in killed.output
    assert "environment.retry-0 was replaced and serves again" in killed.output
    assert "environment.guess-0 is lost" not in killed.output
    assert all(line["ledger/dropped"] == 0 for line in run.metrics[1:])


def counts(evaluation: dict[str, Any]) -> dict[str, list[int]]:
    """Prompts, samples of each, and those without a result, by set."""
    what = ("prompts", "samples", "refused", "failed_samples")
    return {label: [one[name] for name in what] for label, one in evaluation["sets"].items()}


@pytest.mark.real
def test_a_resumed_run_evaluates_the_same_sets_with_the_same_counts(run: Run, killed: Killed) -> None:
    """Each set is sampled as it says, in one entry for each evaluation, and an evaluation before the kill stays."""
    found = evaluations(run)
    assert [one["step"] for one in found] == [0, 3, 6]
    assert [one["step"] for one in killed.evaluations] == [0, 3] and found[0] == killed.evaluations[0]
    assert [counts(one) for one in found[:2]] == [counts(one) for one in killed.evaluations]
    for one in found:
        table = pq.read_table(run.out / "evaluation" / f"step-{one['step']:06d}.parquet").to_pylist()
        for label, (prompts, samples, episodes) in SETS.items():
            assert one["sets"][label]["prompts"] == prompts
            rows = [row for row in table if row["prompt_uid"].startswith(f"eval-{label}-")]
            assert len(rows) == prompts * samples
            assert {bool(row["conversation"]) for row in rows} == {episodes}


@pytest.mark.real
def test_the_counts_by_source_of_a_resumed_run_are_those_of_its_samples(run: Run) -> None:
    trained = dict.fromkeys(SIZES, 0)
    for line, names in zip(run.metrics[1:], groups(run), strict=True):
        rows = trajectories(run.out, line["step"]).to_pylist()
        for source, size in SIZES.items():
            own = [name for name in names if name.startswith(source)]
            rewards = [row["reward"] for row in rows if row["source"] == source]
            assert len(rewards) == len(own) * size
            trained[source] += len(rewards)
            assert line[f"source/{source}/share"] == len(own) / len(names)
            assert line[f"source/{source}/trained"] == trained[source]
            assert line[f"source/{source}/reward"] == pytest.approx(sum(rewards) / len(rewards))
            assert line[f"source/{source}/dropped"] == 0
        solved = [row["reward"] >= 0.3 for row in rows if row["source"] == "sums"]
        assert line["source/sums/pass_rate"] == pytest.approx(sum(solved) / len(solved))
        assert "source/games/pass_rate" not in line
        assert ledger_balances(line)
    last = run.metrics[-1]
    assert sum(trained.values()) == last["ledger/trained"] == last["ledger/dispatched"]
    assert last["source/sums/rows"] < 24  # dedupe


@pytest.mark.real
def test_samples_are_selected_by_their_source(run: Run, tmp_path: Path) -> None:
    found = run_troupe(tmp_path, "samples", str(run.out), "--where", "source = 'games'", "--limit", "1")
    rows: list[dict[str, Any]] = [r for s in run.steps()[1:] for r in trajectories(run.out, s).to_pylist()]
    assert f"1 of {sum(row['source'] == 'games' for row in rows)} samples" in found
