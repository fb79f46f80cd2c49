"""The algorithm section of a spec, and what it becomes with a row of the table (`orchestrator/algorithm_table.py`).

A row is data. The loop, the advantages and the losses know no algorithm by name: they read the configurations that
:func:`policy_loss`, :func:`advantage` and :func:`critic_loss` make of a row and the spec's own settings.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from orchestrator.algorithm_table import ALGORITHMS, Algorithm, KlPenalty
from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS
from orchestrator.spec_errors import nearest
from workers.config import AdvantageConfig, CriticLossConfig, Frozen, ImportanceConfig, PolicyLossConfig

_TOKEN_REWARDS = frozenset({"gamma", "whiten", "reward_clip", "reward_scale", "advantage_clip"})
ESTIMATOR_OPTIONS: dict[str, frozenset[str]] = {
    "group": frozenset({"normalize_by_std"}),
    "smooth_group": frozenset(),
    "best_of_group": frozenset(),
    "distill": frozenset(),
    "returns": _TOKEN_REWARDS,
    "gae": _TOKEN_REWARDS | {"gae_lambda"},
    "n_step": _TOKEN_REWARDS | {"n_steps"},
}
"""Fields of the algorithm section that only some estimators read."""

OBJECTIVE_OPTIONS: dict[str, frozenset[str]] = {
    "clip": frozenset({"clip_range", "clip_low", "clip_high", "dual_clip"}),
    "cispo": frozenset({"clip_high"}),
    "policy_gradient": frozenset(),
    "kl_penalty": frozenset({"kl_old"}),
}
"""Fields of the algorithm section that only some objectives read."""

CRITIC_OPTIONS = frozenset({"value_clip"})
COMPARES = frozenset({"group", "smooth_group", "best_of_group"})
"""Estimators for which a group of equal rewards may carry no signal, so that replacing it makes sense."""


def unknown_algorithm(name: str) -> str:
    """What to say of a name that no algorithm has, of neither kind."""
    lists = "`troupe algorithms` lists those on rollouts, as grpo, and on given examples, as dpo"
    return f"no algorithm '{name[:60]}' ({nearest(name, [*ALGORITHMS, *OFFLINE_ALGORITHMS]) or lists})"


class KlConfig(Frozen):
    """KL divergence from the reference model."""

    coef: float | None = Field(default=None, ge=0.0)
    """Weight of the KL term; the algorithm says whether it stands in the loss or in the reward. Above 0 it needs the
    role `reference`. With a reference and 0 the divergence is only measured."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL term in the loss (Schulman, "Approximating KL divergence", 2020)."""
    target: float | None = Field(default=None, gt=0.0)
    """KL term in the reward: steer the coefficient so that a response's divergence comes out at this (nats)."""
    horizon: int | None = Field(default=None, ge=1)
    """Samples over which the steering takes effect (arXiv 1909.08593); 10000 where left out."""


class KlOldConfig(Frozen):
    """Penalty on KL(old || new) (ppo_penalty)."""

    coef: float | None = Field(default=None, gt=0.0)
    """Coefficient of the first update; it then follows the divergence."""
    target: float | None = Field(default=None, gt=0.0)
    """Divergence per token, in nats, that the coefficient steers for."""


class AlgorithmConfig(Frozen):
    """The algorithm, and what departs from its row. A field left out (or null) takes the algorithm's default."""

    name: str = Field(json_schema_extra={"enum": [*sorted(ALGORITHMS)]})
    """Row of the algorithm table."""
    group_size: int | None = Field(default=None, ge=1)
    """Samples per prompt."""
    clip_range: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The ratio is clipped to 1 - clip_range .. 1 + clip_range."""
    clip_low: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Lower clip alone, in place of `clip_range`."""
    clip_high: float | None = Field(default=None, gt=0.0)
    """Upper clip alone, in place of `clip_range`."""
    dual_clip: float | None = Field(default=None, ge=0.0)
    """Bound on the loss where the advantage is negative (arXiv 1912.09729), above 1; 0 turns it off."""
    kl: KlConfig = KlConfig()
    """KL divergence from the reference model."""
    kl_old: KlOldConfig | None = None
    """Penalty on the divergence from the policy that sampled (ppo_penalty)."""
    kl_stop: float | None = Field(default=None, ge=0.0)
    """Leave out the rest of a step's updates once one finds KL(old || new) per token above this; 0 turns it off."""
    kl_states: int = Field(default=128, ge=0)
    """Tokens of every batch at which KL(old || new) over the whole vocabulary is measured, exactly, after the step's
    updates (`policy/kl_exact`). It takes that many rows of logits; 0: not measured."""
    entropy_coef: float | None = Field(default=None, ge=0.0)
    """Weight of the entropy bonus."""
    ptx_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of `data.ptx` in every update of the policy (PPO-ptx, arXiv 2203.02155,
    eq. 2)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant", "only_token_mean"] | None = None
    """How token losses become one number: every token weighs the same, every sequence does, a constant divides, or the
    sequences' means are added up."""
    importance: ImportanceConfig | None = None
    """Correction for the gap between the sampler and the trainer."""
    normalize_by_std: bool | None = None
    """Group estimator: divide by the group's standard deviation."""
    dynamic_sampling: int | None = Field(default=None, ge=0)
    """Replace groups whose rewards are all equal, at most this many for each group of a step; 0: train on them."""
    gamma: float | None = Field(default=None, ge=0.0, le=1.0)
    """Discount per token."""
    gae_lambda: float | None = Field(default=None, ge=0.0, le=1.0)
    """Exponential weight of longer returns (gae)."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0, variance 1 over the batch's tokens."""
    n_steps: int | None = Field(default=None, ge=1)
    """Tokens whose rewards are summed before the critic's value stands in for the rest (actor_critic)."""
    reward_scale: Literal["none", "batch", "running"] | None = None
    """Shift and scale sequence rewards to mean 0, variance 1 over the batch, or over all batches so far."""
    reward_clip: float | None = Field(default=None, ge=0.0)
    """Clip the sequence reward to plus or minus this; 0 turns it off."""
    advantage_clip: float | None = Field(default=None, ge=0.0)
    """Clip advantages to plus or minus this; 0 turns it off."""
    value_clip: float | None = Field(default=None, ge=0.0)
    """Clip new values to old values plus or minus this (critic); 0 turns it off."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(unknown_algorithm(name))
        return name

    @field_validator("dual_clip")
    @classmethod
    def _off_or_above_one(cls, bound: float | None) -> float | None:
        if bound is not None and 0.0 < bound <= 1.0:
            raise ValueError(f"must be greater than 1 (or 0, off), got {bound}")
        return bound


def row_of(config: AlgorithmConfig) -> Algorithm:
    """The algorithm's row."""
    return ALGORITHMS[config.name]


def group_size(config: AlgorithmConfig) -> int:
    """Samples per prompt."""
    return config.group_size or row_of(config).group_size


def kl_coef(config: AlgorithmConfig) -> float:
    """Weight of the KL term, wherever it stands."""
    row = row_of(config)
    default = row.loss.kl_coef if row.kl_in == "loss" else row.advantage.kl_coef
    return default if config.kl.coef is None else config.kl.coef


def policy_loss(config: AlgorithmConfig) -> PolicyLossConfig:
    """The policy's loss: the row's, with what the spec sets."""
    row = row_of(config)
    given = {
        "clip_low": _first(config.clip_low, config.clip_range),
        "clip_high": _first(config.clip_high, config.clip_range),
        "kl_coef": kl_coef(config) if row.kl_in == "loss" else 0.0,
        "kl_estimator": config.kl.estimator,
        "entropy_coef": config.entropy_coef,
        "aggregation": config.aggregation,
        "importance": config.importance,
    }
    return PolicyLossConfig(**_merge(row.loss, given, dual_clip=config.dual_clip))


def advantage(config: AlgorithmConfig) -> AdvantageConfig:
    """How rewards become advantages: the row's way, with what the spec sets."""
    row = row_of(config)
    given = {
        "normalize_by_std": config.normalize_by_std,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "whiten": config.whiten,
        "n_steps": config.n_steps,
        "reward_scale": config.reward_scale,
        "kl_coef": kl_coef(config) if row.kl_in == "reward" else 0.0,
        "kl_target": config.kl.target,
        "kl_horizon": config.kl.horizon,
    }
    clips = {"reward_clip": config.reward_clip, "advantage_clip": config.advantage_clip}
    return AdvantageConfig(**_merge(row.advantage, given, **clips))


def kl_penalty(config: AlgorithmConfig) -> KlPenalty | None:
    """The penalty on KL(old || new); None for an algorithm without one."""
    default = row_of(config).kl_penalty
    if default is None:
        return None
    given = config.kl_old or KlOldConfig()
    return KlPenalty(given.coef or default.coef, given.target or default.target)


def dynamic_sampling(config: AlgorithmConfig) -> int:
    """Groups without signal that may be replaced, for each group of a step."""
    return row_of(config).dynamic_sampling if config.dynamic_sampling is None else config.dynamic_sampling


def critic_loss(config: AlgorithmConfig) -> CriticLossConfig | None:
    """The critic's loss; None for an algorithm without a critic."""
    row = row_of(config)
    if row.critic_loss is None:
        return None
    return CriticLossConfig(**_merge(row.critic_loss, {}, value_clip=config.value_clip))


def unused_options(config: AlgorithmConfig) -> list[str]:
    """Fields the spec sets and the algorithm does not read."""
    row = row_of(config)
    unread = frozenset().union(*ESTIMATOR_OPTIONS.values()) - ESTIMATOR_OPTIONS[row.advantage.estimator]
    unread |= frozenset().union(*OBJECTIVE_OPTIONS.values()) - OBJECTIVE_OPTIONS[row.loss.objective]
    if row.advantage.estimator not in COMPARES:
        unread |= {"dynamic_sampling"}
    if row.critic_loss is None:
        unread |= CRITIC_OPTIONS
    values = dict(config)
    return [name for name in AlgorithmConfig.model_fields if name in unread and values[name] is not None]


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _merge(default: Frozen, given: dict[str, Any], **bounds: float | None) -> dict[str, Any]:
    """The default's fields, overridden by what is given; a bound of 0 means there is none."""
    set_bounds = {name: bound or None for name, bound in bounds.items() if bound is not None}
    return dict(default) | {name: value for name, value in given.items() if value is not None} | set_bounds
