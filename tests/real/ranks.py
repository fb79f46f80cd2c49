"""Processes of trainers' ranks."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from troupe.workers.contract.config import Rendezvous

if TYPE_CHECKING:
    from troupe.workers.policy import PolicyWorker

_IMPORTED_AHEAD = [
    *("troupe.workers.policy", "troupe.workers.critic", "deepspeed", "torch._dynamo", "tests.real.models"),
    *("transformers.models.llama.modeling_llama", "tests.workers.models.test_token_batch"),
    "deepspeed.runtime.zero.muon.muon_optimizer",  # compiles a function, for which it imports torch's compiler
]
"""What every rank imports, which takes six seconds."""
_SERVER = forkserver.ForkServer()
"""Beside that of engines (`workers/engine/process.py`): a fork server imports only what it is told at its start."""


class _RankProcess(ForkServerProcess):
    def start(self) -> None:
        """Start the process as a fork of the ranks' server."""
        with patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
            super().start()

    def run(self) -> None:
        """Run in the fork. DeepSpeed collects garbage for every model, and would scan all that was imported ahead."""
        gc.freeze()
        super().run()


class _RankContext(ForkServerContext):
    Process = _RankProcess


def rank_context() -> ForkServerContext:
    """Starts ranks as forks of a process that has imported what they need, and nothing else."""
    _SERVER.set_forkserver_preload(_IMPORTED_AHEAD)
    return _RankContext()


def meet(worker: PolicyWorker, rank: int, world: int, addresses: Any) -> Rendezvous:
    """Where the ranks of a group meet; rank 0 opens it and tells the others through the queue `addresses`."""
    if rank == 0:
        opened = worker.rendezvous(one_host=True)
        for _ in range(world):
            addresses.put(opened)
    address, port = addresses.get(timeout=60)
    return Rendezvous(address=address, port=port, rank=rank, world_size=world)


@contextmanager
def reported(rank: int, out: Path) -> Iterator[None]:
    """The body of a rank's process: why it failed is written to `out`."""
    try:
        yield
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


def wait_for_ranks(ranks: Sequence[BaseProcess], out: Path, timeout_s: float) -> None:
    """Wait until all ranks have ended. Fails the test where one fails, with what it has written to `error-RANK.txt`."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            break  # the others wait for it
        time.sleep(0.1)
    for process in ranks:
        process.kill()
        process.join()
    errors = "\n".join(file.read_text() for file in sorted(out.glob("error-*.txt")))
    if errors or any(process.exitcode for process in ranks):
        pytest.fail(f"exit codes {[process.exitcode for process in ranks]}\n{errors}")
