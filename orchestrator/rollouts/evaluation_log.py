"""`evaluation.json`: the results of every evaluation of a run, with how each set was sampled and scored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.rollouts.held_out import CONFIDENCE, SetResult
from troupe.orchestrator.spec.derived.digests import contents_of, plays_and_judges
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.field_tree import field_tree
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.atomic_file import write_atomic
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.consequences import Counts
from troupe.workers.contract.reward_config import RewardFunctionConfig, RewardModelConfig

EVALUATIONS = "evaluation.json"
"""Name of the file in a run's folder."""
FORMAT = 1

Json = dict[str, Any]


def described_sets(spec: RolloutSpec, pools: Mapping[str, Pool]) -> dict[str, Json]:
    """Settings with which each set is sampled and scored, by its label."""
    models = spec.roles.reward.reward_models
    forms = spec.sampling.model_dump(mode="json", include={"stop", "structured"}, exclude_defaults=True)
    found: dict[str, Json] = {}
    for one in held_out_sets(spec):
        sampling = one.sampling.model_dump(mode="json") | forms
        rewards = [
            function.model_dump(mode="json", exclude_defaults=True)
            | (_described_model(function, models[function.model]) if function.model else {})
            for function in one.functions
        ]
        found[one.label] = {
            "digest": pools[one.section].digest,
            "sampling": sampling | {"max_tokens": one.sampling.max_tokens or spec.sampling.max_tokens},
            "rewards": rewards,
            "solved_at": one.solved_at,
            **({"environment": one.environment} if one.environment else {}),
            **plays_and_judges(spec, one),
        }
    return found


def _described_model(function: RewardFunctionConfig, model: RewardModelConfig) -> Json:
    own = model.model_dump(mode="json", include={"level", "separator", "offset"}, exclude_defaults=True)
    found: Json = {"weight": function.weight, "path": model.path, "revision": model.revision, **own}
    contents = contents_of(model.model_dump(mode="json"), field_tree(ModelConfig))
    return found | ({"contents": contents} if contents else {})


def settings_of(sets: Mapping[str, Json]) -> str:
    """Digest of how the sets are sampled and scored: evaluations with the same one can be compared."""
    fields = field_tree(RewardFunctionConfig).children.items()
    others = {name for name, node in fields if node.consequences.evaluation is not Counts.YES}
    counted = {label: dict(one) for label, one in sets.items()}
    for one in counted.values():
        if "rewards" in one:
            one["rewards"] = [{name: reward[name] for name in reward.keys() - others} for reward in one["rewards"]]
    return hashlib.blake2b(json.dumps(counted, sort_keys=True).encode(), digest_size=16).hexdigest()


def as_json(sets: Mapping[str, Json], evaluations: list[Json]) -> Json:
    return {"format": FORMAT, "confidence": CONFIDENCE, "sets": dict(sets), "evaluations": evaluations}


def evaluation_as_json(step: int, results: Mapping[str, SetResult]) -> Json:
    return {"step": step, "sets": {name: asdict(result) for name, result in results.items()}}


class EvaluationLog:
    """Writes the file anew after every evaluation. Its `sets` describe the last evaluation; evaluations before a change
    of the spec have other `settings`."""

    def __init__(self, file: Path, sets: Mapping[str, Json], done: int) -> None:
        """Forgets evaluations after step `done`, the step from which the run resumes."""
        self._file = file
        self._sets = sets
        self._settings = settings_of(sets)
        self._evaluations = [one for one in read_evaluations(file).get("evaluations", []) if one["step"] <= done]

    def add(self, step: int, results: Mapping[str, SetResult]) -> None:
        """Adds an evaluation, replacing one of the same step. Raises OSError."""
        kept = [one for one in self._evaluations if one["step"] != step]
        self._evaluations = [*kept, evaluation_as_json(step, results) | {"settings": self._settings}]
        write_atomic(self._file, json.dumps(as_json(self._sets, self._evaluations), indent=1) + "\n")


def comparable(evaluations: list[Json]) -> list[Json]:
    """The evaluations whose sets were sampled and scored as the last one's."""
    return [one for one in evaluations if one.get("settings") == evaluations[-1].get("settings")]


def read_evaluations(file: Path) -> Json:
    """The content of the file, or empty if it is missing or malformed."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and content.get("format") == FORMAT else {}
