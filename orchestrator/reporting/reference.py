"""The metrics of a run as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from troupe.orchestrator.roles import table

TRAINERS = (*table.TRAINERS, "reward_model")
"""What `TRAINER` in a pattern stands for."""
PHASES = ("generate", "prepare", "update", "sync", "evaluate", "checkpoint")
"""What `PHASE` in a pattern stands for: the phases of `seconds/PHASE` and `utilisation/PHASE`."""

_PLACEHOLDERS = {"TRAINER": "|".join(TRAINERS), "ROLE": "|".join(table.NAMES), "PHASE": "|".join(PHASES)}
_PLACEHOLDERS |= {"COMPONENT": ".+", "K": "[0-9]+"}
_PLACEHOLDER = re.compile(r"[A-Z]+")


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose names follow a pattern."""

    name: str
    """Name in `metrics.jsonl`. Words in capitals stand for a role, a phase, a reward component or a number."""
    unit: str
    meaning: str
    healthy: str
    """What to expect of a run that goes well; `-` where any value may be right."""

    def matches(self, name: str) -> bool:
        """Whether a metric of this name belongs to the row."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        pattern = "".join(f"(?:{_PLACEHOLDERS[part]})" if part in _PLACEHOLDERS else re.escape(part) for part in parts)
        return re.fullmatch(pattern, name) is not None


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Every line": (
        Metric("step", "-", "Step that the line describes; 0 is the evaluation before training.", "rises by 1"),
        Metric("time", "s", "Seconds since 1970 at which the line was written.", "-"),
        Metric("updates", "count", "Optimizer updates in the step.", "`schedule.epochs` times `schedule.minibatches`"),
        Metric(
            "trainer_restarts",
            "count",
            "Restarts of policy and critic in place since the run was started or resumed.",
            "0",
        ),
        Metric(
            "tokens", "count", "Tokens in the step's batch: prompts and responses, before any prompt is shared.", "-"
        ),
    ),
    "Rewards and groups": (
        Metric("reward/mean", "reward", "Mean reward of the batch's samples; failed samples have none.", "rises"),
        Metric("reward/std", "reward", "Population standard deviation of the rewards.", "above 0"),
        Metric(
            "reward/COMPONENT/mean",
            "reward",
            "Mean of one reward component before its weight: a function's label, or `reward_model`.",
            "rises where the component is a goal",
        ),
        Metric("reward/COMPONENT/std", "reward", "Population standard deviation of one component.", "above 0"),
        Metric(
            "groups/mixed",
            "share",
            "Groups whose samples do not all have the same reward.",
            "above 0.2 for algorithms that compare samples of a group; 0 with `group_size: 1`",
        ),
        Metric("failed_samples", "count", "Samples of the step without a reward: their function failed.", "0"),
        Metric(
            "alarm/reward_hacking",
            "0 or 1",
            "1 where the reward rises while a limit of `failures.alarm` is exceeded.",
            "0",
        ),
    ),
    "Episodes": (
        Metric("episodes/turns", "turns", "Mean number of the policy's turns in an episode.", "as the task needs"),
        Metric("episodes/failed", "count", "Episodes that ended without a result; the reasons are logged.", "0"),
        Metric("episodes/restarted", "count", "Episodes that started again: their environment worker died.", "0"),
        Metric(
            "episodes/forked",
            "count",
            "Episodes of several rows: the chat template rewrote their history.",
            "0; otherwise each turn is computed anew, and training costs more",
        ),
        Metric(
            "episodes/max_turns",
            "share",
            "Episodes that the environment had not ended after `roles.environment.max_turns`.",
            "near 0",
        ),
        Metric(
            "episodes/cut_observations",
            "count",
            "Messages of the environment longer than `roles.environment.max_observation_chars`.",
            "0",
        ),
        Metric(
            "environment/COMPONENT", "-", "Mean of a number that the environment reports (`Observation.info`).", "-"
        ),
        Metric(
            "seconds/environment",
            "s",
            "Mean time that an episode waited for its environment.",
            "below the time of its turns; otherwise add environment workers or episodes",
        ),
    ),
    "Prompts and responses": (
        Metric("prompt_tokens/mean", "tokens", "Mean length of the prompts.", "-"),
        Metric(
            "prompt_tokens/cached",
            "share",
            "Prompt tokens that the engines found in their prefix cache.",
            "near the share of a prompt that fills whole cache blocks, with groups or a shared system message",
        ),
        Metric("response_tokens/mean", "tokens", "Mean length of the responses.", "no sudden rise or collapse"),
        Metric("response_tokens/max", "tokens", "Longest response.", "at most `sampling.max_tokens`"),
        Metric(
            "truncated",
            "share",
            "Responses cut at `sampling.max_tokens`.",
            "below 0.1; otherwise raise `sampling.max_tokens`",
        ),
        Metric(
            "masked_samples",
            "count",
            "Samples without loss because they were truncated (`algorithm.mask_truncated`).",
            "below a tenth of the batch",
        ),
        Metric(
            "repetition",
            "share",
            "4-grams of a response that occur earlier in the same response; mean over responses.",
            "below 0.1, and no steady rise",
        ),
        Metric(
            "perplexity",
            "-",
            "exp of the mean negative log-prob of the sampled tokens under the engine.",
            "falls slowly; near 1 the policy no longer explores",
        ),
    ),
    "Candidates": (
        Metric("candidates/reward", "reward", "Mean reward of the answers from `data.train.candidates`.", "-"),
        Metric(
            "candidates/chosen",
            "share",
            "Groups with candidates in which one of them is better than every sample of the policy.",
            "falls, as the policy learns from them",
        ),
        Metric("candidates/failed", "count", "Candidates of the step without a reward.", "0"),
    ),
    "Curriculum": (
        Metric(
            "curriculum/pass_rate",
            "share",
            "Solved samples of the step's prompts (`data.curriculum`), those of replaced groups included.",
            "near 0.5",
        ),
        Metric("curriculum/skipped", "count", "Prompts not drawn when their turn came since the step before.", "-"),
        Metric("curriculum/seen", "count", "Prompts of the pool with results.", "rises to the size of the pool"),
        Metric(
            "curriculum/set_aside",
            "count",
            "Prompts that a pass over the data draws with a probability below 1/2.",
            "below `curriculum/seen`; near it, the data is too easy or too hard",
        ),
    ),
    "Staleness and throughput": (
        Metric(
            "staleness/mean",
            "versions",
            "Mean over samples of the policy's version less that of the sample's oldest token.",
            "0 to `schedule.max_staleness`",
        ),
        Metric("staleness/max", "versions", "Largest staleness of a sample.", "at most `schedule.max_staleness`"),
        Metric("response_tokens_per_s", "tokens/s", "Response tokens over the seconds of the whole step.", "steady"),
        Metric(
            "rollout/tokens_per_s",
            "tokens/s",
            "Tokens sampled by all engines over the seconds in which at least one of them had a group: training does "
            "not count, evaluation does. `troupe bench` measures the same without a run.",
            "steady",
        ),
        Metric("tokens_per_s", "tokens/s", "Tokens trained over the seconds of the step (offline training).", "steady"),
        Metric("examples", "count", "Examples in the step's batch (offline training).", "`schedule.examples_per_step`"),
        Metric("epoch", "count", "Completed passes over the data (offline training).", "-"),
    ),
    "Advantages": (
        Metric("advantage_mean", "-", "Mean advantage over the policy's own tokens.", "near 0"),
        Metric("advantage_std", "-", "Standard deviation of the advantages.", "above 0; 1 with `algorithm.whiten`"),
        Metric("return_mean", "reward", "Mean return of a token, the critic's target.", "rises"),
        Metric("return_std", "reward", "Standard deviation of the returns.", "above 0"),
        Metric("value_mean", "reward", "Mean value that the critic gave before the update.", "near `return_mean`"),
        Metric("value_std", "reward", "Standard deviation of the values.", "-"),
        Metric(
            "explained_variance",
            "-",
            "1 - variance(returns - values) / variance(returns).",
            "rises towards 1; below 0 the critic is worse than a constant",
        ),
        Metric(
            "kl_ref",
            "nats per token",
            "KL(policy || reference) before the update, by k3, from the trainer's log-probs, else the sampler's.",
            "below 0.5, and no steady rise",
        ),
        Metric("kl_coef", "-", "Coefficient of the KL term in the reward (`algorithm.kl.target`).", "settles"),
    ),
    "Updates of the policy": (
        Metric("policy/policy_loss", "-", "Policy-gradient part of the loss.", "-"),
        Metric("policy/entropy_loss", "-", "-`entropy_coef` times the weighted entropy.", "-"),
        Metric(
            "policy/kl_loss", "-", "`kl.coef` times the weighted KL to the reference.", "small beside `policy_loss`"
        ),
        Metric("policy/kl_old_loss", "-", "Penalty on KL(old || new) (`ppo_penalty`).", "-"),
        Metric("policy/ptx_loss", "nats per token", "Negative log-likelihood of the texts of `data.ptx`.", "steady"),
        Metric(
            "policy/entropy",
            "nats per token",
            "Mean entropy of the policy at the sampled tokens.",
            "falls slowly; below 0.05 the policy no longer explores",
        ),
        Metric(
            "policy/clip_fraction",
            "share",
            "Tokens without gradient because their ratio is beyond a clip bound.",
            "0 in the first update of a step, below 0.3 after it",
        ),
        Metric("policy/ratio_max", "-", "Largest ratio of new to old probability.", "1 in the first update; below 10"),
        Metric(
            "policy/kl_old",
            "nats per token",
            "KL(old || new), by k3, found by each update before it moves the policy.",
            "0 in the first update, below 0.05 after it",
        ),
        Metric(
            "policy/kl_exact",
            "nats per token",
            "KL(old || new) over the whole vocabulary at `algorithm.kl_states` tokens, after the last update.",
            "below 0.1; higher: lower the learning rate",
        ),
        Metric(
            "policy/kl_proposed",
            "nats per token",
            "KL(old || new) of the whole step, before it was shortened (`trpo`).",
            "below 10 times `algorithm.trust_region.max_kl`",
        ),
        Metric(
            "policy/step_length",
            "share",
            "Share of the step that was kept (`trpo`); 0: undone.",
            "1 in most steps; lower: lower the learning rate",
        ),
        Metric("policy/kl_old_coef", "-", "Coefficient of the penalty on KL(old || new) (`ppo_penalty`).", "settles"),
        Metric(
            "policy/kl_ref",
            "nats per token",
            "KL to the reference by `algorithm.kl.estimator`; k1 may be negative.",
            "as `kl_ref`",
        ),
        Metric(
            "policy/importance_weight",
            "-",
            "Mean correction for the gap between sampler and trainer.",
            "0.95 to 1.05 with `max_staleness: 0`",
        ),
        Metric(
            "policy/importance_cut_fraction", "share", "Tokens whose correction was truncated or masked.", "below 0.01"
        ),
        Metric(
            "policy/rollout_logprob_gap",
            "nats",
            "Mean absolute difference of the sampler's and the trainer's log-prob of a token.",
            "below 0.001 in float32, below 0.05 in bfloat16; higher: the engine may hold other weights",
        ),
        Metric("policy/rollout_logprob_gap_max", "nats", "Largest such difference.", "below 1"),
    ),
    "Updates of the critic": (
        Metric("critic/value", "reward", "Mean value of a token in the update.", "near `return_mean`"),
        Metric("critic/value_abs_max", "reward", "Largest absolute value.", "near the range of the returns"),
        Metric("critic/value_error", "reward squared", "Mean squared difference of values and returns.", "falls"),
        Metric("critic/value_clip_fraction", "share", "Tokens whose value is clipped (`value_clip`).", "below 0.3"),
    ),
    "Updates of every trained model": (
        Metric("TRAINER/loss", "-", "Loss of the update, summed over ranks; mean over the step's updates.", "-"),
        Metric(
            "TRAINER/grad_norm",
            "-",
            "Global norm of the gradient before clipping; null where it is not finite.",
            "within a factor of ten of its usual value",
        ),
        Metric("TRAINER/learning_rate", "-", "Learning rate of the update.", "follows `roles.ROLE.schedule`"),
        Metric(
            "TRAINER/sequences",
            "count",
            "Rows that were computed in an update. A sample is one row, or several where an episode was forked.",
            "-",
        ),
        Metric("TRAINER/tokens", "count", "Tokens with a loss that were computed in an update.", "-"),
        Metric(
            "TRAINER/padding",
            "share",
            "Padding among the tokens that the model ran on in an update.",
            "0; above, the model does not pack, or `roles.ROLE.packing` is false",
        ),
        Metric(
            "TRAINER/tokens_per_s",
            "tokens/s",
            "Tokens that one worker's model ran on in an update, without padding and with a shared prompt once, over "
            "the seconds of the update.",
            "steady",
        ),
        Metric(
            "TRAINER/mfu",
            "share",
            "Model FLOPs utilization: six operations for each parameter and token, over the GPU's peak in bfloat16. "
            "Written for GPUs with a known peak, and not for mixtures of experts.",
            "0.3 to 0.5",
        ),
        Metric(
            "TRAINER/skipped_updates",
            "share",
            "Updates skipped because the gradient was not finite; no parameter changed.",
            "0; `failures.nonfinite_steps` in a row stop the run",
        ),
        Metric(
            "TRAINER/empty_updates",
            "1",
            "Written where an update had no row with an advantage; no parameter changed.",
            "absent",
        ),
    ),
    "Offline objectives": (
        Metric("TRAINER/nll", "nats per token", "Negative log-likelihood of the responses (`sft`, `orpo`).", "falls"),
        Metric("TRAINER/token_logprob", "nats", "Mean log-prob of a response token (`sft`).", "rises"),
        Metric("TRAINER/preference_loss", "-", "Loss on preferences, labels or rankings.", "falls"),
        Metric("TRAINER/center_loss", "-", "`center_coef` times the squared sum of an example's scores.", "near 0"),
        Metric("TRAINER/lm_loss", "-", "`lm_coef` times the likelihood of the best answer.", "falls"),
        Metric("TRAINER/accuracy", "share", "Pairs in the right order; a tie counts half.", "rises from 0.5"),
        Metric("TRAINER/margin", "-", "Mean difference of the better and the worse answer.", "rises"),
        Metric("TRAINER/score", "-", "Mean score of the reward model.", "near 0 with `center_coef`"),
        Metric(
            "TRAINER/calibration_error",
            "share",
            "Expected calibration error over ten bins of sigmoid(score difference).",
            "below 0.1 at the end",
        ),
        Metric("TRAINER/reward_chosen", "-", "Implicit reward of chosen (best) answers.", "above `reward_rejected`"),
        Metric("TRAINER/reward_rejected", "-", "Implicit reward of all other answers.", "below `reward_chosen`"),
        Metric("TRAINER/reward_desirable", "-", "Implicit reward of desirable answers (`kto`).", "rises"),
        Metric("TRAINER/reward_undesirable", "-", "Implicit reward of undesirable answers (`kto`).", "falls"),
        Metric("TRAINER/reference_point", "nats", "Reference point z0 of `kto`.", "small"),
    ),
    "Evaluation": (
        Metric("eval/prompts", "count", "Held-out prompts that were evaluated.", "`evaluation.prompts`"),
        Metric("eval/refused", "count", "Held-out prompts that cannot be used, such as too long ones.", "0"),
        Metric("eval/failed_samples", "count", "Held-out samples without a reward.", "0"),
        Metric("eval/reward", "reward", "Mean reward on held-out prompts.", "rises with `reward/mean`"),
        Metric(
            "eval/accuracy",
            "share",
            "Samples with a reward of at least `eval/solved_at`; offline training: pairs in the right order.",
            "rises",
        ),
        Metric(
            "eval/pass@K", "share", "Unbiased estimate that one of K samples is solved (arXiv 2107.03374).", "rises"
        ),
        Metric(
            "eval/solved_at",
            "reward",
            "Reward from which a sample is solved (`evaluation.solved_at`). Where the reward does not say, there are "
            "no accuracy and no pass@K.",
            "-",
        ),
        Metric("eval/response_tokens", "tokens", "Mean length of held-out responses.", "-"),
        Metric("eval/examples", "count", "Held-out examples (offline training).", "`evaluation.examples`"),
        Metric("eval/loss", "-", "Loss on held-out examples.", "falls; a rise is overfitting"),
        Metric("eval/nll", "nats per token", "As `TRAINER/nll`, on held-out examples.", "falls"),
        Metric("eval/token_logprob", "nats", "As `TRAINER/token_logprob`, on held-out examples.", "rises"),
        Metric("eval/preference_loss", "-", "As `TRAINER/preference_loss`, on held-out examples.", "falls"),
        Metric("eval/center_loss", "-", "As `TRAINER/center_loss`, on held-out examples.", "near 0"),
        Metric("eval/lm_loss", "-", "As `TRAINER/lm_loss`, on held-out examples.", "falls"),
        Metric("eval/margin", "-", "As `TRAINER/margin`, on held-out examples.", "rises"),
        Metric("eval/score", "-", "As `TRAINER/score`, on held-out examples.", "-"),
        Metric("eval/calibration_error", "share", "As `TRAINER/calibration_error`, on held-out examples.", "below 0.1"),
        Metric("eval/reward_chosen", "-", "As `TRAINER/reward_chosen`, on held-out examples.", "-"),
        Metric("eval/reward_rejected", "-", "As `TRAINER/reward_rejected`, on held-out examples.", "-"),
        Metric("eval/reward_desirable", "-", "As `TRAINER/reward_desirable`, on held-out examples.", "-"),
        Metric("eval/reward_undesirable", "-", "As `TRAINER/reward_undesirable`, on held-out examples.", "-"),
        Metric("eval/reference_point", "nats", "As `TRAINER/reference_point`, on held-out examples.", "-"),
    ),
    "Data": (
        Metric("data/train_rows", "count", "Rows of `data.train` that are used.", "-"),
        Metric("data/eval_rows", "count", "Rows of `data.eval`, without those that `data.held_out` removes.", "-"),
        Metric("data/ptx_rows", "count", "Texts of `data.ptx`.", "-"),
        Metric("data/train_bad_rows", "count", "Rows of `data.train` that cannot be used.", "0, or a few"),
        Metric("data/eval_bad_rows", "count", "Rows of `data.eval` that cannot be used.", "0, or a few"),
        Metric(
            "data/eval_removed_rows",
            "count",
            "Rows of `data.eval` that `data.held_out` removes: `data.train` has the same prompt.",
            "0, or a few",
        ),
        Metric(
            "data/train_refused_rows",
            "count",
            "Prompts of `data.train` that are too long or that the chat template does not render, among the first "
            "20,000 (on rollouts; engines refuse them). Offline they are bad rows.",
            "0, or a few",
        ),
        Metric(
            "data/eval_refused_rows",
            "count",
            "As `data/train_refused_rows`, of `data.eval`.",
            "0, or a few",
        ),
        Metric("data/ptx_bad_rows", "count", "Rows of `data.ptx` that cannot be used.", "0, or a few"),
    ),
    "Ledger": (
        Metric("ledger/dispatched", "count", "Samples dispatched since the start of the run.", "-"),
        Metric("ledger/trained", "count", "Samples that took part in an update.", "near `ledger/dispatched`"),
        Metric("ledger/dropped", "count", "Samples that will not be trained, each with a reason.", "0, or a few"),
        Metric("ledger/in_flight", "count", "dispatched - trained - dropped.", "the groups that are open"),
        Metric("ledger/retries", "count", "Groups dispatched again as a new attempt.", "0, or one per lost engine"),
    ),
    "Time": (
        Metric("seconds/step", "s", "Whole step, from one report to the next.", "steady"),
        Metric(
            "seconds/PHASE",
            "s",
            f"Time of one phase: {', '.join(PHASES)}. A checkpoint counts in the line of the next step.",
            "steady",
        ),
        Metric(
            "seconds/reward",
            "s",
            "Time that the reward workers spent on the step's samples, summed over groups; mostly during `generate`.",
            "below `seconds/generate` times the reward workers; near it, add reward workers or shorten the functions",
        ),
        Metric(
            "utilisation/PHASE",
            "share",
            "`seconds/PHASE` over the time of the step.",
            "with `max_staleness` above 0, `generate` below 0.3; otherwise add rollout workers",
        ),
    ),
    "Workers and memory": (
        Metric("workers/ROLE", "count", "Running workers of a role that can be scaled.", "`roles.ROLE.workers`"),
        Metric(
            "memory/ROLE", "GiB", "Peak resident memory of the role's largest worker so far.", "flat after a few steps"
        ),
        Metric("memory/ROLE_gpu", "GiB", "Peak memory that torch allocated on a GPU.", "below the GPU's memory"),
        Metric("memory/driver", "GiB", "Peak resident memory of the controller's process.", "flat"),
    ),
}
"""Every metric of `metrics.jsonl`, by section of the page."""


def metric_named(name: str) -> Metric | None:
    """The row that describes a metric; None where the table has none."""
    rows = (row for section in SECTIONS.values() for row in section)
    return next((row for row in rows if row.matches(name)), None)
