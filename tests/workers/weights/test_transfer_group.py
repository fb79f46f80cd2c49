"""The process group of a transfer: members that stop, leave or are lost, also where no library tells the others."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.conftest import ROOT
from troupe.workers.contract.roles import EngineLink
from troupe.workers.training.group import open_store
from troupe.workers.weights import transfer_group
from troupe.workers.weights.device_sender import device_sender
from troupe.workers.weights.transfer_group import TransferFailed, TransferGroup, connect_store

ADDRESS = "127.0.0.1"
LARGE = 32 * 2**20
"""Bytes that a connection does not hold."""
MEMBER = """
import os, signal, sys, torch
from troupe.workers.weights.transfer_group import TransferGroup, connect_store
group = TransferGroup(connect_store("127.0.0.1", int(sys.argv[1])), 1, 2, torch.device("cpu"))
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_nobody_waits_for_a_broadcast_to_a_member_that_stopped_once_the_group_is_left() -> None:
    """Gloo would wait for half an hour in the next garbage collection, on whichever thread it is."""
    store = open_store(ADDRESS)
    member = subprocess.Popen([sys.executable, "-c", MEMBER, str(store.port)], cwd=ROOT)
    try:
        group = TransferGroup(store, 0, 2, torch.device("cpu"))
        os.waitid(os.P_PID, member.pid, os.WSTOPPED | os.WNOWAIT)
        wait = group.broadcast(torch.zeros(LARGE, dtype=torch.uint8))
        group.check = _engine_lost
        with pytest.raises(ConnectionError):
            wait()
        group.leave()
        with pytest.raises(TransferFailed, match="rank 0 has left"):
            group.broadcast(torch.zeros(1))
        held = [group, wait]
        del group, wait
        dropping = threading.Thread(target=lambda: (held.clear(), gc.collect()), daemon=True)
        dropping.start()
        dropping.join(10)
        assert not dropping.is_alive()
    finally:
        member.send_signal(signal.SIGKILL)
        member.wait()


def _engine_lost() -> None:
    raise ConnectionError("the engine is gone")


class SilentGroup:
    """A communicator that, like NCCL's, tells nobody that another member is gone: only the first broadcast ends."""

    def __init__(self, *, abort_ends: bool = True) -> None:
        self.broadcasts = 0
        self.abort_ends = threading.Event()
        if abort_ends:
            self.abort_ends.set()

    def broadcast(self, tensor: torch.Tensor, root: int) -> SimpleNamespace:
        """The greeting arrives; what follows is never completed."""
        if not self.broadcasts:
            tensor.fill_(transfer_group._GREETING)
        self.broadcasts += 1
        done = self.broadcasts == 1
        return SimpleNamespace(is_completed=lambda: done, wait=lambda: None)

    def abort(self) -> None:
        """Within a node, NCCL may wait for the other members here."""
        self.abort_ends.wait()


def _silent_pair(monkeypatch: pytest.MonkeyPatch) -> tuple[TransferGroup, TransferGroup]:
    """A sender and a receiver over a real store."""
    monkeypatch.setattr(transfer_group, "_group", lambda *_: SilentGroup())
    store, cpu = open_store(ADDRESS), torch.device("cpu")
    joined: list[TransferGroup] = []

    def receive() -> None:
        joined.append(TransferGroup(connect_store(ADDRESS, store.port), 1, 2, cpu, bound_s=20))

    receiver = threading.Thread(target=receive)
    receiver.start()
    sender = TransferGroup(store, 0, 2, cpu)
    receiver.join()
    return sender, joined[0]


def test_a_receiver_that_no_library_tells_learns_that_the_sender_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = _silent_pair(monkeypatch)
    wait = receiver.broadcast(torch.zeros(1))
    threading.Timer(0.1, sender.leave).start()
    with pytest.raises(TransferFailed, match=r"rank 1: the sender (has left|is gone)"):
        wait()
    receiver.leave()


def test_a_receiver_that_no_library_tells_learns_that_the_senders_process_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is lost with the process that holds it."""
    sender, receiver = _silent_pair(monkeypatch)
    wait = receiver.broadcast(torch.zeros(1))
    del sender
    gc.collect()
    with pytest.raises(TransferFailed, match="rank 1: the sender is gone"):
        wait()
    receiver.leave()


def test_one_receiver_that_fails_frees_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of one engine: vLLM returns the failure of one when all of them have ended."""
    _sender, receiver = _silent_pair(monkeypatch)
    wait = receiver.broadcast(torch.zeros(1))
    receiver._store.set("left", "2")
    with pytest.raises(TransferFailed, match="rank 1: rank 2 has left"):
        wait()


def test_a_communicator_that_is_not_freed_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 frees its communicator before it tells the engines to join again, which then free theirs."""
    monkeypatch.setattr(transfer_group, "_ABORT_S", 0.1)
    silent = SilentGroup(abort_ends=False)
    monkeypatch.setattr(transfer_group, "_group", lambda *_: silent)
    group = TransferGroup(open_store(ADDRESS), 0, 1, torch.device("cpu"))
    leaving = threading.Thread(target=group.leave, daemon=True)
    leaving.start()
    leaving.join(10)
    stuck = leaving.is_alive()
    silent.abort_ends.set()
    assert not stuck


class Absent:
    """The link to an engine that does not join."""

    processes = 1

    def join(self, info: dict[str, Any]) -> None:
        """Fail."""
        raise ConnectionError("rollout-0 is gone")


def test_the_sender_does_not_wait_for_an_engine_that_fails_to_join() -> None:
    with pytest.raises(ConnectionError, match="rollout-0 is gone"):
        device_sender("gloo", cast("EngineLink", Absent()), [("a", torch.float32, (2,))], 0, torch.device("cpu"))


def test_a_member_that_dies_while_the_group_is_formed_is_not_waited_for() -> None:
    """It has come, and never connects: gloo's constructor waits for two minutes, NCCL's first broadcast for good."""
    store = open_store(ADDRESS)
    store.add("here", 1)
    began, failures = time.monotonic(), list[BaseException]()

    def lost() -> None:
        if time.monotonic() - began > 1:
            _engine_lost()

    def receive() -> None:
        try:
            TransferGroup(connect_store(ADDRESS, store.port), 1, 3, torch.device("cpu"))
        except TransferFailed as error:
            failures.append(error)

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    with pytest.raises(ConnectionError, match="the engine is gone"):
        TransferGroup(store, 0, 3, torch.device("cpu"), check=lost)
    receiver.join(20)
    assert time.monotonic() - began < 20
    assert [str(error) for error in failures] == ["rank 1: the sender has left"]


class CountedStore:
    """A store whose members are threads, with the number of keys that they name."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.lock = threading.Lock()
        self.most = 0

    def add(self, key: str, amount: int) -> int:
        """The sum."""
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def set(self, key: str, _value: str) -> None:
        """Is there."""
        self.values[key] = 1

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        self.most = max(self.most, len(keys))
        return all(key in self.values for key in keys)

    def clone(self) -> CountedStore:
        """Another connection."""
        return self


def test_joining_names_as_many_keys_for_many_members_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "_group", lambda *_: SilentGroup())
    store, joined = CountedStore(), list[TransferGroup]()

    def join(rank: int) -> None:
        joined.append(TransferGroup(cast(Any, store), rank, 24, torch.device("cpu")))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(joined), store.values, store.most) == (24, {"here": 24, "all here": 1}, 1)


@pytest.mark.parametrize("raises", [False, True])
def test_a_broadcast_that_failed_on_a_gpu_is_named_as_one(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work has ended and its wait is silent; the weights' digest would be blamed."""
    monkeypatch.setattr(transfer_group, "_group", lambda *_: SilentGroup())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    group = TransferGroup(open_store(ADDRESS), 0, 1, torch.device("cpu"))
    error = RuntimeError("NCCL error: remote process exited")

    def exception() -> RuntimeError:
        if raises:
            raise error
        return error

    work = SimpleNamespace(is_completed=lambda: True, wait=lambda: None, exception=exception)
    with pytest.raises(TransferFailed, match="a broadcast failed: NCCL error: remote process exited"):
        group._wait(work, cast(Any, SimpleNamespace(is_cuda=True)))
