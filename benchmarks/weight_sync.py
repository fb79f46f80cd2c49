"""Weight sync from the trainer to the engines, against only copying and loading, and against a sync through the disk.

    python -m benchmarks.weight_sync --turns 7

The product uses its own `FileSync` (or `DeviceSync`) between its policy and engine actors and verifies every digest.
The weights change before each turn, and after it the samples of the engines must agree with the trainer.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.support.harness import GIGABYTES, NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter
from benchmarks.support.workload import (
    MAX_GAP,
    MIN_CHANGE,
    Settings,
    add_settings,
    grpo_spec,
    on_device,
    without_eos,
)
from troupe.orchestrator.spec.derived.training import resolved_backend

if TYPE_CHECKING:
    from benchmarks.support.weight_sync_setup import WeightSyncSetup

LIMIT, DISK, PRODUCT, CLOSED = "copy + load", "disk", "troupe", "troupe, pause to resume"


class SyncGate:
    """Checks every turn, and collects the outcomes."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: number of response tokens that check a turn."""
        self._tokens = tokens
        self._gaps: list[float] = []
        self._stale: list[float] = []
        self._digests: set[str] = set()

    def turn(self, name: str, stale: float, fresh: float, tokens: int) -> None:
        """Check that the engines have the new weights after a turn.

        Args:
            name: The contender.
            stale: Gap between the samples from before the turn and the trainer's new weights, in nats per token.
            fresh: Gap between the samples from after the turn and the trainer's new weights, in nats per token.
            tokens: Number of tokens sampled after the turn.

        Raises:
            NotCorrect: The engines have other weights, or the two gaps are too similar to tell.
        """
        if tokens != self._tokens:
            raise NotCorrect(f"{name}: the check sampled {tokens} tokens, expected {self._tokens}")
        if not fresh <= MAX_GAP:
            raise NotCorrect(f"{name}: sampler and trainer differ by {fresh:.4f} nats per token after the sync")
        if not MIN_CHANGE * fresh < stale:
            raise NotCorrect(
                f"{name}: the gap to the old weights ({stale:.4f} nats per token) is less than {MIN_CHANGE:g} times "
                f"the gap to the new ones ({fresh:.4f})"
            )
        self._gaps.append(fresh)
        self._stale.append(stale)

    def digest(self, digest: str) -> None:
        """Record the digest of a version. Raises NotCorrect where an earlier version has the same one."""
        if digest in self._digests:
            raise NotCorrect(f"two versions have the digest {digest}: the weights did not change between turns")
        self._digests.add(digest)

    def checks(self) -> dict[str, str]:
        """The checks and their outcomes."""
        checks = {
            "sampler to trainer": f"{max(self._gaps):.4f} nats per token at most after a sync, "
            f"{min(self._stale):.4f} at least before it, in {len(self._gaps)} turns",
        }
        if self._digests:
            checks["digests"] = f"{len(self._digests)} versions, each acknowledged by every engine process"
        return checks


class SyncContenders:
    """The turns of the three ways to sync weights."""

    def __init__(self, setup: WeightSyncSetup, gate: SyncGate, seed: int, folder: Path) -> None:
        """`folder`: a folder on a disk, for the sync through the disk."""
        self._setup = setup
        self._gate = gate
        self._seed = seed
        self._folder = folder
        self._changes = 0
        self.closed: list[Turn] = []
        """The product's turns measured from pause to resume of the engines, including the warm-up turn."""

    def turns(self) -> Mapping[str, Callable[[int], Awaitable[Turn]]]:
        """The contenders by name."""
        return {
            LIMIT: lambda _: self._checked(LIMIT, self._limit),
            DISK: lambda _: self._checked(DISK, self._disk),
            PRODUCT: lambda _: self._checked(PRODUCT, self._product),
        }

    async def _checked(self, name: str, turn: Callable[[], Awaitable[Turn]]) -> Turn:
        """Change the weights, run the turn, and check that the engines sample from the new weights."""
        self._changes += 1
        await self._setup.disturb(self._seed + self._changes)
        stale, _ = await self._setup.gap()
        await self._setup.parts()  # discard what was timed outside turns
        figures = await turn()
        await self._setup.sample()
        fresh, tokens = await self._setup.gap()
        self._gate.turn(name, stale, fresh, tokens)
        return figures

    async def _product(self) -> Turn:
        meter = Meter()
        report = await self._setup.push(self._changes)
        gigabytes = report.nbytes / 1e9
        turn = meter.turn(gigabytes)
        phases = await self._setup.parts()
        closed = phases.pop("closed", 0.0)
        if self._setup.digest:
            self._gate.digest(self._setup.digest)
        inside = sum(seconds for part, seconds in phases.items() if part != "write")
        if closed:
            phases |= {"calls inside the engine": closed - inside}
            self.closed.append(replace(turn, wall_s=closed))
        phases["calls of workers"] = turn.wall_s - sum(phases.values())
        return replace(turn, phases=phases)

    async def _limit(self) -> Turn:
        nbytes = await self._setup.hold(self._changes)
        meter = Meter()
        copied = await self._setup.copy_weights()
        applied = await self._setup.apply_held()
        return meter.turn(nbytes / 1e9, copied + applied, {"write": copied, "load": applied})

    async def _disk(self) -> Turn:
        folder = self._folder / f"version-{self._changes}"
        meter, began = Meter(), time.monotonic()
        await self._setup.export(folder)
        written_s = time.monotonic() - began
        await self._setup.reload_from(folder)
        turn = meter.turn(sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9)
        shutil.rmtree(folder)
        phases = await self._setup.parts()
        phases = {part: phases[part] for part in ("pause", "load", "resume")} | {"write": written_s}
        phases["calls of workers"] = turn.wall_s - sum(phases.values())
        return replace(turn, phases=phases)


async def measure(given: argparse.Namespace) -> Report:
    """Start the workers, alternate the turns, check each of them. Raises NotCorrect."""
    # Imported here because engine processes import this module, and they do not need Ray.
    from benchmarks.support.weight_sync_setup import WeightSyncSetup

    settings = Settings.of(given, lengths="fixed", groups=1, concurrency=64, device="cpu")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.disk)))
        plain = grpo_spec(settings, without_eos(settings.model, folder / "model"), 1, 1)
        spec = on_device(plain, given.device, given.backend)
        setup = await stack.enter_async_context(WeightSyncSetup.open(spec))
        await setup.sample()
        gate = SyncGate(settings.engines * settings.samples * settings.max_tokens)
        contenders = SyncContenders(setup, gate, settings.seed, written)
        taken = await take_turns(contenders.turns(), given.turns)
    if contenders.closed:
        taken[CLOSED] = contenders.closed[1:]
    arguments = {"backend": resolved_backend(spec)}
    return Report("weight_sync", taken, LIMIT, gate.checks(), GIGABYTES, arguments)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("weight_sync", __doc__, 7)
    add = parser.add_argument
    add_settings(parser, engines=1, threads=2, seed=17)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--backend", choices=("auto", "shm", "ipc", "nccl"), default="auto", help="ipc and nccl require --device cuda")
    add("--samples", type=int, default=4, help="samples per engine that check a turn (default: 4)")
    add("--max-tokens", type=int, default=16, help="tokens per sample (default: 16)")
    add(
        "--disk",
        type=Path,
        default=None,
        help="folder for the sync through the disk (default: the temporary directory)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
