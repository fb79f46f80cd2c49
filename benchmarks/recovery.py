"""Time to recover from the death of an engine, against the start of a bare engine.

    python -m benchmarks.recovery --turns 5
    python -m benchmarks.recovery --running          # on a Ray cluster that was up before

The engine's process is killed with SIGKILL while it samples. The pool detects the death and starts a new engine with
the current weights, and the scheduler samples the lost groups again; the turn ends when all of them are back. The
baseline is a new process in which a bare `AsyncLLM` starts and samples the same groups: no recovery is faster than the
start of an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.support.bare_engines import cold_start
from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import stopped
from benchmarks.support.running_head import AUTH, running_head
from benchmarks.support.workload import (
    MAX_GAP,
    MIN_CHANGE,
    Settings,
    add_settings,
    check_lengths,
    encode_prompts,
    groups_by_turn,
    grpo_spec,
    without_eos,
)
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.roles.settings import rollout_config

if TYPE_CHECKING:
    from benchmarks.support.recovery_setup import Recovered

COLD, PRODUCT = "cold start", "troupe"
ENGINES = Unit("engines", "engine", digits=3)
_TIMEOUT_S = 300.0
_LONGEST_PROMPT = 128


class RecoveryGate:
    """Checks every recovery, and collects the outcomes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._gaps: list[float] = []
        self._stale: list[float] = []
        self._retried = 0

    def turn(self, found: Recovered) -> None:
        """Check one recovery.

        Raises:
            NotCorrect: A sample was lost, or sampled from other weights than the trainer's.
        """
        settings = self._settings
        check_lengths(PRODUCT, [found.response_ids], settings)
        if (found.retried, found.restarts) != (settings.groups, 1):
            raise NotCorrect(
                f"{found.retried} of {settings.groups} groups were sampled again on {found.restarts} fresh engines: "
                "the engine did not die while it sampled all of them"
            )
        self._retried += found.retried
        whole = {"trained": self._retried * settings.samples, "dropped": 0, "in_flight": 0}
        if found.ledger != found.ledger | whole:
            raise NotCorrect(f"the ledger has {found.ledger}, expected {whole}")
        if not (found.gap <= MAX_GAP and MIN_CHANGE * found.gap < found.stale):
            raise NotCorrect(
                f"the samples of the fresh engine are {found.gap:.4f} nats per token from the trainer's weights and "
                f"{found.stale:.4f} from the weights it was loaded with"
            )
        self._gaps.append(found.gap)
        self._stale.append(found.stale)

    def checks(self) -> dict[str, str]:
        """The checks and their outcomes."""
        return {
            "nothing lost": f"{self._retried} groups of {self._settings.samples} samples were sampled again, each once",
            "sampler to trainer": f"{max(self._gaps):.4f} nats per token at most on fresh engines, "
            f"{min(self._stale):.4f} at least to the weights they were loaded with",
        }


async def measure(given: argparse.Namespace) -> Report:
    """Start the product, alternate the turns, check each of them. Raises NotCorrect."""
    if given.running and not AUTH.keys() <= os.environ.keys():  # Ray reads the mode of its tokens when it is imported
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.recovery", *sys.argv[1:]], os.environ | AUTH)
    # Imported here because engine processes import this module, and they do not need Ray.
    from benchmarks.support.recovery_setup import RecoverySetup

    settings, turns = Settings.of(given, lengths="fixed", concurrency=64, engines=1), given.turns
    prompts = settings.groups * (turns + 1)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(settings.model, folder / "model")
        spec = grpo_spec(settings, model, turns + 1, prompts)
        pool, _ = load_pools(spec.data)
        prompt_ids = encode_prompts(model, pool.table, range(prompts), _LONGEST_PROMPT)
        work = groups_by_turn(settings, turns + 1, prompt_ids)
        roots = [os.getpid()]
        if given.running:
            head = stack.enter_context(running_head())
            os.environ["RAY_ADDRESS"] = head.address
            roots.append(head.process.pid)
        setup = await stack.enter_async_context(RecoverySetup.open(spec, pool.table, work, roots))
        gate = RecoveryGate(settings)

        async def recover(turn: int) -> Turn:
            found = await setup.turn(turn, settings.seed + turn)
            gate.turn(found)
            return found.turn

        async def start(turn: int) -> Turn:
            with stopped([os.getpid()]):
                found, sampled = await asyncio.to_thread(cold_start, rollout_config(spec), work[turn], _TIMEOUT_S)
            check_lengths(COLD, [sampled.response_ids], settings)
            return found

        taken = await take_turns({COLD: start, PRODUCT: recover}, turns)
    return Report("recovery", taken, COLD, gate.checks(), ENGINES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("recovery", __doc__, 5)
    parser.add_argument("--running", action="store_true", help="join a Ray head that was up before")
    add_settings(parser, groups=2, samples=4, max_tokens=32, threads=2, seed=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
