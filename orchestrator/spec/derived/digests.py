"""Digests of the settings, and of the files that they name, that results depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.paths import paths_below
from troupe.orchestrator.spec.derived.sampling import HeldOutSettings, held_out_sets, reward_functions
from troupe.orchestrator.spec.field_tree import FieldNode, decisive, field_tree
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.consequences import Counts
from troupe.workers.contract.rewards import JUDGE_REWARD

_BLOCKS, _BLOCK = 16, 1 << 16
"""How many blocks of a file are read, of how many bytes: all of a smaller file."""


def evaluation_digest(spec: RunSpec) -> str:
    """Digest of how evaluations are made: the values of those with the same one can be compared."""
    fields = field_tree(type(spec))
    # Digests of earlier versions have these sections, with or without fields that count.
    content = {name: dict(spec)[name] and {} for name in ("data", "evaluation", "roles")}
    given, others = (fields.counted(spec, "evaluation", level) for level in (Counts.YES, Counts.IF_SET))
    content |= given
    if others:
        content["others"] = others
    read_anyway = {"data": None}
    if contents := contents_of(given | read_anyway, fields) | contents_of(others | read_anyway, fields):
        content["contents"] = contents
    if spec.rollouts is not None and (sets := _evaluated_by(spec.rollouts)):
        content["sets"] = sets
    return _digest(content)


def reward_digest(spec: RunSpec) -> str:
    """Digest of the settings that determine rewards in training, but time limits and place; empty for offline data."""
    if spec.rollouts is None:
        return ""
    rollouts: RolloutSpec = spec.rollouts
    reward, judge = rollouts.roles.reward, rollouts.roles.judge
    content: dict[str, Any] = {
        path: [decisive(one, "reward") for one in functions]
        for path, functions in reward_functions(rollouts).items()
        if not path.startswith("data.eval")
    }
    if reward.model is not None:
        content["model"] = [*decisive(reward, "reward")["model"].values(), reward.model_weight]
    if reward.models:
        content["models"] = decisive(reward, "reward")["models"]
    if judge is not None:
        content["judge"] = decisive(judge, "reward")
    if contents := contents_of(decisive(rollouts.roles, "reward"), field_tree(type(rollouts.roles))):
        content["contents"] = contents
    return _digest(content)


def contents_of(section: Any, fields: FieldNode) -> dict[str, str]:
    """Digests of the files and folders on this machine that a dumped part of a spec names, by field."""
    digests = ((field, _content_digest(Path(path))) for field, path in paths_below(section, fields))
    return {field: digest for field, digest in digests if digest}


def identity(section: BaseModel, exclude: set[str] | None = None) -> str:
    """A section without some fields as text, with the digests of the files and folders that it names: a folder may hold
    another model by now."""
    settings = section.model_dump(mode="json", exclude=exclude)
    return json.dumps([settings, contents_of(settings, field_tree(type(section)))])


def _content_digest(path: Path) -> str:
    """Digest of a file, or of a folder's files: names, sizes, and blocks all over them. Empty if it cannot be read."""
    state = hashlib.blake2b(digest_size=16)
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else (path,):
            if not file.is_dir():
                size = file.stat().st_size
                state.update(json.dumps([file.name, size]).encode())
                with file.open("rb") as opened:
                    for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
                        opened.seek(start)
                        state.update(opened.read(_BLOCK))
    except OSError:
        return ""
    return state.hexdigest()


def plays_and_judges(spec: RolloutSpec, held_out: HeldOutSettings) -> dict[str, Any]:
    """The environment of a held-out set and the judge of its samples, as far as they decide results; JSON-ready."""
    found: dict[str, Any] = {}
    if held_out.environment is not None:
        role = spec.roles.environments()[held_out.environment]
        found["played_in"] = decisive(role, "evaluation")
    judge = spec.roles.judge
    plays = held_out.environment is not None and spec.roles.environments()[held_out.environment].has_opponent
    if judge is not None and (plays or any(function.name == JUDGE_REWARD for function in held_out.functions)):
        fields = field_tree(type(judge))
        found["judged_by"] = judged_by = fields.counted(judge, "evaluation", Counts.BY_SET)
        if contents := contents_of(judged_by, fields):
            found["judge_contents"] = contents
    return found


def _evaluated_by(spec: RolloutSpec) -> dict[str, Any]:
    """Environment and judge that decide results, by set; the digest's other fields hold an unnamed environment."""
    sets = {one.label: plays_and_judges(spec, one) for one in held_out_sets(spec)}
    if "" in spec.roles.environments():
        sets = {label: {k: v for k, v in own.items() if k != "played_in"} for label, own in sets.items()}
    return {label: own for label, own in sets.items() if own}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
