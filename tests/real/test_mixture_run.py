"""A run on two sources with separate rewards, one of them with episodes, killed and resumed, on the real stack."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, ledger_balances, run_troupe, running, trajectories
from troupe.orchestrator.data.mixture import prompt_order
from troupe.orchestrator.data.prompts import load_train_pool
from troupe.orchestrator.spec.load import load_rollout_spec

TINY = ROOT / "deploy" / "specs" / "tiny-mixture.yaml"
SPEC = load_rollout_spec(TINY)
SIZES = {"sums": 8, "games": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The shipped spec, whose driver gets SIGKILL at step 3, one after a checkpoint, and which is then resumed."""
    folder = tmp_path_factory.mktemp("runs")
    with running(Run(folder, TINY, name="mixture")) as first:
        first.wait_for_step(3)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        assert first.leftover_processes() == []
    with running(Run(folder, TINY, name="mixture", resume=True)) as second:
        assert second.wait() == 0, second.output
        assert second.leftover_processes() == []
        yield second


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
    assert run.steps() == list(range(1, SPEC.schedule.steps + 1))


@pytest.mark.real
def test_each_source_is_sampled_and_rewarded_as_it_says(run: Run) -> None:
    """Sums are single responses, rewarded by their vowels; games are episodes, rewarded by the environment."""
    for step in run.steps():
        for row in trajectories(run.out, step).to_pylist():
            assert row["prompt_uid"].startswith(f"{row['source']}-")
            (component,) = row["components"]
            if row["source"] == "sums":
                text = row["response"]
                assert (component["name"], row["conversation"]) == ("vowels", "")
                assert len(row["response_ids"]) <= 6
                assert row["reward"] == pytest.approx(sum(c in "aeiou" for c in text) / len(text) if text else 0.0)
            else:
                said = json.loads(row["conversation"])
                turns = [turn["end"] - turn["start"] for turn in row["turns"] if turn["name"] == "assistant"]
                assert said[0] == {"role": "system", "content": "Answer with one number."}
                assert component["name"] == "environment"
                assert row["reward"] in (0.0, 0.9, 1.0)
                assert len(turns) <= 2 and max(turns) <= 4
    last = run.metrics[-1]
    assert last["episodes/turns"] <= 2 and last["episodes/failed"] == 0


@pytest.mark.real
def test_the_counts_by_source_of_a_resumed_run_are_those_of_its_samples(run: Run) -> None:
    trained = dict.fromkeys(SIZES, 0)
    for line, names in zip(run.metrics, groups(run), strict=True):
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
    rows: list[dict[str, Any]] = [r for s in run.steps() for r in trajectories(run.out, s).to_pylist()]
    assert f"1 of {sum(row['source'] == 'games' for row in rows)} samples" in found
