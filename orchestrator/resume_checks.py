"""What a resumed run may change: the spec in its folder against the one given, and the checkpoint against both.

Everything here is checked before Ray starts. A field is refused where the checkpoint's state belongs to its old value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.data.mixture import DrawnSource
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.live.diff import FieldDifference, field_changes
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.training.checkpoint import Checkpoint, stage_problem, trainer_layouts
from troupe.orchestrator.training.parts import states_of
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.contract.advantage_state import AdvantageState

_REFUSED = {
    r"seed": "the order of the data and of sampling follows from it",
    r"algorithm\.name": "the checkpoint's state belongs to the algorithm that wrote it",
    r"model\.path": "the weights are the checkpoint's; to train another model, start another run",
    r"model\.adapter": "the adapters are the checkpoint's; to train others, start another run",
    r"model\.dtype": "the checkpoint's optimizer states are of the other type",
    r"roles\.(policy|critic)\.lora(\..*)?": "the checkpoint holds the weights that trained until then",
    r"roles\.critic": "the checkpoint was written with the other set of trainers",
    r"roles\.critic\.model(\..*)?": "the critic's weights are the checkpoint's; start another run",
    r"data\.max_length": "it decides which examples are trained on, and so their order",
    r"data\.ptx(\.\d+)?\.max_tokens": "it decides where texts are cut, and so their order",
    r"data\.(train|ptx)\.\d+\.name": "the checkpoint holds the position in each source by its name",
    r"(algorithm|data\.train\.\d+)\.group_size": "groups in flight at the checkpoint are sampled again as they were",
    r"data\.train\.\d+\.environment": "groups in flight at the checkpoint are sampled again as they were",
}
"""Reason by pattern of the field's path. Training data are compared by digest, ZeRO stages with the checkpoint."""
_OPTIMIZER = "learning_rate|weight_decay|adam_.*|max_grad_norm|schedule|warmup_updates|min_lr_ratio"
_NOTES = {
    r"data\.train\.\d+\.(weight|repeats|max_tokens)": "from the next prompt on",
    r"data\.train\.\d+\.rewards.*": "rewards before and after may not be comparable",
    r"data\.(train\.\d+|curriculum)\.(solved_at|component)": "results so far count as they were",
    r"data\.(train|ptx)\..*": "allowed where the rows are the same",
    r"evaluation\.(beside|every_steps|at_start|at_end)": "from the next step on",
    r"data\.eval(\..*)?|evaluation(\..*)?": "evaluations before and after may not be comparable",
    r"roles\.reference(\.model.*)?": "the reference is another one from now on",
    r"checkpoint\.best\.(metric|mode)": "the best evaluations so far are forgotten",
    r"roles\.reward\.(functions|model).*": "rewards before and after may not be comparable",
    r"roles\.(policy|critic)\.workers": "optimizer states are resharded",
    rf"roles\.(policy|critic)\.({_OPTIMIZER})": "from the next update on",
    r"algorithm\.(kl|kl_old)\.coef": "from the next step on; a coefficient that adapts starts from it again",
    r"algorithm\.by_source": "from the next step on; running statistics start again",
    r"(algorithm|sampling)\..*": "from the next step on",
}
_LENGTH = ("schedule.steps", "schedule.epochs", "schedule.minibatches")
"""Fields that the number of updates follows from, over which a learning-rate schedule extends."""


@dataclass(frozen=True)
class Resumption:
    """A run that resumes from a checkpoint with a spec."""

    folder: Path
    found: Checkpoint
    spec: RunSpec
    differences: tuple[FieldDifference, ...] | None
    """Between the spec in the run's folder and the one given; None: the folder has no spec that can be read."""
    problems: tuple[str, ...]
    """Other reasons why the run cannot resume."""

    def lines(self) -> list[str]:
        """What the run is to say at its start.

        Raises:
            UsageError: The run cannot resume with this spec; with one line for every reason.
        """
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
    """Compare a spec with what a run wrote.

    Args:
        folder: Folder of the run.
        found: Its checkpoint.
        spec: The spec given.
        saved_spec: File with the spec of the run so far.
    """
    before = _read(saved_spec)
    differences = None if before is None else tuple(_differences(before, spec, found.step))
    problems = list(_problems(found, spec, differences is None))
    problems += [] if before is None else _unknown_starts(found, before, spec)
    return Resumption(folder, found, spec, differences, tuple(problems))


def require_same_rows(found: Checkpoint | None, drawn: Callable[[Mapping[str, Any]], Iterable[DrawnSource]]) -> None:
    """Compare training data with those of a checkpoint, if there is one, so that their order can continue.

    Args:
        found: The checkpoint.
        drawn: The sources of the data, for the state of their order.

    Raises:
        UsageError: They differ.
        CheckpointError: The checkpoint has no such state.
    """
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
    for field, old, new in changes:
        refused = _reason(field, _REFUSED) or _not_in_checkpoint(field, old)
        note = _reason(field, _NOTES) or (_new_length(spec, step) if field in _LENGTH else "")
        yield FieldDifference(field, old, new, refused, "" if refused else note)


def _reason(field: str, reasons: Mapping[str, str]) -> str:
    return next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, field)), "")


def _not_in_checkpoint(field: str, old: Any) -> str:
    """What is refused where it was off before."""
    if field.endswith(".ema_decay") and not old:
        return "the checkpoint has no moving average of the weights"
    if field == "data.ptx" and old is None:
        return "the checkpoint has no position in these texts"
    return ""


def _new_length(spec: RunSpec, step: int) -> str:
    curves = [role.schedule for role in spec.roles.trainers().values() if role.schedule != "constant"]
    if not curves:
        return ""
    return f"the {curves[0]} learning-rate schedule extends over the new number of updates from step {step + 1} on"


def _problems(found: Checkpoint, spec: RunSpec, unknown_spec: bool) -> Iterator[str]:
    """What the checkpoint's files do not fit, whatever the spec was."""
    saved, now = found.trainers(), trainer_layouts(spec)
    for name, layout in now.items():
        if name not in saved:
            continue
        if saved[name].dtype != layout.dtype:  # the ZeRO stage in use follows from it
            if unknown_spec:
                yield f"model.dtype: the checkpoint's {name} is of type {saved[name].dtype}"
        elif wrong := stage_problem(saved[name], layout):
            yield f"roles.{name}.zero_stage: {wrong}"


def _unknown_starts(found: Checkpoint, before: RunSpec, spec: RunSpec) -> Iterator[str]:
    """New coefficients where those of the checkpoint adapt, and an earlier version wrote it: it does not say from which
    they started, so that they would be kept."""
    with found.restoring():
        advantages = AdvantageState.model_validate(found.state.get("source", {}).get("advantages", {}))
        state = PenaltyState.model_validate(states_of({"memory": {}} | found.state)["penalty"])
    kl_old, new_kl_old = (None if one.kl_penalty is None else one.kl_penalty.coef for one in (before, spec))
    for field, old, new, coef, start in (
        ("algorithm.kl.coef", before.kl_start, spec.kl_start, advantages.kl_coef, advantages.kl_start),
        ("algorithm.kl_old.coef", kl_old, new_kl_old, state.kl_old_coef or None, state.kl_old_start),
    ):
        if None not in (old, new, coef) and old != new and start is None:
            why = f"it has adapted to {coef:g}, and this checkpoint of an earlier version does not know it apart"
            yield f"{field}: {old:g} -> {new:g}: refused: {why}; train a step with {old:g} first"
