"""What the policy's and the critic's workers share: joining the training group, checkpoints, metrics, health."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: it is documented

from workers.deepspeed_engine import (
    Device,
    StepResult,
    TrainEngine,
    all_reduce,
    join_group,
    leave_group,
    rendezvous_store,
)
from workers.losses import LossOutput
from workers.messages import Peak, UpdateMetrics, WorkerHealth
from workers.peaks import resident_peak

if TYPE_CHECKING:
    from workers.config import Rendezvous


class TrainingRank:
    """One process of a training group. Methods that touch the model are collective: all ranks call them in step."""

    def __init__(self, name: str, device: Device, model_path: str, seed: int, threads: int) -> None:
        self._name = name
        self._device: Device = device
        self._model_path = model_path
        self._seed = seed
        self._threads = threads
        self._version = 0
        self._store: TCPStore | None = None
        self._engine: TrainEngine | None = None

    @property
    def engine(self) -> TrainEngine:
        """Raises RuntimeError before `start`."""
        if self._engine is None:
            raise RuntimeError(f"{self._name} has not been started")
        return self._engine

    def rendezvous(self) -> tuple[str, int]:
        """(address, port) for the group to meet at; called on the worker that becomes rank 0, before `start`."""
        address = own_address()
        self._store = rendezvous_store(address, 0, serve=True)
        return address, self._store.port

    def join(self, rendezvous: Rendezvous) -> None:
        """Become a rank of the training group."""
        if self._engine is not None:
            raise RuntimeError(f"{self._name} has been started already")
        prepare_torch(self._threads)
        torch.manual_seed(self._seed)
        join_group(rendezvous, self._device, self._store)

    def save(self, directory: str) -> None:
        """Write this rank's part of a resumable checkpoint."""
        self.engine.save(directory)

    def load(self, directory: str) -> int:
        """Take up a checkpoint; returns the number of ranks that wrote it. It is unpickled: verify it before."""
        return self.engine.load(directory)

    def export(self, directory: str) -> None:
        """Write a Hugging Face folder with the current weights."""
        self.engine.export(directory, self._model_path)

    def export_average(self, directory: str) -> None:
        """Write a Hugging Face folder with the moving average of the weights."""
        self.engine.export_average(directory, self._model_path)

    def health(self) -> WorkerHealth:
        """A sign of life."""
        return worker_health(self._name, self._version, self._device)

    def release(self) -> None:
        """Let go of the models; this process stays in its group. Safe to call more than once."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """Release everything and leave the group; safe to call more than once."""
        self.release()
        leave_group()
        self._store = None


def update_metrics(step: StepResult, outputs: Sequence[LossOutput], device: Device, sequences: int) -> UpdateMetrics:
    """`sums`: this rank's share of the loss; `values`: means per loss token and maxima over all ranks. Collective."""
    terms, sums = (
        {name: sum(float(part[name]) for part in parts) for name in parts[0]}
        for parts in ([output.terms for output in outputs], [output.sums for output in outputs])
    )
    maxima = {name: max(float(output.maxima[name]) for output in outputs) for name in outputs[0].maxima}
    totals = all_reduce(sums, device, "sum")
    tokens = totals.pop("tokens")
    means = {name: total / max(tokens, 1.0) for name, total in totals.items()}
    values = means | all_reduce(maxima, device, "max")
    return UpdateMetrics(
        sums=terms | {"tokens": sums["tokens"], "sequences": float(sequences)},
        values=values | {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate},
        skipped=step.skipped,
        peak=own_peak(device),
    )


def worker_health(name: str, version: int, device: Device) -> WorkerHealth:
    """Health of this process."""
    return WorkerHealth(
        name=name, host=socket.gethostname(), pid=os.getpid(), version=version, in_flight=0, peak=own_peak(device)
    )


def own_peak(device: Device) -> Peak:
    """Peak of this process, with what torch allocated on its GPU."""
    return Peak(resident_peak(), torch.cuda.max_memory_allocated() if device == "cuda" else 0)


def prepare_torch(threads: int) -> None:
    """Compute threads of torch on the CPU; 0 leaves what the process was given.

    To be called before torch computes: threads that are there already go on as they were. Numbers below 1e-38 count as
    0 from then on. The gradients of a policy that has become certain are full of them, and a CPU takes fifty times
    as long for each.
    """
    torch.set_flush_denormal(True)
    if threads:
        torch.set_num_threads(threads)


def own_address() -> str:
    """The address other machines reach this one at; loopback where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only picks the outgoing interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
