"""A comparison of two versions of the code: which replays it asks for, and what it concludes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.orchestrator.insight.replay.test_replay import kept_step
from troupe.orchestrator.cli import app
from troupe.orchestrator.commands import replay as replay_command
from troupe.orchestrator.commands.replay import replay as command
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.insight.replay import runs
from troupe.orchestrator.insight.replay.against import ReplayThere, StepThere
from troupe.orchestrator.insight.replay.plan import ReplayPlan
from troupe.orchestrator.insight.replay.repeat import Repeated
from troupe.orchestrator.insight.replay.runs import ReplayOutcome, ReplayRequest, compare
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.step_record import RecordedStep

Each = Callable[[Repeated], bool]


def step_here(step: int) -> Repeated:
    """A step whose two parameters are named after it."""
    weights = {"policy": {"embed": f"e{step}", "head": f"h{step}"}}
    updates = ({"policy/loss": float(step)},)
    return Repeated(step, {"policy": "a"}, {"policy": "a"}, updates, updates, 0.1, weights)


class TwoVersions:
    """In place of the replays: the other version of the code has another head from one of the steps on."""

    def __init__(self, differs_from: int) -> None:
        self.differs_from = differs_from
        self.asked: list[int] = []
        """Last step of each replay with the other code."""
        self.repeated: list[int] = []
        """Steps that this code has repeated."""

    def there(self, root: Path, run: Path, step: int, folder: Path, timeout_s: float) -> ReplayThere:
        self.asked.append(step)
        return ReplayThere(root=str(root), steps=[self._step(number) for number in range(3, step + 1)])

    def here(self, request: ReplayRequest, console: Console, each: Each) -> ReplayOutcome:
        assert request.whole
        done = []
        for folder in request.plan.folders:
            self.repeated.append(folder.kept.step)
            done.append(step_here(folder.kept.step))
            if not each(done[-1]):
                break
        return ReplayOutcome(tuple(done), "", ())

    def _step(self, number: int) -> StepThere:
        step = step_here(number)
        weights = {role: dict(digests) for role, digests in step.weights.items()}
        updates = [dict(step.updates[0])]
        if number >= self.differs_from:
            weights["policy"]["head"], updates[0]["policy/loss"] = "other", 0.25
        return StepThere(step=number, equal=True, weights=weights, updates=updates)


@pytest.fixture
def request_(tmp_path: Path) -> ReplayRequest:
    """A replay of steps 3 to 5."""
    spec = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml")
    folders = tuple(RecordedStep(tmp_path, kept_step(step)) for step in (3, 4, 5))
    return ReplayRequest(tmp_path, ReplayPlan(spec, None, folders))


def compared(versions: TwoVersions, request: ReplayRequest, monkeypatch: pytest.MonkeyPatch) -> runs.Comparison:
    monkeypatch.setattr(runs, "replay_there", versions.there)
    monkeypatch.setattr(runs, "replay", versions.here)
    return compare(request, Path("/other"), Console(io.StringIO()), lambda _: True)


def test_the_first_difference_ends_the_comparison(request_: ReplayRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = TwoVersions(differs_from=4)
    found = compared(versions, request_, monkeypatch)
    assert versions.asked == [5]
    assert versions.repeated == [3, 4]
    assert found.difference is not None
    assert (found.difference.step, found.difference.names) == (4, {"policy": ["head"]})
    assert found.difference.metrics == ["policy/loss is 0.25 there, 4 here"]


def test_versions_that_agree_are_compared_to_the_end(request_: ReplayRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = TwoVersions(differs_from=9)
    found = compared(versions, request_, monkeypatch)
    assert versions.asked == [5]
    assert versions.repeated == [3, 4, 5]
    assert (found.steps, found.difference) == (3, None)


def test_steps_that_the_other_version_leaves_out_are_an_error(
    request_: ReplayRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (RecordedStep(request_.run, kept_step(2)), *request_.plan.folders)
    longer = replace(request_, plan=replace(request_.plan, folders=folders))
    with pytest.raises(TroupeError, match="/other has not repeated step 2"):
        compared(TwoVersions(differs_from=4), longer, monkeypatch)


def test_one_question_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--against and --resample are two questions"):
        command(tmp_path, 1, against=tmp_path, resample=True)


def test_a_comparison_does_not_join_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--against starts its own Ray: .*; drop --address"):
        command(tmp_path, 1, against=tmp_path, address="auto")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with pytest.raises(UsageError, match=r"--against starts its own Ray: .*; unset RAY_ADDRESS"):
        command(tmp_path, 1, against=tmp_path)


@pytest.mark.parametrize("equal", [True, False])
def test_a_replay_is_printed_as_json(equal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def replay(request: ReplayRequest, console: Console, each: Each) -> ReplayOutcome:
        steps = (step_here(3), replace(step_here(4), found={"policy": "a" if equal else "b"}))
        assert all(each(step) for step in steps)
        return ReplayOutcome(steps, "", () if equal else ("torch 2.12 in the run, 2.13 here",))

    monkeypatch.setattr(runs, "replay", replay)
    monkeypatch.setattr(replay_command, "_request", lambda *arguments: None)
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "4", "--json"])
    assert result.exit_code == (0 if equal else 1)
    found = json.loads(result.stdout)
    assert found["equal"] is equal and [step["equal"] for step in found["steps"]] == [True, equal]
    assert found["steps"][1]["recorded"] == {"policy": "a"} and bool(found["software"]) is not equal
