"""Runs of XPO: real Ray and vLLM, with engines of the reference that are killed, and a driver that is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import ROOT
from tests.processes import descendants
from tests.real.commands import Run, checkpoint_weights, ledger_balances, running, trajectories

XPO = ROOT / "deploy" / "specs" / "algorithms" / "xpo.yaml"
STEPS, SAMPLES = 16, 32
SPEC = (
    *("checkpoint={every_steps: 1, keep: 20}", "failures.health_interval_s=2"),
    "roles.policy.schedule=constant",  # it depends on no number of steps
)

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that nothing disturbs for its first steps; then it loses the reference's engine for good."""
    lost = ("schedule.steps=1000", "failures.reference_restarts=0")
    with running(Run(tmp_path_factory.mktemp("whole"), XPO, *SPEC, *lost, name="whole")) as run:
        run.wait_for_step(STEPS)
        engine_of(run, "ReferenceEngine").kill()
        assert run.wait() == 1, run.output
        yield run


def test_every_sample_has_a_response_of_the_reference_that_is_none_of_its_own(whole: Run) -> None:
    for step in (1, STEPS):
        line = whole.metrics[step - 1]
        rows = trajectories(whole.out, step).to_pylist()
        own = {(row["prompt_uid"], row["sample_index"]): row for row in rows if row["weight_versions"]}
        others = {(row["prompt_uid"], row["sample_index"]): row for row in rows if not row["weight_versions"]}
        assert len(own) == len(others) == SAMPLES
        assert others.keys() == {(uid, index + 4) for uid, index in own}
        assert {row["engine"] for row in own.values()} == {"rollout-0"}
        for (uid, index), row in others.items():
            pair = own[uid, index - 4]
            assert (row["engine"], row["prompt_ids"]) == ("reference_engine-0", pair["prompt_ids"])
            assert all(map(math.isnan, row["rollout_logprobs"]))
            assert row["response_ids"] != pair["response_ids"], "at step 1 policy and reference are the same model"
            won = row["reward"] - pair["reward"]
            assert won == 0 or (row["advantages"][0] > 0) is (won > 0) is (pair["advantages"][0] < 0)
        assert line["policy/sequences"] == sum(any(row["advantages"]) for row in rows), "a tie leaves the sample out"
        assert (line["ledger/trained"], line["ledger/dropped"]) == (SAMPLES * step, 0)
        assert line["candidates/reward"] == pytest.approx(sum(row["reward"] for row in others.values()) / SAMPLES)
        assert line["reward/mean"] == pytest.approx(sum(row["reward"] for row in own.values()) / SAMPLES)
        assert "policy/kl_ref" not in line and math.isfinite(line["policy/loss"])
    assert "policy/rollout_logprob_gap" not in whole.metrics[0]


def test_a_run_that_loses_the_reference_s_engine_and_its_driver_equals_an_undisturbed_one(
    whole: Run, tmp_path: Path
) -> None:
    """Bit for bit: groups wait for the new engine, whose responses have the same seeds."""
    spec = (*SPEC, f"schedule.steps={STEPS}")
    with running(Run(tmp_path, XPO, *spec, name="killed")) as run:
        run.wait_for_step(1)
        engine_of(run, "ReferenceEngine").kill()
        run.wait_until(lambda: "reference_engine-0 is lost" in run.output, "the loss to be noticed")
        run.wait_for_step(run.metrics[-1]["step"] + 3)
        run.kill()
    done = run.metrics[-1]["step"]
    assert done < STEPS
    with running(Run(tmp_path, XPO, *spec, name="killed", resume=True)) as again:
        assert again.wait() == 0, again.output
        last = again.metrics[-1]
        assert ledger_balances(last) and (last["ledger/trained"], last["ledger/dropped"]) == (SAMPLES * STEPS, 0)
        assert again.leftover_processes() == [] == again.weight_files
        expected, weights = checkpoint_weights(whole.out, STEPS), checkpoint_weights(again.out, STEPS)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_reference_s_engine_that_is_lost_for_good_ends_the_run_with_the_reason(whole: Run) -> None:
    assert whole.process.returncode == 1
    assert "no reference_engine worker is left (0 of 0 restarts used: failures.reference_restarts)" in whole.output
    assert len(whole.error_lines) == 1, whole.output


def engine_of(run: Run, worker: str) -> psutil.Process:
    """The engine process of the only worker of this class."""
    (process,) = run.processes(worker)
    (engine,) = descendants(process.pid, "EngineCore")
    return engine
