"""Worker configuration of offline training: demonstrations, preferences, labels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.config import RankConfig
from troupe.workers.contract.config_base import Frozen, ModelConfig

Preference = Annotated[
    Literal["logistic", "fidelity"],
    Field(
        description="Loss of a preference. `logistic`: cross-entropy (Bradley-Terry, Plackett-Luce), which grows "
        "without bound with the error. `fidelity`: between 0 and 1, so that single wrong labels matter little; on "
        "ranked answers the mean over all pairs of them."
    ),
]
RewardLevel = Literal["sequence", "token"]
"""The places of the scores that a reward model's loss compares."""
LabelSmoothing = Annotated[
    float, Field(ge=0.0, lt=0.5, description="Chance that the labels of a pair are swapped, or a ranking is reversed.")
]


class SftLossConfig(Frozen):
    """Supervised fine-tuning: negative log-likelihood of the response tokens."""

    kind: Literal["sft"] = "sft"


class RewardLossConfig(Frozen):
    """Reward model: Bradley-Terry on pairs, Plackett-Luce on more than two ranked responses."""

    kind: Literal["reward"] = "reward"
    preference: Preference = "logistic"
    label_smoothing: LabelSmoothing = 0.0
    level: RewardLevel = "sequence"
    """The places of the scores that the loss compares. `sequence`: at the last token, as in use. `token` (pairs): at
    every place from the first token that differs to the end of the longer answer, averaged."""
    center_coef: float = Field(default=0.0, ge=0.0)
    """Weight of (r(chosen) + r(rejected))^2, which keeps the mean score near 0."""
    lm_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the best answer's negative log-likelihood (of all that are tied as the best)."""


class DpoLossConfig(Frozen):
    """Direct preference optimization."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the implicit KL to the reference."""
    preference: Preference = "logistic"
    label_smoothing: LabelSmoothing = 0.0


class IpoLossConfig(Frozen):
    """Identity preference optimization."""

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(default=0.1, gt=0.0)
    """tau in the paper: the target of the log-ratio margin is 1 / (2 beta)."""


class OrpoLossConfig(Frozen):
    """Odds-ratio preference optimization."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0.0)
    """lambda in the paper: weight of the odds-ratio term relative to the likelihood of the chosen response."""


class KtoLossConfig(Frozen):
    """Kahneman-Tversky optimization."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the implicit KL to the reference."""
    desirable_weight: float = Field(default=1.0, gt=0.0)
    """Weight of desirable responses."""
    undesirable_weight: float = Field(default=1.0, gt=0.0)
    """Weight of undesirable responses."""


class RrhfLossConfig(Frozen):
    """Rank responses to align with human feedback."""

    kind: Literal["rrhf"] = "rrhf"
    lm_coef: float = Field(default=1.0, ge=0.0)
    """Weight of the best answer's negative log-likelihood (of all that are tied as the best)."""


class ProcessLossConfig(Frozen):
    """Process reward model: cross-entropy of every step's score with the step's label."""

    kind: Literal["process"] = "process"


class KdLossConfig(Frozen):
    """Distillation on the samples of an earlier run."""

    kind: Literal["kd"] = "kd"
    compares: Literal["distribution", "sampled"] = "distribution"
    """What is compared with the teacher. `distribution`: the divergence of `distill`; `sampled`: the log-prob of the
    sampled token, (log pi - log pi_teacher)^2 / 2."""
    distill: DistillConfig = DistillConfig(coef=1.0)
    """Divergence from the teacher."""

    @property
    def divergence(self) -> DistillConfig:
        """The divergence of distributions; its coefficient is 0 if only sampled tokens are compared."""
        return self.distill if self.compares == "distribution" else DistillConfig()


OfflineLossConfig = Annotated[
    SftLossConfig
    | KdLossConfig
    | RewardLossConfig
    | ProcessLossConfig
    | DpoLossConfig
    | IpoLossConfig
    | OrpoLossConfig
    | KtoLossConfig
    | RrhfLossConfig,
    Field(discriminator="kind"),
]


class ExampleConfig(Frozen):
    """How examples are tokenized."""

    max_length: int = Field(ge=8)
    """Longest prompt plus response, in tokens; a longer example is refused."""
    micro_batch_tokens: int = Field(ge=8)
    """Largest example, in tokens: all its rows, padded to the longest; a larger one is refused."""
    from_divergence: bool = False
    """Comparisons: the loss starts at the first token that differs between the responses."""
    mismatched: bool = False
    """Add to every example its prompt with the response of another example (for the reference point of KTO)."""
    steps: bool = False
    """The responses of an example are the steps of one response, and their scores the labels."""
    sampled: bool = False
    """The examples have token ids, from the samples of a run."""


class OfflineConfig(RankConfig):
    """Configuration of one rank of an offline trainer."""

    loss: OfflineLossConfig
    examples: ExampleConfig
    reference_model: ModelConfig | None
    """A frozen reference to load with the model (colocated)."""
