"""Calls to actors, reservations and processes on real Ray, without a model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import psutil
import pyarrow as pa
import pytest
import pytest_asyncio
import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.experimental import internal_kv

from tests.processes import command_line, descendants
from troupe.orchestrator.cluster import ray_cluster
from troupe.orchestrator.cluster.actors import actor_class
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.errors import (
    ClusterUnreachable,
    DoesNotFit,
    NeverFits,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from troupe.orchestrator.plan.placement import Node, Placement, WorkerPlacement
from troupe.workers.contract.messages import WorkerGone, WorkerHealth
from troupe.workers.contract.roles import Reply, Worker

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

PLACEMENT = Placement(
    "probe", ({"CPU": 1.0, "GPU": 0.0},), "PACK", tuple(WorkerPlacement("reward", i, 0, 0.1, 0.0) for i in range(10))
)
TIMEOUT_S = 60.0
LAZY = "tests.orchestrator.cluster.lazy_worker"


class Probe:
    """A worker with the methods that the tests call."""

    def __init__(self, closed_file: str = "") -> None:
        self._closed_file = closed_file

    def pid(self) -> int:
        return os.getpid()

    def health(self) -> WorkerHealth:
        return WorkerHealth("probe", "host", os.getpid(), 0, 0)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def double(self, *tables: pa.Table) -> tuple[int, pa.Table]:
        table = pa.concat_tables([*tables, *tables])
        return table.num_rows, table

    def double_each(self, *tables: pa.Table) -> tuple[int, *tuple[pa.Table, ...]]:
        return len(tables), *[self.double(table)[1] for table in tables]

    def fail(self) -> None:
        raise ValueError("not like this\nnot at all")

    def report_gone(self) -> None:
        raise WorkerGone("my engine is gone")

    def exit(self) -> None:
        os._exit(3)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        if self._closed_file:
            Path(self._closed_file).write_text("closed")


class Waiter(Probe):
    """An asynchronous worker."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = 0
        self._all_arrived = asyncio.Event()

    async def wait_for_others(self, wanted: int) -> int:
        """Return once `wanted` calls have arrived."""
        self._arrived += 1
        if self._arrived == wanted:
            self._all_arrived.set()
        await self._all_arrived.wait()
        return self._arrived


class Broken(Probe):
    """A worker whose constructor raises."""

    def __init__(self) -> None:
        raise OSError("no such model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """A cluster started for these tests."""
    cluster = Cluster.connect({"CPU": 2.0, "GPU": 0.0})
    await cluster.reserve([PLACEMENT], TIMEOUT_S)
    yield cluster
    await cluster.close(TIMEOUT_S)
    assert not ray.is_initialized()


def spawn(cluster: Cluster, worker_class: type = Probe, *args: str, concurrent: bool = False) -> ActorWorker[Any]:
    """Start a worker on the cluster."""
    spec = ActorSpec(worker_class, args, {"TROUPE_TEST": "yes"}, concurrent)
    return cluster.spawn(PLACEMENT, PLACEMENT.workers[0], "probe-0", spec)


async def test_a_table_is_passed_between_workers_by_reference(cluster: Cluster) -> None:
    first, second = spawn(cluster), spawn(cluster)
    rows, once = await first.call_for_table(Probe.double, TIMEOUT_S, cluster.put(pa.table({"x": [1, 2]})))
    assert (rows, isinstance(once, ray.ObjectRef)) == (2 * 2, True)
    rows, twice = await second.call_for_table(Probe.double, TIMEOUT_S, once, once)
    assert rows == 16
    assert (await twice)["x"].to_pylist() == [1, 2] * 8


async def test_each_table_of_a_call_outlives_the_worker(cluster: Cluster) -> None:
    worker, rows = spawn(cluster), 200_000  # too large for the answer itself
    given = [cluster.put(pa.table({"x": [number] * rows})) for number in range(3)]
    count, tables = await worker.call_for_tables(Probe.double_each, 3, TIMEOUT_S, *given)
    worker.kill()
    with pytest.raises(WorkerDied):
        while True:  # what was sent before the signal arrives may be answered
            await worker.call_for_tables(Probe.double_each, 1, TIMEOUT_S, given[0])
    found = [await cluster.get(table, TIMEOUT_S) for table in tables]
    assert (count, [(table["x"][0].as_py(), table.num_rows) for table in found]) == (
        3,
        [(n, 2 * rows) for n in range(3)],
    )


async def test_a_started_cluster_runs_no_dashboard_and_no_monitors(cluster: Cluster) -> None:
    commands = [command_line(process) for process in descendants()]
    assert any("raylet" in command for command in commands)
    unneeded = ("log_monitor.py", "/dashboard.py", "/monitor.py")
    assert not [command for command in commands if any(name in command for name in unneeded)]


async def test_a_worker_has_its_environment_variables(cluster: Cluster) -> None:
    assert await spawn(cluster).call(Probe.variable, TIMEOUT_S, "TROUPE_TEST") == "yes"


async def test_calls_of_an_asynchronous_worker_run_concurrently(cluster: Cluster) -> None:
    worker = spawn(cluster, Waiter, concurrent=True)
    assert await asyncio.gather(*(worker.call(Waiter.wait_for_others, TIMEOUT_S, 50) for _ in range(50))) == [50] * 50


async def test_an_exception_of_a_worker_is_a_one_line_error(cluster: Cluster) -> None:
    worker = spawn(cluster)
    with pytest.raises(WorkerRaised) as caught:
        await worker.call(Probe.fail, TIMEOUT_S)
    assert str(caught.value) == "probe-0.fail: ValueError: not like this not at all"
    assert await worker.call(Probe.pid, TIMEOUT_S) > 0


async def test_a_worker_that_exits_raises_worker_died(cluster: Cluster) -> None:
    worker = spawn(cluster)
    with pytest.raises(WorkerDied, match=r"^probe-0\.exit: .*died") as caught:
        await worker.call(Probe.exit, TIMEOUT_S)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(WorkerDied):
        await worker.call(Probe.pid, TIMEOUT_S)


async def test_a_worker_that_raises_worker_gone_counts_as_dead(cluster: Cluster) -> None:
    with pytest.raises(WorkerDied, match=r"^probe-0\.report_gone: WorkerGone: my engine is gone$"):
        await spawn(cluster).call(Probe.report_gone, TIMEOUT_S)


class Answering(Worker, Protocol):
    """What the lazy workers can be asked to do."""

    def answer(self, word: str, *, mark: str = "") -> Reply[tuple[str, ...]]: ...

    def fail(self) -> Reply[None]: ...


@pytest.mark.parametrize("name", ["Lazy", "LazyCoroutines"])
async def test_a_worker_class_that_this_process_does_not_import_serves(cluster: Cluster, name: str) -> None:
    concurrent = name != "Lazy"
    lazy = actor_class(f"{LAZY}:{name}", Answering, concurrent=concurrent)
    assert (lazy.__name__, LAZY in sys.modules) == (name, False)
    worker = spawn(cluster, lazy, "a", "b", concurrent=concurrent)
    assert await worker.call(Answering.answer, TIMEOUT_S, "c", mark="!") == ("a", "b", "c!", "Lazy")
    with pytest.raises(WorkerDied, match=r"^probe-0\.fail: WorkerGone: my engine is gone$"):
        await worker.call(Answering.fail, TIMEOUT_S)
    assert LAZY not in sys.modules


async def test_a_worker_class_that_cannot_be_imported_is_named(cluster: Cluster) -> None:
    missing = spawn(cluster, actor_class(f"{LAZY}:Missing", Answering, concurrent=False))
    with pytest.raises(WorkerDied, match=f"module '{LAZY}' has no attribute 'Missing'"):
        await missing.call(Answering.answer, TIMEOUT_S, "c")


async def test_calls_to_a_killed_worker_raise_worker_died(cluster: Cluster) -> None:
    worker = spawn(cluster)
    process = psutil.Process(await worker.call(Probe.pid, TIMEOUT_S))
    call = asyncio.ensure_future(worker.call(Probe.sleep, TIMEOUT_S, TIMEOUT_S))
    await asyncio.sleep(0.5)
    worker.kill()
    worker.kill()
    with pytest.raises(WorkerDied):
        await call
    assert await has_ended(process)


async def test_a_constructor_that_raises_is_reported_with_its_error(cluster: Cluster) -> None:
    with pytest.raises(WorkerDied, match=r"^probe-0\.pid: .*OSError: no such model$") as caught:
        await spawn(cluster, Broken).call(Probe.pid, TIMEOUT_S)
    assert len(str(caught.value).splitlines()) == 1


async def test_a_call_without_an_answer_times_out(cluster: Cluster) -> None:
    worker = spawn(cluster)
    await worker.call(Probe.pid, TIMEOUT_S)
    with pytest.raises(WorkerTimeout, match=r"probe-0\.sleep: no answer in 0\.5 s"):
        await worker.call(Probe.sleep, 0.5, TIMEOUT_S)
    worker.kill()


async def test_a_reservation_that_does_not_fit_reports_requested_and_available_resources(cluster: Cluster) -> None:
    wide = Placement("policy", ({"CPU": 900.0, "GPU": 0.0},) * 2, "PACK", ())
    with pytest.raises(DoesNotFit, match=r"policy within 1 s: it asks for 2 bundle\(s\), 1800 CPU 0 GPU .* CPU 0 GPU"):
        await cluster.reserve([wide], 1.0)


@pytest.mark.parametrize(
    ("owned", "by_hand", "waits", "refused"),
    [(True, False, False, True), (False, True, True, True), (False, False, True, False)],
)
async def test_a_first_start_is_refused_if_the_cluster_does_not_grow(
    owned: bool, by_hand: bool, waits: bool, refused: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the run started; one of nodes that were started by hand, once others had time to join; no other."""
    monkeypatch.setattr(ray_cluster, "_ROOM_TIMEOUT_S", 0.5)
    monkeypatch.setattr(ray_cluster, "_LOOK_S", 0.1)
    (node,), type_of = ray.nodes(), "node_{}" if by_hand else "head-group"
    mapping = {node["NodeID"]: type_of.format(node["NodeID"])}
    report = json.dumps({"autoscaler_report": {"node_type_mapping": mapping}})
    internal_kv._internal_kv_put(DEBUG_AUTOSCALING_STATUS, report, overwrite=True)
    told: list[str] = []
    wide = [Placement("policy", ({"CPU": 900.0, "GPU": 0.0},), "PACK", ())]
    watching = Cluster(owned=owned, session=cluster.logs).refuse_impossible(wide, told.append)
    expected = "no node is large enough for policy: a worker needs 900 CPU 0 GPU on one node, and the largest has"
    with pytest.raises(NeverFits, match=f"^{expected} .*; see `troupe plan`") if refused else nullcontext():
        await watching
    assert [line.startswith(f"waiting for nodes: {expected}") for line in told] == [True] * waits


async def test_a_node_that_joins_in_time_ends_the_wait_for_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_LOOK_S", 0.1)
    small, large = Node("a", 1, 0, labels={}), Node("b", 900, 0, labels={})
    seen = iter([[small], [small], [small, large]])
    monkeypatch.setattr(ray_cluster.ray_nodes, "nodes", lambda: next(seen))
    wide = [Placement("policy", ({"CPU": 900.0, "GPU": 0.0},), "PACK", ())]
    told: list[str] = []
    await Cluster(owned=False, session=cluster.logs).refuse_impossible(wide, told.append)
    assert len(told) == 1 and next(seen, None) is None


async def test_ending_a_worker_closes_it_and_ends_its_process(tmp_path: Path, cluster: Cluster) -> None:
    workers = [spawn(cluster, Probe, str(tmp_path / str(i))) for i in range(2)]
    processes = [psutil.Process(await worker.call(Probe.pid, TIMEOUT_S)) for worker in workers]
    await asyncio.gather(*(cluster.end(worker, TIMEOUT_S) for worker in workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert all([await has_ended(process) for process in processes])
    with pytest.raises(WorkerError):
        await workers[0].call(Probe.pid, TIMEOUT_S)


def leave_a_file(folder: str) -> None:
    Path(folder, f"{os.getpid()}-{os.urandom(4).hex()}").touch()


def refuse_to_prepare(reason: str) -> None:
    raise OSError(reason)


async def test_every_other_node_is_prepared_once(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.prepare_nodes(leave_a_file, 60.0, str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # this node is the driver's
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "another node"))
    with pytest.raises(WorkerRaised, match=r"node .*refuse_to_prepare: .*no space"):
        await cluster.prepare_nodes(refuse_to_prepare, 60.0, "no space")
    for _ in range(2):
        await cluster.prepare_nodes(leave_a_file, 60.0, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_failed_start_of_ray_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> None:
        raise Exception("The head node's dashboard\ndid not come up")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # the cluster of the other tests is not joined
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachable, match=r"^Ray could not be started .*: The head node's dashboard did not"):
        Cluster.connect({"CPU": 1.0, "GPU": 0.0})


async def test_a_startup_timeout_of_ray_is_retried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[object] = []

    def slow(**arguments: object) -> None:
        attempts.append(arguments)
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachable, match=r"^Ray could not be started .*: The current node timed out"):
        Cluster.connect({"CPU": 1.0, "GPU": 0.0})
    assert len(attempts) == 3


async def has_ended(process: psutil.Process) -> bool:
    """Whether the process ends within `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while process.is_running() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return not process.is_running()


async def test_a_look_shows_where_a_worker_is_and_what_it_does(cluster: Cluster) -> None:
    """The worker is looked at while a call runs that was made at once: it is located before its first call ends."""
    cluster.watch(TIMEOUT_S)
    worker = spawn(cluster)
    call = asyncio.create_task(worker.call(Probe.sleep, TIMEOUT_S, TIMEOUT_S))
    async with asyncio.timeout(TIMEOUT_S):
        while worker.name not in cluster.locations():
            await asyncio.sleep(0.1)
        (open_call,) = cluster.calls.open_calls()
        while True:
            (report,) = await asyncio.to_thread(cluster.inspect, {os.getpid(): "driver-0"}, (Path("/tmp"),), 5.0)
            by_worker = {process.worker: process for process in report.processes}
            threads = by_worker["probe-0"].threads
            if threads and threads[-1].frames[0].source == "time.sleep(seconds)":  # else it computes, on the way there
                break
    cluster.kill(worker)
    with pytest.raises(WorkerDied):
        await call
    assert (open_call.worker, open_call.method) == ("probe-0", "sleep")
    assert {"driver-0", "raylet", "gcs_server"} <= by_worker.keys()
    assert report.node.disks[0][0] == "/tmp"
    assert cluster.locations() == {}
