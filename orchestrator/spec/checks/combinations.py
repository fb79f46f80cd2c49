"""Combinations of fields that cannot work, each refused with the path of the field to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks import adapters, data, offline, players, reference_pairs, rollout, shared

Check = Callable[[Any], Iterator[Finding]]

ROLLOUT_CHECKS: tuple[Check, ...] = (
    rollout.check_roles,
    rollout.check_algorithm,
    rollout.check_schedule,
    rollout.check_lengths,
    rollout.check_colocation,
    rollout.check_scaling,
    rollout.check_devices,
    rollout.check_weight_sync,
    rollout.check_sleep,
    data.reward_problems,
    data.data_problems,
    data.text_problems,
    data.held_out_problems,
    shared.output_problems,
    rollout.check_optimizers,
    shared.environment_problems,
    adapters.lora_problems,
    players.player_problems,
    reference_pairs.pair_problems,
)
"""The checks of a `RolloutSpec`, in the order of their messages."""
OFFLINE_CHECKS: tuple[Check, ...] = (
    offline.check_roles,
    offline.check_algorithm,
    offline.check_schedule,
    offline.check_lengths,
    offline.check_devices,
    offline.check_data,
    offline.check_template,
    shared.output_problems,
    offline.check_evaluation,
)
"""The checks of an `OfflineSpec`, in the order of their messages."""


def find_problems(spec: RunSpec) -> list[Finding]:
    checks = OFFLINE_CHECKS if spec.rollouts is None else ROLLOUT_CHECKS
    return [finding for check in checks for finding in check(spec)]
