"""Worker configuration of offline training: demonstrations, preferences, labels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from troupe.workers.contract.config import Frozen, ModelConfig, RankConfig

Preference = Literal["logistic", "fidelity"]
"""Loss of a preference, of how far the model puts the better response ahead."""
RewardLevel = Literal["sequence", "token"]
"""The places of the scores that a reward model's loss compares."""


class SftLossConfig(Frozen):
    """Supervised fine-tuning: negative log-likelihood of the response tokens."""

    kind: Literal["sft"] = "sft"


class RewardLossConfig(Frozen):
    """Reward model: Bradley-Terry on pairs, Plackett-Luce on more than two ranked responses."""

    kind: Literal["reward"] = "reward"
    preference: Preference = "logistic"
    """Loss of a preference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Probability that the order of the responses is reversed."""
    level: RewardLevel = "sequence"
    """Compare the scores of the last tokens, or of all tokens from the first difference on (pairs)."""
    center_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the squared sum of the scores of an example."""
    lm_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the best response's negative log-likelihood."""


class DpoLossConfig(Frozen):
    """Direct preference optimization."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the implicit KL to the reference."""
    preference: Preference = "logistic"
    """Loss of a preference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Probability that the order of the responses is reversed (conservative DPO)."""


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
    """Weight of the best response's negative log-likelihood."""


OfflineLossConfig = Annotated[
    SftLossConfig | RewardLossConfig | DpoLossConfig | IpoLossConfig | OrpoLossConfig | KtoLossConfig | RrhfLossConfig,
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


class OfflineConfig(RankConfig):
    """Configuration of one rank of an offline trainer."""

    loss: OfflineLossConfig
    examples: ExampleConfig
    reference_model: ModelConfig | None
    """A frozen reference to load with the model (colocated)."""
