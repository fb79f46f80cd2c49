"""Ray itself, without any model: what becomes of a call to an actor, of a reservation, and of the processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import pytest_asyncio
import ray

from orchestrator.actor_group import ActorSpec, ActorWorker, Cluster
from orchestrator.errors import ClusterUnreachable, DoesNotFit, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from orchestrator.placement import Placement, Seat
from workers.messages import WorkerGone

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

PLACE = Placement("probe", ({"CPU": 1.0, "GPU": 0.0},), "PACK", tuple(Seat("probe", i, 0, 0.1, 0.0) for i in range(10)))
BOUND_S = 60.0


class Probe:
    """A worker that does what a test wants."""

    def __init__(self, left: str = "") -> None:
        self._left = left

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def double(self, *tables: pa.Table) -> tuple[int, pa.Table]:
        table = pa.concat_tables([*tables, *tables])
        return table.num_rows, table

    def refuse(self) -> None:
        raise ValueError("not like this\nnot at all")

    def give_up(self) -> None:
        raise WorkerGone("my engine is gone")

    def leave(self) -> None:
        os._exit(3)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        if self._left:
            Path(self._left).write_text("closed")


class Waiter(Probe):
    """An asynchronous worker."""

    def __init__(self) -> None:
        super().__init__()
        self._here = 0
        self._all_here = asyncio.Event()

    async def meet(self, wanted: int) -> int:
        """Only done once `wanted` calls are here."""
        self._here += 1
        if self._here == wanted:
            self._all_here.set()
        await self._all_here.wait()
        return self._here


class Broken(Probe):
    """A worker whose constructor raises."""

    def __init__(self) -> None:
        raise OSError("no such model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """A cluster of our own."""
    cluster = Cluster.connect({"CPU": 2.0, "GPU": 0.0})
    await cluster.reserve([PLACE], BOUND_S)
    yield cluster
    await cluster.close(BOUND_S)
    assert not ray.is_initialized()


def spawn(cluster: Cluster, worker_class: type = Probe, *args: str, concurrent: bool = False) -> ActorWorker:
    """A worker of the cluster."""
    spec = ActorSpec(worker_class, args, {"TROUPE_TEST": "yes"}, concurrent)
    return cluster.spawn(PLACE, PLACE.seats[0], "probe-0", spec)


async def test_a_table_stays_a_reference_and_is_read_by_the_next_worker(cluster: Cluster) -> None:
    first, second = spawn(cluster), spawn(cluster)
    rows, once = await first.call_for_table("double", cluster.put(pa.table({"x": [1, 2]})), timeout_s=BOUND_S)
    assert (rows, isinstance(once, ray.ObjectRef)) == (2 * 2, True)
    rows, twice = await second.call_for_table("double", once, once, timeout_s=BOUND_S)
    assert rows == 16
    assert (await twice)["x"].to_pylist() == [1, 2] * 8


async def test_a_cluster_of_our_own_runs_nothing_idle(cluster: Cluster) -> None:
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("raylet" in command for command in commands)
    idlers = ("log_monitor.py", "/dashboard.py", "/monitor.py")
    assert not [command for command in commands if any(idler in command for idler in idlers)]


async def test_a_worker_has_its_environment(cluster: Cluster) -> None:
    assert await spawn(cluster).call("variable", "TROUPE_TEST", timeout_s=BOUND_S) == "yes"


async def test_calls_of_an_asynchronous_worker_run_side_by_side(cluster: Cluster) -> None:
    worker = spawn(cluster, Waiter, concurrent=True)
    assert await asyncio.gather(*(worker.call("meet", 50, timeout_s=BOUND_S) for _ in range(50))) == [50] * 50


async def test_what_a_worker_raises_is_told_in_one_line(cluster: Cluster) -> None:
    worker = spawn(cluster)
    with pytest.raises(WorkerRaised) as caught:
        await worker.call("refuse", timeout_s=BOUND_S)
    assert str(caught.value) == "probe-0.refuse: ValueError: not like this not at all"
    assert await worker.call("pid", timeout_s=BOUND_S) > 0


async def test_a_worker_that_dies_is_told_from_one_that_raises(cluster: Cluster) -> None:
    worker = spawn(cluster)
    with pytest.raises(WorkerDied, match=r"^probe-0\.leave: .*died") as caught:
        await worker.call("leave", timeout_s=BOUND_S)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(WorkerDied):
        await worker.call("pid", timeout_s=BOUND_S)


async def test_a_worker_that_gives_up_counts_as_dead(cluster: Cluster) -> None:
    with pytest.raises(WorkerDied, match=r"^probe-0\.give_up: WorkerGone: my engine is gone$"):
        await spawn(cluster).call("give_up", timeout_s=BOUND_S)


async def test_a_killed_worker_is_dead(cluster: Cluster) -> None:
    worker = spawn(cluster)
    process = psutil.Process(await worker.call("pid", timeout_s=BOUND_S))
    call = asyncio.ensure_future(worker.call("sleep", BOUND_S, timeout_s=BOUND_S))
    await asyncio.sleep(0.5)
    worker.kill()
    worker.kill()
    with pytest.raises(WorkerDied):
        await call
    assert await gone(process)


async def test_a_constructor_that_raises_is_told_with_its_reason(cluster: Cluster) -> None:
    with pytest.raises(WorkerDied, match=r"^probe-0\.pid: .*OSError: no such model$") as caught:
        await spawn(cluster, Broken).call("pid", timeout_s=BOUND_S)
    assert len(str(caught.value).splitlines()) == 1


async def test_nobody_waits_for_a_silent_worker(cluster: Cluster) -> None:
    worker = spawn(cluster)
    await worker.call("pid", timeout_s=BOUND_S)
    with pytest.raises(WorkerTimeout, match=r"probe-0\.sleep: no answer in 0\.5 s"):
        await worker.call("sleep", BOUND_S, timeout_s=0.5)
    worker.kill()


async def test_a_reservation_without_room_says_what_was_asked_and_what_there_is(cluster: Cluster) -> None:
    wide = Placement("policy", ({"CPU": 900.0, "GPU": 0.0},) * 2, "PACK", ())
    with pytest.raises(DoesNotFit, match=r"policy within 1 s: it asks for 2 bundle\(s\), 1800 CPU 0 GPU .* CPU 0 GPU"):
        await cluster.reserve([wide], 1.0)


async def test_closing_asks_every_worker_first_and_ends_every_process(tmp_path: Path, cluster: Cluster) -> None:
    workers = [spawn(cluster, Probe, str(tmp_path / str(i))) for i in range(2)]
    processes = [psutil.Process(await worker.call("pid", timeout_s=BOUND_S)) for worker in workers]
    await asyncio.gather(*(cluster.end(worker, BOUND_S) for worker in workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert all([await gone(process) for process in processes])
    with pytest.raises(WorkerError):
        await workers[0].call("pid", timeout_s=BOUND_S)


async def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> None:
        raise Exception("The head node's dashboard\ndid not come up")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachable, match=r"^Ray could not be started .*: The head node's dashboard did not"):
        Cluster.connect({"CPU": 1.0, "GPU": 0.0})


async def test_a_ray_that_is_slow_to_start_gets_three_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def slow(**arguments: object) -> None:
        asked.append(arguments)
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachable, match=r"^Ray could not be started .*: The current node timed out"):
        Cluster.connect({"CPU": 1.0, "GPU": 0.0})
    assert len(asked) == 3


async def gone(process: psutil.Process) -> bool:
    """Whether the process ends within the bound."""
    deadline = time.monotonic() + BOUND_S
    while process.is_running() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return not process.is_running()
