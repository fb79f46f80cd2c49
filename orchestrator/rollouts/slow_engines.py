"""How long each engine takes for a token: a step waits for the groups of the slowest one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.run_summary import SLOW
from troupe.orchestrator.training.parts import Metrics, RunPart, UpdatedStep
from troupe.workers.contract.messages import GroupSummary, sampled_tokens

logger = logging.getLogger(__name__)

_STEPS = 3
"""Steps in a row in which the same engine is slow: one or two may be chance."""


def seconds_per_token(groups: Iterable[GroupSummary]) -> dict[str, float]:
    """Mean seconds of each engine for a token: of its groups over the tokens of their longest responses, because the
    responses of a group are sampled side by side."""
    seconds, tokens = defaultdict[str, float](float), defaultdict[str, int](int)
    for group in groups:
        if longest := max(sampled_tokens(group.samples), default=0):
            seconds[group.engine] += group.generate_s
            tokens[group.engine] += longest
    return {engine: seconds[engine] / count for engine, count in tokens.items()}


def slowest(paces: Mapping[str, float]) -> tuple[str, float] | None:
    """The slowest engine, and how many times as long as the median of the others it takes; None for a single one."""
    engine = max(paces, key=paces.__getitem__, default=None)
    others = [pace for other, pace in paces.items() if other != engine]
    if engine is None or not others or not (typical := median(others)):
        return None
    return engine, paces[engine] / typical


class SlowEngines(RunPart):
    """Names an engine that stays slower than the others, once, with its node."""

    def __init__(
        self, groups: Callable[[], Sequence[ScoredGroup]], engines: Sequence[Engine], events: EventLog
    ) -> None:
        """`groups` returns the groups of the last batch; `engines`: the pool's."""
        self._groups = groups
        self._engines = engines
        self._events = events
        self._slow, self._steps = "", 0
        """The engine that was slow in the last steps, and in how many of them."""

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        found = slowest(seconds_per_token(group.summary for group in self._groups()))
        if found is None:
            return {}
        engine, factor = found
        slow = engine if factor > SLOW else ""
        self._slow, self._steps = slow, self._steps + 1 if slow == self._slow else 1
        if slow and self._steps == _STEPS:
            node = next((one.host for one in self._engines if one.name == slow), "its node")
            detail = f"takes {factor:.1f} times as long for a token as the median of the others, on {node}"
            logger.warning("%s %s: every step waits for its groups", slow, detail)
            self._events.record("slow_engine", worker=slow, detail=detail)
        return {"rollout/slowest_engine": factor}
