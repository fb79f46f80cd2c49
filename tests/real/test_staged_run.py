"""The shipped spec of three stages, interrupted in the second stage and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, interrupt, running

THREE_STAGES = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"

pytestmark = pytest.mark.long


def test_three_stages_run_in_order_and_resume_in_the_interrupted_stage(tmp_path: Path) -> None:
    overrides = ("checkpoint.every_steps=1", "stages.ppo.schedule.steps=2")
    with running(Run(tmp_path, THREE_STAGES, *overrides, name="chain")) as first:
        first.wait_until(
            lambda: (first.out / "reward_model" / "checkpoints" / "step-000001").exists(), "a checkpoint of stage 2"
        )
        interrupt(first)
        assert first.wait() == 130, first.output
        assert first.leftover_processes() == []
        assert not (first.out / "ppo").exists()
    before = (first.out / "sft" / "metrics.jsonl").read_text()
    with running(Run(tmp_path, THREE_STAGES, *overrides, name="chain", resume=True)) as second:
        assert second.wait() == 0, second.output
        assert "already complete" in second.stdout
        assert second.leftover_processes() == []
    assert second.weight_files == []
    assert (second.out / "sft" / "metrics.jsonl").read_text() == before
    lines = {stage: steps(second.out / stage) for stage in ("sft", "reward_model", "ppo")}
    assert [line["step"] for line in lines["reward_model"]] == [1, 2, 3, 4, 5, 6]
    assert lines["reward_model"][-1]["eval/accuracy"] >= 0.9
    for line in lines["ppo"]:
        assert isinstance(line["reward/reward_model/mean"], float)
        assert line["critic/skipped_updates"] == line["policy/skipped_updates"] == 0.0
    # The reward model starts from the fine-tuned model, not from the base model.
    spec = (second.out / "reward_model" / "spec.yaml").read_text()
    assert str(second.out / "sft" / "checkpoints" / "step-000008" / "model") in spec


def steps(out: Path) -> list[dict[str, Any]]:
    """Lines of the metrics of finished steps."""
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["step"]]
