"""Finished samples of open groups in a checkpoint, so that a resumed run samples none of them again.

The folder `samples` of a checkpoint has `groups.json`, with the scalars of each group, and Parquet files that reward
workers write and read: tables stay in the object store. What is damaged, of another spec or beyond
`checkpoint.samples_mib` is left out, and sampled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.rollouts.open_groups import GroupProgress, Samples
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.spec.derived.digests import contents_of
from troupe.orchestrator.spec.derived.training import needs_old_logprobs, old_logprobs_at_batch, values_at_batch
from troupe.orchestrator.spec.field_tree import field_tree
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.checkpoint import SAMPLES, Checkpoint
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.messages import (
    REWARDS,
    ROLLOUTS,
    FinishedSamples,
    GroupSummary,
    KeepRequest,
    KeptTable,
    RewardSummary,
)

logger = logging.getLogger(__name__)

GROUPS = "groups.json"
FORMAT = (*ROLLOUTS.names, *REWARDS.names)
"""Columns of samples; a checkpoint of another version of Troupe may have others."""
_PER_PART = 16
"""Groups in the same files: a damaged file costs these."""


@dataclass(frozen=True)
class KeptGroup:
    """One group in `groups.json`."""

    prompt_uid: str
    attempt: int
    started_at_version: int
    tables: dict[str, KeptTable]
    """Places of its tables, by kind."""
    finished: FinishedSamples | None = None
    summary: GroupSummary | None = None
    """Set, like the following fields, if the group is scored."""
    rewards: RewardSummary | None = None
    candidates: RewardSummary | None = None
    greedy_reward: float | None = None
    unscored: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptGroups:
    """The content of `groups.json`."""

    fingerprint: str
    """Digest of the parts of the spec that samples and their scores depend on."""
    groups: tuple[KeptGroup, ...] = ()
    format: tuple[str, ...] | int = field(default=FORMAT)
    """Their columns; a number in checkpoints of earlier versions."""


_JSON = TypeAdapter(KeptGroups)


def fingerprint(spec: RolloutSpec) -> str:
    """Digest of the spec's settings for sampling and scoring, and of the files that scoring workers read, without
    numbers of workers and their resources."""
    roles, fields = spec.roles, field_tree(RolloutSpec)
    present = {"reference": None, "environment": None, "judge": None} | roles.present()

    def given(path: str, section: Frozen) -> Any:
        data = section.model_dump(mode="json", exclude_defaults=True)
        return fields.at(path).select(data, lambda one: one.samples)

    parts = {
        "sampling": given("sampling", spec.sampling),
        "algorithm": given("algorithm", spec.algorithm),
        "max_model_len": roles.rollout.max_model_len,
        "critic": roles.critic is not None and not values_at_batch(spec),  # whether a scored group has values
        "old_logprobs": [needs_old_logprobs(spec), old_logprobs_at_batch(spec)],
        "sources": [given("data.train.0", source) for source in spec.data.mixture],
    }
    for name, role in present.items():
        if fields.at(f"roles.{name}").consequences.samples:
            parts[name] = None if role is None else given(f"roles.{name}", role)
            if role is not None and (files := contents_of(parts[name], fields.at(f"roles.{name}"))):
                parts[f"{name} files"] = files
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


async def write_samples(
    folder: Path, spec: RolloutSpec, groups: Sequence[GroupProgress], rewards: RewardPool
) -> tuple[int, int]:
    """Makes reward workers write the samples of open groups to a new folder, scored groups first. Returns how many
    finished samples are written, and how many others there are. Raises WorkerError if a worker failed; OSError if the
    folder cannot be written."""
    place = folder / SAMPLES
    place.mkdir()
    ordered = sorted(groups, key=lambda group: group.scored is None)
    parts = [ordered[start : start + _PER_PART] for start in range(0, len(ordered), _PER_PART)]
    bound = (spec.checkpoint.samples_mib << 20) // max(1, len(parts))
    timeout_s = spec.schedule.train_timeout_s

    async def write(number: int, part: Sequence[GroupProgress]) -> list[tuple[GroupProgress, dict[str, KeptTable]]]:
        request = KeepRequest(number, tuple(map(_rows_of, part)), bound)
        tables = {id(ref): ref for group in part for ref in _tables_of(group)}
        kept = await rewards.keep_groups(str(place), request, list(tables.values()), timeout_s)
        return list(zip(part, kept, strict=False))  # those that do not fit are missing at the end

    written = await gather_all(write(number, part) for number, part in enumerate(parts))
    kept = [_kept(group, tables) for part in written for group, tables in part]
    # Numbers that an environment reports may be NaN, which pydantic would write as null.
    (place / GROUPS).write_text(json.dumps(asdict(KeptGroups(fingerprint(spec), tuple(kept)))))
    samples = sum(group.samples for part in written for group, _ in part)
    return samples, sum(group.samples for group in groups) - samples


async def read_samples(found: Checkpoint, spec: RolloutSpec, rewards: RewardPool) -> list[GroupProgress]:
    """The open groups of a checkpoint, with tables that reward workers have read into the object store. Groups that
    cannot be used are left out, with a message."""
    place = found.path / SAMPLES
    if not place.is_dir():
        return []
    if f"{SAMPLES}/{GROUPS}" in found.damaged:
        logger.warning("%s is damaged: the groups that were open are sampled again", place / GROUPS)
        return []
    try:
        kept = _JSON.validate_json((place / GROUPS).read_bytes())
    except (OSError, ValidationError) as error:
        logger.warning("%s cannot be read: the groups that were open are sampled again: %s", place / GROUPS, error)
        return []
    if kept.format != FORMAT or kept.fingerprint != fingerprint(spec):
        what = "another version of Troupe" if kept.format != FORMAT else "another algorithm, sampling or reward"
        logger.warning("%s: the groups that were open are of %s: they are sampled again", place, what)
        return []
    read = await gather_all(_read(place, group, found.damaged, rewards) for group in kept.groups)
    return [group for group in read if group is not None]


async def _read(place: Path, group: KeptGroup, damaged: frozenset[str], rewards: RewardPool) -> GroupProgress | None:
    """The group with its tables, or None if one of them cannot be read."""
    lost = [table.file for table in group.tables.values() if f"{SAMPLES}/{table.file}" in damaged]
    if lost:
        logger.warning("sampling %s again: %s is damaged", group.prompt_uid, place / lost[0])
        return None
    try:
        tables = {kind: await rewards.read_group(str(place), table) for kind, table in group.tables.items()}
    except WorkerError as error:
        logger.warning("sampling %s again: %s", group.prompt_uid, error)
        return None
    scored, finished = None, None
    if group.summary is not None and group.rewards is not None:
        scored = ScoredGroup(
            group.summary,
            group.rewards,
            tables["rollouts"],
            tables["rewards"],
            tuple(table for kind, table in tables.items() if kind not in ("rollouts", "rewards")),
            greedy_reward=group.greedy_reward,
            candidates=group.candidates,
            unscored=group.unscored,
        )
    elif group.finished is not None:
        finished = Samples(group.finished, tables["rollouts"])
    return GroupProgress(group.prompt_uid, group.attempt, group.started_at_version, scored, finished)


def _rows_of(group: GroupProgress) -> tuple[str, int]:
    """The name of the group's rows: its prompt, and the attempt in which they were sampled."""
    if group.finished is not None and group.scored is None:
        return group.prompt_uid, group.finished.summary.attempt
    return group.prompt_uid, group.attempt


def _tables_of(group: GroupProgress) -> list[object]:
    if group.scored is not None:
        return [group.scored.rollouts, group.scored.reward_table, *group.scored.token_scores]
    return [] if group.finished is None else [group.finished.rollouts]


def _kept(group: GroupProgress, tables: dict[str, KeptTable]) -> KeptGroup:
    kept = KeptGroup(group.prompt_uid, group.attempt, group.started_at_version, tables)
    if group.scored is None:
        return replace(kept, finished=None if group.finished is None else group.finished.summary)
    scored = group.scored
    return replace(
        kept,
        summary=scored.summary,
        rewards=scored.rewards,
        candidates=scored.candidates,
        greedy_reward=scored.greedy_reward,
        unscored=dict(scored.unscored),
    )
