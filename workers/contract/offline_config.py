"""What a worker is told that trains on examples it is given: demonstrations, preferences, labels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.config import Frozen, ModelConfig, TrainerConfig


class SftLossConfig(Frozen):
    """Supervised fine-tuning: negative log-likelihood of the response tokens."""

    kind: Literal["sft"] = "sft"


class RewardLossConfig(Frozen):
    """Reward model: Bradley-Terry on pairs, Plackett-Luce on more than two ranked answers."""

    kind: Literal["reward"] = "reward"
    lm_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the best answer's negative log-likelihood."""


class DpoLossConfig(Frozen):
    """Direct preference optimisation."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the implicit KL to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Chance that a pair's labels are swapped (conservative DPO)."""


class IpoLossConfig(Frozen):
    """Identity preference optimisation."""

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(default=0.1, gt=0.0)
    """The paper's tau: the log-ratio margin is drawn to 1 / (2 beta)."""


class OrpoLossConfig(Frozen):
    """Odds-ratio preference optimisation."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0.0)
    """The paper's lambda: weight of the odds-ratio term beside the likelihood of the chosen answer."""


class KtoLossConfig(Frozen):
    """Kahneman-Tversky optimisation."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the implicit KL to the reference."""
    desirable_weight: float = Field(default=1.0, gt=0.0)
    """Weight of desirable answers."""
    undesirable_weight: float = Field(default=1.0, gt=0.0)
    """Weight of undesirable answers."""


class RrhfLossConfig(Frozen):
    """Rank responses to align with human feedback."""

    kind: Literal["rrhf"] = "rrhf"
    lm_coef: float = Field(default=1.0, ge=0.0)
    """Weight of the best answer's negative log-likelihood."""


OfflineLossConfig = Annotated[
    SftLossConfig | RewardLossConfig | DpoLossConfig | IpoLossConfig | OrpoLossConfig | KtoLossConfig | RrhfLossConfig,
    Field(discriminator="kind"),
]


class ExampleConfig(Frozen):
    """How texts become rows of tokens."""

    max_length: int = Field(ge=8)
    """Longest prompt plus response, in tokens; a longer example is a bad row."""
    micro_batch_tokens: int = Field(ge=8)
    """Largest example, in tokens: all its rows, padded to the longest; a larger one is a bad row."""
    from_divergence: bool = False
    """Pairs: only tokens from the first one on that differs between the two answers carry the loss."""
    mismatched: bool = False
    """Put beside every example its prompt with the next example's response (the reference point of KTO)."""


class OfflineConfig(Frozen):
    """Everything one rank is told that trains on examples."""

    model: ModelConfig
    trainer: TrainerConfig
    loss: OfflineLossConfig
    examples: ExampleConfig
    packing: bool
    """Lay the examples of a micro-batch end to end in one row, without padding."""
    reference_model: ModelConfig | None
    """Load a frozen reference beside the model (colocated)."""
    total_updates: int
    """Optimizer updates the learning-rate schedule spans."""
    seed: int
    device: Literal["cpu", "cuda"]
