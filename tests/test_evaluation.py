"""Held-out evaluation against fakes."""

from __future__ import annotations

import asyncio
import random

import pytest

from orchestrator.errors import WorkerDied
from orchestrator.evaluation import EvalPlan, Evaluator
from orchestrator.prompts import PromptPick
from orchestrator.scoring import RewardPool
from tests.fakes import FakeEngine, FakeHandle, FakeReward, fake_pool
from workers.config import EvalSampling


def evaluate(engine: FakeEngine, reward: FakeReward) -> dict[str, float]:
    """Four prompts, four samples each."""

    async def run() -> dict[str, float]:
        picks = tuple(PromptPick(f"eval-r{row}", row) for row in range(4))
        plan = EvalPlan(picks, EvalSampling(temperature=1.0, samples=4), 1.0, 7)
        rewards = RewardPool([FakeHandle("reward-0", reward)], 1.0)
        return await Evaluator(plan, fake_pool([engine]), rewards, None).run()

    return asyncio.run(run())


def test_accuracy_and_pass_at_k() -> None:
    """Half of the samples are right: pass@2 = 1 - C(2,2)/C(4,2) = 5/6, pass@4 = 1."""
    metrics = evaluate(FakeEngine("rollout-0", random.Random(0)), FakeReward())
    assert metrics["eval/accuracy"] == metrics["eval/reward"] == 0.5
    assert metrics["eval/pass@2"] == pytest.approx(5 / 6)
    assert metrics["eval/pass@4"] == 1.0
    assert metrics["eval/response_tokens"] == 6.5


def test_failed_and_refused_samples_are_counted_and_never_scored() -> None:
    """One prompt is refused, one sample's reward fails; neither is a zero."""
    engine = FakeEngine("rollout-0", random.Random(0), refuse_rows=frozenset({3}))
    metrics = evaluate(engine, FakeReward({("eval-r0", 0): "timeout after 5 s"}))
    assert metrics["eval/refused"] == 1
    assert metrics["eval/failed_samples"] == 1
    assert metrics["eval/accuracy"] == pytest.approx(6 / 11)


def test_a_lost_call_is_made_again_and_a_lasting_failure_is_raised() -> None:
    """A prompt is never left out of an evaluation because an engine failed."""
    assert evaluate(FakeEngine("rollout-0", random.Random(0), fail_next=2), FakeReward())["eval/prompts"] == 4
    with pytest.raises(WorkerDied, match="lost on the way"):
        evaluate(FakeEngine("rollout-0", random.Random(0), fail_next=100), FakeReward())
