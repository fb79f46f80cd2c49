"""Whole runs of the shipped specs on given examples.

Every spec runs on trainers that become the next spec's instead of being started anew; what differs from `troupe run` is
only who starts them. Resumption and several ranks are started as a user starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from orchestrator.actor_group import ActorSpec, ActorWorker, Cluster
from orchestrator.cast import Casting, Scene, Stage, WorkerClasses
from orchestrator.checkpoint import CheckpointStore, verify
from orchestrator.console import Console
from orchestrator.examples import load_examples
from orchestrator.handles import Gang
from orchestrator.placement import Placement, Seat
from orchestrator.prompts import chat_messages
from orchestrator.run_offline import OfflineCompany
from orchestrator.spec_chain import plan_runs, read_document
from orchestrator.spec_offline import OfflineSpec
from tests.conftest import ROOT
from tests.real.helpers import Command, Run, interrupt, running, troupe, weights
from workers.config import ModelConfig, Rendezvous
from workers.config_offline import OfflineConfig
from workers.critic import CriticWorker
from workers.examples import encode_response
from workers.modeling import load_causal, load_value
from workers.offline import ExamplePolicyWorker, RewardTrainer
from workers.policy import PolicyWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.reward_model import RewardModel
from workers.rollout import RolloutWorker
from workers.rollout_prompts import encode_prompt

DPO = ROOT / "deploy" / "tiny-dpo.yaml"
LEARNING = ("policy/loss", "policy/grad_norm", "policy/accuracy", "policy/margin", "policy/learning_rate")
BOUND_S = 240.0
SEATS = Placement(
    "trainees",
    ({"CPU": 1.0},),
    "PACK",
    (Seat("policy", 0, 0, 0.4, 0.0), Seat("reward_model", 0, 0, 0.4, 0.0), Seat("reference", 0, 0, 0.2, 0.0)),
)
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class PolicyTrainee(ExamplePolicyWorker):
    """A policy that can be another spec's next."""

    def become(self, config: OfflineConfig) -> None:
        """Forget the last spec, and stay in the group."""
        self.release()
        ExamplePolicyWorker.__init__(self, config, self._name)
        torch.manual_seed(config.seed)
        self.build()


class RewardTrainee(RewardTrainer):
    """A reward model that can be another spec's next."""

    def become(self, config: OfflineConfig) -> None:
        """Forget the last spec, and stay in the group."""
        self.release()
        RewardTrainer.__init__(self, config, self._name)
        torch.manual_seed(config.seed)
        self.build()


@dataclass(frozen=True)
class Left:
    """What a run left."""

    out: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class School:
    """Who stays for all specs."""

    cluster: Cluster
    trainers: dict[str, ActorWorker]
    reference: ActorWorker
    folder: Path

    async def teach(self, name: str, *overrides: str, folder: str = "") -> Left:
        """One run of a shipped spec."""
        with contextlib.chdir(ROOT):
            return await self._teach(shipped(name, *overrides), self.folder / (folder or name))

    async def examine(self, name: str, *overrides: str) -> dict[str, float]:
        """The held-out figures of a shipped spec's model, with no training."""
        with contextlib.chdir(ROOT):
            spec = shipped(name, *overrides)
            company = await self._company(spec, self.folder)
            held_out = load_examples(spec)[1]
            assert held_out is not None
            return await (await company.evaluator(held_out)).run()

    async def _teach(self, spec: OfflineSpec, out: Path) -> Left:
        company = await self._company(spec, out)
        out.mkdir()
        store = CheckpointStore(out / "checkpoints", spec.checkpoint.keep)
        store.prepare()
        outcome = await (await company.controller(load_examples(spec), store, None)).run()
        assert outcome.steps_done == spec.schedule.steps
        return Left(out)

    async def _company(self, spec: OfflineSpec, out: Path) -> OfflineCompany:
        trainer = self.trainers[spec.row.trains]
        await trainer.call("become", spec.trainer_config(), timeout_s=BOUND_S)
        reference = spec.reference_config()
        scorer = None if reference is None else Gang("reference", [self.reference], reference.micro_batch_tokens)
        stage = Stage(Gang("policy", [trainer], spec.roles.policy.micro_batch_tokens), None, scorer, (), ())
        casting = Casting(spec, self.cluster, CLASSES)
        return OfflineCompany(spec, out, Scene(self.cluster, casting, stage, Console(io.StringIO()), asyncio.Event()))


CLASSES = WorkerClasses(
    RolloutWorker, PolicyWorker, CriticWorker, ReferenceWorker, RewardWorker, PolicyTrainee, RewardTrainee
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are written."""
    return tmp_path_factory.mktemp("offline")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def school(folder: Path) -> AsyncIterator[School]:
    """A cluster with two trainers that have nothing to learn yet."""
    cluster = Cluster.connect({"CPU": 1.0, "GPU": 0.0})
    try:
        await cluster.reserve([SEATS], BOUND_S)
        dpo, reward_model, kto = (shipped(f"tiny-{name}") for name in ("dpo", "reward-model", "kto"))
        actors = (
            ActorSpec(PolicyTrainee, (dpo.trainer_config(), "policy-0"), ENVIRONMENT),
            ActorSpec(RewardTrainee, (reward_model.trainer_config(), "reward_model-0"), ENVIRONMENT),
            ActorSpec(ReferenceWorker, (kto.reference_config(), "reference-0"), ENVIRONMENT),
        )
        policy, reward, reference = (
            cluster.spawn(SEATS, seat, f"{seat.role}-0", actor) for seat, actor in zip(SEATS.seats, actors, strict=True)
        )
        for trainer in (policy, reward):
            address, port = await trainer.call("rendezvous", timeout_s=BOUND_S)
            place = Rendezvous(address=address, port=port, rank=0, world_size=1)
            await trainer.call("start", place, timeout_s=BOUND_S)
        await reference.call("start", timeout_s=BOUND_S)
        yield School(cluster, {"policy": policy, "reward_model": reward}, reference, folder)
    finally:
        await cluster.close(10.0)
        cluster.abandon()


@pytest.fixture(scope="module")
def untied(folder: Path, tiny_model: Path) -> Path:
    """The tiny model with an output head of its own."""
    shutil.copytree(tiny_model, path := folder / "untied")
    config = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=False)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dpo(school: School) -> Left:
    """The shipped spec, to its end, with every checkpoint."""
    return await school.teach("tiny-dpo", "checkpoint.keep=10", "checkpoint.every_steps=1")


def shipped(name: str, *overrides: str) -> OfflineSpec:
    """A spec of deploy/."""
    (planned,) = plan_runs(read_document(ROOT / "deploy" / f"{name}.yaml", overrides))
    assert isinstance(planned.spec, OfflineSpec)
    return planned.spec


def learnt(left: Left, name: str) -> None:
    """What every run on given examples must leave."""
    spec = shipped(name)
    trains = spec.row.trains
    lines = left.metrics
    assert [line["step"] for line in lines] == [0, *range(1, spec.schedule.steps + 1)]
    assert lines[-1]["eval/loss"] < 0.9 * lines[0]["eval/loss"]
    assert lines[-1].get("eval/accuracy", 1.0) >= 0.75
    for line in lines[1:]:
        assert line[f"{trains}/skipped_updates"] == 0.0
        assert line["ledger/trained"] == line["ledger/dispatched"] == line["examples"] * line["step"]
    newest = sorted((left.out / "checkpoints").iterdir())[-1]
    assert {trains, "model"} <= {path.name for path in verify(newest).path.iterdir()}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["tiny-sft", "tiny-orpo", "tiny-kto", "tiny-rrhf"])
async def test_a_shipped_spec_learns_from_its_examples(name: str, school: School) -> None:
    learnt(await school.teach(name), name)


@pytest.mark.asyncio(loop_scope="module")
async def test_dpo_learns_from_its_examples(dpo: Left) -> None:
    learnt(dpo, "tiny-dpo")
    first = dpo.metrics[1]
    # Before the first update policy and reference are one model: nothing is preferred.
    assert first["policy/preference_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["policy/margin"] == pytest.approx(0.0, abs=1e-4)
    AutoModelForCausalLM.from_pretrained(dpo.out / "checkpoints" / "step-000010" / "model")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reward_model_is_what_the_reward_and_critic_roles_start_from(
    school: School,
) -> None:
    left = await school.teach("tiny-reward-model")
    learnt(left, "tiny-reward-model")
    assert 0.0 <= left.metrics[-1]["eval/calibration_error"] < 0.5
    trained = left.out / "checkpoints" / "step-000010" / "model"
    assert load_value(ModelConfig(path=str(trained))).get_submodule("score").state_dict()["weight"].any()
    config = ModelConfig(path=str(trained), dtype="float32")
    assert accuracy(RewardModel(config, 1024, "cpu")) >= 0.9
    plain = AutoModelForSequenceClassification.from_pretrained(trained)
    assert plain.config.num_labels == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stage", [0, 3])
async def test_a_reward_model_leaves_both_heads_as_they_were_trained(school: School, untied: Path, stage: int) -> None:
    """Evaluated alone, what is exported has the very figures that the run itself had at its end."""
    zero = f"roles.policy.zero_stage={stage}"
    overrides = (f"model.path={untied}", "schedule.steps=2", zero)
    left = await school.teach("tiny-reward-model", *overrides, folder=f"untied-{stage}")
    trained = left.out / "checkpoints" / "step-000002" / "model"
    base, exported = (load_causal(ModelConfig(path=str(path))).state_dict() for path in (untied, trained))
    assert not torch.equal(base["lm_head.weight"], exported["lm_head.weight"])
    alone = await school.examine("tiny-reward-model", f"model.path={trained}", zero)
    assert {"eval/loss", "eval/lm_loss", "eval/accuracy"} <= alone.keys()
    assert alone == {name: value for name, value in left.metrics[-1].items() if name.startswith("eval/")}


def test_what_was_trained_is_evaluated_alone_as_in_its_run(dpo: Left, folder: Path) -> None:
    trained = dpo.out / "checkpoints" / "step-000005" / "model"
    with running(Command(folder, troupe("eval", str(DPO), "--model", str(trained)))) as command:
        assert command.wait() == 0, command.told
    figures = {name: value for name, value in dpo.metrics[5].items() if name.startswith("eval/")}
    assert json.loads(command.stdout) == pytest.approx(figures, rel=1e-5)
    assert figures["eval/accuracy"] > 0.5


@pytest.mark.long
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(dpo: Left, folder: Path) -> None:
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


@pytest.mark.long
def test_twice_the_workers_and_smaller_micro_batches_train_the_same(dpo: Left, folder: Path) -> None:
    overrides = ("roles.policy.workers=2", "roles.policy.micro_batch_tokens=256", "schedule.steps=2")
    with running(Run(folder, DPO, *overrides, name="twice")) as run:
        assert run.wait() == 0, run.told
    for name in LEARNING:
        assert run.metrics[1][name] == pytest.approx(dpo.metrics[1][name], rel=1e-3, abs=1e-5), name


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
