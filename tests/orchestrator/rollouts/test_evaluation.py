"""Evaluation on held-out prompts, against fakes."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.fakes import FakeReward, FakeTable, FaultyEngine, FaultyReward, FaultyWorker, fake_pool, fake_spec
from tests.orchestrator.data.test_prompts import pool_of
from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.rollouts import evaluation
from troupe.orchestrator.rollouts.evaluation import Evaluator, HeldOutSet, engine_sampler, levels_of
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.workers.contract.messages import GroupRequest


def evaluate(
    engine: FaultyEngine,
    reward: FakeReward,
    solved_at: float | None = 1.0,
    responses: Path | None = None,
    players: tuple[str, ...] = (),
) -> dict[str, float]:
    """Evaluate four prompts with four samples each (of each player), after step 30."""

    async def run() -> dict[str, float]:
        picks = tuple(PromptPick(f"eval-r{row}", row) for row in range(4))
        reward_role = {"functions": [{"name": "exact_match"}, {"name": "last_number"}]}
        sampling = {"temperature": 1.0, "samples": 4}
        data = {"train": {"kind": "jsonl", "path": "train"}, "eval": {"kind": "jsonl", "path": "eval"}}
        changes = {"sampling": sampling, "solved_at": solved_at}
        spec = fake_spec(evaluation=changes, roles={"reward": reward_role}, data=data)
        rewards = RewardPool([FaultyWorker("reward-0", reward)], 1.0)
        (settings,) = held_out_sets(spec)
        held_out = HeldOutSet(settings := replace(settings, players=players), picks, None)
        found = await Evaluator(7, [held_out], engine_sampler(fake_pool([engine])), rewards, responses).run(30)
        assert found.keys() <= {*settings.metric_names()}
        return found

    return asyncio.run(run())


def test_accuracy_and_pass_at_k() -> None:
    """Half of the samples are correct: pass@2 = 1 - C(2,2)/C(4,2) = 5/6, pass@4 = 1."""
    metrics = evaluate(FaultyEngine("rollout-0", random.Random(0)), FakeReward())
    assert metrics["eval/accuracy"] == metrics["eval/reward"] == 0.5
    assert metrics["eval/pass@2"] == pytest.approx(5 / 6)
    assert metrics["eval/pass@4"] == 1.0
    assert metrics["eval/response_tokens"] == 6.5


def test_each_player_of_a_game_has_its_own_results() -> None:
    """Rewards are 0 and 1 in turn: `first` loses every game."""
    metrics = evaluate(FaultyEngine("rollout-0", random.Random(0)), FakeReward(), players=("first", "second"))
    assert (metrics["eval/reward"], metrics["eval/accuracy"]) == (0.5, 0.5)
    found = {name.removeprefix("eval/players/"): value for name, value in metrics.items() if "/players/" in name}
    shares = {
        f"{player}/{name}": float(player == "second")
        for player in ("first", "second")
        for name in ("reward", "accuracy", "pass@2", "pass@4")
    }
    assert found == shares and "eval/pass@2" not in metrics


def test_each_set_is_evaluated_on_its_own_prompts() -> None:
    """With its sampling; sets of one, two and three prompts in tables of these sizes."""

    async def run() -> dict[str, int]:
        names = ("one", "two", "three")
        sets = {
            n: {
                "kind": "jsonl",
                "path": n,
                "sampling": {
                    "temperature": i / 2,
                    "samples": i,
                    "top_p": 1 - i / 8,
                    "top_k": i,
                    "min_p": i / 16,
                    "stop": [n],
                    "max_tokens": i,
                },
            }
            for i, n in enumerate(names, 2)
        }
        spec = fake_spec(evaluation={}, data={"train": {"kind": "jsonl", "path": "train"}, "eval": sets})
        held_out = [
            HeldOutSet(settings, [PromptPick(f"{settings.name}-r{row}", row) for row in range(size)], settings.name)
            for size, settings in enumerate(held_out_sets(spec), 1)
        ]
        rewards = RewardPool([FaultyWorker("reward-0", FakeReward())], 1.0)
        asked: list[tuple[str, Any, int]] = []
        seeds: set[int] = set()
        inner = engine_sampler(fake_pool([FaultyEngine("rollout-0", random.Random(0))]))

        async def sample(request: GroupRequest, prompts: Any) -> Any:
            asked.append((request.prompt_uid, prompts, i := request.samples))
            assert (request.temperature, request.top_p, request.top_k) == (i / 2, 1 - i / 8, i)
            assert (request.min_p, request.stop, request.max_tokens) == (i / 16, (prompts,), i)
            seeds.add(request.seed)
            return await inner(request, prompts)

        results = await Evaluator(7, held_out, sample, rewards).results(0)
        expected = [(f"{n}-r{row}", n, size + 1) for size, n in enumerate(names, 1) for row in range(size)]
        assert sorted(asked) == sorted(expected) and len(seeds) == 6
        return {name: result.prompts for name, result in results.items()}

    assert asyncio.run(run()) == {"one": 1, "two": 2, "three": 3}


def test_failed_and_refused_samples_are_counted_and_never_scored() -> None:
    """One prompt is refused and the reward of one sample fails; neither counts as reward 0."""
    engine = FaultyEngine("rollout-0", random.Random(0), refuse_rows=frozenset({3}))
    metrics = evaluate(engine, FaultyReward({("eval-r0", 0): "timeout after 5 s"}))
    assert metrics["eval/refused"] == 1
    assert metrics["eval/failed_samples"] == 1
    assert metrics["eval/accuracy"] == pytest.approx(6 / 11)


def test_a_lost_call_is_retried_and_a_lasting_failure_is_raised() -> None:
    """An evaluation never omits a prompt because an engine failed."""
    assert evaluate(FaultyEngine("rollout-0", random.Random(0), fail_next=2), FakeReward())["eval/prompts"] == 4
    with pytest.raises(WorkerDied, match="lost on the way"):
        evaluate(FaultyEngine("rollout-0", random.Random(0), fail_next=100), FakeReward())


def test_a_reward_that_does_not_say_what_is_solved_has_neither_accuracy_nor_pass_at_k() -> None:
    failing = FaultyReward({("eval-r0", 0): "timeout after 5 s"})  # prompts differ, so that there is an interval
    metrics = evaluate(FaultyEngine("rollout-0", random.Random(0)), failing, solved_at=None)
    assert metrics["eval/reward"] == pytest.approx(8 / 15)
    assert metrics.keys() == {
        f"eval/{name}"
        for name in (
            *("prompts", "refused", "failed_samples", "reward", "reward_low", "reward_high"),
            *("response_tokens", "truncated", "best@2", "best@4"),
        )
    }


class KeepingReward(FakeReward):
    """Records what it is asked to write; fails with the given error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written: list[tuple[str, int, list[str]]] = []
        self._error = error

    async def write_evaluation(self, path: str, step: int, *tables: FakeTable) -> int:
        if self._error is not None:
            raise self._error
        self.written.append((path, step, [uid for table in tables for uid in table.uids]))
        return 0


def test_the_samples_are_written_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples are two of the four prompts; rollouts and rewards of each are written."""
    reward, path = KeepingReward(), str(tmp_path / "step-000030.parquet")
    evaluate(FaultyEngine("rollout-0", random.Random(0)), reward, responses=tmp_path)
    assert reward.written == [(path, 30, [f"eval-r{row}" for row in range(4) for _ in range(2)])]
    monkeypatch.setattr(evaluation, "SAVED_SAMPLES", 8)
    evaluate(FaultyEngine("rollout-0", random.Random(0)), reward, responses=tmp_path)
    assert reward.written[1:] == [(path, 30, ["eval-r0", "eval-r0", "eval-r1", "eval-r1"])]
    evaluate(FaultyEngine("rollout-0", random.Random(0)), reward)
    assert len(reward.written) == 2


def test_an_evaluation_is_valid_where_its_samples_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = KeepingReward(WorkerDied("reward-0", "write_evaluation", "the disk is full"))
    assert evaluate(FaultyEngine("rollout-0", random.Random(0)), reward, responses=tmp_path)["eval/reward"] == 0.5
    assert "were not written" in caplog.text and "the disk is full" in caplog.text


def levels(*values: object) -> list[str]:
    """The levels of rows with these values in their metadata."""
    texts = pa.array([json.dumps({"level": value}) for value in values])
    pool = pool_of(len(values))
    column = pool.table.column_names.index("metadata")
    return levels_of(replace(pool, table=pool.table.set_column(column, "metadata", texts)), "level")


def test_a_level_is_one_short_line_without_control_characters() -> None:
    """Data are not trusted, and a level is part of the names of metrics, which are printed."""
    assert levels(3, "Level 5", None) == ["3", "Level 5", ""]
    assert levels("\x1b]0;title\x07 easy\n", "hard\x1b[2J") == ["easy", "hard"]
    assert levels("easy", "l" * 65) == []
    assert levels(*range(33)) == []
