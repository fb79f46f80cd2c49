"""The table of algorithms that train on offline data: the data and roles each needs, its loss and its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from troupe.orchestrator.algorithms.overrides import overridden, overrides
from troupe.orchestrator.errors import nearest
from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import refused
from troupe.workers.contract.offline_config import (
    DpoLossConfig,
    IpoLossConfig,
    KdLossConfig,
    KtoLossConfig,
    OfflineLossConfig,
    OrpoLossConfig,
    ProcessLossConfig,
    RewardLossConfig,
    RrhfLossConfig,
    SftLossConfig,
)

DataFormat = Literal["demonstrations", "pairs", "ranked", "labelled", "steps", "samples"]
Trains = Literal["policy", "reward_model"]
ALGORITHM = refused("the checkpoint's state belongs to the algorithm that wrote it")


@dataclass(frozen=True)
class OfflineAlgorithm:
    """One row: the data the algorithm learns from, whether it needs a reference, and the defaults of its loss."""

    name: str
    summary: str
    formula: str
    """The loss, in plain text."""
    source: str
    """Paper the loss and its defaults follow."""
    formats: tuple[DataFormat, ...]
    """Formats of data that it takes; the first is the default."""
    loss: OfflineLossConfig
    trains: Trains = "policy"
    reference: bool = False
    """Whether it compares with a frozen reference."""
    teacher: bool = False
    """Whether a frozen reference may be its teacher."""
    options: frozenset[str] = frozenset()
    """Fields of the algorithm section that it reads besides its loss's."""


OFFLINE_ALGORITHMS: dict[str, OfflineAlgorithm] = {
    row.name: row
    for row in (
        OfflineAlgorithm(
            name="sft",
            summary="Supervised fine-tuning: maximises the likelihood of responses; prompts carry no loss.",
            formula="loss: mean over response tokens of -log pi(token)",
            source="InstructGPT, arXiv 2203.02155, section 3.5",
            formats=("demonstrations",),
            loss=SftLossConfig(),
        ),
        OfflineAlgorithm(
            name="kd",
            summary="Distillation on the samples of an earlier run, by the teacher's log-probs in them or by the "
            "reference's.",
            formula="loss: distill.coef times the mean over response tokens of the divergence between pi and the "
            "teacher, as gkd; compares: sampled: mean of (log pi - log pi_teacher)^2 / 2 of the sampled tokens",
            source="GKD, arXiv 2306.13649, eq. 2 (supervised KD); sampled: k2 of Schulman 2020, whose gradient on the "
            "policy's samples is that of reverse KL",
            formats=("samples",),
            loss=KdLossConfig(),
            teacher=True,
        ),
        OfflineAlgorithm(
            name="reward_model",
            summary="A scalar head learns which answer people prefer: Bradley-Terry on pairs, with a margin where the "
            "data have one; Plackett-Luce on more than two ranked answers, of which some may be tied.",
            formula="h = r(chosen) - r(rejected) - margin; loss: -(1 - label_smoothing) log sigmoid(h) - "
            "label_smoothing log sigmoid(-h); ranked: -sum_k log(exp r_k / (exp r_k + sum of exp r_j over j worse than "
            "k)); plus center_coef (r(chosen) + r(rejected))^2; plus lm_coef times the best answer's negative "
            "log-likelihood",
            source="InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, arXiv 2307.09288, eq. 2; "
            "ranked: arXiv 2305.18290, eq. 18; label_smoothing: arXiv 2401.06080; preference: fidelity: Tsai et al. "
            "2007, FRank; level: token: DeepSpeed-Chat, arXiv 2308.01320; center_coef: arXiv 2312.09244; "
            "lm_coef: arXiv 2406.10216, eq. 9",
            trains="reward_model",
            formats=("pairs", "ranked"),
            loss=RewardLossConfig(),
        ),
        OfflineAlgorithm(
            name="process_reward_model",
            summary="A scalar head learns whether each step of a response is right, from a label for each step.",
            formula="loss: mean over steps of -label log sigmoid(r) - (1 - label) log(1 - sigmoid(r)), r the score at "
            "the token at which the step ends",
            source="Math-Shepherd, arXiv 2312.08935, eq. 3; Uesato et al., arXiv 2211.14275; PRM800K, arXiv 2305.20050",
            trains="reward_model",
            formats=("steps",),
            loss=ProcessLossConfig(),
        ),
        OfflineAlgorithm(
            name="dpo",
            summary="The policy's log-ratio to a frozen reference is the reward that pairs or ranked answers are "
            "compared by.",
            formula="h = beta ((log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)); "
            "loss: -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h); ranked: as reward_model, "
            "with r = beta (log pi - log pi_ref)",
            source="DPO, arXiv 2305.18290, eq. 7; ranked: eq. 20; label_smoothing: Mitchell 2023, eq. 3; preference: "
            "fidelity: Tsai et al. 2007, FRank",
            formats=("pairs", "ranked"),
            reference=True,
            loss=DpoLossConfig(),
            options=frozenset({"from_divergence"}),
        ),
        OfflineAlgorithm(
            name="ipo",
            summary="As DPO, with a squared loss that pulls the margin towards a fixed size.",
            formula="h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected); loss: (h - 1 / (2 beta))^2",
            source="IPO, arXiv 2310.12036, eq. 17",
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
            formats=("pairs",),
            loss=OrpoLossConfig(),
        ),
        OfflineAlgorithm(
            name="kto",
            summary="Single answers labelled good or bad, compared with a reference point from mismatched answers.",
            formula="h = log pi - log pi_ref of an answer; z = max(0, mean of h over mismatched answers); loss: weight "
            "(1 - sigmoid(beta (h - z))) for good answers, (1 - sigmoid(beta (z - h))) for bad ones",
            source="KTO, arXiv 2402.01306, eq. 7 and 8",
            formats=("labelled",),
            reference=True,
            loss=KtoLossConfig(),
        ),
        OfflineAlgorithm(
            name="rrhf",
            summary="Answers with scores: better ones should be likelier; plus the best one's likelihood.",
            formula="p_i = mean log pi of answer i; "
            "loss: sum over score_i < score_j of max(0, p_i - p_j) + NLL(best answer)",
            source="RRHF, arXiv 2304.05302, eq. 2 to 5",
            formats=("ranked",),
            loss=RrhfLossConfig(),
        ),
    )
}


_PREFERENCE = ("preference_loss", "accuracy", "margin", "reward_chosen", "reward_rejected")
_REPORTED: dict[type[Frozen], tuple[str, ...]] = {
    SftLossConfig: ("nll", "token_logprob"),
    KdLossConfig: ("distill_loss", "teacher_divergence", "token_logprob"),
    RewardLossConfig: ("preference_loss", "accuracy", "margin", "score", "calibration_error"),
    ProcessLossConfig: ("accuracy", "score", "calibration_error"),
    DpoLossConfig: _PREFERENCE,
    IpoLossConfig: _PREFERENCE,
    OrpoLossConfig: (*_PREFERENCE, "nll"),
    KtoLossConfig: ("preference_loss", "accuracy", "reward_desirable", "reward_undesirable", "reference_point"),
    RrhfLossConfig: ("preference_loss", "accuracy", "margin"),
}
"""Metrics of each loss, besides the loss."""
_TERMS = {"center_coef": "center_loss", "lm_coef": "lm_loss"}
"""Terms of a loss by the coefficient that adds them."""


@overrides({DistillConfig: ""})
class DistillSection(Frozen):
    """Divergence from the teachers, or the reference as one, over more than the sampled token: a term of any
    algorithm's loss, and the whole loss of gkd and kd. (Over the sampled token alone it is the term `kl`.)"""


@overrides({type(row.loss): row.name for row in OFFLINE_ALGORITHMS.values()}, without={"kind", "distill"})
class OfflineAlgorithmConfig(Frozen):
    """The algorithm, and settings that replace its defaults. A field left out (or null) takes the algorithm's
    default."""

    name: Annotated[str, ALGORITHM] = Field(json_schema_extra={"enum": [*sorted(OFFLINE_ALGORITHMS)]})
    """Name of the algorithm."""
    from_divergence: bool | None = None
    """dpo, ipo: only tokens from the first difference between the answers on carry the loss. This leaves DPO's loss
    unchanged (shared tokens cancel) and changes IPO's, which is a mean over tokens."""

    distill: DistillSection | None = None
    """Divergence from the teacher, over its likeliest tokens or the whole vocabulary (kd)."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OFFLINE_ALGORITHMS:
            known = f"known: {', '.join(sorted(OFFLINE_ALGORITHMS))}"
            raise ValueError(f"no algorithm '{name[:60]}' ({nearest(name, OFFLINE_ALGORITHMS) or known})")
        return name

    @property
    def row(self) -> OfflineAlgorithm:
        return OFFLINE_ALGORITHMS[self.name]

    @property
    def reported(self) -> tuple[str, ...]:
        """Metrics of the loss on examples, as `workers/algorithms/offline_objectives.py` gives them."""
        loss = self.loss_config()
        coefs = {name: value for name, value in loss if name in _TERMS}
        return ("loss", *_REPORTED[type(loss)], *(term for name, term in _TERMS.items() if coefs.get(name)))

    def loss_config(self) -> OfflineLossConfig:
        """The loss: the row's defaults, overridden by the spec."""
        loss = self.row.loss
        own = {"distill": overridden(loss.distill, dict(self.distill or ()))} if isinstance(loss, KdLossConfig) else {}
        return overridden(loss, dict(self) | own)

    @property
    def distillation(self) -> DistillConfig:
        """The divergence from a teacher in the loss; its coefficient is 0 without one."""
        loss = self.loss_config()
        return loss.divergence if isinstance(loss, KdLossConfig) else DistillConfig()

    def unused(self) -> list[str]:
        """Fields that the spec sets and the algorithm does not read."""
        read = {"name", *self.row.options, *type(self.row.loss).model_fields}
        return [name for name, value in self if value is not None and name not in read]
