"""Which points are measured together, and what follows when one cannot be. Real engines: `tests/real/test_wheel.py`."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.orchestrator.insight.bench.measured import GRPO, point, result
from troupe.orchestrator.cli import app
from troupe.orchestrator.errors import DoesNotFit, StopRequested, WorkerDied, WorkerError
from troupe.orchestrator.insight.bench import engines
from troupe.orchestrator.insight.bench.engines import BenchRequest, bench
from troupe.orchestrator.insight.bench.points import Point
from troupe.orchestrator.insight.bench.results import Result
from troupe.orchestrator.telemetry.console import Console

WORKERS, SEQS, TOKENS = "roles.rollout.workers", "roles.rollout.max_num_seqs", "sampling.max_tokens"


def measure(points: Sequence[Point]) -> list[Result]:
    results: list[Sequence[Result]] = [()]
    bench(BenchRequest(points, 1, None), Console(io.StringIO()), results.append)
    return list(results[-1])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Clusters without engines: `room` is the most engines of one, `broken` says which points fail, and how."""
    state = SimpleNamespace(room=4, broken={}, refused={}, starts=[])

    @asynccontextmanager
    async def open_session(request: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        role = request.spec.roles.rollout
        if role.workers > state.room:
            raise DoesNotFit(f"no room for {role.workers} engines")
        if role.max_num_seqs in state.refused:
            raise state.refused[role.max_num_seqs]
        state.starts.append((role.workers, role.max_num_seqs))

        async def unless_stopped(work: Any) -> Any:
            return await work

        yield SimpleNamespace(unless_stopped=unless_stopped)

    class PointBench:
        def __init__(self, request: Any, own: Point, prompts: Any, context: Any, *, warm_up: bool) -> None:
            self._point = own

        async def run(self) -> Result:
            if error := state.broken.get(self._point.label):
                raise error
            return result(self._point.settings)

    monkeypatch.setattr(engines, "open_session", open_session)
    monkeypatch.setattr(engines, "_PointBench", PointBench)
    return state


def test_engines_are_started_once_for_points_that_share_them(cluster: Any) -> None:
    points = [point({SEQS: n, WORKERS: w}) for w in (1, 2) for n in (16, 32)]
    results = measure(points)
    assert [one.point for one in results] == points and all(one.measures for one in results)
    assert cluster.starts == [(2, 16), (2, 32)]


def test_only_the_points_without_room_are_not_measured(cluster: Any) -> None:
    results = measure([point({WORKERS: workers}) for workers in (1, 8, 4, 16)])
    assert [one.problem for one in results] == ["", "no room for 8 engines", "", "no room for 16 engines"]
    assert cluster.starts == [(4, 32)]


def test_points_after_one_that_fails_get_new_engines(cluster: Any) -> None:
    cluster.broken["max_tokens 5"] = WorkerDied("rollout-0", "generate", "killed")
    results = measure([point({TOKENS: tokens}) for tokens in (4, 5, 6)])
    assert [one.problem for one in results] == ["", "rollout-0.generate: killed", ""]
    assert cluster.starts == [(1, 32), (1, 32)]


def test_engines_that_do_not_start_fail_their_points_alone(cluster: Any) -> None:
    cluster.refused[512] = WorkerError("rollout-0", "start", "no memory for the KV cache")
    results = measure([point({SEQS: n, TOKENS: tokens}) for n in (512, 16) for tokens in (4, 6)])
    assert ["no memory" in one.problem for one in results] == [True, True, False, False]


@pytest.mark.parametrize("how", [StopRequested("stopped"), KeyboardInterrupt(), OSError("the disk is gone")])
def test_what_was_measured_before_an_interruption_is_written_and_shown(
    cluster: Any, how: BaseException, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.broken["max_tokens 6"] = how
    file = tmp_path / "new" / "bench.json"
    command = ["bench", str(GRPO), "--set", f"model.path={tiny_model}", "--sweep", "sampling.max_tokens=4,5,6,7"]
    ended = CliRunner().invoke(app, [*command, "-o", str(file)])
    assert ended.exit_code == (130 if isinstance(how, KeyboardInterrupt) else 1)
    assert "max_tokens 5: bound by" in ended.stdout and f"wrote {file}" in ended.stdout
    record = json.loads(file.read_text())
    assert [one["settings"] for one in record["points"]] == [{TOKENS: 4}, {TOKENS: 5}]
