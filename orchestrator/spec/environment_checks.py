"""What cannot work in a spec with an environment, or without the one that it refers to."""

from __future__ import annotations

import re
from collections.abc import Iterator

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import nearest
from troupe.orchestrator.spec.preflight import Finding
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import EnvironmentRole, ReasoningGymSource
from troupe.workers.contract.config import ENVIRONMENT_REWARD, ENVIRONMENTS

_IMPORTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def environment_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Combinations of fields that cannot work, each with the path of the field to change."""
    yield from _rewards(spec)
    role = spec.roles.environment
    if role is None:
        return
    yield from _role(spec, role)
    for split, source in (("train", spec.data.train), ("eval", spec.data.eval)):
        if source is not None and not isinstance(source, ReasoningGymSource) and source.candidates is not None:
            yield (
                f"data.{split}.candidates",
                "answers from other sources are no episodes: remove it, or the environment",
            )


def _role(spec: RolloutSpec, role: EnvironmentRole) -> Iterator[Finding]:
    path = "roles.environment"
    if role.name not in ENVIRONMENTS and not _IMPORTED.fullmatch(role.name):
        known = f"shipped: {', '.join(ENVIRONMENTS)}; your own: package.module:Class"
        yield f"{path}.name", f"no environment '{role.name[:60]}' ({nearest(role.name, ENVIRONMENTS) or known})"
    if role.name == "tools" and role.tool_parser is None:
        yield f"{path}.tool_parser", "is required: it finds the tool calls in a turn (for SmolLM2 and Qwen: hermes)"
    for field in ("gpus", "accelerator", "colocate_with"):
        if dict(role)[field]:
            yield f"{path}.{field}", "environments run on CPU cores of their own; remove it"
    if role.turn_timeout_s > role.episode_timeout_s:
        limit = f"{role.episode_timeout_s:g}"
        yield f"{path}.turn_timeout_s", f"must be at most roles.environment.episode_timeout_s, {limit}"
    if role.episode_timeout_s >= spec.schedule.generate_timeout_s:
        limit = f"{spec.schedule.generate_timeout_s:g}"
        yield f"{path}.episode_timeout_s", f"must be less than schedule.generate_timeout_s, {limit}"


def _rewards(spec: RolloutSpec) -> Iterator[Finding]:
    """Rewards from the environment, and rewards of steps."""
    estimator = algorithms.row_of(spec.algorithm).advantage.estimator
    advantage = algorithms.advantage(spec.algorithm)
    for index, function in enumerate(spec.roles.reward.functions):
        path = f"roles.reward.functions.{index}"
        given = function.name == ENVIRONMENT_REWARD
        if given and spec.roles.environment is None:
            yield f"{path}.name", "there is no roles.environment that could give rewards"
        if function.process and not given and spec.roles.environment is not None:
            yield f"{path}.process", "the steps of an episode are its turns: only `environment` rewards them"
        if function.process and estimator != "group":
            if advantage.reward_scale != "none":
                yield "algorithm.reward_scale", "scales rewards of responses, not of steps; set none"
            if advantage.reward_clip is not None:
                yield "algorithm.reward_clip", "clips rewards of responses, not of steps; set null"
