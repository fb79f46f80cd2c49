"""What a benchmark measured replaces what `troupe plan` estimates, where it holds for the spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.orchestrator.insight.bench.measured import GRPO, TRAINED, result
from troupe.orchestrator.cli import app
from troupe.orchestrator.commands.plan_table import measurements
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.bench.bounds import record_of
from troupe.orchestrator.plan.measured import Recorded, with_peak
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.plan import Plan, plan
from troupe.orchestrator.plan.worker_memory import Part, Where, WorkerMemory
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.contract.messages import Peak
from troupe.workers.contract.units import GIB

NODES = [Node("here", 4.0, 0.0, 16 * GIB)]


def recorded(update_s: float = TRAINED.step_s, **changes: Any) -> Recorded:
    """A benchmark of the tiny spec."""
    rollouts = replace(result(), peak=Peak(3 * GIB))
    record = json.loads(json.dumps(record_of([rollouts], 2, replace(TRAINED, step_s=update_s))))
    return Recorded("bench.json", record | changes)


def planned(measured: Recorded | None, *overrides: str) -> Plan:
    return plan(load_rollout_spec(GRPO, list(overrides)), NODES, recorded=measured)


def host(found: Plan) -> dict[str, int]:
    return {worker.worker: worker.total for worker in found.memory.workers}


def test_measured_memory_and_times_replace_the_estimates() -> None:
    found = planned(recorded())
    assert host(found) == host(planned(None)) | {"rollout-0": 3 * GIB, "policy-0": 1 * GIB}
    lines = list(measurements(found))
    assert lines[:3] == [
        "measured: memory of policy, rollout (bench.json)",
        "measured: sampling 640 tokens/s, 1.00 s of a step",
        "measured: updates 9000 tokens/s, 0.50 s of a step",
    ]
    assert lines[3].startswith("a step takes about 1.50 s, 15 steps 22 s")


@pytest.mark.parametrize(("update_s", "step_s"), [(0.5, 1.0), (2.0, 2.0)])
def test_engines_sample_during_the_updates_where_the_schedule_lets_them(update_s: float, step_s: float) -> None:
    found = planned(recorded(update_s), "schedule.max_staleness=1").measured
    assert found is not None and found.step_s == pytest.approx(step_s)


def test_other_numbers_of_engines_are_scaled_and_said_so() -> None:
    found = planned(recorded(), "roles.rollout.workers=2")
    assert host(found)["rollout-1"] == 3 * GIB
    assert "measured: sampling 1280 tokens/s, 2 times that of an engine of 1, 0.50 s of a step" in measurements(found)


@pytest.mark.parametrize(
    ("override", "estimated", "line"),
    [
        ("roles.rollout.max_num_seqs=16", "rollout-0", "engines are estimated"),
        ("roles.policy.micro_batch_tokens=512", "policy-0", "trainers are estimated"),
    ],
)
def test_measurements_with_other_settings_are_not_used(override: str, estimated: str, line: str) -> None:
    found = planned(recorded(), override)
    assert host(found)[estimated] == host(planned(None, override))[estimated]
    said = [one for one in measurements(found) if one.startswith(line)]
    assert said and override.partition("=")[0] in said[0]
    assert not any(one.startswith("a step takes") for one in measurements(found))


def test_lengths_that_were_not_sampled_give_memory_but_no_times() -> None:
    found = planned(recorded(), "sampling.max_tokens=12")
    assert host(found)["rollout-0"] == 3 * GIB
    assert not [one for one in measurements(found) if "of a step" in one]


def test_another_model_or_device_is_refused_with_the_reason() -> None:
    other = planned(recorded(), "model.dtype=bfloat16")
    assert host(other) == host(planned(None, "model.dtype=bfloat16"))
    assert list(measurements(other)) == ["bench.json is not used: it is of another model (model.dtype)"]
    assert "device cuda" in next(measurements(planned(recorded(device="cuda"))))


def test_a_gpu_keeps_the_estimate_of_what_torch_does_not_allocate() -> None:
    parts = (Part("weights", 8), Part("process", 5))
    peaks: dict[Where, int] = {"gpu": 20, "host": 9}
    assert with_peak(WorkerMemory("policy-0", "gpu", parts), peaks).total == 25
    assert with_peak(WorkerMemory("policy-0", "host", parts), peaks).total == 9
    shared = (Part("optimizer", 8, periods=("update",)), Part("process", 5))
    assert with_peak(WorkerMemory("policy-0", "gpu", shared), peaks).parts == shared


def test_a_folder_without_results_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"bench\.json does not exist"):
        Recorded.read(tmp_path)
    (tmp_path / "bench.json").write_text('{"points": 3}')
    with pytest.raises(UsageError, match="no result of `troupe bench`"):
        Recorded.read(tmp_path)


def test_the_command_prints_what_was_measured(tmp_path: Path) -> None:
    record = record_of([replace(result(), peak=Peak(3 * GIB))], 2, TRAINED)
    (tmp_path / "bench.json").write_text(json.dumps(record))
    arguments = ["plan", str(GRPO), "--measured", str(tmp_path), "--allow-unknown"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and "measured: sampling 640 tokens/s" in shown.output, shown.output
    (found,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert found["measured"]["memory"]["policy"]["host"] == GIB and found["measured"]["step_s"] == pytest.approx(1.5)
