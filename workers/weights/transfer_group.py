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
from concurrent.futures import Future
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
_HERE, _ALL_HERE, _LEFT = "here", "all here", "left"
"""Keys of the store: how many have come, that all have, and one that has left."""
_PATIENCE = timedelta(minutes=30)
"""Timeout of the library, beyond ours."""
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class TransferFailed(RuntimeError):
    """A member of a transfer group is gone, failed, or does not answer."""


def connect_store(address: str, port: int) -> TCPStore:
    """The store that the sender has opened."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=BOUND_S))


class TransferGroup:
    """This process's membership in a transfer group."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        size: int,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
        bound_s: float = BOUND_S,
    ) -> None:
        """Join at the same time as all others, the sender as rank 0, by NCCL or gloo. `check` is called during waits
        of at most `bound_s` seconds, and raises if another member has failed. Raises TransferFailed."""
        self.check = check
        """Raises if another member has failed; called while this one waits."""
        self._bound_s = bound_s
        self._rank = rank
        self._store = store
        self._has_left = False
        self._group: Any = None
        try:
            if store.add(_HERE, 1) == size:
                store.set(_ALL_HERE, "1")
            self._until(lambda: store.check([_ALL_HERE]), "not every member has joined")
            self._connect(size, device)
        except BaseException:
            self.leave()
            raise

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to send (rank 0) or receive the tensor; returns the wait for its end, which raises TransferFailed if
        a member fails or the bound passes; the group is then of no more use."""
        if self._group is None:
            raise TransferFailed(f"rank {self._rank} has left the transfer group")
        work = self._group.broadcast(tensor, 0)
        return lambda: self._wait(work, tensor)

    def _wait(self, work: Any, tensor: torch.Tensor) -> None:
        self._until(work.is_completed, "a broadcast did not end")
        self._step(work.wait, "a broadcast failed")
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
            # A broadcast that failed has ended too, and its `wait` raises nothing where errors are ours.
            if (error := self._step(work.exception, "a broadcast failed")) is not None:
                raise TransferFailed(f"rank {self._rank}: a broadcast failed: {error}")

    def _connect(self, size: int, device: torch.device) -> None:
        """Form the library's group, and send a first tensor. Gloo's constructor and NCCL's first broadcast wait for
        all in C++ without a bound: on a thread, so that a member's death fails the others in time, with its own
        connection to the store, as one serves one wait after another."""
        greeting = torch.full((1,), _GREETING if self._rank == 0 else 0, dtype=torch.int64, device=device)
        connection: Any = self._store  # its type names no `clone`
        store, made = connection.clone(), Future[tuple[Any, Any]]()

        def form() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                group = _group(store, self._rank, size, device)
                made.set_result((group, group.broadcast(greeting, 0)))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=form, name="joins a transfer group", daemon=True).start()
        self._until(made.done, "not every member has connected")
        self._group, work = self._step(made.result, "the group was not formed")
        self._wait(work, greeting)
        if int(greeting.item()) != _GREETING:
            raise TransferFailed("the first broadcast of the transfer group did not arrive")

    def leave(self) -> None:
        """Leave the group; members that wait for this one fail. The communicator is freed on a thread, awaited for
        seconds: NCCL may wait there for others, and gloo's destructor for a broadcast that a lost member does not
        end; else the next garbage collection would wait on any thread."""
        held, self._group = [self._group], None
        if self._has_left:
            return
        self._has_left = True
        with suppress(RuntimeError):  # the sender is gone, and its store with it
            self._store.set(_LEFT, str(self._rank))
        if held[0] is None:
            return
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
