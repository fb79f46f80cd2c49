"""The error of a forked worker that dies has its signal or exit code and the end of its log, whatever has ended it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

import pytest

from troupe.orchestrator.cluster import worker_server
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, Cluster
from troupe.orchestrator.cluster.worker_server import WorkerServer
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement
from troupe.workers.contract.config import EngineProcess
from troupe.workers.preload.forked_worker import serves

pytestmark = pytest.mark.real

TIMEOUT_S = 120.0


def raises() -> None:
    raise MemoryError


DEATHS: dict[str, Callable[[], object]] = {
    "abort": lambda: ctypes.CDLL(None).abort(),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "MemoryError": raises,
}
REASONS = {
    "abort": "(SIGABRT; its log: dies of abort (Fatal Python error: Aborted))",
    "SIGSEGV": "(SIGSEGV; its log: Fatal Python error: Segmentation fault)",
    "SIGKILL": "(SIGKILL; its log: dies of SIGKILL)",
    "exit": "(exit code 3; its log: dies of exit)",
}


class Dying:
    """A worker that dies in its constructor or in a call."""

    def __init__(self, death: str) -> None:
        serves()
        if death:
            self.die(death)

    def health(self) -> int:
        return os.getppid()

    def die(self, death: str) -> None:
        sys.stderr.write(f"dies of {death}\n")
        sys.stderr.flush()
        DEATHS[death]()

    def close(self) -> None:
        pass


async def died(cluster: Cluster, index: int, death: str, in_constructor: bool) -> str:
    placed = WorkerPlacement("policy", index, 0, 0.1, 0.0)
    placement = Placement(f"policy-{index}", ({"CPU": 0.1},), "PACK", (placed,))
    await cluster.reserve([placement], TIMEOUT_S)
    spec = ActorSpec(Dying, (death if in_constructor else "",), {})
    worker = cluster.spawn(placement, placed, f"policy-{index}", spec)
    with pytest.raises(WorkerDied) as caught:
        assert await worker.call(Dying.health, TIMEOUT_S) in forks
        await worker.call(Dying.die, TIMEOUT_S, death)
    return str(caught.value)


forks: list[int] = []


async def all_deaths() -> dict[tuple[str, bool], str]:
    server = WorkerServer(EngineProcess(device="cpu", threads=1, enforce_eager=True))
    forks.append(server._process.pid)
    cluster = Cluster.connect({"CPU": 2.0}, server=server)
    try:
        cluster.watch(5.0)
        kinds = [(death, early) for early in (False, True) for death in DEATHS if early or death in REASONS]
        found = await asyncio.gather(*(died(cluster, i, *kind) for i, kind in enumerate(kinds)))
        return dict(zip(kinds, found, strict=True))
    finally:
        cluster.abandon()


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, bool], str]:
    """The error after each kind of death."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker_server, "_ENTRY", "tests.orchestrator.light_server:serve")
        return asyncio.run(all_deaths())


@pytest.mark.parametrize("early", [False, True], ids=["call", "constructor"])
@pytest.mark.parametrize("death", DEATHS)
def test_the_error_of_a_dead_worker_has_its_signal_and_the_end_of_its_log(
    found: dict[tuple[str, bool], str], death: str, early: bool
) -> None:
    if death in REASONS:
        assert found[death, early].endswith(REASONS[death])
    elif early:
        assert "MemoryError" in found[death, early]  # an exception in a call does not end a worker
