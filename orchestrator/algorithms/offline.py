"""The table of algorithms that train on given examples: what data and roles each needs, its loss and its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from orchestrator.spec_errors import nearest
from workers.config import Frozen
from workers.config_offline import (
    DpoLossConfig,
    IpoLossConfig,
    KtoLossConfig,
    OfflineLossConfig,
    OrpoLossConfig,
    RewardLossConfig,
    RrhfLossConfig,
    SftLossConfig,
)

DataFormat = Literal["demonstrations", "pairs", "ranked", "labelled"]
Trains = Literal["policy", "reward_model"]


@dataclass(frozen=True)
class OfflineAlgorithm:
    """One row: what the algorithm learns from, who takes part besides the trained model, and its loss's defaults."""

    name: str
    summary: str
    formula: str
    """The loss, in plain text."""
    source: str
    """Paper the loss and its defaults follow."""
    trains: Trains
    formats: tuple[DataFormat, ...]
    """Data it takes; the first is the default."""
    reference: bool
    """Whether it compares with a frozen reference."""
    loss: OfflineLossConfig
    options: frozenset[str] = frozenset()
    """Further fields of the algorithm section it reads, besides those of its loss."""


OFFLINE_ALGORITHMS: dict[str, OfflineAlgorithm] = {
    row.name: row
    for row in (
        OfflineAlgorithm(
            name="sft",
            summary="Supervised fine-tuning: the likelihood of given responses; prompts carry no loss.",
            formula="loss: mean over response tokens of -log pi(token)",
            source="InstructGPT, arXiv 2203.02155, section 3.5",
            trains="policy",
            formats=("demonstrations",),
            reference=False,
            loss=SftLossConfig(),
            options=frozenset({"packing"}),
        ),
        OfflineAlgorithm(
            name="reward_model",
            summary="A scalar head learns which answer people prefer: Bradley-Terry on pairs, with a margin where the "
            "data have one; Plackett-Luce on more than two ranked answers.",
            formula="loss: -log sigmoid(r(chosen) - r(rejected) - margin); ranked: -sum_k log(exp r_k / sum_{j >= k} "
            "exp r_j); plus lm_coef times the chosen answer's negative log-likelihood",
            source="InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, arXiv 2307.09288, eq. 2; "
            "ranked: arXiv 2305.18290, eq. 18; lm_coef: arXiv 2406.10216, eq. 9",
            trains="reward_model",
            formats=("pairs", "ranked"),
            reference=False,
            loss=RewardLossConfig(),
        ),
        OfflineAlgorithm(
            name="dpo",
            summary="The policy's log-ratio to a frozen reference is the reward that pairs are judged by.",
            formula="h = beta ((log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)); "
            "loss: -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)",
            source="DPO, arXiv 2305.18290, eq. 7",
            trains="policy",
            formats=("pairs",),
            reference=True,
            loss=DpoLossConfig(),
            options=frozenset({"from_divergence"}),
        ),
        OfflineAlgorithm(
            name="ipo",
            summary="As DPO, with a squared loss that draws the margin to a fixed size.",
            formula="h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected); loss: (h - 1 / (2 beta))^2",
            source="IPO, arXiv 2310.12036, eq. 17",
            trains="policy",
            formats=("pairs",),
            reference=True,
            loss=IpoLossConfig(),
            options=frozenset({"from_divergence"}),
        ),
        OfflineAlgorithm(
            name="orpo",
            summary="Likelihood of the chosen answer plus the odds ratio of the two; no reference.",
            formula="loss: NLL(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), "
            "odds(y) = p / (1 - p), log p the mean log pi of the answer's tokens",
            source="ORPO, arXiv 2403.07691, eq. 6 and 7",
            trains="policy",
            formats=("pairs",),
            reference=False,
            loss=OrpoLossConfig(),
        ),
        OfflineAlgorithm(
            name="kto",
            summary="Single answers labelled good or bad, judged against a reference point from mismatched answers.",
            formula="h = log pi - log pi_ref of an answer; z = max(0, mean of h over mismatched answers); loss: weight "
            "(1 - sigmoid(beta (h - z))) for good answers, (1 - sigmoid(beta (z - h))) for bad ones",
            source="KTO, arXiv 2402.01306, eq. 7 and 8",
            trains="policy",
            formats=("labelled",),
            reference=True,
            loss=KtoLossConfig(),
        ),
        OfflineAlgorithm(
            name="rrhf",
            summary="Answers with scores: likelier should be better; plus the likelihood of the best. No reference.",
            formula="p_i = mean log pi of answer i; "
            "loss: sum over score_i < score_j of max(0, p_i - p_j) + NLL(best answer)",
            source="RRHF, arXiv 2304.05302, eq. 2 to 5",
            trains="policy",
            formats=("ranked",),
            reference=False,
            loss=RrhfLossConfig(),
        ),
    )
}


class OfflineAlgorithmConfig(Frozen):
    """The algorithm, and what departs from its row. A field left out (or null) takes the algorithm's default."""

    name: str = Field(json_schema_extra={"enum": [*sorted(OFFLINE_ALGORITHMS)]})
    """Row of the algorithm table."""
    beta: float | None = Field(default=None, gt=0.0)
    """dpo, kto: strength of the implicit KL to the reference; ipo: the paper's tau; orpo: the paper's lambda."""
    label_smoothing: float | None = Field(default=None, ge=0.0, lt=0.5)
    """dpo: chance that a pair's labels are swapped."""
    lm_coef: float | None = Field(default=None, ge=0.0)
    """reward_model, rrhf: weight of the best answer's negative log-likelihood."""
    desirable_weight: float | None = Field(default=None, gt=0.0)
    """kto: weight of desirable answers."""
    undesirable_weight: float | None = Field(default=None, gt=0.0)
    """kto: weight of undesirable answers."""
    from_divergence: bool | None = None
    """dpo, ipo: only tokens from the first one on that differs between the two answers carry the loss. It leaves DPO's
    loss as it is (what is shared cancels) and changes IPO's, which is a mean over tokens."""
    packing: bool | None = None
    """sft: lay the examples of a micro-batch end to end in one row instead of padding them. Worth it with an attention
    that skips other examples' blocks (flash attention on GPUs); see docs/offline.md."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OFFLINE_ALGORITHMS:
            known = f"known: {', '.join(sorted(OFFLINE_ALGORITHMS))}"
            raise ValueError(f"no algorithm '{name[:60]}' ({nearest(name, OFFLINE_ALGORITHMS) or known})")
        return name

    @property
    def row(self) -> OfflineAlgorithm:
        """The algorithm's row."""
        return OFFLINE_ALGORITHMS[self.name]

    def loss_config(self) -> OfflineLossConfig:
        """The loss: the row's, with what the spec sets."""
        return self.row.loss.model_copy(update=self._given(type(self.row.loss).model_fields))

    def unused(self) -> list[str]:
        """Fields the spec sets and the algorithm does not read."""
        read = {"name", *self.row.options, *type(self.row.loss).model_fields}
        return [name for name, value in self if value is not None and name not in read]

    def _given(self, names: Any) -> dict[str, Any]:
        return {name: value for name, value in self if name in names and value is not None}
