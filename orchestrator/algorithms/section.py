"""The algorithm section of a spec, merged with the defaults of its row in `orchestrator/algorithms/table.py`.

A row is data. The loop, the advantages and the losses know no algorithm by name: they read the configurations that
`policy_loss`, `advantage` and `critic_loss` build from a row and the spec's own settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from troupe.orchestrator.algorithms.offline import ALGORITHM, OFFLINE_ALGORITHMS, DistillSection
from troupe.orchestrator.algorithms.overrides import overridden, overrides
from troupe.orchestrator.algorithms.table import (
    ADAPTED,
    ALGORITHMS,
    COMPARES,
    CRITIC_OPTIONS,
    KL_FIELDS,
    ROW_ONLY,
    SECTIONS,
    Algorithm,
    KlPenalty,
    TrustRegion,
    unread_options,
)
from troupe.orchestrator.errors import nearest
from troupe.workers.contract.algorithm_config import (
    AdvantageConfig,
    CriticLossConfig,
    CustomConfig,
    ImportanceConfig,
    NaturalGradientConfig,
    PolicyLossConfig,
)
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import AS_SAMPLED, NEXT_STEP, noted

CUSTOM_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Name of a custom algorithm."""
_REPLACED = 3  # groups that a custom filter may replace, for each group of a step, as with dapo


def unknown_algorithm(name: str) -> str:
    """Error message for a name that no algorithm of either kind has."""
    lists = "`troupe algorithms` lists those on rollouts, such as grpo, and on offline data, such as dpo"
    return f"no algorithm '{name[:60]}' ({nearest(name, [*ALGORITHMS, *OFFLINE_ALGORITHMS]) or lists})"


class KlConfig(Frozen):
    """KL divergence from the reference model."""

    coef: Annotated[float | None, ADAPTED] = Field(default=None, ge=0.0)
    """Weight of the KL term, which the algorithm puts in the loss or in the reward. Above 0 it needs the role
    `reference`. With a reference and 0 the divergence is only measured."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL term in the loss (Schulman, "Approximating KL divergence", 2020)."""
    to_go: bool | None = None
    """KL term in the reward, algorithms without a critic: credit a token with the terms from its position on; false:
    with its own only, as ReMax does."""
    target: float | None = Field(default=None, gt=0.0)
    """KL term in the reward: adapt the coefficient so that a response's divergence approaches this, in nats. While
    only the critic trains (`roles.critic.warmup_steps`), the coefficient stays."""
    horizon: int | None = Field(default=None, ge=1)
    """Samples over which the coefficient adapts (arXiv 1909.08593); a step changes it by at most 20 %, even if it has
    more samples. null: 10000."""


@overrides({KlPenalty: ""})
class KlOldConfig(Frozen):
    """Penalty on KL(old || new) (ppo_penalty)."""


@overrides({TrustRegion: ""})
class TrustRegionConfig(Frozen):
    """Limit on the divergence of a step (ppo_kl_limit)."""


@overrides({NaturalGradientConfig: ""})
class NaturalGradientSection(Frozen):
    """TRPO's step (trpo)."""


@overrides({ImportanceConfig: ""})
class ImportanceSection(Frozen):
    """Correction for the difference between sampler and trainer: w = pi_old / pi_rollout of a token. With it the
    objective is decoupled PPO's (arXiv 2110.00641): the ratio is clipped around pi_old."""


@overrides(
    dict.fromkeys((PolicyLossConfig, AdvantageConfig, CriticLossConfig), ""), without=ROW_ONLY | KL_FIELDS | SECTIONS
)
class AlgorithmConfig(Frozen):
    """The algorithm, and settings that replace its defaults. A field left out (or null) takes the algorithm's
    default."""

    name: Annotated[str, ALGORITHM] = Field(
        json_schema_extra={"anyOf": [{"enum": [*sorted(ALGORITHMS)]}, {"pattern": CUSTOM_NAME.pattern}]}
    )
    """Name of the algorithm, or `package.module:attribute` of a custom one (docs/guides/algorithm.md)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """A custom algorithm: arguments of the function that returns it."""
    group_size: Annotated[int | None, AS_SAMPLED] = Field(default=None, ge=1)
    """Samples per prompt."""
    clip_range: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The ratio is clipped to 1 - clip_range .. 1 + clip_range."""
    kl: KlConfig = KlConfig()
    """KL divergence from the reference model."""
    kl_old: KlOldConfig | None = None
    """Penalty on the divergence from the policy that sampled (ppo_penalty)."""
    trust_region: TrustRegionConfig | None = None
    """Limit on the divergence of a step (ppo_kl_limit)."""
    natural_gradient: NaturalGradientSection | None = None
    """TRPO's step (trpo)."""
    importance: ImportanceSection | None = None
    """Correction for the difference between sampler and trainer."""
    distill: DistillSection | None = None
    """Divergence from the teachers, over their likeliest tokens or the whole vocabulary."""
    kl_stop: float | None = Field(default=None, ge=0.0)
    """Skip the rest of a step's updates once KL(old || new) per token is above this; 0 turns it off."""
    kl_states: int = Field(default=128, ge=0)
    """Tokens of every batch at which KL(old || new) over the whole vocabulary is measured, exactly, after the step's
    updates (`policy/kl_exact`). It needs memory for that many rows of logits; 0: not measured."""
    ptx_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of `data.ptx` in every update of the policy (PPO-ptx, arXiv 2203.02155,
    eq. 2)."""
    dynamic_sampling: int | None = Field(default=None, ge=0)
    """Replace groups whose rewards are all equal, at most this many for each group of a step; 0: train on them."""
    mask_truncated: bool = False
    """Responses cut at `sampling.max_tokens` carry no loss; their rewards remain in the statistics of their group
    (overlong filtering: DAPO, arXiv 2503.14476, sec. 3.4)."""
    by_source: Annotated[bool, noted("from the next step on; running statistics start again")] = True
    """With several sources in `data.train`: whitening, `reward_scale` and the running mean of returns are computed
    within each source; false: over all of them together. Groups are compared within themselves in any case."""
    dynamic_sampling_on: str | None = None
    """Dynamic sampling: replace groups in which this reward component (its label, or `reward_model`) has equal values,
    such as a correctness among shaping terms; null: the reward."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ALGORITHMS and not is_custom(name):
            raise ValueError(unknown_algorithm(name))
        return name

    @model_validator(mode="after")
    def _usable(self) -> AlgorithmConfig:
        row_of(self)
        return self


_OF_UPDATE = frozenset(
    ("kl_coef", "kl_estimator", "entropy_coef", "importance", "distill", "observation_coef", "sampler_top_k")
)
"""Fields of a loss that a source with the loss of another algorithm has from the run's."""


@overrides({PolicyLossConfig: ""}, without=ROW_ONLY | _OF_UPDATE)
class SourceAlgorithm(Frozen):
    """What a source of a mixture replaces of the algorithm for its samples. A field left out has the run's value, or,
    of `loss`, that algorithm's default."""

    consequences: ClassVar = NEXT_STEP
    advantage: str | None = None
    """Name of an algorithm without a critic, whose estimator computes the advantages, by its defaults and without a KL
    term in the reward."""
    loss: str | None = None
    """Name of an algorithm whose loss the samples have: objective, ratio, clips and aggregation, by its defaults. Its
    other terms and the correction for the sampler are the run's."""
    kl_coef: float | None = Field(default=None, ge=0.0)
    """As `algorithm.kl.coef`, of a KL term in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """As `algorithm.kl.estimator`."""

    @field_validator("advantage", "loss")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in ALGORITHMS:
            raise ValueError(unknown_algorithm(name))
        return name


REWARDS_ONLY = frozenset(
    {"group", "smooth_group", "decoupled_group", "max_likelihood", "best_of_subsets", "returns", "none"}
)
"""Advantage estimators that may compute a part of a batch from its rewards alone."""


def from_rewards(advantage: AdvantageConfig) -> bool:
    """Whether advantages follow from the rewards of their samples, so that sources may have different ones."""
    others = ("greedy", "player_average", "optimal_token", "mixture")
    plain = advantage.kl_coef == 0 and advantage.covariance == "keep" and advantage.baseline not in others
    return plain and advantage.estimator in REWARDS_ONLY


RUN_LOSSES: tuple[tuple[str, Callable[[Algorithm], bool]], ...] = (
    ("has no ratio and trains at temperature 1", lambda row: not row.loss.has_ratio),
    ("limits the step of a whole update", lambda row: bool(row.kl_penalty or row.trust_region or row.natural_gradient)),
    ("chooses tokens of a whole batch", lambda row: row.advantage.covariance != "keep"),
    ("leaves out samples far from the sampler", lambda row: row.loss.importance.max_divergence is not None),
    ("reads the sampler's likeliest tokens", lambda row: row.loss.recorded_top_k > 0),
    ("trains on pairs", lambda row: row.advantage.estimator in ("preference_pair", "reference_pair")),
    ("has no loss besides the divergence from a teacher", lambda row: row.advantage.estimator == "none"),
    ("has a custom loss, with its metrics", lambda row: row.loss.objective == "custom"),
)
"""Why all sources of a mixture have the loss of an algorithm, and which algorithms these are."""


def run_loss(row: Algorithm) -> str | None:
    """Why all sources have the loss of this algorithm, or None if they may have different ones."""
    return next((why for why, applies in RUN_LOSSES if applies(row)), None)


def named_losses() -> list[str]:
    """Algorithms whose loss a source may have, one of each kind."""
    return _of_each_kind({name: row.loss for name, row in ALGORITHMS.items() if run_loss(row) is None})


def named_advantages() -> list[str]:
    """Algorithms whose advantages a source may have, one of each kind."""
    own = {name: row.advantage.model_copy(update={"kl_coef": 0.0}) for name, row in ALGORITHMS.items()}
    return _of_each_kind({name: one for name, one in own.items() if from_rewards(one)})


def _of_each_kind(configs: Mapping[str, Frozen]) -> list[str]:
    """The first name of each kind of configuration."""
    kinds: dict[tuple[object, ...], str] = {}
    for name, config in configs.items():
        kinds.setdefault(tuple(value for field, value in config if field in ROW_ONLY), name)
    return list(kinds.values())


def is_custom(name: str) -> bool:
    """Whether the name is a custom algorithm's: `package.module:attribute`."""
    return CUSTOM_NAME.fullmatch(name) is not None


def row_of(config: AlgorithmConfig) -> Algorithm:
    """The algorithm's row. Raises ValueError if it is a custom algorithm and cannot be used."""
    if not is_custom(config.name):
        return ALGORITHMS[config.name]
    return custom_row(CustomConfig(name=config.name, args=config.args))


def custom_row(config: CustomConfig) -> Algorithm:
    """The row of the shipped algorithm that the user's own is based on, with the user's functions in their places.
    Raises ValueError if the user's algorithm cannot be used."""
    from troupe.workers.algorithms.custom import load_custom  # imports torch, which a spec without one does not need

    custom = load_custom(config)
    base = ALGORITHMS.get(custom.base)
    if base is None:
        raise ValueError(f"{config.name}: base: {unknown_algorithm(custom.base)}")
    advantage, loss, kl_in = base.advantage, base.loss, base.kl_in
    if custom.advantage is not None:
        # Its rewards have no KL term: the function gets the log-probs and may add one.
        advantage, kl_in = AdvantageConfig(estimator="custom", custom=config), "loss"
    if custom.loss is not None:
        loss = loss.model_copy(update={"objective": "custom", "custom": config})
    return replace(
        base,
        name=config.name,
        summary=custom.summary or f"{base.name} with custom functions.",
        formula=f"the functions of {config.name}; the rest as {base.name}",
        source=f"{config.name}; defaults: {base.source}",
        advantage=advantage,
        loss=loss,
        kl_in=kl_in,
        kl_penalty=None if custom.loss is not None else base.kl_penalty,
        dynamic_sampling=base.dynamic_sampling or (_REPLACED if custom.keep_group is not None else 0),
    )


def group_size(config: AlgorithmConfig) -> int:
    return config.group_size or row_of(config).group_size


def kl_coef(config: AlgorithmConfig) -> float:
    """Weight of the KL term, in the loss or in the reward."""
    row = row_of(config)
    default = row.loss.kl_coef if row.kl_in == "loss" else row.advantage.kl_coef
    return default if config.kl.coef is None else config.kl.coef


def policy_loss(config: AlgorithmConfig) -> PolicyLossConfig:
    """The policy's loss: the row's defaults, overridden by the spec."""
    row = row_of(config)
    clips = {"clip_low": config.clip_range, "clip_high": config.clip_range}
    coef = kl_coef(config) if row.kl_in == "loss" else 0.0
    own = {"kl_coef": coef, "kl_estimator": config.kl.estimator}
    own["distill"] = overridden(row.loss.distill, dict(config.distill or ()))
    own["importance"] = overridden(row.loss.importance, dict(config.importance or ()))
    return overridden(row.loss, clips | _given(config) | own)


def source_loss(config: AlgorithmConfig, own: SourceAlgorithm) -> PolicyLossConfig:
    """The loss of a source of a mixture: the run's, or that of the algorithm that it names, with its own fields."""
    loss = policy_loss(config)
    if own.loss is not None:
        loss = ALGORITHMS[own.loss].loss.model_copy(update={name: vars(loss)[name] for name in _OF_UPDATE})
    return overridden(loss, dict(own))


def corrects_sampler(config: AlgorithmConfig) -> bool:
    """Whether the loss accounts for the difference between the distribution that sampled and the policy's."""
    return policy_loss(config).importance.mode != "none"


def advantage(config: AlgorithmConfig) -> AdvantageConfig:
    """How rewards become advantages: the row's defaults, overridden by the spec."""
    row = row_of(config)
    coef = kl_coef(config) if row.kl_in == "reward" else 0.0
    kl = {"kl_to_go": config.kl.to_go, "kl_target": config.kl.target, "kl_horizon": config.kl.horizon}
    return overridden(row.advantage, _given(config) | kl | {"kl_coef": coef})


def kl_penalty(config: AlgorithmConfig) -> KlPenalty | None:
    """The penalty on KL(old || new); None for an algorithm without one."""
    default = row_of(config).kl_penalty
    if default is None:
        return None
    return overridden(default, dict(config.kl_old or ()))


def trust_region(config: AlgorithmConfig) -> TrustRegion | None:
    """The limit on the divergence of a step; None for an algorithm without one."""
    default = row_of(config).trust_region
    if default is None:
        return None
    return overridden(default, dict(config.trust_region or ()))


def natural_gradient(config: AlgorithmConfig) -> NaturalGradientConfig | None:
    """TRPO's step; None for an algorithm whose policy trains with AdamW."""
    default = row_of(config).natural_gradient
    if default is None:
        return None
    return overridden(default, dict(config.natural_gradient or ()))


def compares_with_batch(config: AlgorithmConfig) -> bool:
    """Whether an advantage depends on samples outside of its group: what `by_source` divides."""
    own = advantage(config)
    return own.whiten or own.reward_scale != "none" or own.baseline in ("running_mean", "batch_mean", "player_average")


def dynamic_sampling(config: AlgorithmConfig) -> int:
    """Groups without signal that may be replaced, for each group of a step."""
    return row_of(config).dynamic_sampling if config.dynamic_sampling is None else config.dynamic_sampling


def critic_loss(config: AlgorithmConfig) -> CriticLossConfig | None:
    """The critic's loss; None for an algorithm without a critic."""
    row = row_of(config)
    return None if row.critic_loss is None else overridden(row.critic_loss, _given(config))


def unused_options(config: AlgorithmConfig) -> list[str]:
    """Fields that the spec sets and the algorithm does not read."""
    row = row_of(config)
    unread = unread_options(row)
    if row.advantage.estimator not in COMPARES:
        unread |= {"dynamic_sampling", "dynamic_sampling_on"}
    if row.critic_loss is None:
        unread |= CRITIC_OPTIONS
    unread |= {name for name in ("trust_region", "natural_gradient") if vars(row)[name] is None}
    if not is_custom(config.name):
        unread |= {"args"}
    return [name for name, value in config if name in unread and value not in (None, {})]


def _given(config: AlgorithmConfig) -> dict[str, Any]:
    return {name: value for name, value in config if value is not None}
