"""Repeats the updates of a run's steps, without engines, and compares the weights with the run's."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.live.diff import field_changes
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.table import TRAINERS, row_of, settings_of
from troupe.orchestrator.runs.session import RunRequest, open_session
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.training import update_rules
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.locations import matching_files
from troupe.orchestrator.spec.sources import Located
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointStore, load_checkpoint
from troupe.orchestrator.training.step_record import REPLAY, RecordedStep, read_step, read_steps
from troupe.orchestrator.training.step_recorder import software
from troupe.orchestrator.training.updates import OfflineUpdates, RolloutUpdates, Updates
from troupe.workers.contract.config_base import NO_TEMPLATE
from troupe.workers.contract.roles import TableRef

Digests = Mapping[str, str]
"""Digest of the weights, by role."""
_TIMED = frozenset({"tokens_per_s", "mfu"})
"""Metrics of an update that depend on how long it took."""


@dataclass(frozen=True)
class ReplayPlan:
    """A replay of a run up to one of its steps."""

    spec: RunSpec
    """The steps' spec, with paths that do not depend on the current folder."""
    checkpoint: Checkpoint | None
    """Where it starts, or None for the initial model."""
    folders: tuple[RecordedStep, ...]
    """The steps to repeat, in order."""

    @property
    def origin(self) -> str:
        return "the initial model" if self.checkpoint is None else f"the checkpoint of step {self.checkpoint.step}"


def plan_replay(run: Path, step: int) -> ReplayPlan:
    """The shortest replay with a step, from the newest valid checkpoint before. Raises UsageError if there is none."""
    folder = read_step(run / REPLAY, step)
    checkpoint = CheckpointStore(run / "checkpoints", keep=1).latest(before=step)
    first = 1 if checkpoint is None else checkpoint.step + 1
    try:
        folders = read_steps(run / REPLAY, range(first, step + 1))
    except UsageError as error:
        origin = "the initial model" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
        raise UsageError(f"it takes steps {first} to {step}, from {origin} on: {error}") from None
    spec = spec_of(folder)
    for other in folders:
        other.tables()  # refused here, before anything starts
        if other.spec_file.read_bytes() != folder.spec_file.read_bytes():
            _require_same_trainers(other, spec_of(other), spec)
    return ReplayPlan(spec, checkpoint, tuple(folders))


def spec_of(folder: RecordedStep) -> RunSpec:
    """The spec of a kept step, with paths that do not depend on the current folder. Raises SpecError."""
    (planned,) = plan_runs(read_document(folder.spec_file))
    overrides = list(_absolute(planned.spec, Path(folder.kept.working_folder)))
    (planned,) = plan_runs(read_document(folder.spec_file, overrides))
    return planned.spec


def _absolute(spec: RunSpec, working_folder: Path) -> Iterator[str]:
    """Overrides that replace relative paths of models, their adapters and templates, and data by absolute ones."""
    fields: dict[str, str | None] = {}
    for section, model in spec.models().items():
        files = {"path": model.path, "adapter": model.adapter, "chat_template": model.chat_template}
        fields |= {f"{section}.{name}": path for name, path in files.items()}
    for name, source in spec.data.sources().items():
        if isinstance(source, Located):
            fields[f"data.{name}.path"] = source.path
    for field, path in fields.items():
        if path is None or path == NO_TEMPLATE or Path(path).is_absolute():
            continue
        found = str(working_folder / path)
        if any(file.exists() for file in matching_files(found)):
            yield f"{field}={json.dumps(found)}"


def _require_same_trainers(folder: RecordedStep, before: RunSpec, spec: RunSpec) -> None:
    """Raises UsageError if the trainers of a step were configured differently from the previous step's."""
    for role in TRAINERS:
        if (role in before.roles.trainers()) != (role in spec.roles.trainers()):
            raise UsageError(f"step {folder.kept.step} was trained with another set of trainers than the last step")
    if _training(before) != _training(spec):
        changed = ", ".join(field for field, _, _ in field_changes(before, spec))
        words = f"the spec changed between step {folder.kept.step} and the last step ({changed})"
        raise UsageError(f"{words}, and there is no checkpoint between them: replay an earlier step")


def _training(spec: RunSpec) -> tuple[object, ...]:
    """What the weights depend on besides the batches."""
    return update_rules(spec), *(_trained_by(spec, role) for role in TRAINERS if role in spec.roles.trainers())


def _trained_by(spec: RunSpec, role: str) -> tuple[object, ...]:
    """What the updates of a role depend on. A constant learning rate does not depend on the length of the run."""
    settings = settings_of(spec, role)
    config = settings.config
    if spec.roles.trainers()[role].schedule == "constant":
        config = config.model_copy(update={"total_updates": 0})
    return row_of(spec, role).kind, config, settings.threads


def steps_of(folders: Sequence[RecordedStep]) -> str:
    """The steps as text: `step 3`, `steps 3 to 5`."""
    first, last = folders[0].kept.step, folders[-1].kept.step
    return f"step {last}" if first == last else f"steps {first} to {last}"


@dataclass(frozen=True)
class Repeated:
    """A step that was repeated."""

    step: int
    recorded: Digests
    """Digests of the weights after the step, in the run."""
    found: Digests
    """Digests of the weights after the step, in the replay."""
    recorded_updates: tuple[Mapping[str, float], ...]
    updates: tuple[Mapping[str, float], ...]
    seconds: float
    """Time of the updates."""

    @property
    def equal(self) -> bool:
        return self.recorded == self.found

    def line(self) -> str:
        result = "equal" if self.equal else "NOT EQUAL"
        parts = ", ".join(_compared(role, digest, self.found.get(role, "")) for role, digest in self.recorded.items())
        return f"step {self.step}: {result} ({parts}; {self.seconds:.2f} s)"

    def different_metrics(self) -> list[str]:
        """Metrics of the first update that differ, but for speeds: `policy/loss is 0.1 in the run, 0.2 here`."""
        count = len(self.recorded_updates)
        for number, (before, now) in enumerate(zip(self.recorded_updates, self.updates, strict=False), start=1):
            compared = [name for name in before if name.rpartition("/")[2] not in _TIMED]
            names = [name for name in compared if not _same(before[name], now.get(name, math.nan))]
            if names:
                of = f"update {number} of {count}: " if count > 1 else ""
                both = ((name, before[name], now.get(name, math.nan)) for name in names)
                return [f"{of}{name} is {first:.9g} in the run, {second:.9g} here" for name, first, second in both]
        return []


class Replayer:
    """Trainers that repeat kept steps."""

    def __init__(self, updates: Updates, put: Callable[[pa.Table], TableRef], timeout_s: float) -> None:
        """Repeats nothing yet. `updates`: the updates and the trainers, whose weights are those before the first
        step."""
        self._updates = updates
        self._put = put
        self._timeout_s = timeout_s

    async def digests(self) -> dict[str, str]:
        groups = self._updates.trainers
        found = await asyncio.gather(*(group.digest(timeout_s=self._timeout_s) for group in groups))
        return {group.role: digest for group, digest in zip(groups, found, strict=True)}

    async def repeat(self, folder: RecordedStep) -> Repeated:
        """Repeats a step's updates. Raises UsageError if a table is not the run's, TrainingDiverged, WorkerError."""
        kept = folder.kept
        tables = await asyncio.to_thread(folder.tables)
        texts = None if tables.texts is None else self._put(tables.texts)
        batch = folder.batch(self._put(tables.batch), texts)
        started = time.monotonic()
        updates, _ = await self._updates.run(kept.step - 1, batch, kept.state)
        seconds = time.monotonic() - started
        return Repeated(kept.step, kept.after, await self.digests(), kept.updates, tuple(updates), seconds)


def start_problem(recorded: Digests, found: Digests, origin: str) -> str:
    """Why the weights that a replay starts from are not the run's; empty if they are, or if it is unknown."""
    wrong = [role for role, digest in recorded.items() if found.get(role) != digest]
    if not wrong:
        return ""
    return f"the {' and '.join(wrong)} of {origin} differ from the weights that the run had there: nothing can be equal"


def software_changes(recorded: Sequence[str], now: Sequence[str]) -> list[str]:
    """Versions and processors that differ: `torch 2.13.0 in the run, torch 2.14.0 here`."""
    here = {line.partition(" ")[0]: line for line in now}
    changes = [(line, here.get(line.partition(" ")[0], "nothing")) for line in recorded]
    return [f"{before} in the run, {after} here" for before, after in changes if before != after]


def _compared(role: str, recorded: str, found: str) -> str:
    """Both digests of a role, shortened; one if they are equal."""
    return f"{role} {recorded[:12]}" + ("" if recorded == found else f" in the run, {found[:12]} here")


def _same(first: Any, second: Any) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


Each = Callable[[Repeated], None]
"""Called with every step that was repeated."""


@dataclass(frozen=True)
class ReplayOutcome:
    """What a replay found."""

    steps: tuple[Repeated, ...]
    start_problem: str
    """Why the first weights are not the run's; empty if they are."""
    software: tuple[str, ...]
    """Software whose version here differs from the run's."""

    @property
    def equal(self) -> bool:
        """Whether the replay had the weights of the run at its start and after every step."""
        return not self.start_problem and all(step.equal for step in self.steps)


def replay(run: Path, step: int, console: Console, each: Each, address: str | None = None) -> ReplayOutcome:
    """Repeats the shortest part of a run that includes a step. Raises UsageError if the step cannot be repeated
    (`plan_replay`); TroupeError if the trainers do not start, or a step cannot be repeated. `step`: the last step that
    is repeated."""
    return asyncio.run(_replay(run, plan_replay(run, step), console, each, address))


async def _replay(out: Path, plan: ReplayPlan, console: Console, each: Each, address: str | None) -> ReplayOutcome:
    timeout_s = plan.spec.schedule.train_timeout_s
    run = RunRequest(plan.spec, out, resume=False, address=address)
    async with open_session(run, console, roles=frozenset(TRAINERS)) as session:
        updates = _updates(plan.spec, session.workers, console)
        console.message(f"repeating {steps_of(plan.folders)} from {plan.origin}")
        if plan.checkpoint is not None:
            await load_checkpoint(plan.checkpoint, updates.trainers, timeout_s)
        replayer = Replayer(updates, session.cluster.put, timeout_s)
        first = plan.folders[0].kept
        wrong = start_problem(first.before, await replayer.digests(), plan.origin)
        done: list[Repeated] = []
        for folder in plan.folders:
            done.append(await session.unless_stopped(replayer.repeat(folder)))
            each(done[-1])
    changes = software_changes(plan.folders[-1].kept.software, software())
    return ReplayOutcome(tuple(done), wrong, tuple(changes))


def _updates(spec: RunSpec, workers: Workers, console: Console) -> Updates:
    """The updates of a spec of either kind, on its trainers."""
    if workers.examples is not None:
        return OfflineUpdates(spec, workers.examples, console)
    if workers.policy is None:
        raise TroupeError("the run has no trainer: there is nothing to repeat")
    return RolloutUpdates(spec.rollouts, workers.policy, workers.critic, console)
