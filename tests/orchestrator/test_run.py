"""The start of a run: the data are checked while Ray and the workers start."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.orchestrator.insight.bench.measured import GRPO
from troupe.orchestrator.data.prompt_check import PromptCheck
from troupe.orchestrator.data.summary import RunData
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.hub.resolve import LocalFiles
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.runs import session as session_module
from troupe.orchestrator.runs.lock import locked
from troupe.orchestrator.runs.session import RunRequest, open_session
from troupe.orchestrator.runs.training import train
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.telemetry.console import Console


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster whose workers have started when `workers` is set; `log` says what happened to it."""
    state = SimpleNamespace(workers=asyncio.Event(), log=[])

    class Launcher:
        def __init__(self, *_: Any) -> None: ...

        async def open(self, *_: Any) -> Workers:
            state.log.append("start workers")
            await state.workers.wait()
            return Workers({})

    async def close(_: float) -> None:
        state.log.append("close")

    connected = SimpleNamespace(
        watch=lambda _: None,
        close=close,
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
