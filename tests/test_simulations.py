"""The benchmarks that simulate their stages, and that of the data plane, shrunken: what they refuse, and their sums."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from benchmarks import data_plane
from benchmarks.controller_cost import WARM_STEPS, controller_turn
from benchmarks.controller_scale import Load, Waits, scale_turn
from benchmarks.harness import NotCorrect
from benchmarks.pipeline_bubble import LONGEST, Times, measured_steps, pipeline_turn, row_of, stages_s
from benchmarks.simulated import Shape, SimPolicy, Simulation, Stage, Table, check
from orchestrator.controller import RunOutcome
from orchestrator.prompts import PromptPick
from workers.messages import GroupRequest, PrepareRequest, RankPlan, TrainSummary, UpdateMetrics

SHAPE = Shape(engines=3, slots=2, groups=6, samples=4, staleness=1, steps=5)


async def run(policy: SimPolicy, shape: Shape = SHAPE) -> RunOutcome:
    outcome, _ = await Simulation(shape, Stage.local(shape, policy)).run()
    return outcome


async def test_a_run_over_stages_without_work_trains_every_sequence() -> None:
    turn = await controller_turn(SHAPE, lambda policy: Stage.local(SHAPE, policy))
    assert turn.amount == (SHAPE.steps - WARM_STEPS - 1) * 24
    assert turn.wall_s > 0 and turn.cpu_s > 0


async def test_lost_and_doubled_sequences_are_refused() -> None:
    class Forgetful(SimPolicy):
        async def update(self, plan: RankPlan, batch: Table) -> UpdateMetrics:
            metrics = await super().update(plan, batch)
            self.rows[-1] -= 1
            return metrics

    class Repeating(SimPolicy):
        async def prepare(self, request: PrepareRequest, *tables: Table) -> tuple[TrainSummary, Table]:
            answer = await super().prepare(request, *tables)
            self.kept[-1] = self.kept[0]
            return answer

    for policy, message in ((Forgetful(), "left some out"), (Repeating(), "trained twice")):
        with pytest.raises(NotCorrect, match=message):
            check(SHAPE, await run(policy), policy)
    policy = SimPolicy()
    outcome = await run(policy)
    check(SHAPE, outcome, policy)
    for wrong in ({"trained": 119, "dropped": 1}, {"trained": 112, "in_flight": 8}, {"dispatched": 121}):
        with pytest.raises(NotCorrect, match="books"):
            check(SHAPE, replace(outcome, ledger=outcome.ledger | wrong), policy)


async def test_a_run_that_is_stopped_has_the_rest_in_flight() -> None:
    policy, shape = SimPolicy(), replace(SHAPE, steps=50)
    simulation = Simulation(shape, Stage.local(shape, policy))
    simulation.on_prompt = lambda pick: simulation.stop.set() if len(policy.kept) == 3 else None
    outcome, _ = await simulation.run()
    assert outcome.stopped and outcome.ledger["in_flight"]
    check(replace(shape, steps=outcome.steps_done), outcome, policy)


def test_times_are_the_prompts_own_and_have_a_long_tail() -> None:
    times = Times(0.1, 0.15, 3)
    drawn = [times.of(row) for row in range(4000)]
    assert drawn[:5] == [times.of(row) for row in range(5)] != [Times(0.1, 0.15, 4).of(row) for row in range(5)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.1, rel=0.1)
    assert max(drawn) == pytest.approx(0.1 * LONGEST) and min(drawn) < 0.02


def test_the_bound_counts_slots_and_steady_steps() -> None:
    times = Times(0.1, 0.15, 3)
    generate_s, train_s = stages_s(SHAPE, times, [[1, 2], [3]])
    assert generate_s == pytest.approx((times.of(1) + times.of(2) + times.of(3)) / 6)
    assert train_s == pytest.approx(0.3)
    assert list(measured_steps(replace(SHAPE, staleness=1, steps=9))) == [2, 3, 4, 5, 6]
    assert row_of("e12-r345") == 345


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_pipeline_of_waiting_stages_does_not_beat_its_bound_by_more_than_its_edges(staleness: int) -> None:
    shape = replace(SHAPE, staleness=staleness, steps=10)
    turn = await pipeline_turn(shape, Times(0.004, 0.004, 3))
    assert turn.wall_s > 0 and 0.0 < turn.rate < 1.5
    steps = len(measured_steps(shape))
    figures = turn.figures
    assert turn.amount == pytest.approx(steps * max(figures["R of a step, s"], figures["T of a step, s"]))
    assert turn.wall_s == pytest.approx(steps * figures["step, s"])


async def test_engines_that_die_are_replaced_and_counted() -> None:
    load = Load(2, saturated_groups=60, paced_groups=10, paced_steps=3, groups_per_s=2000.0, fault_every=8)
    turn = await scale_turn(20, load, seed=1)
    assert turn.amount == 60 * 2 and turn.figures["engines that died"] > 3
    assert turn.figures["dispatches"] > 0 and turn.figures["p50 dispatch, ms"] <= turn.figures["p99 dispatch, ms"]


def test_an_engine_waits_for_a_group_that_is_there() -> None:
    waits = Waits()
    waits.drawn(PromptPick("a", 0))
    request = GroupRequest("a", 0, 0, 1, 1)
    waits.begins("new", request)
    assert waits.seconds == []  # its first group: the fill is not measured
    drawn = waits.drawn_at["a"]
    waits.free_since |= {"early": drawn - 100.0, "late": drawn + 0.0}
    waits.begins("early", request)
    waits.begins("late", request)
    assert 0.0 <= waits.seconds[0] <= waits.seconds[1] < 100.0


def test_what_is_pickled_is_copied_twice() -> None:
    small, large = data_plane.rollouts_table(8, 2000, 1), data_plane.train_table(64, 5000, 1)
    assert 2.0 <= data_plane.Copies.of(small, small).put < 2.1  # into one stream, and its pickle counts
    assert 1.0 <= data_plane.Copies.of(large, large).put < 1.01
    assert data_plane.bytes_in_place(large) == 0 and data_plane.Copies.of(large, large).get > 1.0


def test_reading_sees_every_byte() -> None:
    table = data_plane.train_table(8, 37, 1)
    assert data_plane.read(table) == data_plane.read(data_plane.train_table(8, 37, 1))
    column = table.schema.get_field_index("reward")
    last = [*table["reward"].to_pylist()[:-1], 7.0]
    changed = table.set_column(column, table.schema.field(column), pa.array(last))
    assert data_plane.read(changed) != data_plane.read(table)
    tensors = data_plane.tensors_of(table)
    assert set(tensors) == {
        "prompt_ids",
        "response_ids",
        "loss_mask",
        "rollout_logprobs",
        "old_logprobs",
        "advantages",
    }
    assert data_plane.tensor_bytes(tensors) == 8 * (6 * 8 + data_plane.PROMPT_TOKENS * 8 + 37 * (8 + 1 + 3 * 4))
