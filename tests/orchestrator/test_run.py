"""The start of a run: the data are checked while Ray and the workers start."""

from __future__ import annotations

import asyncio
import io
import json
import random
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from tests.fakes import FakePolicy, FakeReward, FaultyEngine, FaultyWorker, fake_spec, policy_group, restart_fakes
from tests.orchestrator.insight.bench.measured import GRPO
from tests.orchestrator.test_controller import pool_of
from troupe.orchestrator.cluster.worker_group import RecoverableCalls
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.data.prompt_check import PromptCheck
from troupe.orchestrator.data.summary import RunData
from troupe.orchestrator.errors import NeverFits, TroupeError, UsageError
from troupe.orchestrator.hub.resolve import LocalFiles
from troupe.orchestrator.live.lock import locked
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.runs import evaluation
from troupe.orchestrator.runs import session as session_module
from troupe.orchestrator.runs.checkpoints import RunCheckpoints, folder_checkpoints
from troupe.orchestrator.runs.evaluation import EvaluationOptions
from troupe.orchestrator.runs.rollouts import train_on_rollouts
from troupe.orchestrator.runs.session import RunRequest, Session, open_session
from troupe.orchestrator.runs.training import train
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.metrics import PeakMemory
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.orchestrator.training.checkpoint import CheckpointStore


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster whose workers have started when `workers` is set; `log` says what happened to it."""
    state = SimpleNamespace(workers=asyncio.Event(), log=[], impossible="")

    class Launcher:
        def __init__(self, *_: Any) -> None: ...

        async def open(self, *_: Any) -> Workers:
            state.log.append("start workers")
            await state.workers.wait()
            return Workers({})

    async def close(_: float) -> None:
        state.log.append("close")

    async def refuse_impossible(*_: Any) -> None:
        if state.impossible:
            raise NeverFits(state.impossible)

    connected = SimpleNamespace(
        watch=lambda _: None,
        close=close,
        refuse_impossible=refuse_impossible,
        abandon=lambda: state.log.append("abandon"),
        events=SimpleNamespace(close=lambda: None, record=lambda *_, **__: None),
        logs="logs",
    )
    monkeypatch.setattr(session_module, "WorkerLauncher", Launcher)
    monkeypatch.setattr(session_module, "load_data", lambda _: RunData(cast("Any", None), {}))
    monkeypatch.setattr(session_module, "_check", lambda *_: asyncio.create_task(state.check()))
    observer = SimpleNamespace(reporting=nullcontext)
    monkeypatch.setattr(session_module, "_observed", lambda *_: nullcontext(observer))
    monkeypatch.setattr(session_module, "Cluster", SimpleNamespace(connect=lambda *_: connected))
    return state


async def refused(folder: Path) -> Mapping[str, int]:
    """The refused prompts of a run that has started."""
    spec = load_rollout_spec(GRPO)
    request = RunRequest(spec, folder, False, None)
    async with open_session(request, Console(io.StringIO()), local=LocalFiles(spec, ()), trains=True) as session:
        return session.data.refused


async def test_data_that_cannot_be_used_end_the_start_of_the_workers(cluster: Any, tmp_path: Path) -> None:
    async def check() -> PromptCheck:
        while "start workers" not in cluster.log:
            await asyncio.sleep(0)
        raise UsageError("no prompt can be used")

    cluster.check = check
    async with asyncio.timeout(60):
        with pytest.raises(UsageError, match="no prompt can be used"):
            await refused(tmp_path)
    assert cluster.log == ["start workers", "abandon"]


async def test_workers_that_start_first_wait_for_the_check(cluster: Any, tmp_path: Path) -> None:
    async def check() -> PromptCheck:
        while "start workers" not in cluster.log:
            await asyncio.sleep(0)
        cluster.workers.set()
        await asyncio.sleep(0.05)
        return PromptCheck(refused={"train": 3})

    cluster.check = check
    async with asyncio.timeout(60):
        assert await refused(tmp_path) == {"train": 3}
    assert cluster.log == ["start workers", "close", "abandon"]


@pytest.mark.parametrize("first", [True, False])
async def test_a_cluster_without_room_ends_the_first_start_only(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: bool
) -> None:
    """A resumed run had its places: a node that is away may come again."""

    async def check() -> PromptCheck:
        asyncio.get_running_loop().call_later(0.05, cluster.workers.set)
        return PromptCheck()

    cluster.check, cluster.impossible = check, "no node is large enough"
    if not first:
        found = cast("Any", SimpleNamespace(step=0))
        resumed = RunCheckpoints(CheckpointStore(tmp_path / "checkpoints", 1), found)
        monkeypatch.setattr(session_module, "_run_folder", lambda *_: nullcontext(resumed))
        monkeypatch.setattr(session_module, "require_same_rows", lambda *_: None)
    async with asyncio.timeout(60):
        with pytest.raises(NeverFits, match="no node is large enough") if first else nullcontext():
            await refused(tmp_path)
    assert cluster.log == ["start workers", *["close"] * (not first), "abandon"]


@pytest.mark.parametrize("done", [0, 4])
async def test_a_start_that_fails_before_there_is_a_cluster_is_a_failed_run(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: int
) -> None:
    """Events of an earlier start stay, also those of steps after its last checkpoint."""

    async def check() -> PromptCheck:
        return PromptCheck()

    def nowhere(*_: Any) -> None:
        raise TroupeError("no Ray cluster to join")

    cluster.check = check
    found = RunCheckpoints(CheckpointStore(tmp_path / "checkpoints", 1), None)
    monkeypatch.setattr(RunCheckpoints, "done", done)
    monkeypatch.setattr(session_module, "open_checkpoints", lambda *_: found)
    monkeypatch.setattr(session_module, "Cluster", SimpleNamespace(connect=nowhere))
    (tmp_path / "events.jsonl").write_text('{"step": 6, "event": "run_started"}\n')
    with pytest.raises(TroupeError, match="no Ray cluster"):
        await refused(tmp_path)
    before, ended = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert before["step"] == 6 and (ended["step"], ended["how"]) == (done, "failed")
    assert (ended["error"], ended["detail"]) == ("TroupeError", "no Ray cluster to join")


def test_a_run_begins_with_the_warnings_of_its_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Begun(Exception):
        pass

    def begin(*_: Any) -> LocalFiles:
        raise Begun

    monkeypatch.setattr(session_module, "fetch", begin)
    spec, shown = load_rollout_spec(GRPO, ["roles.policy.warmup_updates=99"]), io.StringIO()
    with pytest.raises(Begun):
        train(RunRequest(spec, tmp_path / "run", False, None), Console(shown))
    (line,) = warnings_of(spec)
    assert f"warning: {line}" in " ".join(shown.getvalue().split())


async def test_a_run_folder_is_locked_until_the_last_thread_that_writes_to_it_ends(tmp_path: Path) -> None:
    written, request = threading.Event(), RunRequest(load_rollout_spec(GRPO), tmp_path / "run", False, None)

    def write() -> None:
        time.sleep(0.2)
        with pytest.raises(UsageError, match="a run is active in it"), locked(request.out):
            pass
        written.set()

    async with session_module._run_folder(request, Console(io.StringIO())):
        asyncio.get_running_loop().run_in_executor(None, write)
    with locked(request.out):
        assert written.is_set()


def session_of(out: Path, spec: RolloutSpec, data: RunData) -> Session:
    """A session with fake workers."""
    calls, out = RecoverableCalls(), out / "run"
    out.mkdir(exist_ok=True)
    engines = [Engine(FaultyWorker(name, FaultyEngine(name, random.Random(0))), "host") for name in ("rollout-0",)]
    workers = {"policy": policy_group(FakePolicy(0), calls=calls), "rollout": engines}
    cluster: Any = SimpleNamespace(put=lambda table: table, calls=CallLog(), events=EventLog(), peaks=PeakMemory())
    launcher: Any = SimpleNamespace(calls=calls, restart=restart_fakes, engine=None, replica=None)
    return Session(
        RunRequest(spec, out, False, None),
        spec,
        cluster,
        launcher,
        Workers({**workers, "reward": [FaultyWorker("reward-0", FakeReward())]}),
        Console(io.StringIO()),
        asyncio.Event(),
        folder_checkpoints(spec, out),
        read=data,
    )


@pytest.mark.parametrize("asked", ["before", "meanwhile", "never"])
async def test_a_run_that_was_asked_to_stop_waits_seconds_for_its_workers_to_close(asked: str) -> None:
    stop, waits = asyncio.Event(), list[float]()
    if asked == "before":
        stop.set()

    async def close(timeout_s: float) -> None:
        waits.append(timeout_s)
        if asked == "meanwhile" and not stop.is_set():
            stop.set()
            await asyncio.Event().wait()  # a worker answers to nobody

    ends: Any = SimpleNamespace(close=close)
    await session_module._close_workers(ends, Console(io.StringIO()), stop)
    whole, hurry = session_module.CLOSE_TIMEOUT_S, session_module._HURRY_S
    assert waits == {"before": [hurry], "meanwhile": [whole, hurry], "never": [whole]}[asked]
    assert hurry < 5


def test_training_resumes_in_a_session_with_the_checkpoint_of_an_earlier_one(tmp_path: Path) -> None:
    data = RunData(pool_of(12), {})
    first = asyncio.run(train_in(tmp_path, fake_spec(schedule={"steps": 2}), data))
    assert (first.steps_done, first.ledger["trained"]) == (2, 2 * 20)
    second = asyncio.run(train_in(tmp_path, fake_spec(), data))
    assert (second.steps_done, second.ledger["trained"], second.ledger["dispatched"]) == (4, 4 * 20, 4 * 20)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


async def train_in(out: Path, spec: RolloutSpec, data: RunData) -> RunOutcome:
    return await train_on_rollouts(session_of(out, spec, data))


async def test_an_evaluation_has_the_data_of_its_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = fake_spec(data={"eval": {"kind": "jsonl", "path": "held.jsonl"}}, evaluation={"at_start": True})
    pool = pool_of(5)
    column = pool.table.column_names.index("metadata")
    table = pool.table.set_column(column, pool.table.field(column), pa.array(["{}"] * 5))
    session = session_of(tmp_path, spec, RunData(pool, {"eval": replace(pool, table=table)}))
    monkeypatch.setattr(evaluation, "open_session", lambda *_, **__: nullcontext(session))
    options = EvaluationOptions(output=tmp_path / "results.json")
    metrics = await evaluation.evaluate_on_prompts(session.request, session.console, options)
    assert metrics["eval/prompts"] == 5.0 and metrics["eval/failed_samples"] == 0.0
    assert json.loads((tmp_path / "results.json").read_text())["model"] == {"path": "model"}
