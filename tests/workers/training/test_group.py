"""Where the processes of a training group can be reached."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

import psutil
import pytest

from tests.conftest import ROOT
from troupe.workers.training.group import open_store

JOIN = """
import json, os, psutil, sys
from troupe.workers.contract.config import Rendezvous
from troupe.workers.training.group import join_group, leave_group, open_store, sequence_group
store = open_store("127.0.0.1")
join_group(Rendezvous(address="127.0.0.1", port=store.port, rank=0, world_size=1), "cpu", store)
sequence_group(1)
found = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
assert "GLOO_SOCKET_IFNAME" not in os.environ
leave_group()
print(json.dumps(found))
"""


def test_a_store_can_be_reached_at_its_address_alone() -> None:
    store = open_store("127.0.0.1")
    store.set("key", "value")
    listening = [one for one in psutil.Process().net_connections() if one.laddr and one.laddr.port == store.port]
    assert {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    assert store.get("key") == b"value"


def test_a_rank_that_needs_no_other_machine_listens_at_loopback() -> None:
    """Its store, and gloo, which is asked for no group of several ranks here."""
    done = subprocess.run([sys.executable, "-c", JOIN], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found and set(found) == {"127.0.0.1"}


NETWORK = """
import torch.distributed as dist
from troupe.workers.training.group import all_reduce_line
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
print(all_reduce_line("cpu"))
"""


def test_a_group_measures_how_fast_its_ranks_add_up() -> None:
    done = subprocess.run([sys.executable, "-c", NETWORK], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"an all-reduce of 4 MiB over 4 ranks runs at \S+ GB/s a rank", line), line
