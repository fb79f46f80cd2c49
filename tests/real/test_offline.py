"""Whole runs of the shipped specs on given examples, and of the chain of stages, started as a user starts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from orchestrator.checkpoint import verify
from orchestrator.prompts import chat_messages
from orchestrator.spec_chain import plan_runs, read_document
from tests.conftest import ROOT
from tests.real.helpers import Run, interrupt, running, weights
from workers.config import ModelConfig
from workers.examples import encode_response
from workers.modeling import load_value
from workers.reward_model import RewardModel
from workers.rollout_prompts import encode_prompt

CHAIN = ROOT / "deploy" / "tiny-three-stage.yaml"
DPO = ROOT / "deploy" / "tiny-dpo.yaml"
SPECS = {"sft": "policy", "orpo": "policy", "kto": "policy", "rrhf": "policy"}
LEARNING = ("policy/loss", "policy/grad_norm", "policy/accuracy", "policy/margin", "policy/learning_rate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are written."""
    return tmp_path_factory.mktemp("offline")


@pytest.fixture(scope="module")
def dpo(folder: Path) -> Iterator[Run]:
    """The shipped spec, to its end."""
    with running(Run(folder, DPO, "checkpoint.keep=10", "checkpoint.every_steps=1", name="dpo")) as run:
        assert run.wait() == 0, run.told
        yield run


def learnt(run: Run, spec: Path, trains: str) -> None:
    """What every run on given examples must leave."""
    (planned,) = plan_runs(read_document(spec))
    steps = planned.spec.schedule.steps
    assert run.steps() == [0, *range(1, steps + 1)]
    assert run.metrics[-1]["eval/loss"] < 0.9 * run.metrics[0]["eval/loss"]
    assert run.metrics[-1].get("eval/accuracy", 1.0) >= 0.75
    for line in run.metrics[1:]:
        assert line[f"{trains}/skipped_updates"] == 0.0
        assert line["ledger/trained"] == line["ledger/dispatched"] == line["examples"] * line["step"]
    newest = sorted((run.out / "checkpoints").iterdir())[-1]
    assert {trains, "model"} <= {path.name for path in verify(newest).path.iterdir()}
    assert run.left_over() == []


@pytest.mark.parametrize("name", SPECS)
def test_a_shipped_spec_learns_from_its_examples(name: str, folder: Path) -> None:
    spec = ROOT / "deploy" / f"tiny-{name}.yaml"
    with running(Run(folder, spec, name=name)) as run:
        assert run.wait() == 0, run.told
        learnt(run, spec, SPECS[name])


def test_dpo_learns_from_its_examples(dpo: Run) -> None:
    learnt(dpo, DPO, "policy")
    first = dpo.metrics[1]
    # Before the first update policy and reference are one model: nothing is preferred.
    assert first["policy/preference_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["policy/margin"] == pytest.approx(0.0, abs=1e-4)
    AutoModelForCausalLM.from_pretrained(dpo.out / "checkpoints" / "step-000010" / "model")


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(dpo: Run, folder: Path) -> None:
    overrides = ("checkpoint.keep=10", "checkpoint.every_steps=1", "schedule.steps=5", "evaluation.at_end=false")
    with running(Run(folder, DPO, *overrides, name="resumed")) as first:
        first.until_step(2)
        interrupt(first)
        assert first.wait() == 130, first.told
        assert first.left_over() == []
    with running(Run(folder, DPO, *overrides, name="resumed", resume=True)) as second:
        assert second.wait() == 0, second.told
    for whole, parts in zip(dpo.metrics[1:], second.metrics[1:], strict=False):
        assert {name: parts[name] for name in LEARNING} == {name: whole[name] for name in LEARNING}
    one, two = weights(dpo.out, 5), weights(second.out, 5)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_twice_the_workers_and_smaller_micro_batches_train_the_same(dpo: Run, folder: Path) -> None:
    overrides = ("roles.policy.workers=2", "roles.policy.micro_batch_tokens=256", "schedule.steps=2")
    with running(Run(folder, DPO, *overrides, name="twice")) as run:
        assert run.wait() == 0, run.told
    for name in LEARNING:
        assert run.metrics[1][name] == pytest.approx(dpo.metrics[1][name], rel=1e-3, abs=1e-5), name


def test_a_reward_model_is_what_the_reward_and_critic_roles_start_from(folder: Path) -> None:
    spec = ROOT / "deploy" / "tiny-reward-model.yaml"
    with running(Run(folder, spec, name="reward-model")) as run:
        assert run.wait() == 0, run.told
        learnt(run, spec, "reward_model")
    assert 0.0 <= run.metrics[-1]["eval/calibration_error"] < 0.5
    trained = run.out / "checkpoints" / "step-000010" / "model"
    assert load_value(ModelConfig(path=str(trained))).get_submodule("score").state_dict()["weight"].any()
    config = ModelConfig(path=str(trained), dtype="float32")
    assert accuracy(RewardModel(config, 1024, "cpu")) >= 0.9
    plain = AutoModelForSequenceClassification.from_pretrained(trained)
    assert plain.config.num_labels == 1


def accuracy(model: RewardModel) -> float:
    """Share of held-out pairs that the reward role's own code judges right, on answers as an engine samples them."""
    (planned,) = plan_runs(read_document(ROOT / "deploy" / "tiny-reward-model.yaml"))
    source: Any = planned.spec.data.eval
    rows = []
    for line in (ROOT / source.path).read_text().splitlines():
        pair = json.loads(line)
        messages = json.dumps(chat_messages(pair["prompt"], source))
        prompt = encode_prompt(model.tokenizer, messages, 96)
        for response in (pair["chosen"], pair["rejected"]):
            ids = encode_response(model.tokenizer, messages, prompt, response)
            rows.append({"messages": messages, "response": response, "prompt_ids": prompt, "response_ids": ids})
    scores = [outcome.value or 0.0 for outcome in model.score(pa.Table.from_pylist(rows))]
    return fmean(better > worse for better, worse in zip(scores[::2], scores[1::2], strict=True))


def test_three_stages_follow_one_another_and_go_on_where_they_were_stopped(folder: Path) -> None:
    overrides = ("checkpoint.every_steps=1", "stages.ppo.schedule.steps=2")
    with running(Run(folder, CHAIN, *overrides, name="chain")) as first:
        first.until(lambda: (first.out / "reward_model" / "checkpoints" / "step-000001").exists(), "in stage 2")
        interrupt(first)
        assert first.wait() == 130, first.told
        assert not (first.out / "ppo").exists()
    before = (first.out / "sft" / "metrics.jsonl").read_text()
    with running(Run(folder, CHAIN, *overrides, name="chain", resume=True)) as second:
        assert second.wait() == 0, second.told
        assert "done before" in second.stdout
        assert second.left_over() == []
    assert second.weight_files == []
    assert (second.out / "sft" / "metrics.jsonl").read_text() == before
    lines = {stage: steps(second.out / stage) for stage in ("sft", "reward_model", "ppo")}
    assert [line["step"] for line in lines["reward_model"]] == [1, 2, 3, 4, 5, 6]
    assert lines["reward_model"][-1]["eval/accuracy"] >= 0.9
    for line in lines["ppo"]:
        assert isinstance(line["reward/reward_model/mean"], float)
        assert line["critic/skipped_updates"] == line["policy/skipped_updates"] == 0.0
    # The reward model learnt from the fine-tuned model, and not from the one the chain began with.
    told = (second.out / "reward_model" / "spec.yaml").read_text()
    assert str(second.out / "sft" / "checkpoints" / "step-000008" / "model") in told


def steps(out: Path) -> list[dict[str, Any]]:
    """Lines of the metrics of finished steps."""
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["step"]]
