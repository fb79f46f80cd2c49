"""A replay: starts the trainers of a run, and nothing else of it, and repeats its steps."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.hub.resolve import fetch
from troupe.orchestrator.replay.against import (
    Difference,
    TensorDifference,
    difference,
    replay_there,
    tensor_differences,
)
from troupe.orchestrator.replay.plan import ReplayPlan, steps_of
from troupe.orchestrator.replay.repeat import Repeated, Replayer, software_changes, start_problem
from troupe.orchestrator.replay.step_recorder import software
from troupe.orchestrator.reporting.console import Console
from troupe.orchestrator.roles.table import TRAINERS
from troupe.orchestrator.run import RunRequest, open_run
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.started_workers import Workers
from troupe.orchestrator.training.batch import unless_stopped
from troupe.orchestrator.training.checkpoint import load_checkpoint
from troupe.orchestrator.training.updates import OfflineUpdates, RolloutUpdates, Updates, UpdateSettings

Each = Callable[[Repeated], bool]
"""Called with every step that was repeated; returns whether the replay continues."""


@dataclass(frozen=True)
class ReplayRequest:
    """What the user asked for."""

    run: Path
    plan: ReplayPlan
    address: str | None = None
    whole: bool = False
    """Whether the digest of each parameter is taken."""
    weights: Path | None = None
    """Folder to which the weights are written where `each` ends the replay: ROLE.arrow."""


@dataclass(frozen=True)
class ReplayOutcome:
    """What a replay found."""

    steps: tuple[Repeated, ...]
    start_problem: str
    """Why the first weights are not those of the run; empty where they are."""
    software: tuple[str, ...]
    """What is installed here in another version than in the run."""

    @property
    def equal(self) -> bool:
        """Whether the replay had the weights of the run at its start and after every step."""
        return not self.start_problem and all(step.equal for step in self.steps)


def replay(request: ReplayRequest, console: Console, each: Each) -> ReplayOutcome:
    """Repeats the steps of a plan.

    Args:
        request: The plan, and what to find out.
        console: Shows the progress.
        each: Called with every step.

    Raises:
        TroupeError: The trainers do not start, or a step cannot be repeated.
    """
    return asyncio.run(_replay(request, console, each))


async def _replay(request: ReplayRequest, console: Console, each: Each) -> ReplayOutcome:
    plan, timeout_s = request.plan, request.plan.spec.schedule.train_timeout_s
    local = fetch(plan.spec, console)
    run = RunRequest(plan.spec, request.run, resume=False, address=request.address)
    async with open_run(run, local, console, frozenset(TRAINERS)) as context:
        updates = updates_of(plan.spec, context.workers, console)
        console.message(f"repeating {steps_of(plan.folders)} from {plan.origin}")
        if plan.checkpoint is not None:
            await load_checkpoint(plan.checkpoint, updates.trainers, timeout_s)
        replayer = Replayer(updates, context.cluster.put, timeout_s)
        first = plan.folders[0].kept
        wrong = start_problem(first.before, await replayer.digests(), plan.origin)
        done: list[Repeated] = []
        for folder in plan.folders:
            done.append(await unless_stopped(context.stop, replayer.repeat(folder, request.whole)))
            if not each(done[-1]):
                await _write_weights(request.weights, updates, timeout_s)
                break
    changes = software_changes(plan.folders[-1].kept.software, software())
    return ReplayOutcome(tuple(done), wrong, tuple(changes))


async def _write_weights(folder: Path | None, updates: Updates, timeout_s: float) -> None:
    if folder is not None:
        for group in updates.trainers:
            await group.write_weights(str(folder / f"{group.role}.arrow"), timeout_s=timeout_s)


@dataclass(frozen=True)
class Comparison:
    """A replay with this code and one with another checkout."""

    steps: int
    """Repeated by both."""
    difference: Difference | None
    """None: the weights are equal after every step."""
    tensors: dict[str, list[TensorDifference]] = field(default_factory=dict)
    """How large the difference is, by role, in the order of the model."""


def compare(request: ReplayRequest, checkout: Path, console: Console, each: Each) -> Comparison:
    """Repeats the steps of a plan with another checkout, then with this code until the weights differ.

    The size of the difference needs the other weights of that step: the other checkout repeats the steps once more.

    Args:
        request: The plan.
        checkout: Folder of the other code (`require_checkout`).
        console: Shows the progress.
        each: Called with every step that this code has repeated.

    Raises:
        TroupeError: One of the replays failed.
    """
    schedule, steps = request.plan.spec.schedule, request.plan.folders
    timeout_s = schedule.start_timeout_s + schedule.step_timeout_s * len(steps)
    with tempfile.TemporaryDirectory(prefix="troupe-replay-") as temporary:
        here, there = Path(temporary) / "here", Path(temporary) / "there"
        here.mkdir()
        there.mkdir()
        console.message(f"repeating {steps_of(steps)} with {checkout}")
        other = replay_there(checkout, request.run, steps[-1].kept.step, there, timeout_s, weights=False)
        by_step = {step.step: step for step in other.steps}
        if missing := [folder.kept.step for folder in steps if folder.kept.step not in by_step]:
            raise TroupeError(f"{checkout} has not repeated step {missing[0]}")
        found: list[Difference] = []

        def until_different(step: Repeated) -> bool:
            each(step)
            differs = difference(step, by_step[step.step])
            found.extend([] if differs is None else [differs])
            return differs is None

        done = replay(replace(request, whole=True, weights=here), console, until_different).steps
        if not found:
            return Comparison(len(done), None)
        (first,) = found
        console.message(f"repeating step {first.step} with {checkout}, for its weights")
        replay_there(checkout, request.run, first.step, there, timeout_s, weights=True)
        tensors = {
            role: tensor_differences(here / f"{role}.arrow", there / f"{role}.arrow", names)
            for role, names in first.names.items()
        }
    return Comparison(len(done), first, tensors)


def updates_of(spec: RunSpec, workers: Workers, console: Console) -> Updates:
    """The updates of a spec of either kind, on its trainers."""
    settings = UpdateSettings.from_spec(spec)
    if workers.examples is not None:
        return OfflineUpdates(settings, workers.examples, console)
    if workers.policy is None:
        raise TroupeError("the run has no trainer: there is nothing to repeat")
    return RolloutUpdates(settings, workers.policy, workers.critic, console)
