"""`make cluster-demo`: a run scales on several Ray nodes and survives the loss of a node and of the head."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.real import warm
from tests.real.commands import Command, running, trajectories
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long


def test_a_run_scales_and_survives_the_loss_of_a_node_and_of_the_head(tmp_path: Path) -> None:
    demo = [sys.executable, "-m", "tests.real.cluster_demo", "--runs", str(tmp_path / "runs")]
    with running(Command(tmp_path, demo, warm.template())) as command:
        assert command.wait(900.0) == 0, command.output
        assert command.leftover_processes() == []
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
            # Engines that were added later sampled with the weights of their step, never with older ones.
            assert {span["version"] for span in row["weight_versions"]} == {number - 1}
    assert engines == {"rollout-0", "rollout-1", "rollout-2"}
    found = CheckpointStore(out / "checkpoints", keep=3).latest()
    assert found is not None and found.step == len(steps)
    ledger = found.state["ledger"]
    assert ledger["trained"] == len(seen)
