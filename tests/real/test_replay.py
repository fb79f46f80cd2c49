"""A run of PPO across a resume, and `troupe replay` on real runs: its weights are bitwise those of the run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from tests.conftest import ROOT
from tests.real.commands import (
    GRPO,
    POLICY_METRICS,
    PPO,
    RUN_METRICS,
    SAMPLES_PER_STEP,
    Run,
    equal_steps,
    ledger_balances,
    missing_metrics,
    replayed,
    running,
    trajectories,
)
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import verify

pytestmark = pytest.mark.long

CRITIC_METRICS = ("critic/loss", "critic/grad_norm", "critic/learning_rate", "critic/skipped_updates")
SHORT = ("schedule.steps=3", "schedule.prompts_per_step=4")
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


def trained(folder: Path, spec: Path, *overrides: str, name: str, resume: bool = False) -> Run:
    """A run that has ended well."""
    with running(Run(folder, spec, *overrides, name=name, out=folder / name, resume=resume)) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    assert run.weight_files == []
    return run


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """PPO with a critic, texts and two updates per step: two steps, a checkpoint, and after a resume the others."""
    folder = tmp_path_factory.mktemp("replay")
    sets = ("checkpoint.every_steps=2", "checkpoint.keep=10", *TEXTS)
    trained(folder, PPO, *sets, "schedule.steps=2", name="ppo")
    return trained(folder, PPO, *sets, name="ppo", resume=True)


@pytest.fixture(scope="module")
def ppo(ppo_run: Run) -> Path:
    """Folder of the run of PPO."""
    return ppo_run.out


def test_ppo_with_a_critic_increases_the_reward(ppo_run: Run) -> None:
    spec = load_rollout_spec(PPO)
    assert ppo_run.steps() == list(range(1, spec.schedule.steps + 1))
    for line in ppo_run.metrics:
        assert missing_metrics(line, RUN_METRICS + POLICY_METRICS + CRITIC_METRICS) == []
        assert ledger_balances(line)
    rewards = [line["reward/mean"] for line in ppo_run.metrics]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.05, rewards  # eight standard errors of a step's mean
    found = sorted((ppo_run.out / "checkpoints").iterdir())
    assert {"policy", "critic", "model"} <= {path.name for path in verify(found[-1]).path.iterdir()}
    for row in trajectories(ppo_run.out, spec.schedule.steps).to_pylist():
        assert row["trained"]
        for name in ("advantages", "returns", "values", "old_logprobs", "ref_logprobs", "logprobs", "entropy"):
            assert len(row[name]) == len(row["response_ids"]), name


def test_ppo_with_a_critic_is_repeated_across_a_resume_and_a_damaged_table_is_refused(ppo: Path) -> None:
    """The checkpoint of the resume is removed, so that the replay repeats the steps before and after it."""
    assert equal_steps(replayed(ppo, 4)) == [3, 4]
    shutil.copytree(ppo, damaged := ppo.with_name("damaged"))
    shutil.rmtree(damaged / "checkpoints")
    replay = replayed(damaged, 3)
    assert equal_steps(replay) == [1, 2, 3]
    assert re.search(r"^step 3: equal \(policy \w{12}, critic \w{12}; ", replay.stdout, re.MULTILINE), replay.stdout
    table = damaged / "replay" / "step-000002" / "batch.arrow"
    content = bytearray(table.read_bytes())
    content[-100] ^= 1
    table.write_bytes(content)
    refused = replayed(damaged, 2, code=2)
    assert re.search(r"step-000002/batch.arrow has changed: it has digest \w+ and \d+ bytes", refused.stderr)
    assert refused.stdout == "", "it is refused before anything starts"


def test_a_planted_bug_in_the_loss_is_found(ppo: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("troupe", "orchestrator", "workers"):
        shutil.copytree(ROOT / package, checkout / package, symlinks=True)
    file = checkout / "workers" / "algorithms" / "policy_loss.py"
    text = file.read_text()
    assert text.count(PLANTED[0]) == 1
    file.write_text(text.replace(*PLANTED))
    found = replayed(ppo, 3, "--against", str(checkout), code=1).stdout
    assert re.search(rf"^{checkout} differs first in step 3$", found, re.MULTILINE), found
    assert re.search(r"^  policy: \d+ of \d+ parameters; the first is \S+$", found, re.MULTILINE), found
    assert "  critic: " not in found, "the critic's loss is the same"
    assert "  update 2 of 2: policy/loss is " in found, "before the first update the ratio is 1, and nothing is bounded"


def test_the_samples_of_a_step_are_sampled_again(ppo: Path) -> None:
    """Float32 on the CPU, one engine, all groups at once: with version 2 of the weights every token is the run's."""
    found = replayed(ppo, 3, "--resample").stdout
    assert f"step 3: {SAMPLES_PER_STEP} of {SAMPLES_PER_STEP} samples have the tokens of the run" in found
    gap = re.search(r"log-probs of equal tokens differ by up to (\S+)", found)
    assert gap is not None and float(gap[1]) < 1e-5


# That updates are repeated bit for bit under every ZeRO stage, on one rank and on two, is in test_trainer.py.


def test_grpo_is_repeated_on_two_ranks(tmp_path: Path) -> None:
    """ZeRO-3, from the initial model; the digests of whole parameters are gathered from both ranks."""
    run = trained(tmp_path, GRPO, "roles.policy.workers=2", "roles.policy.zero_stage=3", *SHORT, name="grpo").out
    shutil.rmtree(run / "checkpoints")
    assert equal_steps(replayed(run, 3)) == [1, 2, 3]
