"""Two rounds that sample and train on the ranked samples, killed and resumed: the same weights, bit for bit.

They train as iterated DPO does, as RLHF with a reward model that is trained further in each round, and as RAFT.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.real.commands import Run, running

pytestmark = pytest.mark.long

ROUNDS = """\
name: rounds
seed: 7
rounds: 2
model: {path: .cache/models/tiny-llama, dtype: float32}
roles: {policy: {cpus: 0.5, threads: 1, micro_batch_tokens: 2048, learning_rate: 0.005}}
checkpoint: {every_steps: 1}
stages:
  sample:
    roles:
      rollout: {cpus: 0.5, threads: 1, max_num_seqs: 32, max_model_len: 96, enforce_eager: true, kv_cache_gib: 0.1}
      reward: {cpus: 0.25, functions: [{name: letter_share, args: {letters: e}}]}
    algorithm: {name: grpo, group_size: 4}
    schedule: {steps: 1, prompts_per_step: 8}
    sampling: {max_tokens: 8}
    data: {train: {kind: jsonl, path: deploy/specs/data/demonstrations-train.jsonl, answer: null}}
  dpo:
    roles: {reference: {colocate_with: policy}}
    schedule: {steps: 2, examples_per_step: 4}
    data: {train: {kind: jsonl, path: "stage:sample", answers: answers, scores: scores}, max_length: 96}
  reward_model:
    model: {path: "stage:reward_model"}
    schedule: {steps: 1, examples_per_step: 4}
    data: {train: {kind: jsonl, path: "stage:sample", answers: answers, scores: scores}, max_length: 96}
  grpo:
    model: {path: "stage:dpo"}
    roles:
      rollout: {cpus: 0.5, threads: 1, max_num_seqs: 32, max_model_len: 96, enforce_eager: true, kv_cache_gib: 0.1}
      reward: {cpus: 0.25, threads: 1, model: {path: "stage:reward_model"}}
    algorithm: {group_size: 4}
    schedule: {steps: 2, prompts_per_step: 4}
    sampling: {max_tokens: 8}
    data: {train: {kind: jsonl, path: deploy/specs/data/demonstrations-train.jsonl, answer: null}}
  sft:
    model: {path: "stage:grpo"}
    schedule: {steps: 1, examples_per_step: 4}
    data: {train: {kind: jsonl, path: "stage:sample", where: reward > 0}, max_length: 96}
"""
STEPS = {"sample": 1, "dpo": 2, "reward_model": 1, "grpo": 2, "sft": 1}
KILLED_IN = ("dpo", "grpo")
"""Stages of the second round in whose first step the run is killed."""


def trained(out: Path) -> dict[str, bytes]:
    """The weights after each step, and the samples that were handed on."""
    weights, samples = "round-*/*/checkpoints/step-*/model/*.safetensors", "round-*/sample/*.jsonl"
    files = [*out.glob(weights), *(file for file in out.glob(samples) if file.stem in ("ranked", "best"))]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """The rounds, undisturbed."""
    folder = tmp_path_factory.mktemp("rounds")
    (folder / "rounds.yaml").write_text(ROUNDS)
    with running(Run(folder, folder / "rounds.yaml", f"model.path={tiny_model}", name="whole")) as run:
        assert run.wait() == 0, run.output
    return run


def test_rounds_that_are_killed_and_resumed_end_with_the_same_weights(
    whole: Run, tmp_path: Path, tiny_model: Path
) -> None:
    """The run that is killed begins with the first round of the other one, and finds it complete."""
    given = (tmp_path, whole.out.parent / "rounds.yaml", f"model.path={tiny_model}")
    shutil.copytree(whole.out / "round-0001", tmp_path / "killed" / "round-0001")
    for stage in KILLED_IN:
        with running(Run(*given, name="killed", resume=True)) as run:
            step = run.out / "round-0002" / stage / "checkpoints" / "step-000001"
            run.wait_until(step.exists, f"a step of {stage}")
            run.process.kill()
            run.process.wait()
    with running(Run(*given, name="killed", resume=True)) as last:
        assert last.wait() == 0, last.output
    complete = [line.split(":")[0] for line in last.stdout.splitlines() if "already complete" in line]
    assert len(complete) == len(STEPS) + 3, "all of the first round, and of the second one what is before grpo"
    once, twice = trained(whole.out), trained(last.out)
    assert len(once) == 2 * (sum(STEPS.values()) + 2) and once.keys() == twice.keys()
    assert [name for name in once if once[name] != twice[name]] == []
    assert len(set(once.values())) == len(once), "every step of both rounds changes the weights, and has new samples"


def test_every_round_samples_from_other_prompts(whole: Run) -> None:
    files = sorted(whole.out.glob("round-*/sample/best.jsonl"))
    prompts = [{str(json.loads(row)["prompt"]) for row in file.read_text().splitlines()} for file in files]
    assert [len(found) for found in prompts] == [8, 8] and not prompts[0] & prompts[1]


def test_every_round_goes_on_from_the_models_of_the_round_before(whole: Run) -> None:
    models = {}
    for number, stage in ((number, stage) for number in (1, 2) for stage in STEPS):
        spec = yaml.safe_load((whole.out / f"round-000{number}" / stage / "spec.yaml").read_text())
        models[number, stage] = spec["model"]["path"]
    last = {
        stage: whole.out / "round-0001" / stage / "checkpoints" / f"step-{STEPS[stage]:06d}/model" for stage in STEPS
    }
    assert models[2, "sample"] == models[2, "dpo"] == str(last["sft"])
    assert models[2, "reward_model"] == str(last["reward_model"])
    # A step of Adam moves every weight by the learning rate at most; a new score head would be elsewhere.
    before, after = (
        load_file(whole.out / f"round-000{number}/reward_model/checkpoints/step-000001/model/model.safetensors")
        for number in (1, 2)
    )
    moved = (before["score.weight"] - after["score.weight"]).abs().max().item()
    assert 0 < moved <= 0.0051
