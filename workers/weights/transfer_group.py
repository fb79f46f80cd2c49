"""The process group of a transfer: the sender has rank 0, every engine process has one of the others.

It is separate from the trainers' and the engines' own groups. NCCL connects GPUs; gloo connects hosts, and runs the
same code without a GPU. Every wait is bounded and ends as soon as the caller sees that another member failed.

NCCL does not notify a member that another one is gone. So a member that leaves writes this to the group's store. The
sender holds it, and receivers read it while they wait: a store that does not answer means that the sender is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: it is documented

logger = logging.getLogger(__name__)

T = TypeVar("T")

BOUND_S = 120.0
"""Longest wait for all members to join, and for the broadcast of one bucket."""
_GREETING = 4711
_POLL_S = 0.0005
_WATCH_S = 0.2
"""Interval at which a waiting receiver checks for members that have left."""
_ABORT_S = 5.0
"""Longest wait for a communicator to be freed. Within a node, NCCL may wait until every member frees its own."""
_LEFT = "left"
_PATIENCE = timedelta(minutes=30)
"""Timeout of the library, beyond ours."""
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class TransferFailed(RuntimeError):
    """A member of a transfer group is gone, failed, or does not answer."""


def connect_store(address: str, port: int) -> TCPStore:
    """The store that the sender has opened."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=BOUND_S))


def _nothing() -> None:
    """No member reports failures."""


class TransferGroup:
    """This process's membership in a transfer group."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        size: int,
        device: torch.device,
        check: Callable[[], None] = _nothing,
        bound_s: float = BOUND_S,
    ) -> None:
        """Join. Every member does so at the same time.

        Args:
            store: Store of the group.
            rank: Rank of this process; the sender has 0.
            size: Number of members.
            device: Device of the tensors, which decides the library: NCCL or gloo.
            check: Raises if another member has failed; called while this one waits.
            bound_s: Longest wait for the others, in seconds, here and in `broadcast`.

        Raises:
            TransferFailed: A member did not join.
        """
        self.check = check
        """Raises if another member has failed; called while this one waits."""
        self._bound_s = bound_s
        self._rank = rank
        self._store = store
        store.set(f"here/{rank}", "1")
        self._until(lambda: store.check([f"here/{other}" for other in range(size)]), "not every member has joined")
        self._group: Any = _group(store, rank, size, device)
        greeting = torch.full((1,), _GREETING if rank == 0 else 0, dtype=torch.int64, device=device)
        self.broadcast(greeting)()
        if int(greeting.item()) != _GREETING:
            raise TransferFailed("the first broadcast of the transfer group did not arrive")

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to send the tensor (rank 0) or to receive it (the others); returns the wait for its end.

        The wait raises TransferFailed if a member fails or the bound passes; the group is then of no more use.
        """
        if self._group is None:
            raise TransferFailed(f"rank {self._rank} has left the transfer group")
        work = self._group.broadcast(tensor, 0)

        def wait() -> None:
            self._until(work.is_completed, "a broadcast did not end")
            self._step(work.wait, "a broadcast failed")
            if tensor.is_cuda:
                torch.cuda.current_stream().synchronize()

        return wait

    def leave(self) -> None:
        """Leave the group and free its connections. Members that still wait for this one fail.

        The communicator is freed on a thread that is awaited for a few seconds at most. NCCL may wait there for
        the other members. Gloo's destructor waits for a broadcast that is under way, which a member that is stopped or
        lost does not let end; the next garbage collection would wait for it on any other thread.
        """
        held, self._group = [self._group], None
        if held[0] is None:
            return
        with suppress(RuntimeError):  # the sender is gone, and its store with it
            self._store.set(_LEFT, str(self._rank))
        aborted = threading.Event()

        def free() -> None:
            try:
                held[0].abort()
            except RuntimeError as error:
                logger.warning("rank %d: the transfer group was not freed: %s", self._rank, error)
            aborted.set()
            held.clear()

        threading.Thread(target=free, name="leaves a transfer group", daemon=True).start()
        if not aborted.wait(_ABORT_S):
            logger.warning("rank %d: the transfer group is not freed after %g s", self._rank, _ABORT_S)

    def _until(self, done: Callable[[], bool], failure: str) -> None:
        started = time.monotonic()
        looks = 1
        while not self._step(done, failure):
            self.check()
            waited = time.monotonic() - started
            if waited > self._bound_s:
                raise TransferFailed(f"rank {self._rank}: {failure} in {self._bound_s:g} s")
            if self._rank and waited > looks * _WATCH_S:
                looks += 1
                self._raise_if_left()
            time.sleep(_POLL_S)

    def _raise_if_left(self) -> None:
        if self._step(lambda: self._store.check([_LEFT]), "the sender is gone"):
            who = self._store.get(_LEFT).decode()
            raise TransferFailed(f"rank {self._rank}: {'the sender' if who == '0' else f'rank {who}'} has left")

    def _step(self, step: Callable[[], T], failure: str) -> T:
        try:
            return step()
        except RuntimeError as error:
            raise TransferFailed(f"rank {self._rank}: {failure}: {error}") from error


def _group(store: TCPStore, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, _PATIENCE)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    with _errors_are_ours():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """NCCL groups made here report errors instead of ending the process, which continues to serve or train."""
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before
