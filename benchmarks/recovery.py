"""From the death of an engine until all it held is sampled again, against the start of a bare engine.

    python -m benchmarks.recovery --turns 5

The product's side is its own path: an engine's process is killed with -9 while it samples; the pool notices, brings up
a fresh engine with the weights as they are, and the scheduler samples the groups anew. The baseline is a new process in
which a bare `AsyncLLM` starts and samples the same groups: nobody recovers sooner than an engine starts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bare_engines import BareAsyncLLM, Sampled
from benchmarks.harness import NotCorrect, Report, Turn, Unit, carry_out, take_turns
from benchmarks.processes import Child, Meter, stopped
from benchmarks.weight_sync import MAX_GAP, MIN_CHANGE
from benchmarks.workload import Group, Settings, add_settings, check_lengths, encoded, spec, turns_of, without_end
from orchestrator.prompts import load_pools
from workers.config import RolloutConfig
from workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from benchmarks.recovery_stage import Recovered

COLD, PRODUCT = "cold start", "troupe"
ENGINES = Unit("engines", "engine", digits=3)
_TIMEOUT_S = 300.0
_LONGEST_PROMPT = 128


class Gate:
    """What must be right after every recovery; nothing is reported unless it is."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._gaps: list[float] = []
        self._stale: list[float] = []
        self._retried = 0

    def turn(self, found: Recovered) -> None:
        """Raises NotCorrect where anything was lost, or sampled from other weights than the trainer's."""
        settings = self._settings
        check_lengths(PRODUCT, [found.response_ids], settings)
        if (found.retried, found.restarts) != (settings.groups, 1):
            raise NotCorrect(
                f"{found.retried} of {settings.groups} groups were sampled again on {found.restarts} fresh engines: "
                "the engine did not die in the middle of all of them"
            )
        self._retried += found.retried
        whole = {"trained": self._retried * settings.samples, "dropped": 0, "in_flight": 0}
        if found.books != found.books | whole:
            raise NotCorrect(f"the ledger has {found.books}, not {whole}")
        if not (found.gap <= MAX_GAP and MIN_CHANGE * found.gap < found.stale):
            raise NotCorrect(
                f"what the fresh engine sampled is {found.gap:.4f} nats a token from the trainer's weights, and "
                f"{found.stale:.4f} from those it started with"
            )
        self._gaps.append(found.gap)
        self._stale.append(found.stale)

    def checks(self) -> dict[str, str]:
        """What was found."""
        return {
            "nothing lost": f"{self._retried} groups of {self._settings.samples} samples were sampled again, each once",
            "sampler to trainer": f"{max(self._gaps):.4f} nats a token at most on fresh engines, "
            f"{min(self._stale):.4f} at least from the weights they started with",
        }


def cold_start(config: RolloutConfig, groups: Sequence[Group], settings: Settings) -> Turn:
    """From nothing to the samples of all groups by a bare engine. Raises NotCorrect, ChildFailed."""
    meter, began = Meter([os.getpid()]), time.monotonic()
    child = Child("cold-start", BareAsyncLLM, config, RolloutWorker)
    try:
        sampled: Sampled = child.call("sample", groups, timeout_s=_TIMEOUT_S)
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()
    finally:
        child.close()
    check_lengths(COLD, [sampled.response_ids], settings)
    return Turn(wall_s, 1, cpu_s, foreign)


async def measure(settings: Settings, turns: int) -> Report:
    """Start the product, take turns, check each. Raises NotCorrect."""
    from benchmarks.recovery_stage import RecoveryStage  # every engine's process imports this module, and needs no Ray

    prompts = settings.groups * (turns + 1)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_end(settings.model, folder / "model")
        run = spec(settings, model, turns + 1, prompts)
        pool, _ = load_pools(run.data)
        prompt_ids = encoded(model, pool.table, range(prompts), _LONGEST_PROMPT)
        work = turns_of(settings, turns + 1, prompt_ids)
        stage = await stack.enter_async_context(RecoveryStage.open(run, pool.table, work))
        gate = Gate(settings)

        async def recover(turn: int) -> Turn:
            found = await stage.turn(turn, settings.seed + turn)
            gate.turn(found)
            return found.turn

        async def start(turn: int) -> Turn:
            with stopped([os.getpid()]):
                return await asyncio.to_thread(cold_start, run.rollout_config(), work[turn], settings)

        taken = await take_turns({COLD: start, PRODUCT: recover}, turns)
    return Report("recovery", asdict(settings) | {"turns": turns}, taken, COLD, gate.checks(), ENGINES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_settings(parser, groups=2, samples=4, max_tokens=32, threads=2, turns=5, seed=17)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    given = vars(parse(sys.argv[1:]))
    turns, path = given.pop("turns"), given.pop("json")
    settings = Settings(**given, lengths="fixed", concurrency=64, engines=1)
    carry_out(lambda: asyncio.run(measure(settings, turns)), path)


if __name__ == "__main__":
    main()
