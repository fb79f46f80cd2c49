"""Settings, prompts, lengths and specs that the contenders share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoTokenizer

from benchmarks import ppo_step
from benchmarks.support.workload import (
    Group,
    encode_prompts,
    group,
    groups_by_turn,
    grpo_spec,
    on_device,
    response_lengths,
    tail_length,
    without_eos,
)
from tests.benchmarks.settings import SETTINGS
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.roles.settings import policy_config, rollout_config
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.errors import SpecError
from troupe.workers.data.turn_ends import turn_ends


def test_every_turn_has_prompts_of_its_own() -> None:
    ids = [[row] for row in range(10)]
    turns = groups_by_turn(SETTINGS, 3, ids, first=4)
    assert [[(one.uid, one.row, one.prompt_ids) for one in groups] for groups in turns] == [
        [("turn-0-0", 4, (4,)), ("turn-0-1", 5, (5,))],
        [("turn-1-0", 6, (6,)), ("turn-1-1", 7, (7,))],
        [("turn-2-0", 8, (8,)), ("turn-2-1", 9, (9,))],
    ]


def test_group_has_the_products_seed() -> None:
    assert group(SETTINGS, "p7", 3, [1, 2]) == Group("p7", 3, (1, 2), 2, sampling_seed(5, "p7"))
    assert group(SETTINGS, "p8", 3, [1, 2]).seed != sampling_seed(5, "p7")


def test_spec_is_valid_and_takes_the_settings() -> None:
    plan = grpo_spec(replace(SETTINGS, engines=3), Path("m"), turns=4, prompts=8)
    assert (plan.roles.rollout.workers, plan.group_size, plan.schedule.prompts_per_step) == (3, 2, 2)
    assert rollout_config(plan).sampling.max_tokens == 3
    assert rollout_config(plan).engine.max_num_seqs == 4


def test_examples_stand_solved_in_front_of_every_prompt() -> None:
    plan = grpo_spec(replace(SETTINGS, examples=3), Path("m"), 1, 4)
    plain, few = (load_pools(spec.data)[0].table.to_pylist() for spec in (grpo_spec(SETTINGS, Path("m"), 1, 4), plan))
    for own, longer in zip(plain, few, strict=True):
        (question,), (said,) = (json.loads(row["messages"]) for row in (own, longer))
        *examples, last = said["content"].split("\n\n")
        assert last == question["content"] and longer["answer"] == own["answer"]
        solved = [example.rpartition(":")[2].split(" = ") for example in examples]
        assert [str(eval(problem)) for problem, _ in solved] == [answer for _, answer in solved]
        assert len(examples) == 3 and question["content"] not in examples
    assert plan.roles.rollout.max_model_len == replace(SETTINGS, examples=3).longest_prompt + SETTINGS.max_tokens


def test_model_without_end_cannot_end_but_reads_the_same(tiny_model: Path, tmp_path: Path) -> None:
    folder = without_eos(tiny_model, tmp_path / "model")
    plain, endless = (AutoTokenizer.from_pretrained(path) for path in (tiny_model, folder))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert endless.eos_token_id >= vocabulary > plain.eos_token_id
    assert turn_ends(endless).ids == {endless.eos_token_id}
    assert "eos_token_id" not in json.loads((folder / "generation_config.json").read_text())
    pool, _ = load_pools(grpo_spec(SETTINGS, folder, 1, 4).data)
    assert encode_prompts(folder, pool.table, [0, 3], 200) == encode_prompts(tiny_model, pool.table, [0, 3], 200)


def test_every_loop_takes_the_mean_over_tokens() -> None:
    """Where lengths differ GRPO's own mean over sequences is another gradient."""
    assert policy_config(grpo_spec(SETTINGS, Path("m"), 1, 4)).loss.aggregation == "token_mean"


TAIL = replace(SETTINGS, lengths="long-tail", max_tokens=64, samples=8)


def groups(count: int) -> list[Group]:
    return [group(TAIL, f"p{row}", row, [1]) for row in range(count)]


def test_long_tailed_lengths_follow_from_the_seed_and_never_pass_the_longest() -> None:
    drawn = [length for one in groups(500) for length in response_lengths(TAIL, one)]
    assert drawn == [length for one in groups(500) for length in response_lengths(TAIL, one)]
    assert drawn != [
        length for one in groups(500) for length in response_lengths(TAIL, replace(one, seed=one.seed + 1))
    ]
    assert min(drawn) >= 1 and max(drawn) == 64
    assert fmean(drawn) == pytest.approx(16, rel=0.1)
    assert sum(length > 32 for length in drawn) > 0.03 * len(drawn)
    assert {tail_length(seed, 0, 1) for seed in range(20)} == {1}
    assert response_lengths(SETTINGS, groups(1)[0]) == [SETTINGS.max_tokens] * 8


def test_the_spec_takes_prefix_caching_and_the_device() -> None:
    assert rollout_config(grpo_spec(SETTINGS, Path("m"), 1, 1)).engine.enable_prefix_caching
    plan = grpo_spec(replace(SETTINGS, prefix_caching=False, device="cuda"), Path("m"), 1, 1)
    assert not rollout_config(plan).engine.enable_prefix_caching
    assert rollout_config(plan).device == policy_config(plan).device == "cuda"
    roles = ppo_step.four_models(plan).roles
    assert roles.critic is not None and roles.reference is not None
    assert roles.rollout.gpus == roles.policy.gpus == roles.critic.gpus == roles.reference.gpus == 1
    # The engines of three contenders have to fit on one GPU.
    assert 3 * roles.rollout.gpu_share < 0.9


def test_backends_of_the_gpu_share_one_or_have_one_each() -> None:
    plan = grpo_spec(SETTINGS, Path("m"), 1, 1)
    assert resolved_backend(on_device(plan, "cpu", "auto")) == "shm"
    shared, apart = on_device(plan, "cuda", "ipc"), on_device(plan, "cuda", "nccl")
    assert shared.roles.rollout.colocate_with == "policy" and shared.roles.policy.gpus == 0.5
    assert (apart.roles.rollout.gpus, apart.roles.policy.gpus, resolved_backend(apart)) == (1.0, 1.0, "nccl")
    with pytest.raises(SpecError, match="ipc"):
        on_device(plan, "cpu", "ipc")
