"""What `startup` reads of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.startup import Sample, cpu_by_kind, kind_of, moments, used_until
from benchmarks.support.harness import NotCorrect

BEGAN = 1000.0


def write_run(folder: Path, *, workers: int = 2) -> None:
    """A run whose Ray is up after 3 s, whose workers serve after 5 and 9, and whose first token comes at 9.75."""
    started = [{"event": "worker_started", "worker": f"w-{i}", "time": BEGAN + 5 + 4 * i} for i in range(workers)]
    events = [{"event": "run_started", "time": BEGAN + 3}, *started]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    for name, columns in {
        "timeline": {"method": ["score", "generate", "generate"], "start": [BEGAN + 1, BEGAN + 9.5, BEGAN + 9.6]},
        "trajectories": {"first_token_s": [0.5, 0.25]},
    }.items():
        (folder / name).mkdir()
        pq.write_table(pa.table(columns), folder / name / "step-000001.parquet")


def test_the_parts_of_a_start_add_up(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = moments(tmp_path, BEGAN)
    assert (found.ray, dict(found.served), found.token) == (3.0, {"w-0": 5.0, "w-1": 9.0}, 9.75)
    phases = found.phases()
    assert phases == {"command to Ray": 3.0, "Ray to w-0": 2.0, "Ray to w-1": 6.0, "last worker to token": 0.75}
    assert phases["command to Ray"] + phases["Ray to w-1"] + phases["last worker to token"] == found.token


def test_a_run_without_workers_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, workers=0)
    with pytest.raises(NotCorrect, match="no worker"):
        moments(tmp_path, BEGAN)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("VLLM::EngineCore", "vllm"),
        ("ray::RolloutWorker.start", "rollout"),
        ("ray::PolicyWorker", "policy"),
        ("python -m multiprocessing.forkserver", "fork server"),
        ("python -P -c code troupe.workers.preload.server:serve 3 4", "server"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --x", "Ray"),
        ("/venv/bin/python -m troupe run spec.yaml", "command"),
        ("/bin/sh -c wait", "other"),
    ],
)
def test_processes_are_told_apart_by_their_commands(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_cpu_seconds_are_those_of_the_kernel() -> None:
    own = psutil.Process()
    before = sum(own.cpu_times()[:2])
    found = {pid: seconds for pid, _, seconds in cpu_by_kind(own)}
    assert before <= found[os.getpid()] <= sum(own.cpu_times()[:2])


def test_the_time_of_a_process_that_has_ended_is_no_other_load() -> None:
    samples = [
        Sample(1.0, {7: ("command", 0.5), 8: ("data check", 0.9)}, 1.5),
        Sample(4.0, {7: ("command", 1.0), 9: ("Ray", 4.0), 10: ("Ray", 0.1)}, 1.75),
        Sample(9.0, {7: ("command", 9.0)}, 2.0),
    ]
    cpu, foreign = used_until(samples, 5.0)
    assert cpu == {"Ray": 4.1, "command": 1.0, "data check": 0.9}
    assert foreign == pytest.approx(1.75 - 6.0 / 4.0)
    assert used_until([Sample(2.0, {7: ("command", 2.5)}, 1.0)], 5.0)[1] == 0.0
    with pytest.raises(NotCorrect, match=r"no sample of the processes was taken in 0\.50 s"):
        used_until(samples, 0.5)
