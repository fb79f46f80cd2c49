"""Changes that a resumed run may make: the spec in its folder against the one given, and the checkpoint against both.

Everything here is checked before Ray starts. A change is refused if the checkpoint's state belongs to its old value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.data.mixture import DrawnSource
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.live.diff import FieldDifference, field_changes
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.field_tree import field_tree
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.training.checkpoint import Checkpoint, expert_problem, stage_problem, trainer_layouts


@dataclass(frozen=True)
class Resumption:
    """A run that resumes from a checkpoint with a spec."""

    folder: Path
    found: Checkpoint
    spec: RunSpec
    differences: tuple[FieldDifference, ...] | None
    """Differences between the folder's spec and the given one, or None if the folder has no readable spec."""
    problems: tuple[str, ...]
    """Other reasons why the run cannot resume."""

    def lines(self) -> list[str]:
        """Lines that the run prints at its start. Raises UsageError with a line for every reason not to resume."""
        refused = [str(difference) for difference in self.differences or () if difference.refused]
        if refused or self.problems:
            head = f"cannot resume {self.folder} at step {self.found.step} with this spec:"
            raise UsageError("\n  ".join([head, *refused, *self.problems]))
        head = f"resuming after step {self.found.step} of {self.spec.schedule.steps} from {self.found.path}"
        if self.differences is None:
            return [f"{head}; the folder has no spec to compare with"]
        changes = [f"changed: {difference}" for difference in self.differences]
        return [head, *changes] if changes else [f"{head}; the spec is unchanged"]


def resumption(folder: Path, found: Checkpoint, spec: RunSpec, saved_spec: Path) -> Resumption:
    """Compare a spec with what a run wrote."""
    before = _read(saved_spec)
    differences = None if before is None else tuple(_differences(before, spec, found.step))
    return Resumption(folder, found, spec, differences, tuple(_problems(found, spec, differences is None)))


def require_same_rows(found: Checkpoint | None, drawn: Callable[[Mapping[str, Any]], Iterable[DrawnSource]]) -> None:
    """Compare training data with a checkpoint's, if any, so that their order can continue. Raises UsageError if they
    differ; CheckpointError if the checkpoint has no such state."""
    if found is None:
        return
    with found.restoring():
        for section, state, digest in drawn(found.state["source"]):
            before = state.get("digest", digest)
            if before != digest:
                why = f"the rows are not the checkpoint's (digest {before}, now {digest})"
                raise UsageError(f"{section}: cannot resume: {why}")


def _read(file: Path) -> RunSpec | None:
    try:
        return plan_runs(read_document(file))[0].spec
    except SpecError:
        return None


def _differences(before: RunSpec, spec: RunSpec, step: int) -> Iterator[FieldDifference]:
    changes = field_changes(before, spec)
    if before.algorithm.name != spec.algorithm.name:  # every other difference may follow from this one
        changes = [change for change in changes if change[0] == "algorithm.name"]
    fields = field_tree(type(spec))
    for field, old, new in changes:
        rule = fields.resume(field)
        refused = rule.refused or ("" if old else rule.refused_if_off)
        note = _new_length(spec, step) if rule.length else rule.note
        yield FieldDifference(field, old, new, refused, "" if refused else note)


def _new_length(spec: RunSpec, step: int) -> str:
    curves = [role.schedule for role in spec.roles.trainers().values() if role.schedule != "constant"]
    if not curves:
        return ""
    return f"the {curves[0]} learning-rate schedule extends over the new number of updates from step {step + 1} on"


def _problems(found: Checkpoint, spec: RunSpec, unknown_spec: bool) -> Iterator[str]:
    """Settings that the checkpoint's files do not fit, whatever the spec was."""
    saved, now = found.trainers(), trainer_layouts(spec)
    for name, layout in now.items():
        if name not in saved:
            continue
        if saved[name].dtype != layout.dtype:  # the ZeRO stage in use follows from it
            if unknown_spec:
                yield f"model.dtype: the checkpoint's {name} is of type {saved[name].dtype}"
        elif wrong := stage_problem(saved[name], layout):
            yield f"roles.{name}.zero_stage: {wrong}"
        elif wrong := expert_problem(saved[name], layout):
            yield f"roles.{name}.expert_parallel_size: {wrong}"
