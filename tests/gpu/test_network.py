"""All GPUs of the machine add up a tensor, as the ranks of a group over several nodes do when they start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist

from tests.conftest import ROOT, gpus
from tests.gpu.isolated import Measurements, isolated
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.config_base import Device
from troupe.workers.training.group import LOOPBACK, all_reduce_line, join_group, leave_group, open_store

_LINE = re.compile(r"an all-reduce of (\d+) MiB over (\d+) ranks runs at (\S+) GB/s a rank")
NCCL_LOG = """\
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:2 [0] NCCL INFO Channel 00 : 1[1] -> 2[2] via SHM/direct/direct
host:1:2 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[0] [send] via NET/IB/0/GDRDMA
host:1:2 [0] NCCL INFO NVLS multicast support is available on dev 0
"""


def test_the_transports_are_those_that_nccl_names() -> None:
    assert transports(NCCL_LOG) == ["NET/IB", "P2P/CUMEM", "SHM/direct"]
    assert transports("") == []


@pytest.mark.long
def test_two_ranks_on_the_cpu_add_up(tmp_path: Path, measured: Callable[[Measurements], None]) -> None:
    found = measure("cpu", "2", str(tmp_path))
    assert (found["MiB"], found["ranks"]) == (4, 2) and float(found["GB/s a rank"]) > 0
    measured(found)


@pytest.mark.gpu(2)
def test_the_gpus_of_the_machine_add_up(tmp_path: Path, measured: Callable[[Measurements], None]) -> None:
    found = isolated(tmp_path, measure, "cuda", str(len(gpus().gpus)), str(tmp_path))
    assert float(found["GB/s a rank"]) > 0
    measured(found)
    assert found["transports"] and "NET" not in str(found["transports"]), "GPUs of one machine need no network"


def measure(device: str, ranks: str, folder: str) -> Measurements:
    """Start a process for each rank, and read what they print and what NCCL logs."""
    store, count = open_store(LOOPBACK), int(ranks)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cards = visible.split(",") if visible else [str(number) for number in range(count)]
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}
    command = (sys.executable, "-m", __spec__.name, device, str(store.port), ranks)
    started = [
        subprocess.Popen(
            (*command, str(rank)),
            cwd=ROOT,
            env=os.environ | log | ({"CUDA_VISIBLE_DEVICES": cards[rank]} if device == "cuda" else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        lines = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started)
    match = _LINE.search(lines[0])
    assert match is not None, lines
    logs = "".join(file.read_text() for file in Path(folder).glob("nccl.*"))
    size, taking, rate = match.groups()
    found: Measurements = {"MiB": int(size), "ranks": int(taking), "GB/s a rank": float(rate)}
    return {**found, "transports": ", ".join(transports(logs))}


def transports(log: str) -> list[str]:
    """How NCCL connects ranks, by its log: P2P over NVLink or PCIe, SHM through host memory, NET over a network."""
    return sorted(set(re.findall(r" via ((?:P2P|SHM|NET)/\w+)", log)))


def main(device: Device, port: str, ranks: str, rank: str) -> None:
    """Join the group and print how fast it is."""
    rendezvous = Rendezvous(address=LOOPBACK, port=int(port), rank=int(rank), world_size=int(ranks))
    join_group(rendezvous, device)
    print(all_reduce_line(device))
    dist.barrier()  # a rank that leaves while another still works ends it
    leave_group()


if __name__ == "__main__":
    main(cast("Device", sys.argv[1]), *sys.argv[2:])
