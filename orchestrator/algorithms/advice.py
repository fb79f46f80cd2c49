"""Advice on each algorithm: when to use it, what to watch, and the options that select it in TRL, verl and OpenRLHF."""

from __future__ import annotations

from dataclasses import dataclass

NONE = "-"
"""In place of options: the framework does not have the algorithm."""


@dataclass(frozen=True)
class Advice:
    """Advice on one row of the tables, as Markdown."""

    use: str
    """When to use it."""
    watch: str
    """Metrics by their names, and what to do about them."""
    trl: str
    """Options that select it in TRL, and differences; `-` where TRL does not have it."""
    verl: str
    """The same for verl. `actor.` stands for `actor_rollout_ref.actor.`."""
    openrlhf: str
    """The same for OpenRLHF's `openrlhf.cli.train_ppo_ray`, or the command that the text names."""


_ENTROPY = "`policy/entropy` below 0.05: raise `algorithm.entropy_coef` or lower `roles.policy.learning_rate`"
_STEP = "`policy/kl_exact` above 0.1: lower `roles.policy.learning_rate`"
_UNCLIPPED = (
    "Nothing limits the ratio: `policy/ratio_max` above 10 or `policy/kl_old` above 0.05 in later updates: set "
    "`algorithm.kl_stop`, or lower `schedule.epochs`"
)
_CRITIC = (
    "`explained_variance` should rise above 0 before the policy moves; otherwise raise `roles.critic.warmup_steps` or "
    "`roles.critic.learning_rate`"
)
_KL = "`kl_ref` with a steady rise: raise `algorithm.kl.coef`"
_GROUPS = "`groups/mixed` below 0.2: most groups have equal rewards and no gradient; use other prompts or a curriculum"
_CLIP = "`policy/clip_fraction` above 0.3: fewer `schedule.epochs` or a lower `roles.policy.learning_rate`"
_CRITIC_ELSEWHERE = "- (`algorithm.adv_estimator=gae` always whitens the advantages and clips the ratio)"
_CRITIC_OPENRLHF = "- (`--algo.advantage.estimator gae` always normalises the advantages and clips the ratio)"
_MEAN_BIAS = (
    "The mean includes the sample itself, so the expected gradient is (n - 1)/n of the true policy gradient "
    "(n: `group_size`); `rloo` is unbiased"
)

ADVICE: dict[str, Advice] = {
    "reinforce": Advice(
        use="A baseline to compare with, and tasks with one sample for each prompt and no memory for a critic. The "
        "running mean is one number for all prompts: where prompts differ in difficulty, the variance is high, and "
        "`rloo` or `grpo` need fewer samples.",
        watch=f"`advantage_std` near `reward/std`: the baseline explains nothing; sample groups and use `rloo`. "
        f"{_UNCLIPPED}.",
        trl=NONE,
        verl="- (`algorithm.rollout_correction.bypass_mode=True` with `loss_type=reinforce` gives a loss without "
        "clipping, but no running mean)",
        openrlhf="- (`--algo.advantage.estimator reinforce` is `reinforce_pp`: normalised over the batch and clipped)",
    ),
    "actor_critic": Advice(
        use="Long responses with rewards before their end, where a few steps of reward and a critic beat the whole "
        "return. With one reward at the end, all but the last `algorithm.n_steps` tokens learn from the critic alone; "
        "prefer `actor_critic_gae`.",
        watch=f"{_CRITIC}. {_UNCLIPPED}.",
        trl=NONE,
        verl=NONE,
        openrlhf=NONE,
    ),
    "actor_critic_gae": Advice(
        use="PPO's advantages without its clipping, whitening and value clipping: one update for each batch, and "
        "comparisons that isolate what those add. With several updates for each batch, use `ppo`.",
        watch=f"{_CRITIC}. {_UNCLIPPED}.",
        trl=NONE,
        verl=_CRITIC_ELSEWHERE,
        openrlhf=_CRITIC_OPENRLHF,
    ),
    "ppo": Advice(
        use="Rewards from a reward model, responses whose tokens deserve different credit, several updates for each "
        "batch. It costs a second trained model; for verifiable rewards `grpo` is often as good.",
        watch=f"{_CRITIC}. {_KL}. {_CLIP}. `critic/value_clip_fraction` above 0.3: raise `algorithm.value_clip`.",
        trl="- (1.16 has no PPO trainer)",
        verl="`algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.use_kl_in_reward=True "
        "algorithm.kl_ctrl.kl_coef=0.05 critic.cliprange_value=0.2`",
        openrlhf="`--algo.advantage.estimator gae --algo.advantage.lambd 0.95 --algo.kl.init_coef 0.05 "
        "--critic.value_clip 0.2`; it clips rewards to +-10 (`--reward.clip_range`)",
    ),
    "ppo_penalty": Advice(
        use="Where clipping stops too many tokens, or a divergence per update is the natural limit. PPO's paper found "
        "it worse than clipping; it is here for comparison.",
        watch="`policy/kl_old` should settle near `algorithm.kl_old`'s target; far above it, lower "
        f"`roles.policy.learning_rate`. `policy/kl_old_coef` that grows without end says the same. {_CRITIC}.",
        trl=NONE,
        verl=NONE,
        openrlhf=NONE,
    ),
    "trpo": Advice(
        use="A hard limit on how far one step moves the policy, measured over the whole vocabulary: fragile policies, "
        "high learning rates. Every step costs extra forward passes.",
        watch="`policy/step_length` below 1 in most steps, or `policy/kl_proposed` far above "
        f"`algorithm.trust_region.max_kl`: lower `roles.policy.learning_rate`. {_CRITIC}.",
        trl=NONE,
        verl=NONE,
        openrlhf=NONE,
    ),
    "ppo_max": Advice(
        use="PPO with a reward model whose scale is unknown or drifts: rewards are scaled by their running deviation, "
        "and the bound on advantages tames outliers. With rewards in [0, 1], `ppo` is simpler.",
        watch=f"{_CRITIC}. {_KL}. `reward/std` that rises over the run shrinks the scaled rewards. {_CLIP}.",
        trl=NONE,
        verl=NONE,
        openrlhf="- (`--reward.normalize_enable` and `--reward.clip_range` with `--algo.advantage.estimator gae` are "
        "parts of it; nothing clips advantages)",
    ),
    "grpo": Advice(
        use="Verifiable rewards and memory for one trained model: the usual first choice. Dividing by the group's "
        "deviation favours prompts that are almost always or almost never solved; `dr_grpo` does not. "
        f"{_MEAN_BIAS}, before the division.",
        watch=f"{_GROUPS}. `response_tokens/mean` that rises without `reward/mean`: try `dr_grpo` or `dapo`. {_CLIP}. "
        f"{_ENTROPY}.",
        trl='`GRPOConfig(loss_type="grpo", scale_rewards="group")`; its default `loss_type` is `dapo`',
        verl="`algorithm.adv_estimator=grpo actor.loss_agg_mode=seq-mean-token-mean`, with a reference "
        "`actor.use_kl_loss=True actor.kl_loss_type=low_var_kl`; adds 1e-6 to the deviation; its default "
        "`loss_agg_mode` is `token-mean`",
        openrlhf="`--algo.advantage.estimator group_norm`, with a reference `--algo.kl.use_loss --algo.kl.estimator "
        "k3`; adds 1e-9 to the deviation; the loss is a mean over tokens, not per sequence",
    ),
    "dr_grpo": Advice(
        use="As `grpo`, where wrong answers get longer and longer, or prompts differ much in difficulty. "
        f"{_MEAN_BIAS}: a constant factor that the learning rate absorbs while all groups have the same size.",
        watch=f"`response_tokens/mean`: should no longer rise on wrong answers. `policy/grad_norm`: small for answers "
        f"far below `sampling.max_tokens`, which divides the loss; raise `roles.policy.learning_rate`. {_GROUPS}.",
        trl='`GRPOConfig(loss_type="dr_grpo", scale_rewards="none")`',
        verl="`algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
        "actor.loss_agg_mode=seq-mean-token-sum-norm`; divides by `actor.loss_scale_factor` (default: the padded "
        "length of responses) and not by the number of sequences",
        openrlhf="`--algo.advantage.estimator dr_grpo`: the advantage alone; the loss stays a mean over tokens",
    ),
    "rloo": Advice(
        use="Groups of samples and an unbiased gradient: the others' mean does not depend on the sample, so the "
        "expected gradient is the policy gradient at any group size. With the KL in the reward, as for reward models.",
        watch=f"{_KL}. {_GROUPS}. {_CLIP}.",
        trl="`RLOOConfig(beta=0.05)`; it clips the ratio of the whole response, the product of its "
        "tokens' ratios, and averages over responses; here and in verl the ratio is clipped per token",
        verl="`algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05`",
        openrlhf="`--algo.advantage.estimator rloo --algo.kl.init_coef 0.05`; the KL is not part of what is compared: "
        "each token gets its own and that of later tokens, without a baseline",
    ),
    "remax": Advice(
        use="One sample for each prompt and no critic: the greedy response is a baseline for that very prompt. It "
        "costs a second generation for each prompt; with groups, `rloo` uses its samples better.",
        watch=f"`advantage_mean` far below 0: the greedy response beats the samples; lower `sampling.temperature`. "
        f"{_KL}. {_UNCLIPPED}.",
        trl=NONE,
        verl="`algorithm.adv_estimator=remax algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05`; clips "
        "the ratio; a token also gets the KL of all later tokens, here its own alone",
        openrlhf=NONE,
    ),
    "reinforce_pp": Advice(
        use="PPO's loss without a critic and without groups: many different prompts, one sample each, a reward model. "
        "The batch's mean is the only baseline, so use large batches.",
        watch=f"`return_std`: what whitening divides by; near 0 it amplifies noise. {_KL}. {_CLIP}.",
        trl=NONE,
        verl="`algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True "
        "algorithm.kl_ctrl.kl_coef=0.01`",
        openrlhf="`--algo.advantage.estimator reinforce --algo.kl.init_coef 0.01`",
    ),
    "reinforce_pp_baseline": Advice(
        use="As `grpo`, with one scale for the whole batch instead of one for each group, so that no group of nearly "
        f"equal rewards is blown up. {_MEAN_BIAS}, before whitening.",
        watch=f"{_GROUPS}. {_KL}. {_CLIP}.",
        trl='- (near: `GRPOConfig(scale_rewards="batch")` divides by the deviation of the batch\'s rewards, not of the '
        "advantages of its tokens)",
        verl="`algorithm.adv_estimator=reinforce_plus_plus_baseline`, KL as `actor.use_kl_loss=True "
        "actor.kl_loss_type=mse actor.kl_loss_coef=0.01`",
        openrlhf="`--algo.advantage.estimator reinforce_baseline --algo.kl.use_loss --algo.kl.estimator k2 "
        "--algo.kl.init_coef 0.01`",
    ),
    "dapo": Advice(
        use="Long chains of thought with verifiable rewards: long responses keep their weight, rare tokens may rise "
        "further, and groups that are all right or all wrong are replaced. The replacement costs samples.",
        watch="`groups/mixed` near 1 is its aim; below it, raise `algorithm.dynamic_sampling`. `truncated` above 0.1: "
        f"raise `sampling.max_tokens`. {_ENTROPY}.",
        trl='`GRPOConfig(loss_type="dapo", epsilon_high=0.28)` and the reward `get_soft_overlong_punishment`; no '
        "groups are replaced",
        verl="`algorithm.adv_estimator=grpo actor.clip_ratio_high=0.28 actor.loss_agg_mode=token-mean`; "
        "`algorithm.filter_groups.enable=True` and `overlong_buffer` belong to its DAPO recipe",
        openrlhf="`--algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.28 "
        "--algo.dynamic_filtering_enable --reward.overlong_buffer_len N`; it keeps groups whose mean score lies "
        "within `--algo.dynamic_filtering_range`",
    ),
    "gspo": Advice(
        use="Mixture-of-experts models and long responses, where the ratios of single tokens are noise: one ratio for "
        "the whole response keeps or drops it as a whole.",
        watch="`policy/clip_fraction`: far higher than in `grpo` is normal, since the clip range is small and whole "
        f"responses are clipped; near 1, widen `algorithm.clip_low` and `algorithm.clip_high`. {_STEP}. {_GROUPS}.",
        trl='`GRPOConfig(importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4)`',
        verl="`actor.policy_loss.loss_mode=gspo algorithm.adv_estimator=grpo actor.clip_ratio_low=0.0003 "
        "actor.clip_ratio_high=0.0004`; the token form, `gspo_token`, which has the same gradient while a response "
        "has one advantage",
        openrlhf="`--actor.policy_loss_type gspo --algo.advantage.estimator group_norm --actor.eps_clip_low_high "
        "0.0003 0.0004`",
    ),
    "gspo_token": Advice(
        use="`gspo` with process rewards, whose advantages differ within a response. With one advantage for the whole "
        "response it has `gspo`'s gradient.",
        watch=f"`policy/clip_fraction` near 1: widen `algorithm.clip_low` and `algorithm.clip_high`. {_STEP}. "
        f"{_GROUPS}.",
        trl=NONE,
        verl="`actor.policy_loss.loss_mode=gspo`, as for `gspo`",
        openrlhf=NONE,
    ),
    "dcpo": Advice(
        use="Several passes over few prompts: a group of equal rewards still learns from the prompt's earlier visits, "
        "and rare tokens may change more. In a single pass over the data, no prompt has a history.",
        watch=f"`policy/clip_fraction` should be below `grpo`'s. `policy/ratio_max` near 10 is its cap: lower "
        f"`roles.policy.learning_rate`. `groups/mixed` matters less than in `grpo`. {_ENTROPY}.",
        trl=NONE,
        verl=NONE,
        openrlhf=NONE,
    ),
    "cispo": Advice(
        use="Several updates for each batch on long responses: no token loses its gradient, so rare tokens that start "
        "a reflection keep learning.",
        watch=f"`policy/ratio_max` above 1 + `algorithm.clip_high`: weights are being cut. {_STEP}: nothing else "
        f"limits the step. {_GROUPS}.",
        trl='`GRPOConfig(loss_type="cispo", epsilon_high=5.0)`: its bound is `epsilon_high` itself, here it is 1 + '
        "`clip_high`",
        verl="`actor.policy_loss.loss_mode=cispo algorithm.adv_estimator=grpo actor.clip_ratio_high=4.0 "
        "actor.clip_ratio_low=1.0`; it has a lower bound too, which 1.0 removes",
        openrlhf=NONE,
    ),
    "raft": Advice(
        use="The simplest loop that improves a model: sampling, choosing, fine-tuning. Robust where policy gradients "
        "diverge. It learns from good answers only and narrows the policy.",
        watch=f"`policy/entropy` falls faster than with a policy gradient: fewer `schedule.epochs`, or a higher "
        f"`sampling.temperature`. {_STEP}. {_GROUPS}: a group of equal rewards still trains its first sample.",
        trl=NONE,
        verl=NONE,
        openrlhf=NONE,
    ),
    "distill": Advice(
        use="A better model with the same tokenizer exists: every token gets a signal, so it needs far fewer samples "
        "than a reward. The teacher bounds what it learns.",
        watch="`kl_ref`, the divergence from the teacher, should fall. `reward/mean` is measured, not optimized. "
        f"{_STEP}. `response_tokens/mean` that collapses: compare the teacher's chat template with the student's.",
        trl="`DistillationConfig(beta=1.0)`: reverse KL over the whole vocabulary, as a loss to differentiate; here it "
        "is the reward of the sampled token",
        verl="the recipe `on_policy_distill_trainer`: KL to the teacher's top-k distribution, as a loss to "
        "differentiate",
        openrlhf=NONE,
    ),
    "sft": Advice(
        use="The first stage: teaches format and behaviour from good answers. Most other algorithms start better from "
        "the model that it gives.",
        watch="`eval/loss` that rises while `policy/nll` falls is overfitting: fewer steps or a lower "
        "`roles.policy.learning_rate`.",
        trl="`SFTConfig`, on data of prompts and completions (there `completion_only_loss` is the default)",
        verl="`verl.trainer.sft_trainer`",
        openrlhf="`openrlhf.cli.train_sft`",
    ),
    "reward_model": Advice(
        use="Preferences, and a policy that is to learn from its own samples (`ppo`, `rloo`) rather than from the "
        "pairs alone.",
        watch="`eval/accuracy` that stops at 0.5: labels or order are wrong. `eval/calibration_error` above 0.1: set "
        "`algorithm.label_smoothing`. `eval/margin` that grows while `eval/accuracy` does not: overfitting.",
        trl="`RewardConfig(center_rewards_coefficient=...)`, with a column `margin`; pairs only",
        verl=NONE,
        openrlhf="`openrlhf.cli.train_rm --model.loss_type sigmoid --model.margin_loss_enable`; pairs only",
    ),
    "dpo": Advice(
        use="Preferences and no wish to sample: one model trained, one frozen. Sensitive to pairs unlike what the "
        "policy would say; start from `sft` on the chosen answers.",
        watch="`policy/reward_chosen` that falls together with `policy/reward_rejected`: both answers get less likely; "
        "raise `algorithm.beta` or lower `roles.policy.learning_rate`. `eval/accuracy` should rise with "
        "`policy/accuracy`.",
        trl='`DPOConfig(loss_type="sigmoid", beta=0.1)`; its `label_smoothing` is for the losses `robust` and '
        "`exo_pair`, not for this one",
        verl=NONE,
        openrlhf="`openrlhf.cli.train_dpo --model.beta 0.1 --model.label_smoothing 0.0`",
    ),
    "ipo": Advice(
        use="DPO that overfits: almost deterministic preferences, or few pairs. The margin has a target, 1 / (2 beta), "
        "instead of growing without end.",
        watch="`policy/margin` should settle; `eval/loss` that rises: raise `algorithm.beta`, which lowers the target.",
        trl='`DPOConfig(loss_type="ipo", beta=0.1)`; mean over tokens, as here',
        verl=NONE,
        openrlhf="`openrlhf.cli.train_dpo --model.ipo_enable --model.beta 0.1`; sum over tokens, here the mean",
    ),
    "orpo": Advice(
        use="Pairs and a base model: fine-tuning and preference in one stage, without a reference in memory.",
        watch="`policy/nll` should fall and `policy/accuracy` rise; if `policy/nll` stalls, lower `algorithm.beta`. "
        "`eval/loss` that rises is overfitting.",
        trl="`trl.experimental.orpo.ORPOConfig(beta=...)`",
        verl=NONE,
        openrlhf=NONE,
    ),
    "kto": Advice(
        use="Answers with a thumb up or down and no pairs. With very unequal numbers of both, set "
        "`algorithm.desirable_weight` and `algorithm.undesirable_weight` so that weight times number is comparable.",
        watch="`policy/reward_desirable` should rise and `policy/reward_undesirable` fall; if both fall, raise "
        "`algorithm.desirable_weight`. `policy/reference_point` that grows: the policy moves away from the reference "
        "everywhere; raise `algorithm.beta`.",
        trl='`KTOConfig(loss_type="kto", beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)`',
        verl=NONE,
        openrlhf=NONE,
    ),
    "rrhf": Advice(
        use="Several scored answers for each prompt, from any sources, and no reference in memory. Nothing ties the "
        "policy to its start; for pairs with a reference use `dpo`.",
        watch="`policy/accuracy` should rise and `policy/lm_loss` fall; if the first stays, lower `algorithm.lm_coef`. "
        "`eval/loss` that rises is overfitting.",
        trl=NONE,
        verl=NONE,
        openrlhf=NONE,
    ),
}  # fmt: skip
