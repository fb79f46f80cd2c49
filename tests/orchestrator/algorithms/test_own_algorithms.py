"""Algorithms of the user's own: how they become a row, what the checks find, and that they compute what a row does."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.conftest import ROOT
from tests.workers.algorithms.test_policy_objectives import random_tokens
from troupe.orchestrator.algorithms.custom import check, group_filter
from troupe.orchestrator.algorithms.section import AlgorithmConfig, advantage, dynamic_sampling, policy_loss, row_of
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.checks.machine import missing
from troupe.orchestrator.spec.derived.training import skips_zero_advantage
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.algorithms import policy_loss as losses
from troupe.workers.algorithms.custom_checks import Available, check_custom, random_batch
from troupe.workers.algorithms.estimators import estimate
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import CustomConfig
from troupe.workers.contract.messages import RewardSummary, TrainRow

OWN = "tests.orchestrator.algorithms.own_algorithms"


def config_of(name: str, **args: object) -> AlgorithmConfig:
    return AlgorithmConfig(name=f"{OWN}:{name}", args=args)


def test_the_row_is_that_of_its_base_with_the_users_functions() -> None:
    row, base = row_of(config_of("mean_baseline", scale=2.0)), ALGORITHMS["dr_grpo"]
    custom = CustomConfig(name=f"{OWN}:mean_baseline", args={"scale": 2.0})
    assert (row.advantage.estimator, row.advantage.custom) == ("custom", custom)
    assert row.loss == base.loss.model_copy(update={"objective": "custom", "custom": custom})
    assert (row.group_size, row.min_group_size, row.forbidden) == (8, 2, base.forbidden)
    assert dynamic_sampling(config_of("mean_baseline")) == 3  # there is a filter


def test_the_users_functions_give_what_the_shipped_row_gives() -> None:
    """dr_grpo's advantages, and its loss where nothing is clipped; with the sampler's weights and the aggregation."""
    config, shipped = config_of("mean_baseline"), AlgorithmConfig(name="dr_grpo")
    batch = random_batch(3)
    mine = estimate(advantage(config), batch, AdvantageState()).advantages
    torch.testing.assert_close(mine, estimate(advantage(shipped), batch, AdvantageState()).advantages)
    tokens = random_tokens(5, "constant", drift=0.05)
    got, expected = (losses.policy_loss(tokens, policy_loss(one)) for one in (config, shipped))
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    slopes = [torch.autograd.grad(one.loss, tokens.logprobs, retain_graph=True)[0] for one in (got, expected)]
    torch.testing.assert_close(*slopes)
    far = ((tokens.logprobs - tokens.old_logprobs).exp() - 1).abs() > 0.04  # pyright: ignore[reportOperatorIssue]
    assert float(got.sums["far"]) == float((far & tokens.loss_mask).sum()) > 0


def test_a_loss_with_a_term_of_its_own_trains_rows_without_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a row has a gradient, and is in a micro-batch. A shipped loss skips it, whoever computes the advantages."""
    monkeypatch.chdir(ROOT)
    grpo = ROOT / "deploy" / "specs" / "algorithms" / "grpo.yaml"
    specs = {
        name: load_rollout_spec(grpo, [f"algorithm.name={name}"])
        for name in ("grpo", f"{OWN}:own_advantage", f"{OWN}:pulls_to_reference", f"{OWN}:mean_baseline")
    }
    assert [skips_zero_advantage(spec) for spec in specs.values()] == [True, True, False, False]
    episodes = ROOT / "deploy" / "specs" / "tiny-environment.yaml"
    assert skips_zero_advantage(load_rollout_spec(episodes))
    assert not skips_zero_advantage(load_rollout_spec(episodes, ["algorithm.observation_coef=0.1"]))

    spec = specs[f"{OWN}:pulls_to_reference"]
    tokens = random_tokens(5, "constant", drift=0.05)
    tokens = replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    (slope,) = torch.autograd.grad(losses.policy_loss(tokens, policy_loss(spec.algorithm)).loss, tokens.logprobs)
    assert bool(slope[tokens.loss_mask].any())
    rows = [TrainRow(10, 5, False), TrainRow(10, 5, True)]
    (plan,) = plan_update(rows, [0, 1], 1, 100, skip_zero_advantage=skips_zero_advantage(spec))
    assert sorted(chain.from_iterable(plan.micro_batches)) == [0, 1]


def test_advantages_can_be_whitened_and_clipped() -> None:
    config = AlgorithmConfig.model_validate({"name": f"{OWN}:mean_baseline", "whiten": True, "advantage_clip": 0.5})
    result = estimate(advantage(config), random_batch(4), AdvantageState()).advantages
    assert float(result.abs().max()) == 0.5


@pytest.mark.parametrize("name", ["mean_baseline", "detached"])
def test_a_right_algorithm_passes_every_check(name: str) -> None:
    checks = check_custom(CustomConfig(name=f"{OWN}:{name}"))
    assert [one for one in checks if one.problem] == []
    assert len(checks) == {"mean_baseline": 14, "detached": 5}[name]


@pytest.mark.parametrize(
    ("name", "check", "problem"),
    [
        ("detached_by_mistake", "loss: finite differences", "autograd says"),
        ("divides_by_zero", "advantage: equal rewards", "not finite where all rewards"),
        ("by_position", "advantage: order of samples", "order of the samples"),
        ("per_sample", "advantage: finite", "shape [6], not [21]"),
        ("overflows", "loss: finite", "the loss is"),
        ("mixes_sequences", "loss: split into micro-batches", "other sequences of its micro-batch"),
        ("sees_masked", "loss: masked tokens", "depends on masked tokens"),
        ("no_gradient", "loss: finite", "does not depend on logprobs"),
        ("corrected_twice", "loss: corrected once", "corrects for the sampler, and so does algorithm.importance"),
        ("drops_far_tokens", "loss: corrected once", "depends on the sampler"),
        ("reshapes", "advantage: unequal groups", "depends on the order"),
        ("reshapes", "advantage: lone samples", "RuntimeError"),
        ("alone_is_nan", "advantage: lone samples", "not every advantage is finite, with groups of 1"),
        ("by_length", "advantage: samples without loss", "some samples masked or without tokens"),
        ("vague_filter", "keep_group: answer", "returned a int, not a bool"),
        ("ordered_filter", "keep_group: answer", "order of the samples"),
    ],
)
def test_the_checks_name_the_mistake(name: str, check: str, problem: str) -> None:
    found = {one.name: one.problem for one in check_custom(CustomConfig(name=f"{OWN}:{name}"))}
    assert problem in found[check]


def test_a_loss_may_correct_for_the_sampler_where_the_trainer_does_not() -> None:
    found = check_custom(CustomConfig(name=f"{OWN}:corrected_twice"), available=Available(importance=False))
    assert "loss: corrected once" not in {one.name for one in found}
    twice, alone, off = (
        AlgorithmConfig.model_validate({"name": f"{OWN}:{name}", "importance": importance})
        for name, importance in [
            ("corrected_twice", None),
            ("corrected_alone", None),
            ("corrected_twice", {"mode": "none"}),
        ]
    )
    given = {"old_logprobs": True, "ref_logprobs": True, "values": False}
    assert "corrected once" in " ".join(check(twice, **given))
    assert check(alone, **given) == check(off, **given) == []


@pytest.mark.parametrize(
    "name", [name for name, row in ALGORITHMS.items() if row.loss.has_ratio and not row.loss.recorded_top_k]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_shipped_losses_have_the_policy_gradient_on_a_bandit(name: str, level: str) -> None:
    """Five arms, sampled by another distribution than the policy's: in expectation, the gradient of the mean reward."""
    generator = torch.Generator().manual_seed(len(name))
    logits, other, rewards = torch.randn(3, 5, generator=generator, dtype=torch.double)
    logits.requires_grad_()
    (known,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    importance = {"mode": "truncate", "level": level, "cap": 0, "max_divergence": 0}
    wide = {"clip_low": 0.999, "clip_high": 9.0, "kl": {"coef": 0.0}}
    config = policy_loss(AlgorithmConfig.model_validate({"name": name, "importance": importance, **wide}))
    sampler = (logits.detach() + 0.5 * other).log_softmax(0)
    policy = logits.log_softmax(0)
    tokens = losses.PolicyTokens(
        logprobs=policy,
        entropy=torch.zeros(5, dtype=torch.double),
        rollout_logprobs=sampler,
        advantages=rewards,
        weights=sampler.exp(),  # how often an arm is sampled
        loss_mask=torch.ones(5, dtype=torch.bool),
        sequence=torch.arange(5),
        old_logprobs=policy.detach(),
    )
    (found,) = torch.autograd.grad(losses.policy_loss(tokens, config).loss, logits)
    torch.testing.assert_close(found, -known)


def test_checks_give_what_the_run_gives() -> None:
    config = CustomConfig(name=f"{OWN}:needs_reference")
    assert not any("NoneType" in one.problem for one in check_custom(config))
    without = check_custom(config, available=Available(ref_logprobs=False))
    assert all("NoneType" in one.problem for one in without)


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        (f"{OWN}:absent", {}, "module tests.orchestrator.algorithms.own_algorithms has no 'absent'"),
        (f"{OWN}:NUMBER", {}, "is a int, not a troupe.algorithms.CustomAlgorithm"),
        (f"{OWN}:detached", {"scale": 1}, "takes no arguments"),
        (f"{OWN}:mean_baseline", {"scal": 1}, "unexpected keyword argument 'scal'"),
        (f"{OWN}:nothing", {}, "neither advantage nor loss nor keep_group"),
        (f"{OWN}:other_base", {}, "base: no algorithm 'grp' (did you mean 'grpo'?)"),
        ("no_such_module:row", {}, "cannot import no_such_module: ModuleNotFoundError"),
    ],
)
def test_an_algorithm_that_cannot_be_used_is_a_mistake_in_the_spec(
    name: str, args: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig(name=name, args=args)
    assert problem in str(caught.value)


def test_a_spec_says_where_the_mistake_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    grpo = ROOT / "deploy" / "specs" / "algorithms" / "grpo.yaml"
    with pytest.raises(SpecError, match=r"grpo.yaml:\d+: algorithm: .*has no 'absent'"):
        load_rollout_spec(grpo, [f"algorithm.name={OWN}:absent"])
    with pytest.raises(SpecError, match=r"algorithm.args: grpo does not use it; remove it"):
        load_rollout_spec(grpo, ["algorithm.args={scale: 1}"])
    with pytest.raises(SpecError, match=r"algorithm.clip_range: .* does not use it; remove it"):
        load_rollout_spec(grpo, [f"algorithm.name={OWN}:mean_baseline", "algorithm.clip_range=0.1"])
    # What only the checks find: at `validate` and at the start of a run.
    spec = load_rollout_spec(grpo, [f"algorithm.name={OWN}:needs_reference"])
    assert any(path == "algorithm.name" and "NoneType" in problem for path, problem in missing(spec))
    assert missing(load_rollout_spec(grpo, [f"algorithm.name={OWN}:mean_baseline"])) == []


def test_a_failure_in_the_filter_names_it() -> None:
    decide = group_filter(config_of("ordered_filter"))
    assert decide is not None
    assert decide(RewardSummary("p", 0, ("timeout", "ok"), (None, 1.0), {}))
    with pytest.raises(TroupeError, match=r"ordered_filter: keep_group: IndexError.*rewards of p"):
        decide(RewardSummary("p", 0, ("timeout",), (None,), {}))
    assert group_filter(AlgorithmConfig(name="grpo")) is None
