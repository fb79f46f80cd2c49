"""`make cluster-demo`: a run that scales on a cluster of several Ray nodes, and a node that dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.checkpoint import CheckpointStore
from tests.conftest import ROOT
from tests.real.helpers import Command, running, trajectories

pytestmark = pytest.mark.long


def test_a_run_scales_and_outlives_a_node(tmp_path: Path) -> None:
    demo = [sys.executable, str(ROOT / "deploy" / "cluster_demo.py"), "--runs", str(tmp_path / "runs")]
    with running(Command(tmp_path, demo)) as command:
        assert command.wait(900.0) == 0, command.told
        assert command.left_over() == []
    (out,) = (tmp_path / "runs").iterdir()
    steps = sorted((out / "trajectories").iterdir())
    seen: set[tuple[str, int]] = set()
    engines: set[str] = set()
    for number in range(1, len(steps) + 1):
        for row in trajectories(out, number).to_pylist():
            sample = (row["prompt_uid"], row["sample_index"])
            assert sample not in seen
            seen.add(sample)
            engines.add(row["engine"])
            # Engines that came late had the weights of the step, never older ones.
            assert {span["version"] for span in row["weight_versions"]} == {number - 1}
    assert engines == {"rollout-0", "rollout-1", "rollout-2"}
    found = CheckpointStore(out / "checkpoints", keep=3).latest()
    assert found is not None and found.step == len(steps)
    books = found.state["ledger"]
    assert books["trained"] == len(seen)
