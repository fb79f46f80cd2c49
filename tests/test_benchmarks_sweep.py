"""Pure parts of the settings that benchmarks share, of rollout_throughput's sweeps, and of its long-tailed lengths."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import grpo_step, ppo_step, rollout_throughput, time_to_reward, weight_sync
from benchmarks.bare_engines import sampling_params
from benchmarks.harness import NotCorrect, Report, Turn
from benchmarks.processes import Child
from benchmarks.rollout_throughput import PRODUCT, Gate, measure_anew, rollout_class
from benchmarks.sweep import named, points, swept
from benchmarks.training_load import RESPONSE_TOKENS, Beside, TrainingLoad
from benchmarks.workload import MODEL, Group, group, lengths_of, spec, tail_length
from tests.test_benchmarks import SETTINGS

TAIL = replace(SETTINGS, lengths="long-tail", max_tokens=64, samples=8)


def groups(count: int) -> list[Group]:
    return [group(TAIL, f"p{row}", row, [1]) for row in range(count)]


def test_long_tailed_lengths_follow_from_the_seed_and_never_pass_the_longest() -> None:
    drawn = [length for one in groups(500) for length in lengths_of(TAIL, one)]
    assert drawn == [length for one in groups(500) for length in lengths_of(TAIL, one)]
    assert drawn != [length for one in groups(500) for length in lengths_of(TAIL, replace(one, seed=one.seed + 1))]
    assert min(drawn) >= 1 and max(drawn) == 64
    assert fmean(drawn) == pytest.approx(16, rel=0.1)
    assert sum(length > 32 for length in drawn) > 0.03 * len(drawn)
    assert {tail_length(seed, 0, 1) for seed in range(20)} == {1}
    assert lengths_of(SETTINGS, groups(1)[0]) == [SETTINGS.max_tokens] * 8


def test_every_contender_is_told_the_length_of_a_sample_and_nothing_else_differs() -> None:
    config = spec(TAIL, TAIL.model, 1, 1).rollout_config()
    tail, plain = (rollout_class(settings)(config, "rollout-0") for settings in (TAIL, SETTINGS))
    one = groups(1)[0]
    params = sampling_params(tail, one)
    assert [each.max_tokens for each in params] == lengths_of(TAIL, one)
    for own, products in zip(params, sampling_params(plain, one), strict=True):
        own.max_tokens = products.max_tokens
        assert repr(own) == repr(products)


def test_gate_wants_every_sample_to_have_its_own_length() -> None:
    settings = replace(TAIL, groups=2)
    work = groups(2)
    right = [[7] * length for one in work for length in lengths_of(settings, one)]
    gate = Gate(settings)
    gate.turn(PRODUCT, work, right)
    with pytest.raises(NotCorrect, match="other lengths"):
        gate.turn(PRODUCT, work, right[::-1])
    with pytest.raises(NotCorrect, match="other lengths"):
        gate.turn(PRODUCT, work, [*right[:-1], right[-1] + [7]])


def test_a_sweep_is_every_combination() -> None:
    assert points([]) == [{}]
    assert swept("max-tokens=16,32") == ("max_tokens", (16, 32))
    assert points([("concurrency", (16, 32)), ("engines", (1, 2))]) == [
        {"concurrency": 16, "engines": 1},
        {"concurrency": 16, "engines": 2},
        {"concurrency": 32, "engines": 1},
        {"concurrency": 32, "engines": 2},
    ]
    point = {"max_tokens": 16, "engines": 2}
    assert named(Path("out/one.json"), point) == Path("out/one-max-tokens-16-engines-2.json")
    assert named(Path("out/one.json"), {}) == Path("out/one.json") and named(None, point) is None


@pytest.mark.parametrize("wrong", ["concurrency", "concurrency=", "concurrency=a", "seed=1,2", "device=1", "=1"])
def test_a_sweep_of_something_else_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rollout_throughput.parse(["--sweep", wrong])
    assert wrong in capsys.readouterr().err


def test_settings_are_shared_and_have_each_benchmarks_own_defaults() -> None:
    for module, turns in ((rollout_throughput, 11), (grpo_step, 5), (ppo_step, 5), (weight_sync, 7)):
        given = module.parse(["--seed", "3"])
        assert (given.model, given.dtype, given.threads, given.turns, given.seed) == (MODEL, "bfloat16", 2, turns, 3)
        assert given.json is None
    given = time_to_reward.parse(["--max-tokens", "5"])
    assert (given.groups, given.samples, given.max_tokens, given.concurrency) == (16, 8, 5, 64)
    given = rollout_throughput.parse(["--no-prefix-caching", "--sweep", "engines=1,2", "--sweep", "groups=3"])
    assert not given.prefix_caching and given.sweep == [("engines", (1, 2)), ("groups", (3,))]


def test_the_turns_of_several_runs_count_together() -> None:
    def report(*bare: float) -> Report:
        taken = {name: [Turn(s, 10.0, s, 0.0) for s in bare] for name in ("LLM.generate", "AsyncLLM")}
        taken["AsyncLLM"] = [replace(turn, wall_s=1.5) for turn in taken["AsyncLLM"]]
        return Report(
            "sampling", {"turns": len(bare)}, taken | {PRODUCT: taken["AsyncLLM"]}, "LLM.generate", {"a": "b"}
        )

    runs = iter([report(1.0), report(2.0), report(3.0)])
    pooled = measure_anew(3, lambda: next(runs), ("LLM.generate", "AsyncLLM"))
    assert [turn.wall_s for turn in pooled.taken["LLM.generate"]] == [1.0, 2.0, 3.0]
    assert pooled.baseline == "AsyncLLM", "the better one of all turns, not of the first run"
    assert pooled.arguments == {"turns": 1, "runs": 3}
    assert pooled.checks == {"run 1, a": "b", "run 2, a": "b", "run 3, a": "b"}
    alone = report(1.0)
    assert measure_anew(1, lambda: alone, ("LLM.generate",)) is alone
    with pytest.raises(SystemExit):
        rollout_throughput.parse(["--runs", "0"])


@pytest.mark.parametrize("wrong", [["--training"], ["--engines", "2"], ["--sweep", "engines=1,2"]])
def test_on_a_gpu_there_is_one_engine_and_no_load(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout_throughput.parse(["--device", "cuda", "--sweep", "groups=1,2"]).device == "cuda"
    with pytest.raises(SystemExit):
        rollout_throughput.parse(["--device", "cuda", *wrong])
    assert "one engine" in capsys.readouterr().err


def test_the_spec_takes_prefix_caching_and_the_device() -> None:
    assert spec(SETTINGS, Path("m"), 1, 1).rollout_config().engine.enable_prefix_caching
    plan = spec(replace(SETTINGS, prefix_caching=False, device="cuda"), Path("m"), 1, 1)
    assert not plan.rollout_config().engine.enable_prefix_caching
    assert plan.rollout_config().device == plan.policy_config().device == "cuda"
    roles = ppo_step.four_models(plan).roles
    assert roles.critic is not None and roles.reference is not None
    assert roles.rollout.gpus == roles.policy.gpus == roles.critic.gpus == roles.reference.gpus == 1
    # The engines of three contenders have to fit on one GPU.
    assert 3 * roles.rollout.gpu_memory_utilization < 0.9


TURN = Turn(2.0, 10.0, 1.0, 0.0)


async def test_nothing_is_noted_without_a_load() -> None:
    async def turn() -> tuple[Turn, list[int]]:
        return TURN, [1]

    assert await Beside(None).during(turn()) == (TURN, [1])
    assert Beside(None).pids == []


async def test_what_the_load_trains_during_a_turn_is_noted_and_nothing_else(tiny_model: Path) -> None:
    load = Child("training-load", TrainingLoad, spec(SETTINGS, tiny_model, 1, 1).policy_config())
    beside = Beside(load)

    async def rows(count: int) -> int:
        first, until = beside.trained(), time.monotonic() + 120
        while (trained := beside.trained() - first) < count * RESPONSE_TOKENS and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return trained

    async def turn() -> tuple[Turn, int]:
        return TURN, await rows(2)

    try:
        assert await rows(20) >= 20 * RESPONSE_TOKENS  # more than the turn waits for, and none of it counts
        figures, trained = await beside.during(turn())
        noted = figures.figures["trained beside it, tokens/s"] * TURN.wall_s
        assert noted % RESPONSE_TOKENS == 0
        assert noted >= trained >= 2 * RESPONSE_TOKENS
        assert beside.pids == [load.pid]
    finally:
        beside.close()
