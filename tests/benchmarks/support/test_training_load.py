"""The training load in the background of a turn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.support.harness import Turn
from benchmarks.support.processes import RemoteObject
from benchmarks.support.training_load import RESPONSE_TOKENS, BackgroundLoad, TrainingLoad
from benchmarks.support.workload import grpo_spec
from tests.benchmarks.settings import SETTINGS
from troupe.orchestrator.roles.settings import policy_config

TURN = Turn(2.0, 10.0, 1.0, 0.0)


async def test_nothing_is_measured_without_a_load() -> None:
    async def turn() -> tuple[Turn, list[int]]:
        return TURN, [1]

    assert await BackgroundLoad(None).during(turn()) == (TURN, [1])
    assert BackgroundLoad(None).pids == []


async def test_only_tokens_trained_during_a_turn_are_counted(tiny_model: Path) -> None:
    load = RemoteObject("training-load", TrainingLoad, policy_config(grpo_spec(SETTINGS, tiny_model, 1, 1)))
    beside = BackgroundLoad(load)

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
