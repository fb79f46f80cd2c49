"""A run of RAFT whose prompts bring answers from other sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, running, trajectories
from troupe.orchestrator.spec.load import load_rollout_spec

SPEC = ROOT / "deploy" / "specs" / "tiny-raft.yaml"
STEPS = 2


def test_the_policy_learns_the_best_answers_from_other_sources(tmp_path: Path) -> None:
    """A random model writes no true equation, so a candidate wins every group, and its likelihood rises."""
    spec = load_rollout_spec(SPEC)
    with running(Run(tmp_path, SPEC, f"schedule.steps={STEPS}", name="raft")) as run:
        assert run.wait() == 0, run.output
    first, second = run.metrics
    assert second["ledger/trained"] == second["ledger/dispatched"] == STEPS * spec.samples_per_step
    for line in (first, second):
        rows = trajectories(run.out, line["step"]).to_pylist()
        own, given = ([row for row in rows if bool(row["weight_versions"]) is by_policy] for by_policy in (True, False))
        assert len(own) == spec.samples_per_step and len(given) > 2 * spec.schedule.prompts_per_step
        assert {row["reward"] for row in own} == {0.0} and {row["reward"] for row in given} == {0.0, 1.0}
        assert line["candidates/chosen"] == 1.0 and line["candidates/failed"] == 0.0
        assert line["candidates/reward"] == pytest.approx(sum(row["reward"] for row in given) / len(given))
        assert line["reward/mean"] == 0.0
        # The best candidate of every group alone is computed: one sequence a prompt, all tokens of it.
        best = [len(row["response_ids"]) for row in given if row["reward"] == 1.0]
        assert line["policy/sequences"] == len(best) == spec.schedule.prompts_per_step
        assert line["policy/tokens"] == sum(best)
    assert second["policy/loss"] < first["policy/loss"] - 0.5
