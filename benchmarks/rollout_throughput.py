"""Tokens per second streamed through the orchestrator, against bare vLLM on the same prompts and seeds.

    python -m benchmarks.rollout_throughput --groups 16 --samples 8 --max-tokens 32
    python -m benchmarks.rollout_throughput --lengths long-tail

The product samples through its own Ray actors, engine pool, scheduler, `RolloutWorker.generate` and Arrow tables in the
object store; only scoring is left out. The baselines are `LLM.generate` and `AsyncLLM` with the same engine arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support.bare_engines import BareAsyncLLM, BareLLM, SampledBatch
from benchmarks.support.harness import NotCorrect, Report, Turn, best, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter, RemoteObject, stopped
from benchmarks.support.workload import (
    Group,
    Settings,
    add_settings,
    encode_prompts,
    group,
    groups_by_turn,
    grpo_spec,
    response_lengths,
    without_eos,
)
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.roles.settings import rollout_config
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from benchmarks.support.rollout_setup import RolloutSetup

BARE: dict[str, type] = {"LLM.generate": BareLLM, "AsyncLLM": BareAsyncLLM}
PRODUCT = "troupe"
CHECKED_PROMPTS = 4
START_TIMEOUT_S, TURN_TIMEOUT_S = 300.0, 300.0


class Bare:
    """A baseline with as many engines as the product; each engine samples its share of the groups."""

    def __init__(self, name: str, children: Sequence[RemoteObject]) -> None:
        self._name = name
        self._children = children

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines."""
        return [child.pid for child in self._children]

    async def turn(self, groups: Sequence[Group]) -> tuple[Turn, list[list[int]]]:
        """Run one turn; returns it and the response token ids, in the order of the groups' samples."""
        return await asyncio.to_thread(self._turn, groups)

    def _turn(self, groups: Sequence[Group]) -> tuple[Turn, list[list[int]]]:
        count = len(self._children)
        meter = Meter(self.pids)
        for number, child in enumerate(self._children):
            child.send("sample", groups[number::count])
        parts: list[SampledBatch] = [child.receive(TURN_TIMEOUT_S) for child in self._children]
        wall_s = max(part.ended for part in parts) - min(part.began for part in parts)
        turn = meter.turn(sum(len(row) for part in parts for row in part.response_ids), wall_s)
        ids: list[list[int]] = []
        taken = [iter(part.response_ids) for part in parts]
        for number, one in enumerate(groups):
            ids += [next(taken[number % count]) for _ in range(one.samples)]
        return turn, ids

    async def alone(self, one: Group, greedy: bool) -> list[list[int]]:
        """Sample one group on the first engine while it is idle; returns its response token ids."""
        answer: SampledBatch = await asyncio.to_thread(
            self._children[0].call, "sample", [one], greedy, timeout_s=TURN_TIMEOUT_S
        )
        return answer.response_ids


class ThroughputGate:
    """Checks that all contenders did the same work, and collects the outcomes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._totals: dict[str, int] = {}
        self.checks: dict[str, str] = {}

    def turn(self, name: str, groups: Sequence[Group], ids: Sequence[Sequence[int]]) -> None:
        """Check one turn.

        Args:
            name: The contender.
            groups: The groups of the turn.
            ids: Response token ids, in the order of the groups' samples.

        Raises:
            NotCorrect: A sequence is missing or empty, or does not have its predetermined length.
        """
        settings = self._settings
        if len(ids) != settings.sequences:
            raise NotCorrect(f"{name} sampled {len(ids)} sequences, expected {settings.sequences}")
        wanted = [length for one in groups for length in response_lengths(settings, one)]
        if settings.endless and [len(one) for one in ids] != wanted:
            raise NotCorrect(f"{name} sampled sequences of other lengths than the expected {wanted}")
        if not all(ids):
            raise NotCorrect(f"{name} sampled an empty sequence")
        self._totals[name] = self._totals.get(name, 0) + sum(map(len, ids))

    def totals(self) -> None:
        """Compare the total tokens of the contenders. Raises NotCorrect where they differ too much."""
        least, most = min(self._totals.values()), max(self._totals.values())
        allowed = 1.0 if self._settings.endless else 1.1
        if most > allowed * least:
            raise NotCorrect(f"the contenders sampled different amounts: {self._totals}")
        self.checks["tokens sampled"] = ", ".join(f"{name} {count}" for name, count in self._totals.items())

    async def same_tokens(self, groups: Sequence[Group], alone: dict[str, Callable[..., Any]]) -> None:
        """Check that all contenders sample the same token ids, greedy and seeded, for sequences that run alone.

        Sequences run alone because the numerics of a batch depend on its other sequences.

        Args:
            groups: The groups to sample.
            alone: By contender, a function that samples one group on an idle engine.

        Raises:
            NotCorrect: Token ids differ.
        """
        tokens = 0
        for one in groups:
            for greedy in (True, False):
                answers = {name: await sample(one, greedy) for name, sample in alone.items()}
                if len({str(ids) for ids in answers.values()}) != 1:
                    raise NotCorrect(f"greedy={greedy}: the contenders sampled different tokens: {answers}")
                tokens += sum(map(len, answers[PRODUCT]))
        self.checks["same token ids, greedy and seeded"] = f"{tokens} tokens of {len(groups)} prompts equal"


async def measure_once(given: argparse.Namespace, baselines: Sequence[str]) -> Report:
    """Start all contenders, check that they sample the same tokens, and alternate their turns.

    Args:
        given: The arguments of the command.
        baselines: Names of the baselines to run (keys of BARE).

    Raises:
        NotCorrect: A check failed.
    """
    # Imported here because engine processes import this module, and they do not need Ray.
    from benchmarks.support.rollout_setup import RolloutSetup

    settings, turns = Settings.of(given), given.turns
    needed = settings.groups * (turns + 1) + CHECKED_PROMPTS
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(settings.model, folder / "model") if settings.endless else settings.model
        spec = grpo_spec(settings, model, turns + 1, needed)
        rollout = rollout_class(settings)
        pool, _ = load_pools(spec.data)
        prompt_ids = encode_prompts(model, pool.table, range(needed), settings.longest_prompt)
        checked = [
            group(replace(settings, samples=1), f"check-{row}", row, prompt_ids[row]) for row in range(CHECKED_PROMPTS)
        ]
        work = groups_by_turn(settings, turns + 1, prompt_ids, CHECKED_PROMPTS)
        children = {
            name: [
                RemoteObject(f"{name}-{i}", BARE[name], rollout_config(spec), rollout) for i in range(settings.engines)
            ]
            for name in baselines
        }
        processes = [child for members in children.values() for child in members]
        pids = [child.pid for child in processes]
        for child in processes:
            stack.callback(child.close)
            child.send("ready")
        product = await stack.enter_async_context(
            RolloutSetup.open(spec, pool.table, work, pids, given.max_load, rollout)
        )
        for child in processes:
            await asyncio.to_thread(child.receive, START_TIMEOUT_S)
        bare = {name: Bare(name, members) for name, members in children.items()}
        gate = ThroughputGate(settings)
        await gate.same_tokens(checked, {name: one.alone for name, one in bare.items()} | {PRODUCT: product.alone})
        taken = await alternate(turns, bare, product, work, gate)
        arguments = {"max_load": product.max_load}
        return Report("rollout_throughput", taken, best(taken, list(bare)), gate.checks, arguments=arguments)


def measure(given: argparse.Namespace) -> Report:
    """Measure as often as `--runs` says. Raises NotCorrect."""
    baselines = list(BARE) if given.baseline is None else [given.baseline]
    return measure_repeatedly(given.runs, lambda: asyncio.run(measure_once(given, baselines)), baselines)


def measure_repeatedly(times: int, once: Callable[[], Report], baselines: Sequence[str]) -> Report:
    """Combine the turns of several runs, each of which starts all processes again.

    Processes with equal settings differ by a few per cent for their whole life, which more turns do not average out.
    """
    runs = [once() for _ in range(times)]
    if times == 1:
        return runs[0]
    taken = {name: [turn for run in runs for turn in run.taken[name]] for name in runs[0].taken}
    checks = {f"run {i}, {check}": found for i, run in enumerate(runs, 1) for check, found in run.checks.items()}
    return replace(runs[0], taken=taken, baseline=best(taken, baselines), checks=checks)


def rollout_class(settings: Settings) -> type[RolloutWorker]:
    """The class of the rollout workers: the product's, or the one with a different length for every sample."""
    if settings.lengths != "long-tail":
        return RolloutWorker
    from benchmarks.support.long_tail import LongTailRollout

    return LongTailRollout


async def alternate(
    turns: int,
    bare: dict[str, Bare],
    product: RolloutSetup,
    work: Sequence[Sequence[Group]],
    gate: ThroughputGate,
) -> dict[str, list[Turn]]:
    """Run the turns of all contenders, each with the others suspended, and check them. Raises NotCorrect."""
    pids = {name: contender.pids for name, contender in bare.items()}
    baselines = [pid for own in pids.values() for pid in own]

    def contender(name: str) -> Callable[[int], Any]:
        async def take(turn: int) -> Turn:
            if name == PRODUCT:
                with stopped(baselines):
                    taken, ids = await product.turn(turn)
            else:
                with stopped([os.getpid()], without=pids[name]):
                    taken, ids = await bare[name].turn(work[turn])
            gate.turn(name, work[turn], ids)
            return taken

        return take

    taken = await take_turns({name: contender(name) for name in (*bare, PRODUCT)}, turns)
    gate.totals()
    return taken


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("rollout_throughput", __doc__, 11)
    defaults = {"groups": 16, "samples": 8, "max_tokens": 32, "concurrency": 64, "engines": 1, "threads": 2}
    add_settings(parser, **defaults, seed=17)
    add = parser.add_argument
    add(
        "--lengths",
        choices=("fixed", "long-tail", "natural"),
        default="fixed",
        help="fixed: all --max-tokens long; long-tail: lognormal per sample; natural: the model ends its responses",
    )
    add(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for the engines of all contenders",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--baseline", choices=BARE, help="the only baseline to run (default: both; the faster one is the baseline)")
    add(
        "--runs",
        type=int,
        default=1,
        help="start all processes again this many times and combine the turns (default: 1)",
    )
    add(
        "--max-load",
        type=int,
        default=0,
        help="maximum number of unfinished samples per engine, including queued ones (default: 0, troupe's own)",
    )
    given = parser.parse_args(arguments)
    if given.device == "cuda" and given.engines > 1:
        parser.error("--device cuda supports one engine: all contenders share one GPU")
    if given.runs < 1:
        parser.error(f"--runs must be at least 1, got {given.runs}")
    return given


if __name__ == "__main__":
    run_benchmark(parse, measure)
