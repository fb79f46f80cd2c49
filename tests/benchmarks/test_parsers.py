"""The command lines of all benchmarks."""

from __future__ import annotations

from benchmarks import grpo_step, ppo_step, rollout_throughput, time_to_reward, weight_sync
from benchmarks.support.workload import MODEL


def test_settings_are_shared_and_have_each_benchmarks_own_defaults() -> None:
    for module, turns in ((rollout_throughput, 11), (grpo_step, 5), (ppo_step, 5), (weight_sync, 7)):
        given = module.parse(["--seed", "3"])
        assert (given.model, given.dtype, given.threads, given.turns, given.seed) == (MODEL, "bfloat16", 2, turns, 3)
        assert given.json is None
    given = time_to_reward.parse(["--max-tokens", "5"])
    assert (given.groups, given.samples, given.max_tokens, given.concurrency) == (16, 8, 5, 64)
    given = rollout_throughput.parse(["--no-prefix-caching", "--sweep", "engines=1,2", "--sweep", "groups=3"])
    assert not given.prefix_caching and given.sweep == [("engines", (1, 2)), ("groups", (3,))]
