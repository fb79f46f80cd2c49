"""Whole runs of rows of a matrix in this process, and what holds after each of them.

Only the connection to Ray differs from `troupe run`: the runs share one cluster, and the process that their workers are
forked from, so that a run starts in seconds.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import MODELS
from tests.pairs.far_engine import FarRolloutWorker
from tests.pairs.features import Matrix
from tests.pairs.matrices import FAR, RESUMED
from tests.real.commands import ledger_balances, metrics_lines, trajectories
from tests.real.warm import forked_import_servers
from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_server import WorkerServer
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.runs import session
from troupe.orchestrator.runs.prepare import checked
from troupe.orchestrator.runs.session import RunRequest, StopSwitch
from troupe.orchestrator.runs.training import train
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.errors import Source
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.config import EngineProcess

CPUS = 16
"""Cores that the cluster says to have: workers reserve some, and share what there is."""
STEPS = 2
GAP = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Nats by which the log-probs of engine and trainer may differ under the same weights, by the type of the model."""


class _SharedServer(WorkerServer):
    """The process that workers are forked from, which outlives each run."""

    def close(self) -> None:
        """Does nothing: other runs follow."""

    def end(self) -> None:
        """End the process."""
        super().close()


@contextmanager
def shared_cluster() -> Iterator[None]:
    """While the block runs, the runs of this process use one local cluster and one server of workers."""
    with forked_import_servers():
        server = _SharedServer(EngineProcess(device="cpu", threads=1, enforce_eager=True))
    first = Cluster.connect({"CPU": float(CPUS)})
    folder = ray_nodes.connected()
    if folder is None:
        raise RuntimeError("not connected to Ray")

    @contextmanager
    def connected(request: RunRequest, roles: frozenset[str] | None) -> Iterator[Cluster]:
        cluster = Cluster(owned=False, session=folder, server=server)
        try:
            cluster.watch(request.spec.failures.stopped_s)
            yield cluster
        finally:
            cluster.abandon()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "_connected", connected)
            yield
    finally:
        first.abandon()
        server.end()


class _StoppingConsole(Console):
    """Asks its run to stop after the first step."""

    def __init__(self, stream: io.StringIO, switch: StopSwitch) -> None:
        super().__init__(stream)
        self._switch = switch

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Shows the step, and stops the run."""
        super().step(step, metrics)
        self._switch.stop()


@dataclass(frozen=True)
class Finished:
    """A run of a row that has ended."""

    spec: RunSpec
    out: Path
    outcome: RunOutcome
    output: str


def run_row(matrix: Matrix, row: Mapping[str, str], out: Path, places: Mapping[str, str]) -> Finished:
    """Train for two steps as a row says. One that is resumed is stopped after its first step."""
    spec = matrix.spec(row, **places)
    checked((PlannedRun("", spec, Source(matrix.name), out),))
    classes = {"rollout": FarRolloutWorker} if row.get("host", "").startswith(FAR) else {}
    stream, resume = io.StringIO(), row.get("end") == RESUMED
    if resume:
        switch = StopSwitch()
        stopped = train(RunRequest(spec, out, False, None, classes, switch), _StoppingConsole(stream, switch))
        assert stopped.stopped and 1 <= stopped.steps_done < STEPS, stream.getvalue()
    outcome = train(RunRequest(spec, out, resume, None, classes), Console(stream))
    return Finished(spec, out, outcome, stream.getvalue())


def check(run: Finished) -> None:
    """Require what holds after every run."""
    every = metrics_lines(run.out)
    lines = [line for line in every if "ledger/dispatched" in line]  # others are of evaluations beside the steps
    assert run.outcome.steps_done == STEPS and not run.outcome.stopped
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for line in every for value in line.values() if isinstance(value, float)), every
    _check_metrics(lines)
    _check_ledger(lines, run)
    _check_weights(run, lines)
    if run.spec.rollouts is not None:
        _check_versions(run)
        _check_samples(lines, run)


def _check_metrics(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        trained = [role for role in ("policy", "critic", "reward_model") if f"{role}/grad_norm" in line]
        # float16 skips the updates of its first, too large loss scales, which have no norm.
        skipped = {role: line[f"{role}/skipped_updates"] for role in trained}
        assert trained and all(skipped[role] == line.get(f"{role}/overflows", 0) for role in trained), line
        assert all(skipped[role] == 1 or line[f"{role}/grad_norm"] > 0 for role in trained), line


def _check_ledger(lines: list[dict[str, Any]], run: Finished) -> None:
    assert all(map(ledger_balances, lines))
    counts = run.outcome.ledger
    assert counts["in_flight"] == 0 and counts["dispatched"] == counts["trained"] + counts["dropped"], counts
    assert all(line.get("failed_samples", 0.0) == 0.0 for line in lines), run.outcome.drop_reasons
    assert counts["trained"] > 0, run.outcome.drop_reasons


def _check_versions(run: Finished) -> None:
    """Each version that was trained was published and acknowledged by each engine with its digest."""
    spec = run.spec.rollouts
    published = [event for event in RunFolder(run.out).events() if event["event"] == "weights"]
    # An engine that evaluates beside training catches up afterwards.
    held = spec.evaluation is not None and spec.evaluation.beside
    for event in published:
        workers = spec.roles.rollout.workers
        assert max(1, workers - held) <= len(event["engines"]) == event["loaded"] <= workers, event
        assert set(event["engines"].values()) == {event["digest"]}, event
    assert published[-1]["version"] == STEPS
    digests = {event["version"]: event["digest"] for event in published}
    assert len(set(digests.values())) == len(digests), "two versions have the same weights"


def _check_samples(lines: list[dict[str, Any]], run: Finished) -> None:
    spec = run.spec.rollouts
    for line in lines:
        # The tokens of a form alone are not recorded.
        comparable = spec.sampling.structured is None or spec.sampling.truncates
        if comparable and line["staleness/max"] == 0.0 and "policy/rollout_logprob_gap" in line:
            assert line["policy/rollout_logprob_gap"] < GAP[spec.model.dtype], line
        if spec.output.trajectories:
            rows = trajectories(run.out, line["step"]).to_pylist()
            versions = {span["version"] for row in rows for span in row["weight_versions"]}
            newest = line["step"] - 1
            assert newest - spec.schedule.max_staleness <= min(versions) <= max(versions) <= newest
            assert all(math.isfinite(row["reward"]) for row in rows)


def _check_weights(run: Finished, lines: list[dict[str, Any]]) -> None:
    """What the newest checkpoint holds is not what training began with, unless each update of float16 overflowed."""
    updates = run.spec.schedule.minibatches * run.spec.schedule.epochs
    moved = any(line.get("policy/overflows", 0.0) < updates for line in lines)
    folder = run.out / "checkpoints" / f"step-{STEPS:06d}" / "model"
    if run.spec.trains_adapters:
        adapters = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] == 4
        given = run.spec.model.adapter
        before = {} if given is None else load_file(Path(given) / "adapter_model.safetensors")
        halves = {name: tensor for name, tensor in adapters.items() if "lora_B" in name}
        assert halves
        for name, tensor in halves.items():
            old = before[name].float() if before else torch.zeros_like(tensor).float()
            assert torch.equal(tensor.float(), old) is not moved, name
        return
    before, after = load_file(MODELS / "tiny-llama" / "model.safetensors"), load_file(folder / "model.safetensors")
    shared = after.keys() & before.keys()
    same = [name for name in shared if torch.equal(before[name].to(after[name].dtype), after[name])]
    assert len(same) == (0 if moved else len(shared)), same
