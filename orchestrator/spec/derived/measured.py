"""What the measurements of a point hold for: the settings of a spec that they depend on, by their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troupe.orchestrator.spec.field_tree import live_names
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import Frozen

Settings = Mapping[str, Mapping[str, Any]]
"""Settings by what they determine: `model`, `engine`, `sampling`, `trainer`."""


def settings_of(spec: RolloutSpec) -> Settings:
    """The settings of a spec, as they are recorded with its measurements."""
    schedule, roles = spec.schedule, spec.roles
    batch = {"algorithm.group_size": spec.group_size, "schedule.prompts_per_step": schedule.prompts_per_step}
    updates = {"schedule.epochs": schedule.epochs, "schedule.minibatches": schedule.minibatches}
    critic = {} if roles.critic is None else _flat("roles.critic", roles.critic)
    return {
        "model": _flat("model", spec.model),
        "engine": _flat("roles.rollout", roles.rollout, live_names(roles.rollout)),
        "sampling": _flat("sampling", spec.sampling) | batch,
        "trainer": _flat("roles.policy", roles.policy) | critic | updates,
    }


def different(one: Settings, other: Settings, *parts: str) -> list[str]:
    """Paths of the settings in these parts that are not equal."""
    return [
        path
        for part in parts
        for path in sorted({*one[part], *other[part]})
        if one[part].get(path) != other[part].get(path)
    ]


def _flat(section: str, values: Frozen, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of a section by their paths."""
    return {f"{section}.{name}": value for name, value in values.model_dump(mode="json", exclude=set(without)).items()}
