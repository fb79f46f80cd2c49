"""Runs of the shipped spec of DAPO with its filters: of truncated samples, of groups, and of prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.real.commands import Run, checkpoint_weights, running, trajectories
from troupe.orchestrator.spec.load import load_rollout_spec

SPEC = ROOT / "deploy" / "specs" / "tiny-dapo.yaml"
LEARNING = ("policy/loss", "policy/grad_norm", "reward/mean", "masked_samples", "ledger/trained", "ledger/dropped")
RESUMED_STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of the runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def dapo(folder: Path) -> Iterator[Run]:
    """Two steps of the shipped spec."""
    with running(Run(folder, SPEC, "schedule.steps=2", name="dapo")) as run:
        assert run.wait() == 0, run.output
        yield run


def test_truncated_samples_carry_no_loss(dapo: Run) -> None:
    spec = load_rollout_spec(SPEC)
    masked = 0
    for line in dapo.metrics:
        truncated = trajectories(dapo.out, line["step"])["finish_reason"].to_pylist().count("length")
        masked += truncated
        assert line["masked_samples"] == truncated
        assert line["policy/sequences"] <= spec.samples_per_step - truncated
        assert line["policy/grad_norm"] > 0
    assert 0 < masked < 2 * spec.samples_per_step
    last = dapo.metrics[-1]
    assert last["ledger/trained"] == 2 * spec.samples_per_step - masked
    assert f"dropped: truncated: it carries no loss {masked}" in re.sub(" +", " ", dapo.stdout)


def test_groups_are_replaced_by_the_values_of_one_component(dapo: Run) -> None:
    """Letter shares differ in every group: on the reward, no group would be replaced."""
    values: dict[str, set[float]] = {}
    for line in dapo.metrics:
        for row in trajectories(dapo.out, line["step"]).to_pylist():
            found = {component["name"]: component["value"] for component in row["components"]}
            values.setdefault(row["prompt_uid"], set()).add(found["has_ing"])
    assert set(map(frozenset, values.values())) == {frozenset({0.0, 1.0})}
    assert "no signal: all values of has_ing in the group are equal" in dapo.stdout


def test_results_of_all_groups_are_remembered(dapo: Run) -> None:
    """Of trained and of replaced groups alike, with the truncated samples."""
    last = dapo.metrics[-1]
    groups = last["ledger/dispatched"] / load_rollout_spec(SPEC).group_size
    state = json.loads((dapo.out / "checkpoints" / "step-000002" / "state.json").read_text())
    results = state["source"]["prompts"]["curriculum"]["results"]
    assert len(results) == last["curriculum/seen"] == min(groups, 12)  # the first pass over the 12 prompts
    assert 0 < last["curriculum/pass_rate"] < 1


@pytest.mark.long
def test_a_resumed_run_draws_and_learns_as_an_uninterrupted_one(folder: Path) -> None:
    """Across the second pass over the data, in which the curriculum skips prompts."""
    with running(Run(folder, SPEC, f"schedule.steps={RESUMED_STEPS}", name="whole")) as whole:
        assert whole.wait() == 0, whole.output
    with running(Run(folder, SPEC, "schedule.steps=2", name="parts")) as first:
        assert first.wait() == 0, first.output
    with running(Run(folder, SPEC, f"schedule.steps={RESUMED_STEPS}", name="parts", resume=True)) as second:
        assert second.wait() == 0, second.output
    assert any(line["curriculum/skipped"] for line in whole.metrics)
    for expected, line in zip(whole.metrics, second.metrics, strict=True):
        names = [name for name in expected if name in LEARNING or name.startswith("curriculum/")]
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
        drawn, again = (trajectories(run.out, line["step"])["prompt_uid"].to_pylist() for run in (whole, second))
        assert again == drawn
    expected, weights = (checkpoint_weights(run.out, RESUMED_STEPS) for run in (whole, second))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
