"""Curves of adapters beside those of all weights: which runs are started, and what is read of them."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import lora_curve
from benchmarks.lora_curve import ARMS, Figures, costs, figures, finished, parse, settings, train
from troupe.orchestrator.spec.load import load_rollout_spec


@pytest.mark.parametrize("arm", ARMS)
def test_the_ways_to_train_differ_in_nothing_but_what_trains_and_its_rate(arm: str) -> None:
    given = [part for part in settings(arm, 3, 7) if part != "--set"]
    spec = load_rollout_spec(lora_curve.SPEC, given)
    assert (spec.roles.policy.lora is not None) == (arm == "adapters")
    assert (spec.seed, spec.schedule.steps) == (3, 7)
    same = {"name": "x", "roles.policy.lora": None, "roles.policy.learning_rate": 1e-5}
    sets = [f"{name}={json.dumps(value)}" for name, value in same.items()]
    other = load_rollout_spec(lora_curve.SPEC, ["seed=3", "schedule.steps=7", *sets])
    assert load_rollout_spec(lora_curve.SPEC, [*given, *sets]) == other


def run_folder(out: Path) -> Path:
    """A finished run of two steps."""
    out.mkdir()
    steps = [
        {"step": 0, "eval/reward": 0.2, "memory/policy": 9.0},
        {"step": 1, "reward/mean": 0.1, "seconds/step": 4.0, "seconds/update": 2.0, "memory/policy": 3.0},
        {"step": 2, "reward/mean": 0.3, "seconds/step": 6.0, "seconds/update": 3.0, "memory/policy": 2.0}
        | {"eval/reward": 0.5},
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    events = [{"event": "weights", "version": version, "bytes": 5_000_000 + version} for version in (1, 2)]
    (out / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return out


def test_costs_are_read_of_the_run_and_of_its_plan(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "run")
    assert finished(out, 2) and not finished(out, 3) and not finished(tmp_path, 2)
    found = figures("adapters", 1, 2, out)
    assert (found.update_bytes, found.step_s, found.update_s, found.peak_gib) == (5_000_002, 5.0, 2.5, 3.0)
    assert found.evaluated == (0.2, 0.5)
    assert 1.0 < found.planned_gib < figures("all", 1, 2, out).planned_gib < 100.0


def test_costs_are_one_row_for_each_run() -> None:
    table = costs({"all 1": Figures(269_000_000, 12.34, 8.0, 6.5, 6.0, (0.4, 0.85))})
    assert table.splitlines()[2] == "| all 1 | 269.0 | 12.3 | 8.0 | 6.50 | 6.00 | 0.40 -> 0.85 |"


def test_a_run_that_fails_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lora_curve.sys, "executable", "false")
    with pytest.raises(subprocess.CalledProcessError):
        train("all", 1, 2, tmp_path / "run", time.monotonic() + 60)


def test_unknown_arms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).arms == ["all", "adapters"] and parse(["all", "--seeds", "1", "2"]).seeds == [1, 2]
    with pytest.raises(SystemExit):
        parse(["full"])
    assert "no full; known: all, adapters" in capsys.readouterr().err
