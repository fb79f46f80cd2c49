"""The process group of a transfer, between this process and one that stops."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.conftest import ROOT
from troupe.workers.weights.transfer_group import TransferFailed, TransferGroup, open_store

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
