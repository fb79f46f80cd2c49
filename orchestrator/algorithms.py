"""The table of algorithms: which roles each needs and what its defaults are.

A row is data. The loop, the advantages and the losses know no algorithm by name: they read the configurations that
:func:`policy_loss`, :func:`advantage` and :func:`critic_loss` make of a row and the spec's own settings.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from workers.config import AdvantageConfig, CriticLossConfig, Frozen, ImportanceConfig, PolicyLossConfig

OptionalRole = Literal["critic", "reference"]
KlPlacement = Literal["loss", "reward"]


@dataclass(frozen=True)
class Algorithm:
    """One row: what the algorithm needs besides rollout, policy and reward, and its defaults."""

    name: str
    summary: str
    source: str
    """Paper the defaults follow."""
    required: frozenset[OptionalRole]
    forbidden: frozenset[OptionalRole]
    group_size: int
    min_group_size: int
    kl_in: KlPlacement
    """Where the KL-to-reference term goes: into the loss, or into every token's reward."""
    advantage: AdvantageConfig
    loss: PolicyLossConfig
    critic_loss: CriticLossConfig | None = None


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="grpo",
            summary="Every reward is judged against the other samples of its group; no critic.",
            source="DeepSeekMath, arXiv 2402.03300, eq. 3 and 4",
            required=frozenset(),
            forbidden=frozenset({"critic"}),
            group_size=8,
            min_group_size=2,
            kl_in="loss",
            advantage=AdvantageConfig(estimator="group", normalize_by_std=True, whiten=False),
            loss=PolicyLossConfig(kl_estimator="k3", aggregation="sequence_mean"),
        ),
        Algorithm(
            name="ppo",
            summary="A critic's values give advantages per token (GAE); KL to the reference is part of the reward.",
            source="PPO, arXiv 1707.06347; RLHF form: InstructGPT, arXiv 2203.02155",
            required=frozenset({"critic"}),
            forbidden=frozenset(),
            group_size=1,
            min_group_size=1,
            kl_in="reward",
            advantage=AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=0.95, whiten=True, kl_coef=0.05),
            loss=PolicyLossConfig(kl_estimator="k1", aggregation="token_mean"),
            critic_loss=CriticLossConfig(value_clip=0.2),
        ),
    )
}

ESTIMATOR_OPTIONS: dict[str, frozenset[str]] = {
    "group": frozenset({"normalize_by_std"}),
    "gae": frozenset({"gamma", "gae_lambda", "whiten", "reward_clip"}),
}
"""Fields of the algorithm section that only one estimator reads."""

CRITIC_OPTIONS = frozenset({"value_clip"})


class KlConfig(Frozen):
    """KL divergence from the reference model."""

    coef: float | None = Field(default=None, ge=0.0)
    """Weight of the KL term; the algorithm says whether it stands in the loss or in the reward. Above 0 it needs the
    role `reference`. With a reference and 0 the divergence is only measured."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL term in the loss (Schulman, "Approximating KL divergence", 2020)."""


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
    entropy_coef: float | None = Field(default=None, ge=0.0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How token losses become one number: every token weighs the same, every sequence does, or a constant divides."""
    importance: ImportanceConfig | None = None
    """Correction for the gap between the sampler and the trainer."""
    normalize_by_std: bool | None = None
    """Group estimator: divide by the group's standard deviation."""
    gamma: float | None = Field(default=None, ge=0.0, le=1.0)
    """Discount per token (gae)."""
    gae_lambda: float | None = Field(default=None, ge=0.0, le=1.0)
    """Exponential weight of longer returns (gae)."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0, variance 1 over the batch's tokens (gae)."""
    reward_clip: float | None = Field(default=None, ge=0.0)
    """Clip the sequence reward to plus or minus this (gae); 0 turns it off."""
    value_clip: float | None = Field(default=None, ge=0.0)
    """Clip new values to old values plus or minus this (critic); 0 turns it off."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ALGORITHMS:
            near = difflib.get_close_matches(name, ALGORITHMS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(ALGORITHMS))}"
            raise ValueError(f"no algorithm '{name[:60]}' ({hint})")
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
        "kl_coef": kl_coef(config) if row.kl_in == "reward" else 0.0,
    }
    return AdvantageConfig(**_merge(row.advantage, given, reward_clip=config.reward_clip))


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
