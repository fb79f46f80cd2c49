"""The benchmarks' own helpers: statistics, turns, processes, and that the baselines do the product's work."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks import grpo_step, reward_curves
from benchmarks.bare_loop import BareStep, BareTrainer, Sampled, group_advantages
from benchmarks.harness import (
    GIGABYTES,
    SEQUENCES,
    NotCorrect,
    Report,
    Spread,
    Turn,
    best,
    in_turn,
    ratios,
    take_turns,
)
from benchmarks.processes import RAY_NICENESS, Child, ChildFailed, Meter, cpu_seconds, stopped
from benchmarks.rollout_throughput import PRODUCT, Gate
from benchmarks.workload import Group, Settings, encoded, group, spec, turns_of, without_end
from orchestrator.batching import plan_update
from orchestrator.prompts import PromptPool, load_pools
from orchestrator.scheduler import sampling_seed
from tests.child_server import Server
from workers.advantages import group_advantages as product_advantages
from workers.losses import PolicyTokens, policy_loss, token_weights
from workers.messages import ROLLOUTS, TrainRow
from workers.modeling import CausalLogprobs, load_causal
from workers.tensors import TokenTable

ROLLOUT_TOKENS = pa.schema(
    [ROLLOUTS.field(name) for name in ("prompt_ids", "response_ids", "rollout_logprobs", "loss_mask")]
)
SETTINGS = Settings(
    model=Path(".cache/models/tiny-llama"),
    dtype="float32",
    lengths="fixed",
    groups=2,
    samples=2,
    max_tokens=3,
    concurrency=4,
    engines=1,
    threads=1,
    seed=5,
)

GROUPS = [group(SETTINGS, uid, row, [1, 2]) for row, uid in enumerate(("p0", "p1"))]


def test_every_turn_has_prompts_of_its_own() -> None:
    ids = [[row] for row in range(10)]
    turns = turns_of(SETTINGS, 3, ids, first=4)
    assert [[(one.uid, one.row, one.prompt_ids) for one in groups] for groups in turns] == [
        [("turn-0-0", 4, (4,)), ("turn-0-1", 5, (5,))],
        [("turn-1-0", 6, (6,)), ("turn-1-1", 7, (7,))],
        [("turn-2-0", 8, (8,)), ("turn-2-1", 9, (9,))],
    ]


def turn(tokens: int, seconds: float = 1.0, **phases: float) -> Turn:
    return Turn(seconds, tokens, 2.0 * seconds, 0.25, phases)


def test_spread_is_median_least_and_greatest() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread.of([1.0]).text(1) == "1.0 (1.0 .. 1.0)"
    with pytest.raises(ValueError, match="no figures"):
        Spread.of([])


def test_every_contender_comes_first_equally_often() -> None:
    orders = [in_turn(["a", "b", "c"], n) for n in range(6)]
    assert orders[1] == ["b", "c", "a"]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]


async def test_turns_are_interleaved_and_the_first_is_thrown_away() -> None:
    seen: list[tuple[str, int]] = []

    def contender(name: str):
        async def take(number: int) -> Turn:
            seen.append((name, number))
            return turn(number)

        return take

    taken = await take_turns({name: contender(name) for name in "ab"}, 2)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [figures.amount for figures in taken["a"]] == [1, 2]


def test_ratios_compare_turns_of_the_same_round() -> None:
    # The machine slows down to a third: throughputs scatter, ratios do not.
    fast, slow = [turn(100), turn(30)], [turn(50), turn(15)]
    assert ratios(slow, fast) == [0.5, 0.5]
    with pytest.raises(ValueError, match="argument"):
        ratios(slow, fast[:1])
    assert best({"x": fast, "y": slow, "z": [turn(1000)]}, ["x", "y"]) == "x"


def test_report_shows_and_writes_every_figure(tmp_path: Path) -> None:
    taken = {"bare": [turn(100, update=0.5), turn(120, update=0.7)], "troupe": [turn(90), turn(120)]}
    report = Report("name", {"model": Path("m")}, taken, "bare", {"tokens": "equal"})
    written = json.loads(report.write(tmp_path / "results" / "one.json").read_text())
    assert [figures["amount"] for figures in written["turns"]["troupe"]] == [90, 120]
    assert written["summary"]["troupe"]["ratio"] == {"median": 0.95, "low": 0.9, "high": 1.0}
    assert written["summary"]["bare"]["phases"]["update"]["median"] == pytest.approx(0.6)
    assert written["checks"] == {"tokens": "equal"} and written["arguments"] == {"model": "m"}
    assert written["machine"]["cores"] >= 1 and "torch" in written["versions"]
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    text = console.export_text()
    assert "0.950 (0.900 .. 1.000)" in text and "checked: tokens: equal" in text and "update" in text
    assert "tokens/s" in text and "CPU ms/token" in text and "other figures" not in text


def test_report_counts_in_the_benchmarks_unit() -> None:
    taken = {"memcpy": [Turn(0.5, 4.0, 0.5, 0.0)], "put": [Turn(1.0, 4.0, 2.0, 0.0, figures={"copies per byte": 1.25})]}
    report = Report("name", {}, taken, "memcpy", {}, GIGABYTES)
    assert report.summary()["put"]["GB_per_s"].median == 4.0
    assert report.summary()["put"]["cpu_ms_per_GB"].median == 500.0
    assert Report("name", {}, taken, "memcpy", {}, SEQUENCES).summary()["put"]["cpu_us_per_sequence"].median == 5e5
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    text = console.export_text()
    assert "GB/s" in text and "4.00 (4.00 .. 4.00)" in text and "1.250 (1.250 .. 1.250)" in text


@pytest.fixture(scope="module")
def child():
    child = Child("server", Server, 40)
    yield child
    child.close()


def test_child_answers_and_hands_on_errors(child: Child) -> None:
    assert child.call("add", 2, timeout_s=60) == 42
    child.send("add", 1)
    assert child.receive(60) == 43
    with pytest.raises(ChildFailed, match="no such thing"):
        child.call("fail", timeout_s=60)
    assert child.call("niceness", timeout_s=60) == max(RAY_NICENESS, os.nice(0))


def test_cpu_time_counts_the_tree_but_for_what_is_left_out(child: Child) -> None:
    meter, others = Meter([child.pid]), cpu_seconds([os.getpid()], [child.pid])
    child.call("burn", 0.3, timeout_s=60)
    own, foreign = meter.read()
    assert 0.25 < own < 5.0 and foreign >= 0.0
    assert cpu_seconds([os.getpid()], [child.pid]) - others < 0.25
    assert cpu_seconds([os.getpid()]) > own


def test_stopped_processes_stand_still_and_go_on(child: Child) -> None:
    below = psutil.Process(child.call("leave_child", timeout_s=60))
    with stopped([os.getpid()], without=[child.pid]):
        assert below.status() != psutil.STATUS_STOPPED
        assert child.call("add", 0, timeout_s=60)
    with stopped([child.pid]):
        deadline = time.monotonic() + 10.0
        while below.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)  # a signal takes its time
        assert below.status() == psutil.STATUS_STOPPED
        child.send("niceness")
        with pytest.raises(ChildFailed, match="no answer"):
            child.receive(0.5)
    assert child.receive(60) == max(RAY_NICENESS, os.nice(0))


def test_closing_a_child_ends_everything_below_it() -> None:
    child = Child("server", Server, 0)
    below = psutil.Process(child.call("leave_child", timeout_s=60))
    child.close()
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE
    child.close()


def test_group_has_the_products_seed() -> None:
    assert group(SETTINGS, "p7", 3, [1, 2]) == Group("p7", 3, (1, 2), 2, sampling_seed(5, "p7"))
    assert group(SETTINGS, "p8", 3, [1, 2]).seed != sampling_seed(5, "p7")


def test_spec_is_valid_and_takes_the_settings() -> None:
    plan = spec(replace(SETTINGS, engines=3), Path("m"), turns=4, prompts=8)
    assert (plan.roles.rollout.workers, plan.group_size, plan.schedule.prompts_per_step) == (3, 2, 2)
    assert plan.rollout_config().sampling.max_tokens == 3
    assert plan.rollout_config().engine.max_num_seqs == 4


def test_model_without_end_cannot_end_but_reads_the_same(tiny_model: Path, tmp_path: Path) -> None:
    folder = without_end(tiny_model, tmp_path / "model")
    plain, endless = (AutoTokenizer.from_pretrained(path) for path in (tiny_model, folder))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert endless.eos_token_id >= vocabulary > plain.eos_token_id
    assert "eos_token_id" not in json.loads((folder / "generation_config.json").read_text())
    pool, _ = load_pools(spec(SETTINGS, folder, 1, 4).data)
    assert encoded(folder, pool.table, [0, 3], 200) == encoded(tiny_model, pool.table, [0, 3], 200)


def test_gate_refuses_other_work() -> None:
    good = [[1, 2, 3]] * 4
    gate = Gate(SETTINGS)
    gate.turn(PRODUCT, GROUPS, good)
    gate.turn("LLM", GROUPS, good)
    gate.totals()
    assert gate.checks["tokens sampled"] == "troupe 12, LLM 12"
    with pytest.raises(NotCorrect, match="3 sequences"):
        gate.turn("LLM", GROUPS, good[:3])
    with pytest.raises(NotCorrect, match="other lengths"):
        gate.turn("LLM", GROUPS, [*good[:3], [1]])
    natural = Gate(replace(SETTINGS, lengths="natural"))
    natural.turn(PRODUCT, GROUPS, good)
    natural.turn("LLM", GROUPS, [[1]] * 4)
    with pytest.raises(NotCorrect, match="different amounts"):
        natural.totals()


async def test_gate_refuses_other_tokens() -> None:
    async def first(one: Group, greedy: bool) -> list[list[int]]:
        return [[one.row, int(greedy)]]

    async def second(one: Group, greedy: bool) -> list[list[int]]:
        return [[one.row, 1]]

    groups, gate = [Group("a", 1, (1,), 1, 1)], Gate(SETTINGS)
    await gate.same_tokens(groups, {PRODUCT: first, "LLM": first})
    assert gate.checks
    with pytest.raises(NotCorrect, match="greedy=False"):
        await gate.same_tokens(groups, {PRODUCT: first, "LLM": second})


def batch() -> tuple[list[Sampled], torch.Tensor]:
    """Two groups of two, of uneven lengths, and their rewards."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(20, 40000, (count,), generator=generator).tolist()

    sampled = [
        Sampled(ids(prompt), ids(response), torch.randn(response, generator=generator).sub(10.8).tolist())
        for prompt, response in ((3, 5), (3, 2), (6, 1), (6, 4))
    ]
    return sampled, torch.tensor([[0.1, 0.5], [0.9, 0.3]]).double()


def test_bare_loop_has_the_products_gradient(tiny_model: Path) -> None:
    plan = spec(replace(SETTINGS, model=tiny_model), tiny_model, 1, 4).policy_config()
    plan = plan.model_copy(update={"trainer": plan.trainer.model_copy(update={"micro_batch_tokens": 16})})
    sampled, rewards = batch()
    advantages = group_advantages(rewards)
    groups = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(advantages, product_advantages(rewards.flatten(), groups, True))
    bare = BareTrainer(plan)
    figures = bare.add_gradients(sampled, advantages)

    model = load_causal(plan.model)
    module = CausalLogprobs(model, plan.sampling.temperature)
    rows = [
        {
            "prompt_ids": one.prompt_ids,
            "response_ids": one.response_ids,
            "rollout_logprobs": one.rollout_logprobs,
            "loss_mask": [True] * len(one.response_ids),
        }
        for one in sampled
    ]
    table = TokenTable(pa.Table.from_pylist(rows, schema=ROLLOUT_TOKENS))
    lengths = [TrainRow(len(one.prompt_ids) + len(one.response_ids), len(one.response_ids), True) for one in sampled]
    (ranks,) = plan_update(lengths, range(4), 1, 16, skip_silent=True)
    assert len(ranks.micro_batches) > 1
    loss = 0.0
    for micro_batch in table.batches(ranks.micro_batches):
        logprobs, entropy = module(
            micro_batch.input_ids, micro_batch.attention_mask, micro_batch.positions, micro_batch.targets
        )
        rollout_logprobs = table.floats("rollout_logprobs", micro_batch)
        assert rollout_logprobs is not None
        weights = token_weights(micro_batch.loss_mask, micro_batch.sequence, "token_mean", 12, 4, 3)
        tokens = PolicyTokens(
            logprobs=logprobs,
            entropy=entropy,
            rollout_logprobs=rollout_logprobs,
            advantages=advantages.float()[micro_batch.rows][micro_batch.sequence],
            weights=weights,
            loss_mask=micro_batch.loss_mask,
            sequence=micro_batch.sequence,
        )
        output = policy_loss(tokens, plan.loss)
        output.loss.backward()
        loss += float(output.loss.detach())
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    for own, parameter in zip(bare.gradients(), model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-7)


def test_bare_loop_trains_and_starts_the_next_step_clean(tiny_model: Path) -> None:
    bare = BareTrainer(spec(replace(SETTINGS, model=tiny_model), tiny_model, 1, 4, learning_rate=1e-3).policy_config())
    sampled, rewards = batch()
    before = {name: weight.clone() for name, weight in bare.named_weights()}
    first = bare.update(sampled, group_advantages(rewards))
    assert first["grad_norm"] > 0
    assert all(not torch.equal(weight, before[name]) for name, weight in bare.named_weights() if weight.ndim > 1)
    assert all(not gradient.any() for gradient in bare.gradients())


def steps(length: int = 3, gap: float = 0.01, norm: float = 1.0):
    """One step's worth of what `grpo_step.check` reads."""
    work = [[Group("a", 0, (1,), 2, 1), Group("b", 1, (1,), 2, 2)]]
    ids = [7] * length
    metrics = [{"policy/rollout_logprob_gap": 0.01, "policy/grad_norm": 1.0}]
    sampled = [{(uid, index): [7] * 3 for uid in "ab" for index in range(2)}]
    bare = [BareStep(1.0, {}, 4 * length, {"rollout_logprob_gap": gap, "grad_norm": norm}, [ids] * 4)]
    return work, metrics, sampled, bare


def test_step_check_passes_equal_work() -> None:
    checks = grpo_step.check(SETTINGS, *steps())
    assert checks["first step"].startswith("4 of 4 responses equal")


def test_step_check_passes_steps_without_an_advantage() -> None:
    work, metrics, sampled, bare = steps()
    nothing = {"policy/empty_updates": 1.0}
    assert "troupe 0.0100" in grpo_step.check(SETTINGS, work, [*metrics, nothing], sampled, bare)["sampler to trainer"]
    with pytest.raises(KeyError):
        grpo_step.check(SETTINGS, work, [*metrics, {}], sampled, bare)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"length": 2}, "tokens, not 3"), ({"gap": 0.5}, "nats apart"), ({"norm": 2.0}, "norms of")],
)
def test_step_check_refuses_other_work(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(NotCorrect, match=message):
        grpo_step.check(SETTINGS, *steps(**wrong))  # pyright: ignore[reportArgumentType]


def test_step_check_refuses_another_loss_of_the_same_samples() -> None:
    with pytest.raises(NotCorrect, match=r"norms of 1\.0000 and 1\.1270, 4 samples are equal"):
        grpo_step.check(SETTINGS, *steps(norm=1.127))
    work, metrics, sampled, bare = steps(norm=1.127)
    sampled[0]["a", 0] = [8] * 3
    assert grpo_step.check(SETTINGS, work, metrics, sampled, bare)["first step"].startswith("3 of 4 responses equal")


def test_every_loop_takes_the_mean_over_tokens() -> None:
    """Where lengths differ GRPO's own mean over sequences is another gradient."""
    assert spec(SETTINGS, Path("m"), 1, 4).policy_config().loss.aggregation == "token_mean"


def test_step_check_refuses_other_prompts() -> None:
    work, metrics, sampled, bare = steps()
    del sampled[0]["a", 1]
    with pytest.raises(NotCorrect, match="same prompts"):
        grpo_step.check(SETTINGS, work, metrics, sampled, bare)


def test_steps_draw_the_products_prompts(tiny_model: Path) -> None:
    plan = spec(replace(SETTINGS, model=tiny_model), tiny_model, turns=2, prompts=4)
    pool, _ = load_pools(plan.data)
    assert isinstance(pool, PromptPool)
    work = grpo_step.steps_of(SETTINGS, plan, pool, tiny_model)
    assert [len(groups) for groups in work] == [2, 2]
    assert sorted(one.row for groups in work for one in groups) == [0, 1, 2, 3]
    assert len({one.uid for groups in work for one in groups}) == 4


def test_phases_add_up_to_the_step() -> None:
    metrics = {"seconds/step": 10.0} | {f"seconds/{name}": 2.0 for name in grpo_step.PHASES}
    assert grpo_step.phases_of(metrics) | {"other": 2.0} == grpo_step.phases_of(metrics)


def test_reward_curves_stand_side_by_side(tmp_path: Path) -> None:
    for name, lines in {
        "one": [{"step": 0, "eval/reward": 0.1}, {"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": None}],
        "two": [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = {name: reward_curves.curve(tmp_path / name, "reward/mean") for name in ("one", "two")}
    assert reward_curves.table(curves).splitlines() == [
        "| step | one | two |",
        "| ---: | ---: | ---: |",
        "| 1 | 0.250 | 0.500 |",
        "| 2 |  | 0.750 |",
    ]
    with pytest.raises(ValueError, match="no finished step has eval/loss"):
        reward_curves.curve(tmp_path / "one", "eval/loss")
