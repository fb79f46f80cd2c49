"""The table of metrics: every metric of a run has exactly one row, and a row says what to expect."""

from __future__ import annotations

import pytest

from troupe.orchestrator.telemetry.console import COLUMNS
from troupe.orchestrator.telemetry.metrics import PHASES, PeakMemory, metric_named, metric_sections
from troupe.orchestrator.training.ledger import Ledger
from troupe.workers.contract.messages import Answer, Peak

_WRITTEN = """
advantage_mean advantage_std critic/grad_norm critic/learning_rate critic/loss critic/sequences critic/skipped_updates
critic/tokens critic/value critic/value_abs_max critic/value_clip_fraction critic/value_error
data/eval_bad_rows data/eval_rows data/train_bad_rows data/train_rows dispatched_samples epoch eval/accuracy
eval/calibration_error eval/examples eval/failed_samples eval/loss eval/margin eval/preference_loss eval/prompts
eval/refused eval/response_tokens eval/reward eval/score eval/solved_at examples explained_variance failed_samples
groups/mixed kl_ref ledger/dispatched ledger/dropped ledger/in_flight ledger/retries ledger/trained memory/critic
memory/driver memory/policy memory/reference memory/reward memory/rollout perplexity policy/clip_fraction policy/entropy
policy/grad_norm policy/importance_cut_fraction policy/importance_weight policy/kl_exact policy/kl_old policy/kl_ref
policy/learning_rate policy/loss policy/nll policy/policy_loss policy/ratio_max policy/rollout_logprob_gap
policy/rollout_logprob_gap_max policy/sequences policy/skipped_updates policy/token_logprob policy/tokens
prompt_tokens/cached prompt_tokens/mean repetition response_tokens/max response_tokens/mean response_tokens_per_s
return_mean return_std reward/last_number/mean reward/last_number/std reward/letter_share/mean reward/letter_share/std
reward/mean reward/reward_model/mean reward/reward_model/std reward/std reward_model/accuracy
reward_model/calibration_error reward_model/grad_norm reward_model/learning_rate reward_model/loss reward_model/margin
reward_model/preference_loss reward_model/score reward_model/sequences reward_model/skipped_updates rollout/tokens_per_s
seconds/checkpoint seconds/evaluate seconds/generate seconds/prepare seconds/reward seconds/step seconds/sync
seconds/update staleness/max staleness/mean step time tokens tokens_per_s truncated updates
utilisation/checkpoint utilisation/evaluate utilisation/generate utilisation/prepare utilisation/rollout
utilisation/sync utilisation/update value_mean value_std workers/reference workers/reward workers/rollout
"""
WRITTEN = _WRITTEN.split()
"""Names in `metrics.jsonl` of recorded runs: GRPO with evaluation, PPO with four models, SFT, a reward model."""

_CONFIGURED = """
candidates/chosen
candidates/failed
candidates/reward
critic/aligned_skips
critic/empty_updates
players/first/draws
players/first/reward
players/first/wins
kl_teacher.math
untaught_teacher.math
reward/helpful/offset
reward/helpful/running_mean
reward/helpful/running_std
source/math/helpful/offset
source/math/helpful/running_mean
source/math/helpful/running_std
memory/teacher.math
workers/teacher.math
rollout/slowest_engine
policy/distill_loss
policy/sampler_divergence
policy/sampler_mass
policy/loss_scale
policy/observation_loss
policy/overflows
policy/teacher_divergence
curriculum/pass_rate
curriculum/seen
curriculum/set_aside
curriculum/skipped
data/eval_refused_rows
data/eval_removed_rows
data/ptx_bad_rows
trainer_restarts
data/ptx_rows
data/ptx.books_rows
data/train_refused_rows
environment/games/solved
seconds/save_copy
seconds/save_wait
seconds/save_write
environment/solved
episodes/games/failed
episodes/games/max_sampled_tokens
episodes/games/max_seconds
episodes/games/max_total_tokens
episodes/games/max_turns
episodes/games/restarted
episodes/games/turns
memory/environment.games
seconds/environment/games
workers/environment.games
episodes/compactions
episodes/cut_observations
episodes/failed
episodes/forked
episodes/max_sampled_tokens
episodes/max_seconds
episodes/max_total_tokens
episodes/max_turns
episodes/restarted
episodes/turns
data/eval.math-500_bad_rows
data/eval.math-500_rows
eval/accuracy_high
eval/accuracy_low
eval/level/3/accuracy
eval/level/3/reward
eval/maj@4
eval/position_consistency
eval/position_consistency_high
eval/position_consistency_low
eval/win_rate
eval/win_rate_high
eval/win_rate_low
eval/players/first/pass@2
eval/players/first/accuracy
eval/both/players/first/reward
eval/math-500/avg
eval/math-500/avg_high
eval/math-500/avg_low
eval/math-500/level/3/avg
eval/math-500/level/3/reward
eval/math-500/pass@2
eval/math-500/reward_low
eval/reward_high
eval/reward_low
eval/truncated
eval/center_loss
eval/lm_loss
eval/nll
eval/best@4
eval/pass@16
eval/pass@2
eval/reference_point
eval/reward_chosen
eval/reward_desirable
eval/reward_rejected
eval/reward_undesirable
eval/token_logprob
eval/distill_loss
eval/teacher_divergence
covariant_fraction
effective_opponents
kl_coef
masked_samples
memory/policy_gpu
memory/rollout_gpu
policy/accuracy
policy/empty_updates
policy/entropy_loss
policy/kl_loss
policy/kl_old_coef
policy/kl_old_loss
policy/kl_proposed
policy/kl_step
policy/lm_loss
policy/margin
policy/preference_loss
policy/ptx_loss
policy/reference_point
policy/reward_chosen
policy/reward_desirable
policy/mfu
policy/padding
policy/tokens_per_s
policy/reward_rejected
policy/reward_undesirable
policy/rejected_steps
policy/step_length
policy/surrogate_gain
reward/my_package.rewards:politeness/mean
reward_model/center_loss
reward_model/lm_loss
seconds/environment
source/math/dispatched
source/math/dropped
source/math/epoch
source/math/mixed
source/math/pass_rate
source/math/response_tokens
source/math/reward
source/math/rows
source/math/share
source/math/trained
source/math/truncated
"""
CONFIGURED = _CONFIGURED.split()
"""Names that need an option those runs did not set."""


@pytest.mark.parametrize("name", sorted({*WRITTEN, *CONFIGURED}))
def test_a_metric_has_a_row(name: str) -> None:
    assert metric_named(name) is not None, f"add {name} to orchestrator/telemetry/metrics.yaml"


@pytest.mark.parametrize(
    "name", ["reward", "policy/unheard_of", "rollout/loss", "seconds/nap", "eval/math/passes", "memory/policy_tpu"]
)
def test_another_name_has_none(name: str) -> None:
    assert metric_named(name) is None


def test_rows_have_names_of_their_own_and_no_empty_cell() -> None:
    rows = [row for section in metric_sections().values() for row in section]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert all((row.unit, row.meaning, row.healthy)), row.name
        assert row.meaning.endswith("."), row.name


def test_every_row_has_a_metric() -> None:
    used = {row.name for name in (*WRITTEN, *CONFIGURED) if (row := metric_named(name)) is not None}
    assert {row.name for section in metric_sections().values() for row in section} - used == set()


def test_what_the_code_names_today_has_rows() -> None:
    peaks = PeakMemory()
    peaks.note("rollout-0", Answer(peak=Peak(1, 1)))
    names = {f"ledger/{name}" for name in Ledger().counts()} | set(peaks.metrics())
    names |= {name for column in COLUMNS for name in column.names} | {f"seconds/{phase}" for phase in PHASES}
    assert {name for name in names if metric_named(name) is None} == set()
