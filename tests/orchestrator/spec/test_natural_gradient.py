"""What TRPO's step excludes in a spec, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.orchestrator.roles.settings import policy_config
from troupe.orchestrator.spec.derived.training import needs_old_logprobs, skips_zero_advantage
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.contract.algorithm_config import NaturalGradientConfig

SPEC = Path(__file__).resolve().parents[3] / "deploy" / "specs" / "algorithms" / "trpo.yaml"


def test_the_step_is_the_rows_with_what_the_spec_sets() -> None:
    spec = load_rollout_spec(SPEC, ["algorithm.natural_gradient={damping: 0.5}", "algorithm.kl.coef=0"])
    assert policy_config(spec).natural_gradient == NaturalGradientConfig(max_kl=0.01, damping=0.5)
    # The line search compares with the policy of before, and the divergence is that of all samples.
    assert needs_old_logprobs(spec) and not skips_zero_advantage(spec)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("roles.policy.learning_rate=0.1", "roles.policy.learning_rate: trpo takes no step of AdamW"),
        ("roles.policy.max_grad_norm=0.1", "roles.policy.max_grad_norm: trpo takes no step of AdamW"),
        ("roles.policy.schedule=linear", "roles.policy.schedule: trpo takes no step of AdamW"),
        ("model.dtype=bfloat16", "model.dtype: must be float32"),
        ("roles.policy.zero_stage=2", "roles.policy.zero_stage: must be 0 or 1"),
        ("roles.policy.lora={}", "roles.policy.lora: trpo trains all weights"),
        ("roles.policy={workers: 2, sequence_parallel_size: 2}", "roles.policy.sequence_parallel_size: must be 1"),
        ("roles.policy.gradient_checkpointing=true", "roles.policy.gradient_checkpointing: trpo differentiates"),
        ("algorithm.ptx_coef=0.1", "algorithm.ptx_coef: trpo measures"),
        ("schedule.minibatches=2", "schedule.minibatches: must be 1, got 2"),
        ("schedule.epochs=3", "schedule.epochs: must be 1, got 3"),
        ("algorithm.trust_region={max_kl: 0.1}", "algorithm.trust_region: trpo does not use it"),
        ("algorithm.name=ppo", "algorithm.natural_gradient: ppo does not use it"),
    ],
)
def test_what_the_step_does_not_use_or_cannot_have_is_refused(setting: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_rollout_spec(SPEC, [setting])
