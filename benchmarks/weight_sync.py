"""New weights from the trainer into the engines, against copying and loading alone, and against the way over the disk.

    python -m benchmarks.weight_sync --turns 7

The product's side is its own: `FileSync` (or `DeviceSync`), the policy's and the engines' Ray actors, every digest
verified. Before each turn the weights change, and after it the engines must sample what the trainer expects.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.harness import GIGABYTES, NotCorrect, Report, Turn, carry_out, take_turns
from benchmarks.processes import Meter
from benchmarks.workload import Backend, Settings, add_settings, on_device, spec, without_end

if TYPE_CHECKING:
    from benchmarks.weight_stage import WeightStage

LIMIT, DISK, PRODUCT, CLOSED = "copy + load", "disk", "troupe", "troupe, pause to resume"
MAX_GAP = 0.1
"""Nats between sampler and trainer per token after a sync."""
MIN_CHANGE = 2.0
"""The gap to the weights before the sync is at least so many times the gap after it, or it could not be told."""


class Gate:
    """What must be right after every turn; nothing is reported unless it is."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: response tokens of a check."""
        self._tokens = tokens
        self._gaps: list[float] = []
        self._stale: list[float] = []
        self._digests: set[str] = set()

    def turn(self, name: str, stale: float, fresh: float, tokens: int) -> None:
        """Raises NotCorrect unless the engines have the new weights.

        `stale`, `fresh`: nats a token between the trainer with the new weights and what the engines sampled before
        and after the turn.
        """
        if tokens != self._tokens:
            raise NotCorrect(f"{name}: {tokens} tokens were sampled to check it, not {self._tokens}")
        if not fresh <= MAX_GAP:
            raise NotCorrect(f"{name}: sampler and trainer are {fresh:.4f} nats a token apart after it")
        if not MIN_CHANGE * fresh < stale:
            raise NotCorrect(f"{name}: old weights ({stale:.4f} nats apart) look like new ones ({fresh:.4f})")
        self._gaps.append(fresh)
        self._stale.append(stale)

    def digest(self, digest: str) -> None:
        """Raises NotCorrect where a version has the digest of another one."""
        if digest in self._digests:
            raise NotCorrect(f"two versions have the digest {digest}: the weights did not change between turns")
        self._digests.add(digest)

    def checks(self) -> dict[str, str]:
        """What was found."""
        checks = {
            "sampler to trainer": f"{max(self._gaps):.4f} nats a token at most after a sync, "
            f"{min(self._stale):.4f} at least before it, in {len(self._gaps)} turns",
        }
        if self._digests:
            checks["digests"] = f"{len(self._digests)} versions, each acknowledged by every engine process"
        return checks


class Contenders:
    """The three ways, each as a turn."""

    def __init__(self, stage: WeightStage, gate: Gate, seed: int, folder: Path) -> None:
        """`folder`: on a disk, for the way over it."""
        self._stage = stage
        self._gate = gate
        self._seed = seed
        self._folder = folder
        self._changes = 0
        self.closed: list[Turn] = []
        """The product's turns once more, from the engines' pause to their resumption; the first is the warm-up."""

    def turns(self) -> Mapping[str, Callable[[int], Awaitable[Turn]]]:
        """By name."""
        return {
            LIMIT: lambda _: self._checked(LIMIT, self._limit),
            DISK: lambda _: self._checked(DISK, self._disk),
            PRODUCT: lambda _: self._checked(PRODUCT, self._product),
        }

    async def _checked(self, name: str, turn: Callable[[], Awaitable[Turn]]) -> Turn:
        """New weights, the turn, and whether the engines sample from them."""
        self._changes += 1
        await self._stage.disturb(self._seed + self._changes)
        stale, _ = await self._stage.gap()
        await self._stage.parts()  # what was noted meanwhile is nobody's
        figures = await turn()
        await self._stage.sample()
        fresh, tokens = await self._stage.gap()
        self._gate.turn(name, stale, fresh, tokens)
        return figures

    async def _product(self) -> Turn:
        meter, began = Meter([os.getpid()]), time.monotonic()
        report = await self._stage.push(self._changes)
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()
        phases = await self._stage.parts()
        closed = phases.pop("closed", 0.0)
        if self._stage.digest:
            self._gate.digest(self._stage.digest)
        inside = sum(seconds for part, seconds in phases.items() if part != "write")
        gigabytes = report.nbytes / 1e9
        if closed:
            phases |= {"calls inside the engine": closed - inside}
            self.closed.append(Turn(closed, gigabytes, cpu_s, foreign))
        phases["calls of workers"] = wall_s - sum(phases.values())
        return Turn(wall_s, gigabytes, cpu_s, foreign, phases)

    async def _limit(self) -> Turn:
        nbytes = await self._stage.hold(self._changes)
        meter = Meter([os.getpid()])
        copied = await self._stage.copy_weights()
        copy_cpu_s, _ = meter.read()
        meter = Meter([os.getpid()])
        applied = await self._stage.apply_held()
        cpu_s, foreign = meter.read()
        phases = {"write": copied, "load": applied}
        return Turn(copied + applied, nbytes / 1e9, copy_cpu_s + cpu_s, foreign, phases)

    async def _disk(self) -> Turn:
        folder = self._folder / f"version-{self._changes}"
        meter, began = Meter([os.getpid()]), time.monotonic()
        await self._stage.export(folder)
        written_s = time.monotonic() - began
        await self._stage.reload_from(folder)
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        shutil.rmtree(folder)
        phases = await self._stage.parts()
        phases = {part: phases[part] for part in ("pause", "load", "resume")} | {"write": written_s}
        phases["calls of workers"] = wall_s - sum(phases.values())
        return Turn(wall_s, nbytes / 1e9, cpu_s, foreign, phases)


async def measure(
    settings: Settings, turns: int, device: Literal["cpu", "cuda"], backend: Backend, disk: Path | None
) -> Report:
    """Start the workers, take turns, check each. Raises NotCorrect."""
    from benchmarks.weight_stage import WeightStage  # every engine's process imports this module, and needs no Ray

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk)))
        plan = on_device(spec(settings, without_end(settings.model, folder / "model"), 1, 1), device, backend)
        stage = await stack.enter_async_context(WeightStage.open(plan))
        await stage.sample()
        gate = Gate(settings.engines * settings.samples * settings.max_tokens)
        contenders = Contenders(stage, gate, settings.seed, written)
        taken = await take_turns(contenders.turns(), turns)
    if contenders.closed:
        taken[CLOSED] = contenders.closed[1:]
    arguments = asdict(settings) | {"turns": turns, "device": device, "backend": plan.resolved_backend()}
    return Report("weight_sync", arguments, taken, LIMIT, gate.checks(), GIGABYTES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    add = parser.add_argument
    add_settings(parser, engines=1, threads=2, turns=7, seed=17)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--backend", choices=("auto", "shm", "ipc", "nccl"), default="auto", help="ipc and nccl need --device cuda")
    add("--samples", type=int, default=4, help="samples that check a turn, on each engine")
    add("--max-tokens", type=int, default=16, help="of each of them")
    add("--disk", type=Path, default=None, help="folder for the way over the disk (default: the temporary directory)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    given = vars(parse(sys.argv[1:]))
    turns, path, disk = given.pop("turns"), given.pop("json"), given.pop("disk")
    device, backend = given.pop("device"), given.pop("backend")
    settings = Settings(**given, lengths="fixed", groups=1, concurrency=64)
    carry_out(lambda: asyncio.run(measure(settings, turns, device, backend, disk)), path)


if __name__ == "__main__":
    main()
