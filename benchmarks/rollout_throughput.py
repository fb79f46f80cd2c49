"""Tokens per second streamed through the orchestrator, against bare vLLM on the same prompts and seeds.

    python -m benchmarks.rollout_throughput --groups 16 --samples 8 --max-tokens 32
    python -m benchmarks.rollout_throughput --sweep concurrency=16,32,64 --sweep engines=1,2
    python -m benchmarks.rollout_throughput --lengths long-tail --training

The product samples on its own path: Ray actors, engine pool, scheduler, `RolloutWorker.generate`, Arrow tables in the
object store. Only scoring is left out. Baselines: `LLM.generate` and `AsyncLLM`, with the same engine arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bare_engines import BareAsyncLLM, BareLLM, Sampled
from benchmarks.harness import NotCorrect, Report, Turn, best, carry_out, take_turns
from benchmarks.processes import Child, Meter, stopped
from benchmarks.sweep import named, points, swept
from benchmarks.training_load import Beside, TrainingLoad
from benchmarks.workload import Group, Settings, add_settings, encoded, group, lengths_of, spec, turns_of, without_end
from orchestrator.prompts import load_pools
from workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from benchmarks.streaming import Streaming

BARE: dict[str, type] = {"LLM.generate": BareLLM, "AsyncLLM": BareAsyncLLM}
PRODUCT = "troupe"
CHECKED_PROMPTS = 4
START_TIMEOUT_S, TURN_TIMEOUT_S = 300.0, 300.0


class Bare:
    """One baseline: as many engines as the product has, each with its share of the groups."""

    def __init__(self, name: str, children: Sequence[Child]) -> None:
        self._name = name
        self._children = children

    @property
    def pids(self) -> list[int]:
        """Its processes' ids."""
        return [child.pid for child in self._children]

    async def turn(self, groups: Sequence[Group]) -> tuple[Turn, list[list[int]]]:
        """One turn, and the response token ids in the order of the groups' samples."""
        return await asyncio.to_thread(self._turn, groups)

    def _turn(self, groups: Sequence[Group]) -> tuple[Turn, list[list[int]]]:
        count = len(self._children)
        meter = Meter(self.pids)
        for number, child in enumerate(self._children):
            child.send("sample", groups[number::count])
        parts: list[Sampled] = [child.receive(TURN_TIMEOUT_S) for child in self._children]
        cpu_s, foreign = meter.read()
        wall_s = max(part.ended for part in parts) - min(part.began for part in parts)
        ids: list[list[int]] = []
        taken = [iter(part.response_ids) for part in parts]
        for number, one in enumerate(groups):
            ids += [next(taken[number % count]) for _ in range(one.samples)]
        return Turn(wall_s, sum(map(len, ids)), cpu_s, foreign), ids

    async def alone(self, one: Group, greedy: bool) -> list[list[int]]:
        """The group's samples on the first engine, which does nothing else."""
        answer: Sampled = await asyncio.to_thread(
            self._children[0].call, "sample", [one], greedy, timeout_s=TURN_TIMEOUT_S
        )
        return answer.response_ids


class Gate:
    """Collects what must be equal; nothing is reported unless it is."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._totals: dict[str, int] = {}
        self.checks: dict[str, str] = {}

    def turn(self, name: str, groups: Sequence[Group], ids: Sequence[Sequence[int]]) -> None:
        """`ids`: in the order of the groups' samples.

        Raises NotCorrect where a sequence is missing, or has another length than the one known beforehand.
        """
        settings = self._settings
        if len(ids) != settings.sequences:
            raise NotCorrect(f"{name} sampled {len(ids)} sequences, not {settings.sequences}")
        wanted = [length for one in groups for length in lengths_of(settings, one)]
        if settings.endless and [len(one) for one in ids] != wanted:
            raise NotCorrect(f"{name} sampled sequences of other lengths than {wanted}")
        if not all(ids):
            raise NotCorrect(f"{name} sampled an empty sequence")
        self._totals[name] = self._totals.get(name, 0) + sum(map(len, ids))

    def totals(self) -> None:
        """Raises NotCorrect where the contenders' totals of tokens are not alike."""
        least, most = min(self._totals.values()), max(self._totals.values())
        allowed = 1.0 if self._settings.endless else 1.1
        if most > allowed * least:
            raise NotCorrect(f"the contenders sampled different amounts: {self._totals}")
        self.checks["tokens sampled"] = ", ".join(f"{name} {count}" for name, count in self._totals.items())

    async def same_tokens(self, groups: Sequence[Group], alone: dict[str, Callable[..., Any]]) -> None:
        """Every contender gives the same token ids, greedy and seeded, for sequences that run alone.

        Alone, because the sums of a batch depend on what else is in it. Raises NotCorrect.
        """
        tokens = 0
        for one in groups:
            for greedy in (True, False):
                answers = {name: await sample(one, greedy) for name, sample in alone.items()}
                if len({str(ids) for ids in answers.values()}) != 1:
                    raise NotCorrect(f"greedy={greedy}: the contenders sampled different tokens: {answers}")
                tokens += sum(map(len, answers[PRODUCT]))
        self.checks["same token ids, greedy and seeded"] = f"{tokens} tokens of {len(groups)} prompts equal"


async def measure(settings: Settings, turns: int, max_load: int, training: bool, baselines: Sequence[str]) -> Report:
    """Start everybody, check, take turns; with `training` beside a process that trains. Raises NotCorrect."""
    from benchmarks.streaming import Streaming  # every engine's process imports this module, and needs no Ray

    needed = settings.groups * (turns + 1) + CHECKED_PROMPTS
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_end(settings.model, folder / "model") if settings.endless else settings.model
        run = spec(settings, model, turns + 1, needed)
        rollout = rollout_class(settings)
        pool, _ = load_pools(run.data)
        prompt_ids = encoded(model, pool.table, range(needed), longest=128)
        checked = [
            group(replace(settings, samples=1), f"check-{row}", row, prompt_ids[row]) for row in range(CHECKED_PROMPTS)
        ]
        work = turns_of(settings, turns + 1, prompt_ids, CHECKED_PROMPTS)
        children = {
            name: [Child(f"{name}-{i}", BARE[name], run.rollout_config(), rollout) for i in range(settings.engines)]
            for name in baselines
        }
        beside = Beside(Child("training-load", TrainingLoad, run.policy_config()) if training else None)
        processes = [child for members in children.values() for child in members]
        stack.callback(beside.close)
        pids = [child.pid for child in processes]
        for child in processes:
            stack.callback(child.close)
            child.send("ready")
        streaming = await stack.enter_async_context(
            Streaming.open(run, pool.table, work, [*pids, *beside.pids], max_load, rollout)
        )
        for child in processes:
            await asyncio.to_thread(child.receive, START_TIMEOUT_S)
        bare = {name: Bare(name, members) for name, members in children.items()}
        taken, best_bare, checks = await compare(turns, bare, streaming, checked, work, Gate(settings), beside)
        arguments = asdict(settings) | {"turns": turns, "max_load": streaming.max_load, "training": training}
        return Report("rollout_throughput", arguments, taken, best_bare, checks)


def measure_anew(times: int, once: Callable[[], Report], baselines: Sequence[str]) -> Report:
    """The turns of that many runs as those of one, everybody started anew for each.

    Processes of equal settings differ by a few per cent as long as they live, which more turns do not even out.
    """
    runs = [once() for _ in range(times)]
    if times == 1:
        return runs[0]
    taken = {name: [turn for run in runs for turn in run.taken[name]] for name in runs[0].taken}
    checks = {f"run {i}, {check}": found for i, run in enumerate(runs, 1) for check, found in run.checks.items()}
    arguments = runs[0].arguments | {"runs": times}
    return replace(runs[0], arguments=arguments, taken=taken, baseline=best(taken, baselines), checks=checks)


def rollout_class(settings: Settings) -> type[RolloutWorker]:
    """The product's worker, or the one in which every sample has its own bound."""
    if settings.lengths != "long-tail":
        return RolloutWorker
    from benchmarks.long_tail import LongTailRollout

    return LongTailRollout


async def compare(
    turns: int,
    bare: dict[str, Bare],
    streaming: Streaming,
    checked: Sequence[Group],
    work: Sequence[Sequence[Group]],
    gate: Gate,
    beside: Beside,
) -> tuple[dict[str, list[Turn]], str, dict[str, str]]:
    """The checks and the turns: (turns of each contender, the better baseline, outcome of the checks)."""
    alone: dict[str, Callable[..., Any]] = {name: contender.alone for name, contender in bare.items()}
    await gate.same_tokens(checked, alone | {PRODUCT: streaming.alone})

    everyone = {name: contender.pids for name, contender in bare.items()}
    baselines = [pid for pids in everyone.values() for pid in pids]

    def contender(name: str) -> Callable[[int], Any]:
        async def take(turn: int) -> Turn:
            if name == PRODUCT:
                with stopped(baselines):
                    figures, ids = await beside.during(streaming.turn(turn))
            else:
                with stopped([os.getpid()], without=[*everyone[name], *beside.pids]):
                    figures, ids = await beside.during(bare[name].turn(work[turn]))
            gate.turn(name, work[turn], ids)
            return figures

        return take

    taken = await take_turns({name: contender(name) for name in (*bare, PRODUCT)}, turns)
    gate.totals()
    return taken, best(taken, list(bare)), gate.checks


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout_throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = {"groups": 16, "samples": 8, "max_tokens": 32, "concurrency": 64, "engines": 1, "threads": 2}
    add_settings(parser, **defaults, turns=11, seed=17)
    add = parser.add_argument
    add(
        "--lengths",
        choices=("fixed", "long-tail", "natural"),
        default="fixed",
        help="long-tail: lognormal, one for each sample; natural: the model ends its responses",
    )
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="of every contender's engines")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--baseline", choices=BARE, help="only this one (default: both, and the better one counts)")
    add("--training", action="store_true", help="beside a process that trains all the time, for every contender")
    add("--runs", type=int, default=1, help="start everybody anew so many times; the turns of all count (default: 1)")
    add(
        "--max-load",
        type=int,
        default=0,
        help="samples an engine has yet to finish, queued ones too (0: as troupe decides)",
    )
    add(
        "--sweep",
        type=swept,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="measure for each of these values, a table and a file for each; may be repeated",
    )
    given = parser.parse_args(arguments)
    default: dict[str, int] = {"engines": given.engines}
    engines = max((default | point)["engines"] for point in points(given.sweep))
    if given.device == "cuda" and (given.training or engines > 1):
        parser.error("--device cuda takes one engine and no --training: all baselines use one GPU, the load the CPU")
    if given.runs < 1:
        parser.error("--runs takes at least 1")
    return given


def main() -> None:
    """Measure, print, write: once for every point of the sweep."""
    given = vars(parse(sys.argv[1:]))
    turns, runs, max_load, path = (given.pop(name) for name in ("turns", "runs", "max_load", "json"))
    training, sweeps, baseline = given.pop("training"), given.pop("sweep"), given.pop("baseline")
    baselines = list(BARE) if baseline is None else [baseline]
    for point in points(sweeps):
        settings = replace(Settings(**given), **point)

        def run(settings: Settings = settings) -> Report:
            return asyncio.run(measure(settings, turns, max_load, training, baselines))

        carry_out(lambda run=run: measure_anew(runs, run, baselines), named(path, point))


if __name__ == "__main__":
    main()
