"""Which updates are recorded, and the trace that a rank writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from troupe.orchestrator.spec.sections import ProfileConfig
from troupe.orchestrator.training.updates import UpdateProfiles
from troupe.workers.contract.messages import RankPlan
from troupe.workers.training.meter import profiled

PLANS = [RankPlan(((rank,),), 1, 1) for rank in range(3)]


def test_the_first_update_of_each_role_in_a_chosen_step_is_recorded_on_the_chosen_ranks(tmp_path: Path) -> None:
    profiles = UpdateProfiles(ProfileConfig(steps=(2, 5), ranks=(0, 2)), tmp_path)
    for step in (1, 3, 6):
        assert profiles.traced(step, "policy", PLANS) == PLANS
    traces = [plan.trace for plan in profiles.traced(5, "policy", PLANS)]
    names = [f"{tmp_path}/profile/step-000005-policy-{rank}.json.gz" for rank in (0, 2)]
    assert traces == [names[0], "", names[1]]
    assert profiles.traced(5, "policy", PLANS) == PLANS, "the second update of the step"
    assert profiles.traced(5, "critic", PLANS)[0].trace.endswith("step-000005-critic-0.json.gz")
    assert UpdateProfiles(None, tmp_path).traced(5, "policy", PLANS) == PLANS


def test_a_trace_has_the_operations_of_the_block(tmp_path: Path) -> None:
    trace = tmp_path / "profile" / "step-000001-policy-0.json.gz"
    with profiled(str(trace), "cpu"):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
    with profiled("", "cpu"):
        pass
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]
