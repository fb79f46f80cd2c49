"""A sweep on the real stack whose process is killed while its second trial trains, and which is resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.commands import Command, metrics_lines, running, troupe_command
from troupe.orchestrator.insight.sweep.sweep import RECORD

pytestmark = [pytest.mark.long, pytest.mark.real, pytest.mark.timeout(1500)]

STEPS = 12
TRIALS = ["trial-001", "trial-002"]


def sweep(folder: Path, out: Path, *options: str) -> Command:
    """Two learning rates, one trial after the other."""
    fields = ("roles.policy.learning_rate=0.003,0.01", f"schedule.steps={STEPS}", "evaluation.every_steps=10")
    sets = [part for field in fields for part in ("--set", field)]
    spec = str(ROOT / "deploy" / "specs" / "tiny-sft.yaml")
    return Command(folder, troupe_command("sweep", spec, *sets, "--out", str(out), *options))


@dataclass(frozen=True)
class Sweeps:
    """A sweep that ran undisturbed, and one that was killed and resumed."""

    whole: Path
    resumed: Path
    tables: tuple[str, str]
    """What each printed at its end."""
    finished: tuple[int, int]
    """When the first trial's metrics were written last, before the kill and at the end."""
    at_the_kill: list[dict[str, Any]]
    """Metrics of the second trial."""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeps]:
    folder = tmp_path_factory.mktemp("sweeps")
    whole, out = folder / "whole", folder / "resumed"
    first, second = (out / name / "metrics.jsonl" for name in TRIALS[:2])
    with ExitStack() as stack:
        killed = stack.enter_context(running(sweep(folder, out)))
        killed.wait_until(lambda: len(metrics_lines(second.parent)) > 2, "two steps of the second trial")
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        assert killed.leftover_processes() == []
        at_the_kill, finished = metrics_lines(second.parent), first.stat().st_mtime_ns
        resumed = stack.enter_context(running(sweep(folder, out, "--resume")))
        assert resumed.wait(900) == 0, resumed.output
        assert resumed.leftover_processes() == []
        undisturbed = stack.enter_context(running(sweep(folder, whole)))
        assert undisturbed.wait(900) == 0, undisturbed.output
        tables = undisturbed.stdout, resumed.stdout
        yield Sweeps(whole, out, tables, (finished, first.stat().st_mtime_ns), at_the_kill)


def record(out: Path) -> dict[str, Any]:
    """The results, without the place of the folder."""
    found = json.loads((out / RECORD).read_text().replace(str(out), "OUT"))
    assert [trial["status"] for one in found["settings"] for trial in one["trials"]] == ["complete"] * len(TRIALS)
    return found


def test_the_results_are_those_of_an_undisturbed_sweep(sweeps: Sweeps) -> None:
    assert record(sweeps.resumed) == record(sweeps.whole)
    whole, resumed = (text.split("report:")[0] for text in sweeps.tables)
    assert resumed == whole and "eval/loss" in whole
    means = {one["mean"] for one in record(sweeps.whole)["settings"]}
    assert len(means) == len(TRIALS) and None not in means


def test_no_step_of_a_trial_is_trained_twice(sweeps: Sweeps) -> None:
    """The first trial was complete, and the second one saved, when the sweep's process died."""
    assert sweeps.finished[0] == sweeps.finished[1], "a complete trial is not run again"
    last = sweeps.at_the_kill[-1]["step"]
    assert (
        2 <= last < STEPS and sweeps.at_the_kill == metrics_lines(sweeps.resumed / TRIALS[1])[: len(sweeps.at_the_kill)]
    )
    for name in TRIALS:
        steps = [line["step"] for line in metrics_lines(sweeps.resumed / name)]
        assert steps == [*range(steps[0], STEPS + 1)] and steps[0] <= 1
