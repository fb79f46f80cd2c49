"""Configuration of the losses and the advantages of an algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import AS_SAMPLED

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "only_token_mean"]


class ImportanceConfig(Frozen):
    """Correction for the difference between sampler and trainer: w = exp(old_logprobs - rollout_logprobs).

    With it the objective is decoupled PPO's (arXiv 2110.00641): `old_logprobs` belong to the proximal policy that
    the ratio is clipped around, `rollout_logprobs` to the behaviour policy that sampled."""

    mode: Literal["none", "truncate", "mask"] = "truncate"
    """`none`: no correction; `truncate`: min(w, cap) (truncated importance sampling); `mask`: weight 0 for w outside
    [1/cap, cap]."""
    level: Literal["token", "sequence"] = "token"
    """`token`: every token has its own w; `sequence`: all tokens of a sample share the product of their w."""
    cap: float | None = Field(default=2.0, gt=1.0)
    """Upper bound of w, if it has one."""
    max_divergence: float | None = Field(default=None, gt=0.0)
    """Leave out the samples whose mean KL(sampler || policy) per token is above this, in nats. Each token's is that of
    a choice between it and all others (FlashREINFORCE)."""


class DistillConfig(Frozen):
    """Divergence from the teachers, over more than the sampled token: a term of the policy's loss."""

    coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence in the loss; 0: none."""
    divergence: Literal["reverse", "forward", "jensen_shannon", "skewed"] = "forward"
    """With s and t the distributions of student and teacher: `reverse`: KL(s || t), which keeps the student to what the
    teacher finds likely; `forward`: KL(t || s), which makes it cover all of that; `jensen_shannon`: beta KL(t || m) +
    (1 - beta) KL(s || m), m = beta t + (1 - beta) s (GKD, arXiv 2306.13649, eq. 1); `skewed`: KL(t || alpha t + (1 -
    alpha) s) (DistiLLM, arXiv 2402.03898, sec. 3.1)."""
    support: Literal["teacher_top_k", "student_top_k", "full"] = "teacher_top_k"
    """Tokens that are compared: the `k` likeliest of the teacher or of the student, and all others together as one, or
    the whole vocabulary. All but `teacher_top_k` need teachers with `colocate_with: policy`: the reference, or frozen
    models and the policy's average as `roles.teacher`."""
    k: int = Field(default=64, ge=1)
    """Number of the likeliest tokens."""
    beta: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of the teacher in the mixture, and weight of its divergence (jensen_shannon)."""
    alpha: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the teacher in the mixture (skewed)."""

    @property
    def stored_k(self) -> int:
        """Tokens that a teacher stores for each response token; 0: none."""
        return self.k if self.coef and self.support == "teacher_top_k" else 0

    @property
    def in_process(self) -> bool:
        """Whether the teacher's logits are computed in the policy's workers, in its updates."""
        return self.coef > 0 and self.support != "teacher_top_k"


class CustomConfig(Frozen):
    """A custom algorithm (`workers/algorithms/custom.py`)."""

    name: str
    """`package.module:attribute`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function that returns it."""


class PolicyLossConfig(Frozen):
    """The policy's loss on one micro-batch."""

    objective: Literal[
        "clip",
        "policy_gradient",
        "soft_gate",
        "geometric",
        "divergence",
        "cispo",
        "score_centering",
        "kl_penalty",
        "likelihood",
        "custom",
    ] = "clip"
    """`clip`: PPO's clipped ratio (arXiv 1707.06347, eq. 7); `policy_gradient`: -advantage * ratio, not clipped (eq.
    6), which has REINFORCE's gradient in the first update on a batch and is corrected for the policy's change in later
    ones; `soft_gate`: the ratio through a sigmoid (SAPO, arXiv 2511.20347); `geometric`: the geometric mean of a
    sample's ratios, each clipped before (GMPO, arXiv 2507.20673); `divergence`: -advantage * ratio, without the tokens
    at which the policy has left the sampler's (DPPO, arXiv 2602.04879, eq. 12); `cispo`: -advantage * log-prob,
    weighted by the clipped ratio without gradient (arXiv 2506.13585, eq. 4); `score_centering`: -advantage * (w *
    log-prob - its mean under the sampler), w of the policy that is trained (arXiv 2609.20807); `kl_penalty`: the
    unclipped ratio plus beta * KL(old || new) (arXiv 1707.06347, eq. 8); `likelihood`: -advantage * log-prob at
    temperature 1, without any correction for who sampled the tokens (RAFT); `custom`: the function of the user's
    algorithm."""
    divergence: Literal["tv", "kl"] = "tv"
    """Objective divergence: the distance between sampler and policy, both as a choice between the sampled token and all
    others: total variation or KL (DPPO, eq. 13 and 14)."""
    custom: CustomConfig | None = None
    """Objective custom: the user's algorithm."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Level of the probability ratio. `token`: each token's own; `sequence`: the geometric mean over the sample
    (GSPO, arXiv 2507.18071, eq. 7); `sequence_token`: that mean with the gradient of each token (GSPO-token, eq.
    14)."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low (`gmpo`: exp(-clip_low); `clip_range` sets both clips). `dppo_tv`,
    `dppo_kl`: the largest divergence of a token that has become less likely."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high (`gmpo`: exp(clip_high); `clip_range` sets both clips). `dppo_tv`,
    `dppo_kl`: the largest divergence of a token that has become likelier."""
    dynamic_clip: bool = False
    """Widen the bounds for improbable tokens, from `clip_low`, `clip_high` and the old probability (DCPO, arXiv
    2509.02333, sec. 3.1)."""
    max_ratio: float | None = Field(default=None, gt=1.0)
    """Maximum of the upper bound, with `dynamic_clip`."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """If the advantage is negative, the loss is at most -dual_clip * advantage (arXiv 1912.09729)."""
    gate_positive: float = Field(default=1.0, gt=0.0)
    """Temperature of the gate for tokens with an advantage above 0 (sapo): the higher, the sooner a token whose ratio
    has left 1 loses its gradient."""
    gate_negative: float = Field(default=1.05, gt=0.0)
    """The same for the other tokens."""
    sampler_top_k: Annotated[int, AS_SAMPLED] = Field(default=128, ge=1, le=1024)
    """score_centering: number of the sampler's likeliest tokens that are recorded with each sampled one, for the mean
    over its distribution; 8 bytes each."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL-to-reference term in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(pi || pi_ref) per token (Schulman, "Approximating KL divergence", 2020)."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token_mean"
    """How token losses are reduced. `token_mean`: every token of the mini-batch has the same weight; `sequence_mean`:
    every sequence has the same weight, shared by its tokens; `sequence_sum`: the sum over a sequence's tokens, averaged
    over sequences; `constant`: the sum over tokens divided by sequences times `max_tokens` (Dr. GRPO);
    `only_token_mean`: the sum of the sequences' means, not divided (DCPO). A sequence is a sample, also if an episode
    has several rows."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction for the difference between sampler and trainer."""
    distill: DistillConfig = DistillConfig()
    """Divergence from a teacher."""
    observation_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of what the environment adds to episodes, with what the chat template puts
    around it: its mean over these tokens of the mini-batch, at the temperature of the loss (ECHO, arXiv 2605.24517).
    0: they have no loss."""

    @property
    def has_ratio(self) -> bool:
        """Whether the loss compares the policy with the one that sampled."""
        return self.objective != "likelihood"

    @property
    def recorded_top_k(self) -> int:
        """Number of the sampler's likeliest tokens that the loss reads; 0: none."""
        return self.sampler_top_k if self.objective == "score_centering" else 0

    @property
    def reads_logits(self) -> bool:
        """Whether the loss reads more of the policy's distributions than the sampled token."""
        return self.distill.coef > 0 or self.recorded_top_k > 0

    @property
    def needs_whole_samples(self) -> bool:
        """Whether the loss of a token depends on its sample's other tokens: the rows of a sample share a
        micro-batch."""
        if not self.has_ratio:
            return False
        one_weight = self.importance.mode != "none" and self.importance.level == "sequence"
        left_out = self.importance.max_divergence is not None
        return self.objective == "custom" or self.ratio != "token" or one_weight or left_out


class NaturalGradientConfig(Frozen):
    """TRPO's step: the natural gradient, scaled to a divergence, and a line search (arXiv 1502.05477, appendix C)."""

    max_kl: float = Field(default=0.01, gt=0.0)
    """Largest KL(old || new) of a step, in nats: the mean over all tokens that the policy sampled, over the whole
    vocabulary."""
    damping: float = Field(default=0.1, ge=0.0)
    """Added to the diagonal of the Fisher matrix that is solved for. Less: closer to the natural gradient, and more
    iterations."""
    cg_iterations: int = Field(default=10, ge=1)
    """Most iterations of the conjugate gradient method; each costs about two updates."""
    backtrack: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Factor on the step's length in each attempt after the first."""
    attempts: int = Field(default=10, ge=1)
    """Lengths that are tried; if none lowers the loss within `max_kl`, the policy stays as it is."""


class CriticLossConfig(Frozen):
    """The critic's loss on one micro-batch."""

    value_clip: float | None = Field(default=0.2, gt=0.0)
    """New values are clipped to the old values plus or minus this; without it, the loss is the plain squared error."""


STEP_ESTIMATORS = frozenset({"group", "turn_group", "returns", "gae", "n_step"})
"""Advantage estimators that use process rewards; the others take one reward per response."""


class AdvantageConfig(Frozen):
    """How rewards become advantages (and, with a critic, returns)."""

    estimator: Literal[
        "group",
        "turn_group",
        "smooth_group",
        "decoupled_group",
        "max_likelihood",
        "best_of_subsets",
        "best_of_group",
        "preference_pair",
        "reference_pair",
        "returns",
        "gae",
        "n_step",
        "distill",
        "none",
        "custom",
    ]
    """`group`: reward relative to the other samples of the group (GRPO); `turn_group`: also the return of each turn
    relative to turns of the group in the same state (GiGPO); `smooth_group`: also relative to earlier visits of the
    prompt (DCPO); `decoupled_group`: each component of the reward relative to the group, then summed
    (GDPO); `max_likelihood`: divided by the group's mean reward (MaxRL); `best_of_subsets`: the
    best reward of `pass_k` samples, relative to all choices of that many (pass@k training); `best_of_group`: samples
    per group for the best sample, 0 for the others (RAFT); `preference_pair`: the weight of DPO's gradient for the
    best sample, minus it for the worst, 0 for the others (online DPO); `reference_pair`: the weight of XPO's gradient
    for a sample and the reference's response that it is compared with (XPO);
    `returns`: sums of token rewards minus a baseline (REINFORCE family); `gae`, `n_step`: temporal differences of the
    critic; `distill`: log-prob under the teacher minus log-prob under the policy; `none`: 0, for a loss with another
    term; `custom`: the function of the user's algorithm."""
    custom: CustomConfig | None = None
    """Estimator custom: the user's algorithm."""
    normalize_by_std: bool = True
    """Estimators group, turn_group: divide by the group's standard deviation."""
    turn_gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Estimator turn_group: discount per turn of the return that a turn is compared by."""
    turn_coef: float = Field(default=1.0, ge=0.0)
    """Estimator turn_group: weight of the comparison of turns beside that of samples."""
    pass_k: int = Field(default=4, ge=2)
    """Estimator best_of_subsets: samples in a subset, whose best one counts. A group needs more samples than this."""
    dpo_beta: float = Field(default=0.1, gt=0.0)
    """Estimators preference_pair, reference_pair: beta of DPO, the strength of the implicit KL to the reference."""
    exploration_coef: float = Field(default=1e-5, ge=0.0)
    """Estimator reference_pair: alpha of XPO, the weight of the log-likelihood of the reference's responses, which is
    lowered."""
    baseline: Literal[
        "none",
        "running_mean",
        "batch_mean",
        "group_mean",
        "leave_one_out",
        "greedy",
        "player_average",
        "optimal_token",
        "mixture",
    ] = "none"
    """returns: what is subtracted from a sample's return: nothing, the mean of all earlier batches, the mean of this
    batch, the mean of the group, the mean of the other samples of the group, the reward of the greedy response to the
    same prompt, the moving average of the returns of the same player in the same source, or, from each token's return,
    the mean of the group's returns from that token on, weighted by how uncertain each sample was so far (OTB).
    `mixture`: the reward is the share of comparisons that the sample wins against the others of the group, weighted as
    if a mixture of policy and reference had sampled them, and a half is subtracted (Nash-MD)."""
    mixture_coef: float = Field(default=0.125, ge=0.0, le=1.0)
    """Baseline mixture: weight of the reference in the mixture, which is proportional to policy^(1 - mixture_coef)
    reference^mixture_coef; 0: the policy plays against itself."""
    baseline_decay: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Baseline player_average: weight of the average so far against the next return."""
    reward_to_go: bool = True
    """returns: credit a token with the rewards from its position on; false: with the rewards of the whole response."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token (returns, gae, n_step)."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Exponential weight of longer returns, lambda (gae)."""
    n_steps: int = Field(default=8, ge=1)
    """Estimator n_step: tokens whose rewards are summed before the critic's value replaces the rest."""
    whiten: bool = False
    """Estimators returns, gae, n_step: normalize advantages to mean 0 and variance 1 over the batch's tokens."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Estimators returns, gae, n_step: clip the final advantages to plus or minus this."""
    covariance: Literal["keep", "drop", "penalize"] = "keep"
    """What happens to the tokens whose log-prob and advantage are both far above (or below) their means, which lower
    the entropy most (arXiv 2505.22617): nothing, no gradient (Clip-Cov), or a penalty on |log pi - log pi_old|
    (KL-Cov)."""
    cov_share: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Share of the batch's tokens that are dropped or penalized, at least one (clip_cov, kl_cov)."""
    cov_low: float = Field(default=1.0, ge=0.0)
    """clip_cov: only tokens with a covariance above this are dropped."""
    cov_high: float = Field(default=5.0, gt=0.0)
    """clip_cov: only tokens with a covariance below this are dropped."""
    cov_penalty: float = Field(default=1.0, gt=0.0)
    """kl_cov: coefficient of |log pi - log pi_old|."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """returns, gae, n_step: add -kl_coef * (old_logprobs - ref_logprobs) to every token's reward."""
    kl_to_go: bool = True
    """returns: credit a token with the KL terms from its position on; false: with its own only (ReMax)."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt the coefficient so that the KL divergence of a response approaches this target, in nats."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples over which the coefficient adapts (arXiv 1909.08593, sec. 2.2); a batch counts as at most that many."""
    reward_scale: Literal["none", "batch", "running"] = "none"
    """Estimators returns, gae, n_step: normalize sequence rewards to mean 0 and variance 1, over the batch or over all
    batches so far (PPO-max, arXiv 2307.04964)."""
    reward_clip: float | None = Field(default=None, gt=0.0)
    """Estimators returns, gae, n_step: clip the (scaled) sequence reward to plus or minus this."""

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether an advantage depends on the log-probs before the update."""
        compared = self.baseline == "mixture" or self.estimator in ("distill", "preference_pair", "reference_pair")
        return compared or self.kl_coef > 0 or self.covariance != "keep" or self.reads_square_sums

    @property
    def compares_reference(self) -> bool:
        """Whether the samples of a group are compared with as many of the reference."""
        return self.estimator == "reference_pair"

    @property
    def reads_square_sums(self) -> bool:
        """Whether the baseline reads the policy's distributions before the update (`SQUARE_SUMS`)."""
        return self.baseline == "optimal_token"
