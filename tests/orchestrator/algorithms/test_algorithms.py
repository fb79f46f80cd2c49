"""The algorithm table and what it becomes with a spec's own settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from docs.tooling.algorithm_reference import spec_of
from tests.conftest import ROOT
from troupe.orchestrator.algorithms.description import description, listing, row_defaults
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.section import (
    AlgorithmConfig,
    ImportanceSection,
    KlConfig,
    advantage,
    critic_loss,
    group_size,
    kl_coef,
    policy_loss,
    unused_options,
)
from troupe.orchestrator.algorithms.table import (
    ALGORITHMS,
    CRITIC_OPTIONS,
    ESTIMATOR_OPTIONS,
    OBJECTIVE_OPTIONS,
)
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.algorithms.estimators import estimate
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import (
    AdvantageConfig,
    CriticLossConfig,
    ImportanceConfig,
    PolicyLossConfig,
)


def config_of(name: str, **settings: Any) -> AlgorithmConfig:
    """The section of an algorithm; it has the settings of the losses."""
    return AlgorithmConfig.model_validate({"name": name, **settings})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_without_settings_is_its_defaults(name: str) -> None:
    row, config = ALGORITHMS[name], AlgorithmConfig(name=name)
    assert row.name == name
    assert policy_loss(config) == row.loss
    assert advantage(config) == row.advantage
    assert critic_loss(config) == row.critic_loss
    assert group_size(config) == row.group_size >= row.min_group_size
    assert unused_options(config) == []
    assert row.summary and row.source and row.formula


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_is_consistent(name: str) -> None:
    row = ALGORITHMS[name]
    assert not row.required & row.forbidden
    assert (row.critic_loss is not None) == ("critic" in row.required)
    assert (row.advantage.estimator in ("gae", "n_step")) == ("critic" in row.required)
    assert (row.kl_penalty is not None) == (row.loss.objective == "kl_penalty")
    assert row.advantage.estimator in ESTIMATOR_OPTIONS and row.loss.objective in OBJECTIVE_OPTIONS
    other = row.advantage.kl_coef if row.kl_in == "loss" else row.loss.kl_coef
    assert other == 0.0


def test_grpo_follows_its_paper() -> None:
    config = AlgorithmConfig(name="grpo")
    loss, how = policy_loss(config), advantage(config)
    assert (loss.aggregation, loss.kl_estimator, loss.clip_low, loss.clip_high) == ("sequence_mean", "k3", 0.2, 0.2)
    assert (how.estimator, how.normalize_by_std) == ("group", True)
    assert critic_loss(config) is None


def test_ppo_has_gae_and_kl_in_the_reward() -> None:
    config = config_of("ppo", kl=KlConfig(coef=0.1))
    assert policy_loss(config).kl_coef == 0.0
    assert advantage(config) == AdvantageConfig(estimator="gae", gae_lambda=0.95, whiten=True, kl_coef=0.1)
    assert critic_loss(config) == CriticLossConfig(value_clip=0.2)


def test_settings_override_the_row() -> None:
    config = config_of(
        "grpo",
        group_size=4,
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        kl=KlConfig(coef=0.02, estimator="k2"),
        entropy_coef=0.01,
        aggregation="constant",
        importance=ImportanceSection.model_validate({"mode": "mask", "cap": 4.0}),
        normalize_by_std=False,
    )
    assert policy_loss(config) == PolicyLossConfig(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        kl_coef=0.02,
        kl_estimator="k2",
        entropy_coef=0.01,
        aggregation="constant",
        importance=ImportanceConfig(mode="mask", cap=4.0),
    )
    assert advantage(config) == AdvantageConfig(estimator="group", normalize_by_std=False, whiten=False)
    assert group_size(config) == 4
    assert kl_coef(config) == 0.02


def test_clip_range_sets_both_sides() -> None:
    loss = policy_loss(config_of("ppo", clip_range=0.3))
    assert (loss.clip_low, loss.clip_high) == (0.3, 0.3)


def test_a_zero_is_a_setting_and_not_a_default() -> None:
    config = config_of("ppo", kl=KlConfig(coef=0.0), gamma=0.0, gae_lambda=0.0, whiten=False, entropy_coef=0.0)
    assert kl_coef(config) == 0.0
    assert advantage(config) == AdvantageConfig(estimator="gae", gamma=0.0, gae_lambda=0.0, whiten=False)


def test_a_bound_of_zero_is_off() -> None:
    config = config_of("ppo", value_clip=0.0, reward_clip=0.0, dual_clip=0.0)
    assert critic_loss(config) == CriticLossConfig(value_clip=None)
    assert advantage(config).reward_clip is None
    assert policy_loss(config).dual_clip is None
    config = config_of("ppo", value_clip=0.4, reward_clip=5.0)
    assert critic_loss(config) == CriticLossConfig(value_clip=0.4)
    assert advantage(config).reward_clip == 5.0


def test_options_an_algorithm_does_not_read_are_named() -> None:
    given = {"gamma": 1.0, "gae_lambda": 0.9, "whiten": True, "reward_clip": 1.0, "value_clip": 0.1}
    assert unused_options(config_of("grpo", **given, normalize_by_std=True)) == list(given)
    assert unused_options(config_of("ppo", **given, normalize_by_std=True)) == ["normalize_by_std"]


@pytest.mark.parametrize("name", [row.name for row in ALGORITHMS.values() if row.advantage.estimator == "returns"])
def test_a_discount_is_an_option_where_it_changes_an_advantage(name: str) -> None:
    """Three tokens and a reward at the end."""
    one = torch.zeros(3)
    batch = SampledTokens(torch.tensor([1.0, 0.0]), torch.zeros(2).long(), torch.tensor([2, 1]), one, one, one, None)
    batch = replace(batch, greedy_rewards=torch.zeros(2), square_sums=one)
    found = [
        estimate(advantage(config_of(name, gamma=gamma)), batch, AdvantageState()).advantages.tolist()
        for gamma in (1.0, 0.5)
    ]
    assert ("gamma" in unused_options(config_of(name, gamma=0.5))) == (found[0] == found[1])
    assert ("gamma" in dict(row_defaults(ALGORITHMS[name]))) == (found[0] != found[1])


def test_option_tables_name_fields_that_exist() -> None:
    assert frozenset().union(*ESTIMATOR_OPTIONS.values()) <= set(AlgorithmConfig.model_fields) | {"kl_to_go"}
    assert frozenset().union(*OBJECTIVE_OPTIONS.values()) <= set(AlgorithmConfig.model_fields)
    assert set(AlgorithmConfig.model_fields) >= CRITIC_OPTIONS
    for options in ESTIMATOR_OPTIONS.values():
        assert options <= set(AdvantageConfig.model_fields)


@pytest.mark.parametrize("name", ["GRPO", "", "reinforce\n"])
def test_an_unknown_algorithm_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="no algorithm"):
        AlgorithmConfig(name=name)


@pytest.mark.parametrize(
    "bad", [{"clip_range": 1.0}, {"clip_low": 0.0}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"gamma": 1.1}]
)
def test_settings_out_of_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        config_of("ppo", **bad)


NUMBERS = ("clip_range", "clip_low", "clip_high", "dual_clip", "entropy_coef", "gamma", "gae_lambda", "reward_clip")


@given(
    st.sampled_from(sorted(ALGORITHMS)),
    st.dictionaries(st.sampled_from((*NUMBERS, "value_clip")), st.floats(-2, 4) | st.sampled_from([0.0, 1.0])),
)
def test_what_the_section_takes_the_workers_take_too(name: str, numbers: dict[str, float]) -> None:
    """The section's bounds are those of the workers' models: what passes here never fails there."""
    try:
        config = config_of(name, **numbers)
    except ValidationError:
        return
    policy_loss(config)
    advantage(config)
    critic_loss(config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_is_described_and_a_shipped_spec_runs_it(name: str) -> None:
    text = description(name)
    assert name in listing() and ALGORITHMS[name].formula in text and ALGORITHMS[name].source in text
    spec = spec_of(name)
    changes = [] if spec.name == name else [f"algorithm.name={name}"]
    assert load_rollout_spec(ROOT / spec.path, changes).algorithm.name == name


@pytest.mark.parametrize("name", OFFLINE_ALGORITHMS)
def test_every_offline_row_is_described(name: str) -> None:
    text = description(name)
    assert name in listing() and OFFLINE_ALGORITHMS[name].formula in text and OFFLINE_ALGORITHMS[name].source in text


def test_the_rows_shown_defaults_are_fields_a_spec_can_set() -> None:
    fields = set(AlgorithmConfig.model_fields) | {"kl.coef", "kl.estimator", "kl.to_go"}
    for row in ALGORITHMS.values():
        assert {field for field, _ in row_defaults(row)} <= fields
