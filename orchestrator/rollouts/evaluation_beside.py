"""Held-out evaluation while training continues: on one engine, which keeps the evaluated weights until it has ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

from troupe.orchestrator.errors import EvaluationLost, WorkerError
from troupe.orchestrator.pools.engines import Engine, EnginePool
from troupe.orchestrator.rollouts.evaluation import ATTEMPTS, Evaluator, Sampler
from troupe.workers.contract.messages import GroupRequest, GroupSummary
from troupe.workers.contract.roles import TableRef

logger = logging.getLogger(__name__)


def held_sampler(pool: EnginePool, engine: Engine, version: int) -> Sampler:
    """Samples on an engine that is held at a version, as many prompts at a time as it has room for.

    Raises EvaluationLost if the engine is lost or leaves, or tokens are of another version; the WorkerError of the
    last attempt if it fails otherwise.
    """
    turn = asyncio.Lock()

    async def sample(request: GroupRequest, prompts: TableRef) -> tuple[GroupSummary, TableRef]:
        for attempt in itertools.count(1):
            async with turn:
                reserved = await pool.reserve(engine, request.samples)
            if not reserved:
                break
            try:
                summary, rollouts = await pool.generate(request, prompts, engine)
            except WorkerError as error:
                await pool.report_failure(engine, error)
                if engine in pool.engines and attempt >= ATTEMPTS:
                    raise
                continue
            finally:
                await pool.release(engine, request.samples)
            if any({one.oldest_version, one.newest_version} != {version} for one in summary.samples):
                raise EvaluationLost(f"{engine.name} has received other weights")
            return summary, rollouts
        raise EvaluationLost(f"{engine.name} is lost, or leaves")

    return sample


class EvaluationBeside:
    """Evaluates the weights that the engines serve, while training continues on all engines but one."""

    def __init__(self, evaluator: Evaluator, pool: EnginePool) -> None:
        self._evaluator = evaluator
        self._pool = pool

    async def begin(self, step: int) -> Coroutine[Any, Any, dict[str, float]] | None:
        """Takes an engine for an evaluation, after the previous one's has caught up; None if no engine can be spared.

        Args:
            step: Steps that the weights which the engines serve were trained for, their version.

        Returns:
            The coroutine of `Evaluator.run`. It raises EvaluationLost if its engine is lost and no
            other one has the version.
        """
        await self._pool.none_held()
        engine = self._pool.hold()
        return None if engine is None else self._run(step, engine)

    async def _run(self, step: int, engine: Engine) -> dict[str, float]:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._evaluator.run(step, sample=held_sampler(self._pool, engine, step))
            except EvaluationLost as error:
                other = self._pool.hold() if self._pool.version == step and attempt < ATTEMPTS else None
                if other is None:
                    raise
                logger.warning("the evaluation of step %d begins again on %s: %s", step, other.name, error)
            finally:
                self._pool.let_go(engine)
            engine = other
