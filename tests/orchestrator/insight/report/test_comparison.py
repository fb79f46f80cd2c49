"""Names and results of several runs."""

from __future__ import annotations

import json
from pathlib import Path

from troupe.orchestrator.insight.report.overview import MOST_POINTS, labels, outcome, used
from troupe.orchestrator.insight.verdicts.history import History

from .folders import RECORDED


def test_runs_of_the_same_name_are_told_apart_by_their_folders() -> None:
    folders = [Path("/runs/a"), Path("/runs/b"), Path("/old/b"), Path("/runs/c")]
    assert labels(["x", "y", "y", "z"], folders) == ["x", "runs/b", "old/b", "z"]
    assert labels(["x", "x"], folders[:2]) == ["a", "b"]
    assert labels(["x", "x"], [folders[0], folders[0]]) == ["/runs/a", "/runs/a"], "the same run twice"


def test_results_of_a_run() -> None:
    lines = [json.loads(line) for line in (RECORDED / "healthy-laptop.jsonl").read_text().splitlines()]
    found = outcome(History.of(lines))
    assert found["learned"]["name"] == "reward/mean" and found["learned"]["last"] > found["learned"]["first"]
    assert found["held_out"] is None or found["held_out"]["name"] == "eval/accuracy"
    assert found["tokens"] == sum(line.get("tokens", 0.0) for line in lines)
    assert found["tokens_per_s"] > 0 and found["seconds"] > 0
    offline = [json.loads(line) for line in (RECORDED / "healthy-dpo.jsonl").read_text().splitlines()]
    assert outcome(History.of(offline))["learned"]["name"] == "policy/preference_loss"
    assert outcome(History.of([])) == {
        "learned": None,
        "held_out": None,
        "tokens_per_s": None,
        "tokens": 0.0,
        "seconds": 0.0,
    }


def test_tokens_and_seconds_add_up_without_the_pause_before_a_resumption() -> None:
    lines = [
        {"step": 0, "time": 0.0},
        {"step": 1, "time": 10.0, "tokens": 5.0, "seconds/step": 2.0},
        {"step": 2, "time": 12.0, "tokens": 5.0, "seconds/step": 2.0},
        {"step": 2, "time": 9000.0, "tokens": 7.0, "seconds/step": 3.0},
    ]
    found = used(lines)
    assert found["tokens"] == {"steps": [0, 1, 2], "values": [0.0, 5.0, 12.0]}
    assert found["seconds"] == {"steps": [0, 1, 2], "values": [0.0, 2.0, 5.0]}
    assert used([{"step": 1, "time": 1.0}])["tokens"] == {"steps": [], "values": []}
    long = used([{"step": step, "tokens": 1.0} for step in range(1, 5 * MOST_POINTS)])["tokens"]
    assert len(long["steps"]) == MOST_POINTS and long["values"][-1] == 5 * MOST_POINTS - 1
