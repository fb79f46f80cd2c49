"""Configuration of rewards: functions, their combinations and reward models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from troupe.workers.contract.config_base import Frozen, ModelConfig
from troupe.workers.contract.consequences import (
    COUNTED,
    EVALUATED,
    EVALUATED_IF_SET,
    NOT_REWARDED,
    OTHER_REWARDS,
    REWARDED,
    UNCOUNTED,
    Consequences,
    Counts,
)
from troupe.workers.contract.rewards import COMBINATIONS, JUDGE_REWARD, REWARD_MODEL

_TIMEOUT = Consequences(evaluation=Counts.AT_DEFAULT, reward=Counts.NO)


class RewardFunctionConfig(Frozen):
    """One reward component."""

    name: Annotated[str, COUNTED] = Field(min_length=1)
    """A built-in function (exact_match, numeric, regex, length, reasoning_gym, equations, python_tests,
    judge, ...), `reward_model`, a combination of other components (product, gate, min, max, mean, mean_minus_variance,
    mean_minus_std) or `package.module:function`."""
    weight: Annotated[float, COUNTED] = 1.0
    """The sample's reward is the weighted sum of its components."""
    timeout_s: Annotated[float, _TIMEOUT] = Field(default=5.0, gt=0.0)
    """A call that takes longer makes the sample fail; it never becomes a reward. For `judge`: the time in which all
    samples of a group are judged."""
    batched: Annotated[bool, EVALUATED, NOT_REWARDED] = False
    """True: the function is called once for a group, with lists of responses, answers and metadata, and returns a list
    with one result per response; None in it fails that sample. False: it is called for each response, and for all of
    them at the same time if it is asynchronous."""
    args: Annotated[dict[str, Any], COUNTED] = Field(default_factory=dict)
    """Keyword arguments of the function. Of `reward_model`: `model`, its name in `roles.reward.models`. Of a
    combination: `of`, the labels of its components, and `coef`, the weight of the variance or the standard deviation
    (1.0)."""
    label: Annotated[str, COUNTED] = ""
    """Name in the metrics; if empty, the name of the reward model, or the function's own name."""
    env: Annotated[tuple[str, ...], EVALUATED, NOT_REWARDED] = ()
    """Environment variables with secrets (`..._TOKEN`, `PASSWORD`, URLs with a password, ...) that the function may
    read; it gets none but these."""
    process: Annotated[bool, COUNTED] = False
    """True: the function returns steps, and each is rewarded at its end (process supervision); a function that returns
    a number makes the sample fail. False: one number counts for the whole response; for a function that returns steps
    it is their outcome (by default their mean)."""
    normalize: Annotated[bool, UNCOUNTED] = False
    """Train on the component's values minus their mean, divided by their standard deviation, over the samples of all
    steps so far (`algorithm.by_source`: of the source). Metrics, samples and evaluations have the values themselves."""

    @property
    def component(self) -> str:
        """Name of the component: the label, or the name of the reward model or the function."""
        return self.label or self.model or self.name.rpartition(":")[2]

    @property
    def model(self) -> str:
        """Name of the reward model that gives the component, or empty."""
        return str(self.args.get("model", REWARD_MODEL)) if self.name == REWARD_MODEL else ""

    @property
    def of(self) -> tuple[str, ...]:
        """Labels of the components that it combines, or empty if it is no combination."""
        return tuple(map(str, self.args.get("of", ()))) if self.name in COMBINATIONS else ()

    @property
    def compares(self) -> str:
        """What a judge compares (`compare` of its arguments), or empty."""
        return str(self.args.get("compare", "")) if self.name == JUDGE_REWARD else ""


class ModelArgs(Frozen):
    """Arguments of the component `reward_model`."""

    model: str = REWARD_MODEL
    """Name of the model in `roles.reward.models`; by default `roles.reward.model`."""


class CombinationArgs(Frozen):
    """Arguments of a component that combines others."""

    of: tuple[str, ...] = Field(min_length=2)
    """Their labels."""
    coef: float = Field(default=1.0, ge=0.0)
    """Weight of the variance or the standard deviation."""


_IF_SET = Consequences(evaluation=Counts.IF_SET, reward=Counts.IF_SET)


_REWARD_MODEL = Consequences(
    of={"path": REWARDED, "revision": REWARDED, "adapter": REWARDED}
    | {"level": _IF_SET, "separator": _IF_SET, "offset": _IF_SET}
)


ScoreLevel = Literal["response", "token_mean", "min", "mean", "last", "step"]
"""What a reward model scores, and how the scores of steps become rewards."""


class RewardModelConfig(ModelConfig):
    """A reward model: a sequence classifier with one label."""

    level: ScoreLevel = "response"
    """What the model scores. `response`: the response, at its last token; `token_mean`: every token of the response,
    whose mean is the score. A process reward model also gives the chance that a step is right, where the step ends:
    `min`, `mean` and `last` make one reward of the steps', and `step` rewards each of them (process rewards)."""
    separator: str = Field(default="\n\n", min_length=1)
    """Text that ends each step but the last, as `separator` of the data on which the model was trained."""
    offset: float | str = 0.0
    """Subtracted from every score: a number, or the column with reference answers (the `answer` of `data.train`, or one
    of its `metadata`), whose mean score it is, so that these score 0 on average (arXiv 2203.02155, sec. 3.5). The mean
    is over 256 rows at most, for each reward that sources have, and is measured once, before the first step."""


class RewardConfig(Frozen):
    """The rewards that a reward worker computes."""

    functions: Annotated[tuple[RewardFunctionConfig, ...], OTHER_REWARDS] = ()
    """Reward functions; the reward is their weighted sum."""
    model: Annotated[RewardModelConfig | None, EVALUATED, NOT_REWARDED, OTHER_REWARDS, _REWARD_MODEL] = None
    """A reward model (a sequence classifier with one label); its score is the component `reward_model`, unless one of
    `functions` names it."""
    models: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)], RewardModelConfig],
        EVALUATED_IF_SET,
        NOT_REWARDED,
        OTHER_REWARDS,
        _REWARD_MODEL,
    ] = Field(default_factory=dict)
    """Several reward models by name, all of which each worker holds. The component `{name: reward_model, args: {model:
    NAME}}`, of `functions` or of the rewards of a source, is the score of one."""
    model_weight: Annotated[float, COUNTED, OTHER_REWARDS] = 1.0
    """Weight of the score of `model`."""
    micro_batch_tokens: Annotated[int, UNCOUNTED] = Field(default=4096, ge=8)
    """Maximum number of tokens in one forward pass of a reward model."""
    memory_limit_mib: Annotated[int, UNCOUNTED] = Field(default=2048, ge=64)
    """Maximum memory that the process of one reward function may allocate, in MiB. Reserved addresses and shared
    mappings do not count."""
    threads: Annotated[int, UNCOUNTED] = Field(default=0, ge=0)
    """Compute threads of the reward models (CPU only). 0: as many as the role's `cpus`, at least one."""

    @property
    def components(self) -> tuple[RewardFunctionConfig, ...]:
        """The reward's components: `functions`, and `model` unless one of them names it."""
        if self.model is None or any(function.model == REWARD_MODEL for function in self.functions):
            return self.functions
        return (*self.functions, RewardFunctionConfig(name=REWARD_MODEL, weight=self.model_weight))

    @property
    def reward_models(self) -> dict[str, RewardModelConfig]:
        """The reward models by the name that components give them."""
        return dict(self.models) if self.model is None else {REWARD_MODEL: self.model, **self.models}


class ScoringConfig(RewardConfig):
    """Configuration of one reward worker: the rewards of the role, and of data that have their own."""

    sets: dict[str, tuple[RewardFunctionConfig, ...]] = Field(default_factory=dict)
    """Reward functions by the path of the section that they belong to (`data.eval.math500`), used instead of the
    role's functions and reward model."""
    teacher_tokens: bool = False
    """Whether the samples that it writes have the teachers' likeliest tokens."""
