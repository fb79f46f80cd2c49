"""Which groups of a step are sampled again, with which weights, and how the samples differ from the run's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.replay.plan import ReplayPlan, plan_up_to, spec_of
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.batch import GroupOrigin
from troupe.orchestrator.training.step_record import REPLAY, RecordedStep, read_step

_COLUMNS = ("prompt_uid", "sample_index", "segment", "prompt_ids", "response_ids", "rollout_logprobs")
Key = tuple[str, int, int]
"""(prompt_uid, sample_index, segment)"""


@dataclass(frozen=True)
class ResamplePlan:
    """A step whose groups are sampled again."""

    folder: RecordedStep
    spec: RolloutSpec
    replay: ReplayPlan
    """Steps that are repeated first, for the weights."""
    groups: Mapping[int, tuple[GroupOrigin, ...]]
    """The groups by the version of the weights that sampled them, in the order of the versions."""
    mixed: int
    """Groups that several versions have sampled: they cannot be sampled again."""


@dataclass(frozen=True)
class Resampled:
    """What sampling again found."""

    step: int
    samples: int
    differences: tuple[str, ...]
    """The first token of each sample that differs, as text, in the order of the batch."""
    mixed: int
    largest_gap: float
    """Largest difference of the log-probs of equal tokens, up to the first that differs."""

    @property
    def equal(self) -> bool:
        """Whether every sample has the same tokens as in the run."""
        return not self.differences

    def lines(self) -> list[str]:
        """The result as text."""
        same = self.samples - len(self.differences)
        lines = [f"step {self.step}: {same} of {self.samples} samples have the tokens of the run"]
        lines.append(f"  log-probs of equal tokens differ by up to {self.largest_gap:.3g}")
        if self.differences:
            lines.append(f"  the first difference is in {self.differences[0]}")
        if self.mixed:
            lines.append(f"  {self.mixed} group(s) were sampled by several versions of the weights and are left out")
        return lines


def plan_resample(run: Path, step: int) -> ResamplePlan:
    """How to sample the groups of a step again.

    Raises:
        UsageError: The step has no groups that can be sampled again, or a step that is needed is not kept.
    """
    folder = read_step(run / REPLAY, step)
    spec: RolloutSpec | None = spec_of(folder).rollouts
    if spec is None:
        raise UsageError(f"step {step} was trained on offline data: it has no samples")
    if spec.roles.environments():
        raise UsageError("--resample: samples of a run with an environment depend on its answers, which are not kept")
    single = [group for group in folder.kept.groups if group.oldest_version == group.newest_version]
    mixed = len(folder.kept.groups) - len(single)
    if not single:
        raise UsageError(f"step {step}: no group was sampled by one version of the weights alone ({mixed} were not)")
    groups: dict[int, tuple[GroupOrigin, ...]] = {}
    for group in sorted(single, key=lambda group: group.oldest_version):
        groups[group.oldest_version] = (*groups.get(group.oldest_version, ()), group)
    return ResamplePlan(folder, spec, plan_up_to(run, min(groups), max(groups), folder), groups, mixed)


def compare_samples(plan: ResamplePlan, recorded: pa.Table, found: Iterable[pa.Table]) -> Resampled:
    """The samples of a plan's groups, compared.

    Args:
        plan: What was sampled again.
        recorded: The TRAIN table.
        found: ROLLOUTS tables.

    Raises:
        UsageError: A prompt is another one.
    """
    wanted = {group.prompt_uid for groups in plan.groups.values() for group in groups}
    before = {key: row for key, row in _rows([recorded]).items() if key[0] in wanted}
    now = _rows(found)
    differences: list[str] = []
    gap, samples = 0.0, 0
    for key, row in before.items():
        again = now.get(key)
        if again is None:
            continue  # an answer from another source: nothing was sampled
        samples += 1
        if row["prompt_ids"] != again["prompt_ids"]:
            raise UsageError(f"the prompt of {key[0]} is not that of the run: the data have changed")
        position = first_difference(row["response_ids"], again["response_ids"])
        shared = len(row["response_ids"]) if position is None else position
        logprobs = zip(row["rollout_logprobs"][:shared], again["rollout_logprobs"][:shared], strict=True)
        gap = max([gap, *(abs(first - second) for first, second in logprobs)])
        if position is not None:
            where = f"{key[0]} sample {key[1]}, token {position} of the response"
            differences.append(f"{where}: {_token(row, position)} in the run, {_token(again, position)} here")
    return Resampled(plan.folder.kept.step, samples, tuple(differences), plan.mixed, gap)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Position of the first token that differs, also if one ends and the other continues, or None if they are equal."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


def _token(row: Mapping[str, Any], position: int) -> str:
    if position >= len(row["response_ids"]):
        return "the end"
    return f"{row['response_ids'][position]} (log-prob {row['rollout_logprobs'][position]:.6f})"


def _rows(tables: Iterable[pa.Table]) -> dict[Key, dict[str, Any]]:
    rows = (row for table in tables for row in table.select(_COLUMNS).to_pylist())
    return {(row["prompt_uid"], row["sample_index"], row["segment"]): row for row in rows}
