"""The table of algorithms: one row each, plain data, with the source of its formulas and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from troupe.workers.contract.algorithm_config import (
    AdvantageConfig,
    CriticLossConfig,
    DistillConfig,
    ImportanceConfig,
    NaturalGradientConfig,
    PolicyLossConfig,
)
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import noted

OptionalRole = Literal["critic", "reference"]
KlPlacement = Literal["loss", "reward"]


ADAPTED = noted("from the next step on; a coefficient that adapts starts from it again")


class KlPenalty(Frozen):
    """PPO's penalty on KL(old || new), with a coefficient that follows the divergence (arXiv 1707.06347, sec. 4)."""

    coef: Annotated[float, ADAPTED] = Field(gt=0.0)
    """Coefficient of the first update; it then follows the divergence."""
    target: float = Field(gt=0.0)
    """Divergence per token, in nats: above 1.5 times it the coefficient doubles, below a 1.5th of it halves."""


class TrustRegion(Frozen):
    """TRPO's constraint: a step is shortened until KL(old || new) is within a limit (arXiv 1502.05477, eq. 14)."""

    max_kl: float = Field(gt=0.0)
    """Largest KL(old || new) per token after a step, in nats, measured over the whole vocabulary at `kl_states` tokens.
    A longer step is shortened until it is within the limit."""
    backtrack: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Factor on the step's length in each attempt."""
    attempts: int = Field(default=10, ge=1)
    """Attempts; if none is within the limit, the step is undone."""


ROW_ONLY = frozenset(
    ("objective", "divergence", "ratio", "dynamic_clip", "max_ratio", "estimator", "baseline", "covariance")
) | {"reward_to_go", "custom"}
"""Fields of the losses that distinguish the algorithms: a spec does not set them."""
SECTIONS = frozenset({"distill", "importance"})
"""Fields of the losses that are sections in a spec, too, whose fields replace the defaults one by one."""
KL_FIELDS = frozenset({"kl_coef", "kl_estimator", "kl_to_go", "kl_target", "kl_horizon"})
"""Fields of the losses that are in the section `kl`."""

_RATIO = frozenset({"importance", "kl_stop"})
_TOKEN_REWARDS = frozenset({"gamma", "whiten", "reward_clip", "reward_scale", "advantage_clip"})
ESTIMATOR_OPTIONS: dict[str, frozenset[str]] = {
    "group": frozenset({"normalize_by_std"}),
    "turn_group": frozenset({"normalize_by_std", "turn_gamma", "turn_coef"}),
    "smooth_group": frozenset(),
    "decoupled_group": frozenset(),
    "max_likelihood": frozenset(),
    "best_of_subsets": frozenset({"pass_k"}),
    "best_of_group": frozenset(),
    "preference_pair": frozenset({"dpo_beta"}),
    "reference_pair": frozenset({"dpo_beta", "exploration_coef"}),
    "distill": frozenset(),
    "none": frozenset(),
    "custom": frozenset({"whiten", "advantage_clip"}),
    "returns": _TOKEN_REWARDS | {"kl_to_go"},
    "gae": _TOKEN_REWARDS | {"gae_lambda"},
    "n_step": _TOKEN_REWARDS | {"n_steps"},
}
"""Fields of the algorithm section that only some estimators read."""

OBJECTIVE_OPTIONS: dict[str, frozenset[str]] = {
    "clip": _RATIO | {"clip_range", "clip_low", "clip_high", "dual_clip"},
    "geometric": _RATIO | {"clip_range", "clip_low", "clip_high"},
    "divergence": _RATIO | {"clip_range", "clip_low", "clip_high"},
    "soft_gate": _RATIO | {"gate_positive", "gate_negative"},
    "cispo": _RATIO | {"clip_high"},
    "score_centering": _RATIO | {"sampler_top_k"},
    "policy_gradient": _RATIO,
    "kl_penalty": _RATIO | {"kl_old"},
    "likelihood": frozenset(),
    "custom": _RATIO,
}
"""Fields of the algorithm section that only some objectives read."""

COVARIANCE_OPTIONS: dict[str, frozenset[str]] = {
    "keep": frozenset(),
    "drop": frozenset({"cov_share", "cov_low", "cov_high"}),
    "penalize": frozenset({"cov_share", "cov_penalty"}),
}
"""Fields of the algorithm section that only rows read that control the covariance of tokens."""
BASELINE_OPTIONS: dict[str, frozenset[str]] = {
    "player_average": frozenset({"baseline_decay"}),
    "mixture": frozenset({"mixture_coef"}),
}
"""Fields of the algorithm section that only one baseline reads."""
CRITIC_OPTIONS = frozenset({"value_clip"})
COMPARES = frozenset(
    (
        *("group", "smooth_group", "max_likelihood", "best_of_subsets", "best_of_group"),
        *("preference_pair", "reference_pair", "custom"),
    )
)
"""Estimators for which a group of equal rewards may carry no signal, so that it is worth replacing."""


@dataclass(frozen=True)
class Algorithm:
    """One row: the roles the algorithm needs besides rollout, policy and reward, and its defaults."""

    name: str
    summary: str
    formula: str
    """Advantage and objective, in plain text."""
    source: str
    """Paper the defaults follow."""
    advantage: AdvantageConfig
    loss: PolicyLossConfig
    required: frozenset[OptionalRole] = frozenset()
    forbidden: frozenset[OptionalRole] = frozenset({"critic"})
    group_size: int = 1
    min_group_size: int = 1
    kl_in: KlPlacement = "loss"
    """Where the KL-to-reference term goes: into the loss, or into every token's reward."""
    critic_loss: CriticLossConfig | None = None
    dynamic_sampling: int = 0
    """Groups without signal that may be replaced, for each group of a step."""
    kl_penalty: KlPenalty | None = None
    """Objective kl_penalty: its coefficient and target."""
    trust_region: TrustRegion | None = None
    """Limit on the divergence of a step."""
    natural_gradient: NaturalGradientConfig | None = None
    """TRPO's step in place of AdamW's."""


_of_groups = partial(Algorithm, group_size=8, min_group_size=2)
_of_critic = partial(Algorithm, required=frozenset({"critic"}), forbidden=frozenset(), kl_in="reward")
_GRPO = AdvantageConfig(estimator="group", normalize_by_std=True)
_GAE = AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=0.95, whiten=True, kl_coef=0.05)
_CLIP = "max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))"
_R_TOKEN = "r = pi(token) / pi_old(token)"
_GRADIENT = f"loss -A_t r, {_R_TOKEN}: the gradient of -A_t log pi(token) in a batch's first update"

ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="reinforce",
            summary="Policy gradient with rewards to go, minus the mean return of all earlier batches.",
            formula=f"A_t = sum_{{t' >= t}} gamma^(t'-t) reward_t' - running mean; {_GRADIENT}",
            source="Williams 1992; Sutton and Barto, Reinforcement Learning, 2nd ed., sec. 13.3 and 13.4",
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="running_mean", reward_to_go=True),
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
        ),
        Algorithm(
            name="flash_reinforce",
            summary="Policy gradient with one sample for each prompt, minus the batch's mean; samples far from the "
            "sampler are left out.",
            formula="A = reward - mean of the batch's rewards; loss -A p / q, p = pi(token), q = pi_rollout(token), "
            "with the gradient of -sg[p / q] A log p; 0 in samples whose mean over tokens of q log(q / p) + (1 - q) "
            "log((1 - q) / (1 - p)) is above importance.max_divergence; mean per sequence, with those as sequences",
            source="FlashREINFORCE, Hu et al. 2026 (yifanzhang-pro.github.io/FlashREINFORCE), its reference code",
            advantage=AdvantageConfig(estimator="returns", baseline="batch_mean", reward_to_go=False),
            loss=PolicyLossConfig(
                objective="policy_gradient",
                aggregation="sequence_mean",
                importance=ImportanceConfig(cap=None, max_divergence=3e-3),
            ),
        ),
        Algorithm(
            name="rae",
            summary="Self-play: policy gradient with each player's return, minus the moving average of that player's.",
            formula="A = R - b, then b = baseline_decay b + (1 - baseline_decay) R, of each player in each source; "
            f"{_GRADIENT}",
            source="SPIRAL, arXiv 2506.24119 (role-conditioned advantage estimation); order and decay: its code",
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="player_average", reward_to_go=False),
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
        ),
        _of_critic(
            name="actor_critic",
            summary="Policy gradient with k-step advantages from a critic.",
            formula=f"A_t = sum_{{l<k}} gamma^l reward_{{t+l}} + gamma^k V_{{t+k}} - V_t; {_GRADIENT}",
            source="A3C, arXiv 1602.01783, sec. 4",
            advantage=AdvantageConfig(estimator="n_step", n_steps=8),
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=None),
        ),
        _of_critic(
            name="actor_critic_gae",
            summary="Policy gradient with generalised advantage estimates from a critic.",
            formula=f"A_t = sum_l (gamma lambda)^l (reward_{{t+l}} + gamma V_{{t+l+1}} - V_{{t+l}}); {_GRADIENT}",
            source="GAE, arXiv 1506.02438, eq. 16",
            advantage=AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=0.95),
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=None),
        ),
        _of_critic(
            name="ppo",
            summary="A critic's values give advantages per token (GAE); KL to the reference is part of the reward.",
            formula="token reward -kl_coef (log pi_old - log pi_ref), reward at the last; A by GAE, whitened; "
            f"loss {_CLIP}, {_R_TOKEN}",
            source="PPO, arXiv 1707.06347, eq. 7; on language models: InstructGPT, arXiv 2203.02155, DeepSpeed-Chat, "
            "arXiv 2308.01320",
            advantage=_GAE,
            loss=PolicyLossConfig(kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=0.2),
        ),
        _of_critic(
            name="ppo_penalty",
            summary="PPO without clipping: a penalty on KL(old || new) whose coefficient follows the divergence.",
            formula=f"A as ppo; loss -A r + beta KL(old || new), {_R_TOKEN}; "
            "beta doubles above 1.5 target, halves below target / 1.5",
            source="PPO, arXiv 1707.06347, eq. 8",
            advantage=_GAE,
            loss=PolicyLossConfig(objective="kl_penalty", kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=0.2),
            kl_penalty=KlPenalty(coef=1.0, target=0.01),
        ),
        _of_critic(
            name="ppo_kl_limit",
            summary="PPO without clipping: a step beyond a limit on KL(old || new) is shortened.",
            formula=f"A as ppo; loss -A r, {_R_TOKEN}; after a step: new = old + backtrack (new - old) until "
            "KL(old || new) <= max_kl, measured over the whole vocabulary",
            source="the constraint of TRPO, arXiv 1502.05477, eq. 14, on AdamW's step; no natural gradient and no "
            "search for a better surrogate (appendix C)",
            advantage=_GAE,
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=0.2),
            trust_region=TrustRegion(max_kl=0.01),
        ),
        _of_critic(
            name="trpo",
            summary="The natural gradient, scaled to a limit on KL(old || new), and a line search; no learning rate.",
            formula=f"A as ppo; loss L = -A r, {_R_TOKEN}; F = Hessian of the mean KL(old || new) over the batch's "
            "tokens; x = (F + damping I)^-1 grad L by conjugate gradients; new = old - b sqrt(2 max_kl / x^T F x) x, b "
            "the first of 1, backtrack, backtrack^2, ... with L(new) < L(old) and KL(old || new) <= max_kl, else b = 0",
            source="TRPO, arXiv 1502.05477, appendix C; damping and iterations: Spinning Up",
            advantage=_GAE,
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=0.2),
            natural_gradient=NaturalGradientConfig(),
        ),
        _of_critic(
            name="ppo_max",
            summary="PPO made stable: rewards scaled and clipped, advantages whitened and clipped, values clipped.",
            formula="reward -> clip((reward - running mean) / running std, +-reward_clip); "
            f"A by GAE, whitened, clipped to +-advantage_clip; loss {_CLIP}",
            source="PPO-max, arXiv 2307.04964, sec. 5; its published code for the numbers",
            advantage=_GAE.model_copy(
                update={"reward_scale": "running", "reward_clip": 10.0, "advantage_clip": 0.5, "kl_coef": 0.02}
            ),
            loss=PolicyLossConfig(kl_estimator="k1"),
            critic_loss=CriticLossConfig(value_clip=0.2),
        ),
        _of_groups(
            name="grpo",
            summary="Compares every reward with those of the other samples of its group; no critic.",
            formula="A = (reward - group mean) / (group std + 1e-4); "
            f"loss {_CLIP} + kl_coef KL, {_R_TOKEN}, mean per sequence; process rewards "
            "(deploy/specs/tiny-grpo-process.yaml): A_t = sum over the steps that end at t or later of "
            "(step reward - mean of the group's steps) / (their std + 1e-4)",
            source="DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; process rewards: sec. 4.1.3",
            advantage=_GRPO,
            loss=PolicyLossConfig(aggregation="sequence_mean"),
        ),
        _of_groups(
            name="dr_grpo",
            summary="GRPO without its two biases: no division by the standard deviation, none by the length.",
            formula=f"A = reward - group mean; loss {_CLIP}, {_R_TOKEN}, summed over tokens / (sequences * max_tokens)",
            source="Dr. GRPO, arXiv 2503.20783, sec. 3.2",
            advantage=_GRPO.model_copy(update={"normalize_by_std": False}),
            loss=PolicyLossConfig(aggregation="constant"),
        ),
        Algorithm(
            name="rloo",
            summary="A sample's return minus the mean of the others of its group; KL is part of the reward.",
            formula="R = reward - kl_coef sum_t (log pi_old - log pi_ref); A = R - mean of the others' R; "
            f"loss {_CLIP}, {_R_TOKEN}: the gradient of -A log pi(token) in a batch's first update",
            source="RLOO, arXiv 2402.14740, eq. 6; kl_coef as in TRL; clipped per token as in verl",
            group_size=4,
            min_group_size=2,
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="leave_one_out", reward_to_go=False, kl_coef=0.05),
            loss=PolicyLossConfig(kl_estimator="k1"),
        ),
        _of_groups(
            name="otb",
            summary="A baseline for each token: the returns of the group, weighted by how uncertain each sample was.",
            formula="A_t = G_t - sum_i W_it G_it / sum_i W_it, i the samples of the group with a token t, 0 subtracted "
            "if there is one; G_t = sum_{t' >= t} reward_t', W_t = sum_{t' <= t} 1 - 2 pi_old(token t') + "
            f"sum_v pi_old(v)^2; loss {_CLIP}, {_R_TOKEN}, mean over tokens",
            source="OTB, arXiv 2602.07078; the tail of the longest sample: its code in verl",
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="optimal_token"),
            loss=PolicyLossConfig(kl_estimator="k1"),
        ),
        Algorithm(
            name="remax",
            summary="A sample's return minus the reward of the greedy response to the same prompt.",
            formula="A_t = reward - reward(greedy response) - kl_coef (log pi_old - log pi_ref)(token t alone); "
            f"{_GRADIENT}",
            source="ReMax, arXiv 2310.10505, eq. 5; the token's own KL: its published code",
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="greedy", kl_coef=0.05, kl_to_go=False),
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1"),
        ),
        Algorithm(
            name="reinforce_pp",
            summary="PPO's loss without a critic: returns with token KL, normalised over the whole batch.",
            formula=f"A_t = sum_{{t' >= t}} reward_t', whitened over the batch's tokens; loss {_CLIP}, {_R_TOKEN}",
            source="REINFORCE++, arXiv 2501.03262, sec. 3",
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="none", whiten=True, kl_coef=0.01),
            loss=PolicyLossConfig(kl_estimator="k1"),
        ),
        _of_groups(
            name="reinforce_pp_baseline",
            summary="REINFORCE++ with the group's mean as baseline; KL is part of the loss.",
            formula=f"A = reward - group mean, whitened over the batch's tokens; loss {_CLIP} + kl_coef k2",
            source="REINFORCE++, arXiv 2501.03262, sec. 3 (baseline variant)",
            advantage=AdvantageConfig(estimator="returns", baseline="group_mean", reward_to_go=False, whiten=True),
            loss=PolicyLossConfig(kl_estimator="k2", kl_coef=0.01),
        ),
        _of_groups(
            name="gigpo",
            summary="GRPO that also compares turns of an episode with turns in the same state; no critic.",
            formula="A_t = A(sample) + turn_coef A(turn of t), each (x - mean) / (std + 1e-4): of the rewards in the "
            "group, and of the returns of the group's turns that answer the same observation; the return of turn k is "
            f"sum_{{j >= k}} turn_gamma^(j-k) reward in turn j; loss {_CLIP}, {_R_TOKEN}, mean per sequence",
            source="GiGPO, arXiv 2505.10978, eq. 3, 7 and 8; turn_gamma, turn_coef: its code; aggregation as in grpo",
            advantage=AdvantageConfig(estimator="turn_group"),
            loss=PolicyLossConfig(aggregation="sequence_mean"),
        ),
        _of_groups(
            name="gdpo",
            summary="GRPO that normalises every component of the reward apart, so that none drowns the others.",
            formula="A = sum over components of weight (value - group mean) / (group std + 1e-4), over its std in the "
            f"batch; loss {_CLIP}, {_R_TOKEN}, mean per sequence",
            source="GDPO, arXiv 2601.05242; aggregation as in grpo",
            advantage=AdvantageConfig(estimator="decoupled_group"),
            loss=PolicyLossConfig(aggregation="sequence_mean"),
        ),
        _of_groups(
            name="dapo",
            summary="GRPO with a higher upper clip, token-level loss, and replacement of groups without signal.",
            formula=f"A as grpo; loss {_CLIP}, {_R_TOKEN}, mean over tokens; groups of equal rewards are resampled; "
            "reward function overlong punishes length softly",
            source="DAPO, arXiv 2503.14476, eq. 8 to 13",
            advantage=_GRPO,
            loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
            dynamic_sampling=3,
        ),
        _of_groups(
            name="clip_cov",
            summary="GRPO without the gradient of the few tokens that lower the entropy most.",
            formula="A as grpo, 0 at the cov_share of tokens with the highest c = (log pi_old - mean) (A - mean) "
            f"within cov_low < c < cov_high, means over the batch; loss {_CLIP}, {_R_TOKEN}, mean over tokens",
            source="Clip-Cov, arXiv 2505.22617; there random ones within the bounds, in each micro-batch, by log pi",
            advantage=_GRPO.model_copy(update={"covariance": "drop"}),
            loss=PolicyLossConfig(aggregation="token_mean"),
        ),
        _of_groups(
            name="kl_cov",
            summary="GRPO with a penalty on the change of the few tokens that lower the entropy most; no clipping.",
            formula=f"A as grpo; loss -A r + p |log pi - log pi_old|, {_R_TOKEN}, p = cov_penalty at the cov_share of "
            "tokens with the highest (log pi_old - mean) (A - mean), 0 at the others, means over the batch; mean over "
            "tokens",
            source="KL-Cov, arXiv 2505.22617, with its coefficient; there in each micro-batch, by log pi",
            advantage=_GRPO.model_copy(update={"covariance": "penalize"}),
            loss=PolicyLossConfig(objective="policy_gradient", aggregation="token_mean"),
        ),
        _of_groups(
            name="gspo",
            summary="GRPO with one ratio for the whole response.",
            formula=f"A as grpo; loss {_CLIP}, r = exp(mean over tokens of log pi - log pi_old), mean per sequence",
            source="GSPO, arXiv 2507.18071, eq. 5 to 7; clip ranges: sec. 5.1",
            advantage=_GRPO,
            loss=PolicyLossConfig(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"),
        ),
        _of_groups(
            name="gspo_token",
            summary="GSPO with a gradient per token, for advantages that differ within a response.",
            formula=f"A as grpo; loss {_CLIP}, r = sg[sequence ratio] pi / sg[pi], mean per sequence",
            source="GSPO, arXiv 2507.18071, eq. 13 and 14",
            advantage=_GRPO,
            loss=PolicyLossConfig(ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"),
        ),
        _of_groups(
            name="gmpo",
            summary="GRPO with the geometric mean of a response's ratios, each clipped in a wide range before.",
            formula="A as grpo; loss -A exp(mean over tokens of min(log r, clip_high), for A < 0 of "
            f"max(log r, -clip_low)), {_R_TOKEN}, mean per sequence",
            source="GMPO, arXiv 2507.20673; bounds e^-0.4 and e^0.4: sec. 4",
            advantage=_GRPO,
            loss=PolicyLossConfig(
                objective="geometric", ratio="sequence", clip_low=0.4, clip_high=0.4, aggregation="sequence_mean"
            ),
        ),
        _of_groups(
            name="sapo",
            summary="A soft gate for the clip: the gradient of a token fades as its ratio leaves 1.",
            formula="A as grpo; loss -A sigmoid(tau (r - 1)) 4 / tau, tau = gate_positive for A > 0, else "
            f"gate_negative, {_R_TOKEN}, mean per sequence",
            source="SAPO, arXiv 2511.20347; temperatures: its defaults",
            advantage=_GRPO,
            loss=PolicyLossConfig(objective="soft_gate", aggregation="sequence_mean"),
        ),
        _of_groups(
            name="dppo_tv",
            summary="A trust region in probabilities instead of ratios: total variation between sampler and policy.",
            formula=f"A as dr_grpo; loss -A r, {_R_TOKEN}, 0 for A > 0 where pi - pi_rollout > clip_high, for A < 0 "
            "where pi_rollout - pi > clip_low; summed over tokens / (sequences * max_tokens)",
            source="DPPO, arXiv 2602.04879, eq. 12 and 13 (binary); bounds and advantage: its published code",
            advantage=_GRPO.model_copy(update={"normalize_by_std": False}),
            loss=PolicyLossConfig(objective="divergence", clip_low=0.15, clip_high=0.15, aggregation="constant"),
        ),
        _of_groups(
            name="dppo_kl",
            summary="As dppo_tv, with a KL divergence between sampler and policy.",
            formula="as dppo_tv, 0 where q log(q / p) + (1 - q) log((1 - q) / (1 - p)) is above the bound and p has "
            "left q in the direction of A, p = pi(token), q = pi_rollout(token)",
            source="DPPO, arXiv 2602.04879, eq. 12 and 14 (binary); bounds and advantage: its published code",
            advantage=_GRPO.model_copy(update={"normalize_by_std": False}),
            loss=PolicyLossConfig(
                objective="divergence", divergence="kl", clip_low=0.05, clip_high=0.05, aggregation="constant"
            ),
        ),
        _of_groups(
            name="maxrl",
            summary="GRPO that divides by the group's mean reward: towards the likelihood of a right answer.",
            formula="A = (reward - group mean) / group mean, of rewards that are 0 or more; "
            f"loss {_CLIP}, {_R_TOKEN}, mean over tokens",
            source="MaxRL, arXiv 2602.02710; division and aggregation as in its published code",
            advantage=AdvantageConfig(estimator="max_likelihood"),
            loss=PolicyLossConfig(aggregation="token_mean"),
        ),
        Algorithm(
            name="pass_at_k",
            summary="Trains for the best of k samples: a sample is judged by the subsets of its group that it is in.",
            formula="R(S) = best reward of a subset of pass_k samples; A = (mean R of the subsets with the sample - "
            f"mean R of all subsets) / (their std + 1e-4); loss {_CLIP}, {_R_TOKEN}, mean over tokens",
            source="Pass@k training, arXiv 2508.10751 (analytical derivation, there for rewards of 0 and 1); pass_k: "
            "Troupe's default",
            group_size=8,
            min_group_size=3,
            advantage=AdvantageConfig(estimator="best_of_subsets", pass_k=4),
            loss=PolicyLossConfig(aggregation="token_mean"),
        ),
        _of_groups(
            name="dcpo",
            summary="Clip bounds that widen for improbable tokens; rewards standardised over a prompt's visits.",
            formula="A smoothed between this visit's and all visits' standardised rewards; loss max(-A r, -A clip(r, "
            "lower, upper)), lower = 1/2 + 1/2 sqrt(max(1 - 4 clip_low / pi_old, 0)), "
            "upper = 1/2 + 1/2 sqrt(1 + 4 clip_high / pi_old); means per sequence, added up",
            source="DCPO, arXiv 2509.02333, sec. 3; its published code for the caps on the ratio and the loss",
            advantage=AdvantageConfig(estimator="smooth_group"),
            loss=PolicyLossConfig(
                dynamic_clip=True,
                clip_low=0.16,
                clip_high=0.2,
                max_ratio=10.0,
                dual_clip=10.0,
                aggregation="only_token_mean",
            ),
        ),
        _of_groups(
            name="cispo",
            summary="The weight of a token is clipped instead of its gradient.",
            formula=f"A as grpo; loss -sg[min(r, 1 + clip_high)] A log pi(token), {_R_TOKEN}, mean over tokens",
            source="CISPO, arXiv 2506.13585, eq. 4 and 5; upper bound: arXiv 2510.13786",
            advantage=_GRPO,
            loss=PolicyLossConfig(objective="cispo", clip_high=4.0, aggregation="token_mean"),
        ),
        _of_groups(
            name="score_centering",
            summary="Policy gradient without the drift that a sampler other than the policy adds to it.",
            formula="A as dr_grpo; loss -A (sg[w] log p(token) - sum_v sg[q(v) w(v)] log p(v)), p = pi, q = "
            "pi_rollout, w = min(p / q, importance.cap); the sampler_top_k likeliest tokens of q are known, and q = "
            "rho p at all others, which leaves the sum of sg[q(v) w(v) - rho min(1 / rho, importance.cap) p(v)] "
            "log p(v) over the known ones, rho = (1 - sum q) / (1 - sum p); mean over tokens",
            source="Score Centering, arXiv 2609.20807, eq. 7 to 12; weights (TIS+SC): appendix A.2; k: its runs; cap, "
            "least tail of 1e-6: torchtitan",
            advantage=_GRPO.model_copy(update={"normalize_by_std": False}),
            loss=PolicyLossConfig(objective="score_centering"),
        ),
        _of_groups(
            name="raft",
            summary="Best of K: fine-tunes the policy on the best sample of every group.",
            formula="loss: mean over groups of the mean -log pi(token), at temperature 1, of the sample with the "
            "highest reward; no ratio and no weight for the sampler, as in supervised fine-tuning",
            source="RAFT, arXiv 2304.06767, alg. 1",
            advantage=AdvantageConfig(estimator="best_of_group"),
            loss=PolicyLossConfig(
                objective="likelihood", aggregation="sequence_mean", importance=ImportanceConfig(mode="none")
            ),
        ),
        Algorithm(
            name="online_dpo",
            summary="DPO on pairs that the policy samples: the best and the worst response of every group.",
            formula="h = dpo_beta ((log pi_old - log pi_ref)(best) - (log pi_old - log pi_ref)(worst)); A = n dpo_beta "
            "sigmoid(-h) for the best of a group of n, minus that for the worst, 0 for the others; loss -A r, "
            f"{_R_TOKEN}, summed over tokens / sequences: in a batch's first update the gradient of -log sigmoid(h), "
            "averaged over pairs; no weight for the sampler",
            source="OAIF, arXiv 2402.04792, alg. 1, with rewards for preferences; loss: DPO, arXiv 2305.18290, eq. 7",
            required=frozenset({"reference"}),
            group_size=2,
            min_group_size=2,
            advantage=AdvantageConfig(estimator="preference_pair"),
            loss=PolicyLossConfig(
                objective="policy_gradient", aggregation="sequence_sum", importance=ImportanceConfig(mode="none")
            ),
        ),
        Algorithm(
            name="xpo",
            summary="Online DPO that explores: each sample is compared with a response that the reference samples.",
            formula="h = dpo_beta ((log pi_old - log pi_ref)(better) - (log pi_old - log pi_ref)(worse)) of y of the "
            "policy and y' of the reference; A = n dpo_beta sigmoid(-h) for the better one, minus that for the worse, "
            "0 for equal rewards, and n exploration_coef less for y', n = sequences / pairs; loss -A log pi(token), "
            "summed over tokens / sequences: in a batch's first update the gradient of -log sigmoid(h) + "
            "exploration_coef log pi(y'), averaged over pairs; no ratio and no weight for the sampler",
            source="XPO, arXiv 2405.21046, alg. 1, with rewards for preferences; dpo_beta and exploration_coef: TRL",
            required=frozenset({"reference"}),
            advantage=AdvantageConfig(estimator="reference_pair"),
            loss=PolicyLossConfig(
                objective="likelihood", aggregation="sequence_sum", importance=ImportanceConfig(mode="none")
            ),
        ),
        _of_groups(
            name="nash_md",
            summary="Plays against a mixture of itself and the reference: what counts is the share of comparisons won.",
            formula="w = (pi_ref / pi_old)^mixture_coef of whole responses; A = sum over the others of the group of w "
            "[1 if the reward is higher, 1/2 if equal] / sum of w - 1/2 - kl_coef sum_t (log pi_old - log pi_ref); "
            f"loss -A r, {_R_TOKEN}, summed over tokens / sequences",
            source="Nash-MD-PG, arXiv 2312.00886, with rewards for preferences; there a separate response of the "
            "mixture is the opponent, here the policy's own are, weighted; mixture_coef, kl_coef: Troupe's defaults",
            required=frozenset({"reference"}),
            kl_in="reward",
            advantage=AdvantageConfig(estimator="returns", baseline="mixture", reward_to_go=False, kl_coef=0.05),
            loss=PolicyLossConfig(objective="policy_gradient", kl_estimator="k1", aggregation="sequence_sum"),
        ),
        Algorithm(
            name="distill",
            summary="On-policy distillation: the reference is a teacher that scores every token.",
            formula=f"A_t = log pi_teacher(token) - log pi_old(token); loss {_CLIP}, {_R_TOKEN}, mean over tokens",
            source="reverse KL on the student's samples: GKD, arXiv 2306.13649; per token: MiniLLM, arXiv 2306.08543",
            required=frozenset({"reference"}),
            advantage=AdvantageConfig(estimator="distill"),
            loss=PolicyLossConfig(),
        ),
        Algorithm(
            name="gkd",
            summary="On-policy distillation by a divergence from a teacher at every token, without a reward.",
            formula="loss: distill.coef times the mean over tokens of the divergence between pi and the teacher (the "
            "reference), KL(teacher || pi) by default, over the teacher's k likeliest tokens and all others together; "
            "the gradient does not pass through the sampling",
            source="GKD, arXiv 2306.13649, alg. 1 with all samples the student's; k: Troupe's default",
            required=frozenset({"reference"}),
            advantage=AdvantageConfig(estimator="none"),
            loss=PolicyLossConfig(objective="policy_gradient", distill=DistillConfig(coef=1.0)),
        ),
    )
}


TAUGHT = frozenset({"distill", "gkd"})
"""Algorithms that learn from another model, the reference, instead of a reward."""


def unread_options(row: Algorithm) -> frozenset[str]:
    """Fields that other estimators and objectives read, but the row's do not."""
    unread = frozenset().union(*ESTIMATOR_OPTIONS.values()) - ESTIMATOR_OPTIONS[row.advantage.estimator]
    unread |= frozenset().union(*OBJECTIVE_OPTIONS.values()) - OBJECTIVE_OPTIONS[row.loss.objective]
    unread |= frozenset().union(*COVARIANCE_OPTIONS.values()) - COVARIANCE_OPTIONS[row.advantage.covariance]
    unread |= frozenset().union(*BASELINE_OPTIONS.values()) - BASELINE_OPTIONS.get(row.advantage.baseline, frozenset())
    # Without rewards to go every token is credited with the whole return, which is not discounted.
    return unread if row.advantage.reward_to_go else unread | {"gamma"}
