"""The sleep piece of the GPU check: an engine gives memory back while a trainer updates, at both levels.

One engine and a sender on one GPU, without Ray. After a rest of its cache the engine samples the same tokens from the
same weights. After a rest of its weights it refuses to wake, until new ones are sent, and then serves these.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import torch

from deploy.gpu_check.outcome import NotRight, write_measurements
from deploy.gpu_check.transfer import TransferCheck
from troupe.workers.contract.config import RolloutConfig, Sleep
from troupe.workers.contract.units import GIB
from troupe.workers.engine.rest import StaleWake

LEAST_SHARE = {"kv_cache": 0.3, "weights": 0.5}
"""Share of the engine's memory that has to be free while it rests. With a small model most of it is the KV cache."""


class SleepCheck(TransferCheck):
    """An engine that rests."""

    def __init__(self, model: Path, level: Sleep) -> None:
        super().__init__(model, "ipc", eager=True)
        self._level: Sleep = level

    def rollout_config(self) -> RolloutConfig:
        """Configuration of an engine."""
        return super().rollout_config().model_copy(update={"sleep": self._level})

    async def run(self) -> None:
        """Rest and wake. Raises NotRight."""
        before = _free_bytes()
        self.engines = [await self.start(0)]
        await self.send_and_check("first transfer, s")
        awake = _free_bytes()
        began = time.monotonic()
        await self.engines[0].rest()
        self.measurements["rest, s"] = time.monotonic() - began
        freed, held = _free_bytes() - awake, max(1, before - awake)
        self.measurements |= {"GiB freed": freed / GIB, "share freed": freed / held}
        if freed < LEAST_SHARE[self._level] * held:
            raise NotRight(f"{self._level}: a rest freed {freed / held:.0%} of the engine's memory")
        await (self._wake() if self._level == "kv_cache" else self._wake_refused())
        await self.engines[0].rest()
        await self.send_and_check("update of an engine that rests, s")

    async def _wake(self) -> None:
        """The cache comes back, and the weights are those from before."""
        began = time.monotonic()
        await self.engines[0].wake()
        self.measurements["wake, s"] = time.monotonic() - began
        self.measurements["nats per token after waking"] = await self.gap(self.engines[0])

    async def _wake_refused(self) -> None:
        """Weights that were discarded are not sampled from."""
        try:
            await self.engines[0].wake()
        except StaleWake:
            return
        raise NotRight("an engine woke without the weights that it had discarded")


def _free_bytes() -> int:
    """Free memory of the GPU, over all processes."""
    return int(torch.cuda.mem_get_info()[0])


async def measure(model: Path) -> dict[str, float | str]:
    """Check both levels; returns the measurements. Raises NotRight."""
    found: dict[str, float | str] = {}
    levels: tuple[Sleep, ...] = ("kv_cache", "weights")
    for level in levels:
        check = SleepCheck(model, level)
        try:
            await check.run()
        finally:
            await check.close()
        found |= {f"{level}: {name}": value for name, value in check.measurements.items()}
    return found


def main() -> None:
    """Check and write the measurements; exits with code 1 where the check fails."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_check.sleep", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--json", type=Path, required=True, help="file for the measurements")
    given = parser.parse_args()
    write_measurements(given.json, lambda: asyncio.run(measure(given.model)))


if __name__ == "__main__":
    main()
