"""The shipped chain of stages, started and interrupted as a user does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.helpers import Run, interrupt, running

CHAIN = ROOT / "deploy" / "tiny-three-stage.yaml"

pytestmark = pytest.mark.long


def test_three_stages_follow_one_another_and_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    overrides = ("checkpoint.every_steps=1", "stages.ppo.schedule.steps=2")
    with running(Run(tmp_path, CHAIN, *overrides, name="chain")) as first:
        first.until(lambda: (first.out / "reward_model" / "checkpoints" / "step-000001").exists(), "in stage 2")
        interrupt(first)
        assert first.wait() == 130, first.told
        assert not (first.out / "ppo").exists()
    before = (first.out / "sft" / "metrics.jsonl").read_text()
    with running(Run(tmp_path, CHAIN, *overrides, name="chain", resume=True)) as second:
        assert second.wait() == 0, second.told
        assert "done before" in second.stdout
        assert second.left_over() == []
    assert second.weight_files == []
    assert (second.out / "sft" / "metrics.jsonl").read_text() == before
    lines = {stage: steps(second.out / stage) for stage in ("sft", "reward_model", "ppo")}
    assert [line["step"] for line in lines["reward_model"]] == [1, 2, 3, 4, 5, 6]
    assert lines["reward_model"][-1]["eval/accuracy"] >= 0.9
    for line in lines["ppo"]:
        assert isinstance(line["reward/reward_model/mean"], float)
        assert line["critic/skipped_updates"] == line["policy/skipped_updates"] == 0.0
    # The reward model learnt from the fine-tuned model, and not from the one the chain began with.
    told = (second.out / "reward_model" / "spec.yaml").read_text()
    assert str(second.out / "sft" / "checkpoints" / "step-000008" / "model") in told


def steps(out: Path) -> list[dict[str, Any]]:
    """Lines of the metrics of finished steps."""
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["step"]]
