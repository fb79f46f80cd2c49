"""Which steps a replay repeats, from where, and with which spec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.live.diff import field_changes
from troupe.orchestrator.roles.table import TRAINERS, row_of, settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.machine import Located
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.locations import matching_files
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointStore
from troupe.orchestrator.training.step_record import REPLAY, RecordedStep, read_step, read_steps
from troupe.workers.contract.config import NO_TEMPLATE


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
        """Where it starts, as text."""
        return "the initial model" if self.checkpoint is None else f"the checkpoint of step {self.checkpoint.step}"


def plan_replay(run: Path, step: int) -> ReplayPlan:
    """The shortest replay of a run that includes a step: from the newest valid checkpoint before it.

    Raises:
        UsageError: A step that is needed is not kept or was changed, or the spec of the trainers changed between the
            steps.
    """
    return plan_up_to(run, step - 1, step, read_step(run / REPLAY, step))


def plan_up_to(run: Path, first_version: int, last: int, folder: RecordedStep) -> ReplayPlan:
    """The shortest replay that has the weights after step `first_version` and repeats the steps up to `last`.

    Args:
        run: Folder of the run.
        first_version: A number of steps; it starts from a checkpoint of that many steps or fewer.
        last: The last step that is repeated; no step is repeated if it is the checkpoint's.
        folder: The step whose spec the trainers have.

    Raises:
        UsageError: A step that is needed is not kept or was changed, or the spec of the trainers changed between the
            steps.
    """
    checkpoint = CheckpointStore(run / "checkpoints", keep=1).latest(before=first_version + 1)
    first = 1 if checkpoint is None else checkpoint.step + 1
    try:
        folders = read_steps(run / REPLAY, range(first, last + 1))
    except UsageError as error:
        origin = "the initial model" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
        raise UsageError(f"it takes steps {first} to {last}, from {origin} on: {error}") from None
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
    for name, source in spec.data_sources().items():
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
    return spec.update_rules, *(_trained_by(spec, role) for role in TRAINERS if role in spec.roles.trainers())


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
