"""Two rounds that sample and train on the ranked samples, killed and resumed: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.commands import Run, running

pytestmark = pytest.mark.long

ROUNDS = """\
name: rounds
seed: 7
rounds: 2
model: {path: .cache/models/tiny-llama, dtype: float32}
checkpoint: {every_steps: 1}
stages:
  sample:
    roles:
      rollout: {cpus: 0.5, threads: 1, max_num_seqs: 32, max_model_len: 96, enforce_eager: true, kv_cache_gib: 0.1}
      policy: {cpus: 0.5, threads: 1, micro_batch_tokens: 2048}
      reward: {cpus: 0.25, functions: [{name: letter_share, args: {letters: e}}]}
    algorithm: {name: grpo, group_size: 4}
    schedule: {steps: 1, prompts_per_step: 8}
    sampling: {max_tokens: 8}
    data: {train: {kind: jsonl, path: deploy/specs/data/demonstrations-train.jsonl, answer: null}}
  dpo:
    roles:
      policy: {cpus: 0.5, threads: 1, micro_batch_tokens: 1024, learning_rate: 0.005}
      reference: {colocate_with: policy}
    schedule: {steps: 2, examples_per_step: 4}
    data: {train: {kind: jsonl, path: "stage:sample", answers: answers, scores: scores}, max_length: 96}
"""


def trained(out: Path) -> dict[str, bytes]:
    """The weights after each stage, and the samples that were handed on."""
    files = [*out.glob("round-*/*/checkpoints/step-*/model/*.safetensors"), *out.glob("round-*/sample/ranked.jsonl")]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def test_rounds_that_are_killed_and_resumed_end_with_the_same_weights(tmp_path: Path, tiny_model: Path) -> None:
    spec = tmp_path / "rounds.yaml"
    spec.write_text(ROUNDS)
    model = f"model.path={tiny_model}"
    with running(Run(tmp_path, spec, model, name="whole")) as whole:
        assert whole.wait() == 0, whole.output
    with running(Run(tmp_path, spec, model, name="killed")) as first:
        first.wait_until((first.out / "round-0001/dpo/checkpoints/step-000001").exists, "a step of the first dpo")
        first.process.kill()
        first.wait()
    with running(Run(tmp_path, spec, model, name="killed", resume=True)) as second:
        assert second.wait() == 0, second.output
    assert "already complete" in second.stdout
    once, twice = trained(whole.out), trained(second.out)
    assert len(once) == 2 * (1 + 2 + 1) and once.keys() == twice.keys()
    assert [name for name in once if once[name] != twice[name]] == []
    weights = [one for name, one in sorted(once.items()) if "dpo" in name]
    assert len(set(weights)) == len(weights), "every step of both rounds changes the weights"
