"""A run of PPO across losses of its critic and policy and a resume, and `troupe replay` of it: its weights are bitwise
those of the run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.commands import (
    POLICY_METRICS,
    PPO,
    RUN_METRICS,
    Run,
    equal_steps,
    kill,
    kill_each,
    ledger_balances,
    missing_metrics,
    replayed,
    running,
    trajectories,
)
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import CheckpointStore, verify

pytestmark = pytest.mark.long

CRITIC_METRICS = ("critic/loss", "critic/grad_norm", "critic/learning_rate", "critic/skipped_updates")
TEXTS = (
    "algorithm.ptx_coef=0.1",
    "data.ptx={kind: jsonl, path: deploy/specs/data/texts.jsonl, max_tokens: 64, texts_per_step: 8}",
)
"""Every update of the policy also trains on plain texts."""
PLANTED = (
    "loss, clipped = torch.maximum(plain, bounded), bounded > plain",
    "loss, clipped = torch.minimum(plain, bounded), bounded > plain",
)
"""PPO's bound on the ratio, and a bug in it: the better of both losses instead of the worse one."""


@dataclass(frozen=True)
class PPORun:
    """A run whose first start ended because no restart of its trainers was left."""

    first: Run
    """The first start."""
    metrics: list[dict[str, Any]]
    """Metrics of the first start."""
    saved: int
    """Step of its last checkpoint."""
    resumed: Run
    """The second start, which trained to the end."""


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PPORun]:
    """PPO with a critic, texts and two updates per step. Critic, critic and policy are killed in its first start."""
    folder = tmp_path_factory.mktemp("replay")
    sets = ("checkpoint.every_steps=4", "checkpoint.keep=10", "failures.trainer_restarts=2", *TEXTS)
    with running(Run(folder, PPO, *sets, "schedule.steps=1000", name="ppo")) as first:
        kill_each(first, (1, "CriticWorker"), (5, "CriticWorker"))
        first.wait_for_step(9)
        kill(first, "PolicyWorker")
        assert first.wait() == 1, first.output
        assert first.leftover_processes() == []
        assert first.weight_files == []
        lines, found = first.metrics, CheckpointStore(first.out / "checkpoints", keep=10).latest()
        assert found is not None
    with running(Run(folder, PPO, *sets, name="ppo", resume=True)) as second:
        assert second.wait() == 0, second.output
        assert second.leftover_processes() == []
    assert second.weight_files == []
    yield PPORun(first, lines, found.step, second)


@pytest.fixture(scope="module")
def ppo(ppo_run: PPORun) -> Path:
    """Folder of the run of PPO."""
    return ppo_run.resumed.out


def test_a_dead_critic_is_brought_back_with_the_policy_until_no_restart_is_left(ppo_run: PPORun) -> None:
    """From the initial model, then from a checkpoint; the last loss, of the policy, ends the run.

    That the trainers came back with the weights they had is in the test of the replay, which starts from the initial
    model and has every later digest of the run.
    """
    first = ppo_run.first
    assert len(first.error_lines) == 1, first.output
    last = r"error: policy-0\.\w+: .*2 of 2 restarts used: failures.trainer_restarts"
    assert re.match(last, first.error_lines[0]), first.error_lines
    assert "policy and critic restarted from the initial model, " in first.stdout
    assert re.search(r"policy and critic restarted from the checkpoint of step [48], ", first.stdout)
    assert [line["step"] for line in ppo_run.metrics] == list(range(1, len(ppo_run.metrics) + 1))
    for line in ppo_run.metrics:
        assert ledger_balances(line)
        assert (line["ledger/dropped"], line["ledger/retries"]) == (0, 0)
    assert ppo_run.saved >= 8  # saved before step 9 was reported


def test_ppo_with_a_critic_increases_the_reward(ppo_run: PPORun) -> None:
    spec, run = load_rollout_spec(PPO), ppo_run.resumed
    assert run.steps() == list(range(1, spec.schedule.steps + 1))
    for line in run.metrics:
        assert missing_metrics(line, RUN_METRICS + POLICY_METRICS + CRITIC_METRICS) == []
        assert ledger_balances(line)
    rewards = [line["reward/mean"] for line in run.metrics]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.05, rewards  # eight standard errors of a step's mean
    found = sorted((run.out / "checkpoints").iterdir())
    assert {"policy", "critic", "model"} <= {path.name for path in verify(found[-1]).path.iterdir()}
    for row in trajectories(run.out, spec.schedule.steps).to_pylist():
        assert row["trained"]
        for name in ("advantages", "returns", "values", "old_logprobs", "ref_logprobs", "logprobs", "entropy"):
            assert len(row[name]) == len(row["response_ids"]), name


def test_without_checkpoints_every_step_is_repeated_from_the_initial_model(ppo_run: PPORun, ppo: Path) -> None:
    """Around every loss, and the first steps after the resume."""
    shutil.copytree(ppo, copy := ppo.with_name("without-checkpoints"))
    shutil.rmtree(copy / "checkpoints")
    step = ppo_run.saved + 2
    assert equal_steps(replayed(copy, step)) == list(range(1, step + 1))


def test_a_damaged_table_is_refused_before_anything_starts(ppo: Path) -> None:
    shutil.copytree(ppo, damaged := ppo.with_name("damaged"))
    table = damaged / "replay" / "step-000002" / "batch.arrow"
    content = bytearray(table.read_bytes())
    content[-100] ^= 1
    table.write_bytes(content)
    refused = replayed(damaged, 2, code=2)
    assert re.search(r"step-000002/batch.arrow has changed: it has digest \w+ and \d+ bytes", refused.stderr)
    assert refused.stdout == ""


def test_a_planted_bug_in_the_loss_is_found(ppo: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("troupe", "orchestrator", "workers"):
        shutil.copytree(ROOT / package, checkout / package, symlinks=True)
    file = checkout / "workers" / "algorithms" / "policy_loss.py"
    text = file.read_text()
    assert text.count(PLANTED[0]) == 1
    file.write_text(text.replace(*PLANTED))
    found = replayed(ppo, 5, code=1, root=checkout).stdout
    assert re.search(r"^step 5: NOT EQUAL \(policy \w+ in the run, \w+ here, critic \w+; ", found, re.MULTILINE), found
    assert "  step 5, update 2 of 2: policy/loss is " in found, "before the first update nothing is bounded"


# That updates are repeated bit for bit under every ZeRO stage, on one rank and on two, is in test_trainer.py; a run of
# two policy workers is repeated in test_grpo_run.py.
