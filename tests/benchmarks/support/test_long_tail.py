"""The rollout worker with a length for every sample."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rollout_throughput import rollout_class
from benchmarks.support.bare_engines import sampling_params
from benchmarks.support.workload import Group, group, grpo_spec, response_lengths
from tests.benchmarks.settings import SETTINGS
from troupe.orchestrator.roles.settings import rollout_config

TAIL = replace(SETTINGS, lengths="long-tail", max_tokens=64, samples=8)


def groups(count: int) -> list[Group]:
    return [group(TAIL, f"p{row}", row, [1]) for row in range(count)]


def test_only_the_length_of_a_sample_differs_from_the_product() -> None:
    config = rollout_config(grpo_spec(TAIL, TAIL.model, 1, 1))
    tail, plain = (rollout_class(settings)(config, "rollout-0") for settings in (TAIL, SETTINGS))
    one = groups(1)[0]
    params = sampling_params(tail, one)
    assert [each.max_tokens for each in params] == response_lengths(TAIL, one)
    for own, products in zip(params, sampling_params(plain, one), strict=True):
        own.max_tokens = products.max_tokens
        assert repr(own) == repr(products)
