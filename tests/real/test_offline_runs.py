"""Whole runs of the shipped specs on offline data.

Only the start of the workers differs from `troupe run`: all specs share the trainers, which are reconfigured for the
next spec instead of being restarted. The command itself, and Ctrl-C, are in test_staged_run.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
from collections import defaultdict
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

from tests.conftest import ROOT
from tests.real.commands import (
    Command,
    checkpoint_weights,
    equal_steps,
    metrics_lines,
    replayed,
    running,
    troupe_command,
)
from tests.real.warm import forked_import_servers
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.cluster.worker_group import ExampleGroup, ReferenceGroup
from troupe.orchestrator.cluster.worker_server import WorkerServer
from troupe.orchestrator.data.conversations import chat_messages
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.settings import offline_config, scorer_configs
from troupe.orchestrator.runs.checkpoints import folder_checkpoints
from troupe.orchestrator.runs.offline import OfflineRun
from troupe.orchestrator.runs.session import RunRequest, Session
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import verify
from troupe.workers.contract.config import EngineProcess
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.offline_config import OfflineConfig
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import encode_response
from troupe.workers.models.modeling import load_causal, load_value
from troupe.workers.offline import ExamplePolicyWorker, RewardTrainer
from troupe.workers.reference import ReferenceWorker
from troupe.workers.rewards.model import RewardModel

pytestmark = pytest.mark.long

DPO = ROOT / "deploy" / "specs" / "tiny-dpo.yaml"
LEARNING = ("policy/loss", "policy/grad_norm", "policy/accuracy", "policy/margin", "policy/learning_rate")
RANKED = ("tiny-dpo-ranked", "algorithm.label_smoothing=0.1")
BOUNDED = ("tiny-reward-model-ranked", "algorithm.center_coef=0.2", "algorithm.lm_coef=0.1")
BY_TOKEN = ("tiny-reward-model-token", "algorithm.center_coef=0.2", "algorithm.lm_coef=0.1")
HALF = ("schedule.examples_per_step=8", "evaluation.every_steps=0", "checkpoint.every_steps=0")
"""Half the examples, which are enough to learn from, and evaluation and checkpoint at the end."""
TIMEOUT_S = 240.0
PLACEMENT = Placement(
    "reusable",
    ({"CPU": 1.0},),
    "PACK",
    (
        *(WorkerPlacement(role, place, 0, 0.15, 0.0) for role in ("policy", "reward") for place in range(3)),
        WorkerPlacement("reference", 0, 0, 0.1, 0.0),
    ),
)
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class ReusablePolicy(ExamplePolicyWorker):
    """A policy worker that can be reconfigured."""

    def reconfigure(self, config: OfflineConfig) -> None:
        """Build the model of another configuration in the same process group."""
        self.release()
        ExamplePolicyWorker.__init__(self, config, self._name)
        torch.manual_seed(config.seed)
        self.build()


class ReusableRewardModel(RewardTrainer):
    """A reward model trainer that can be reconfigured."""

    def reconfigure(self, config: OfflineConfig) -> None:
        """Build the model of another configuration in the same process group."""
        self.release()
        RewardTrainer.__init__(self, config, self._name)
        torch.manual_seed(config.seed)
        self.build()


@dataclass(frozen=True)
class FinishedRun:
    """The output folder of a finished run."""

    out: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl so far."""
        return metrics_lines(self.out)


@dataclass(frozen=True)
class SharedWorkers:
    """Workers that all specs share."""

    cluster: Cluster
    policies: dict[int, list[ActorWorker[ReusablePolicy]]]
    """The ranks, by their number."""
    reward_models: dict[int, list[ActorWorker[ReusableRewardModel]]]
    reference: ActorWorker[ReferenceWorker]
    folder: Path

    async def train(self, name: str, *overrides: str, folder: str = "") -> FinishedRun:
        """Run a shipped spec."""
        with contextlib.chdir(ROOT):
            spec, out = shipped(name, *overrides), self.folder / (folder or name)
            out.mkdir()
            assert await self._train(spec, out, asyncio.Event()) == spec.schedule.steps
            return FinishedRun(out)

    async def train_in_two_parts(self, name: str, *overrides: str, folder: str, first: int) -> FinishedRun:
        """Run a shipped spec that is asked to stop after some steps, and resumed on trainers that are built anew."""
        with contextlib.chdir(ROOT):
            spec, out, stop = shipped(name, *overrides), self.folder / folder, asyncio.Event()
            out.mkdir()
            training = asyncio.create_task(self._train(spec, out, stop))
            while len(FinishedRun(out).metrics) <= first:
                assert not training.done()
                await asyncio.sleep(0.02)
            stop.set()
            assert first <= await training < spec.schedule.steps
            assert await self._train(spec, out, asyncio.Event()) == spec.schedule.steps
            return FinishedRun(out)

    async def evaluate(self, name: str, *overrides: str) -> dict[str, float]:
        """Evaluate the model of a shipped spec on its held-out data, without training."""
        with contextlib.chdir(ROOT):
            spec = shipped(name, *overrides)
            parts = await self._parts(spec, self.folder, asyncio.Event())
            return await (await parts.evaluator()).run(0)

    async def _train(self, spec: OfflineSpec, out: Path, stop: asyncio.Event) -> int:
        """Train from the newest checkpoint in the folder, if there is one. Returns the number of steps of the run."""
        parts = await self._parts(spec, out, stop)
        controller = await parts.controller()
        return (await controller.run()).steps_done

    async def _parts(self, spec: OfflineSpec, out: Path, stop: asyncio.Event) -> OfflineRun:
        config, policy = offline_config(spec), spec.roles.policy
        if spec.trains == "policy":
            ranks: list[Any] = self.policies[policy.workers]
            await asyncio.gather(*(rank.call(ReusablePolicy.reconfigure, TIMEOUT_S, config) for rank in ranks))
        else:
            ranks = self.reward_models[policy.workers]
            await asyncio.gather(*(rank.call(ReusableRewardModel.reconfigure, TIMEOUT_S, config) for rank in ranks))
        trainer = ExampleGroup(spec.trains, ranks, policy.micro_batch_tokens)
        packs = await asyncio.gather(*(rank.call(ExamplePolicyWorker.packs, TIMEOUT_S) for rank in ranks))
        trainer.packs = all(packs)
        role = scorer_configs(spec).get("reference")
        reference = None if role is None else ReferenceGroup("reference", [self.reference], role.micro_batch_tokens)
        workers = Workers({"policy": trainer} | ({} if reference is None else {"reference": reference}))
        launcher = WorkerLauncher(spec, self.cluster)
        console = Console(io.StringIO())
        request, checkpoints = RunRequest(spec, out, False, None), folder_checkpoints(spec, out)
        opened = (request, spec, self.cluster, launcher, workers, console, stop, checkpoints)
        return OfflineRun(Session(*opened, read=load_data(spec)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of the runs."""
    return tmp_path_factory.mktemp("offline")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folder: Path) -> AsyncIterator[SharedWorkers]:
    """A cluster with a policy, a reward model and a reference worker that all specs share."""
    with forked_import_servers():
        forks = WorkerServer(EngineProcess(device="cpu", threads=1, enforce_eager=True))  # as there are seven workers
    cluster = Cluster.connect({"CPU": 1.0, "GPU": 0.0}, server=forks)
    try:
        await cluster.reserve([PLACEMENT], TIMEOUT_S)
        dpo, reward_model, kto = (shipped(f"tiny-{name}") for name in ("dpo", "reward-model", "kto"))
        actors = {
            "policy": ActorSpec(ReusablePolicy, (offline_config(dpo), "policy"), ENVIRONMENT),
            "reward": ActorSpec(ReusableRewardModel, (offline_config(reward_model), "reward_model"), ENVIRONMENT),
            "reference": ActorSpec(ReferenceWorker, (scorer_configs(kto)["reference"], "reference-0"), ENVIRONMENT),
        }
        workers: defaultdict[str, list[ActorWorker[Any]]] = defaultdict(list)
        for placed in PLACEMENT.workers:
            workers[placed.role].append(
                cluster.spawn(PLACEMENT, placed, f"{placed.role}-{placed.index}", actors[placed.role])
            )
        policies, reward_models = ({1: found[:1], 2: found[1:]} for found in (workers["policy"], workers["reward"]))
        for ranks in (*policies.values(), *reward_models.values()):
            await ExampleGroup("policy", ranks, 1).start(TIMEOUT_S)
        (reference,) = workers["reference"]
        await reference.call(ReferenceWorker.start, TIMEOUT_S)
        yield SharedWorkers(cluster, policies, reward_models, reference, folder)
    finally:
        await cluster.close(10.0)
        cluster.abandon()


@pytest.fixture(scope="module")
def untied(folder: Path, tiny_model: Path) -> Path:
    """A model with an untied output head."""
    shutil.copytree(tiny_model, path := folder / "untied")
    config = AutoConfig.from_pretrained(path, tie_word_embeddings=False)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tied(folder: Path) -> Path:
    """The ranked answers of deploy/, with two equal scores in every row."""
    path = folder / "tied.jsonl"
    rows = [json.loads(line) for line in (ROOT / "deploy/specs/data/ranked-train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["scores"][number % 2 + 1] = row["scores"][number % 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dpo(shared: SharedWorkers) -> FinishedRun:
    """A whole run of tiny-dpo."""
    return await shared.train("tiny-dpo")


def shipped(name: str, *overrides: str) -> OfflineSpec:
    """Load a spec of deploy/."""
    document = read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides)
    (planned,) = plan_runs(document)
    assert isinstance(planned.spec, OfflineSpec)
    return planned.spec


def assert_learns(run: FinishedRun, name: str) -> None:
    """Check the metrics and the checkpoint of a whole run on offline data."""
    spec = shipped(name)
    trains = spec.row.trains
    lines = run.metrics
    assert [line["step"] for line in lines] == [0, *range(1, spec.schedule.steps + 1)]
    assert lines[-1]["eval/loss"] < 0.9 * lines[0]["eval/loss"]
    assert lines[-1].get("eval/accuracy", 1.0) >= 0.75
    for line in lines[1:]:
        assert line[f"{trains}/skipped_updates"] == 0.0
        assert line["ledger/trained"] == line["ledger/dispatched"] == line["examples"] * line["step"]
    newest = sorted((run.out / "checkpoints").iterdir())[-1]
    assert {trains, "model"} <= {path.name for path in verify(newest).path.iterdir()}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((f"tiny-{name}", HALF) for name in ("sft", "kd", "orpo", "kto", "rrhf", "dpo-ranked", "reward-model-token")),
        ("tiny-reward-model-ranked", ()),
        ("tiny-process-reward-model", ()),
    ],
)
async def test_a_shipped_spec_reduces_its_held_out_loss(
    name: str, overrides: tuple[str, ...], shared: SharedWorkers
) -> None:
    assert_learns(await shared.train(name, *overrides), name)


@pytest.mark.asyncio(loop_scope="module")
async def test_dpo_reduces_its_held_out_loss(dpo: FinishedRun) -> None:
    assert_learns(dpo, "tiny-dpo")
    first = dpo.metrics[1]
    # Before the first update policy and reference are equal, so the margin is zero and the loss is log 2.
    assert first["policy/preference_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["policy/margin"] == pytest.approx(0.0, abs=1e-4)
    AutoModelForCausalLM.from_pretrained(dpo.out / "checkpoints" / "step-000010" / "model")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_trained_reward_model_loads_in_the_reward_and_critic_roles(
    shared: SharedWorkers,
) -> None:
    run = await shared.train("tiny-reward-model", *HALF)
    assert_learns(run, "tiny-reward-model")
    assert 0.0 <= run.metrics[-1]["eval/calibration_error"] < 0.5
    trained = run.out / "checkpoints" / "step-000010" / "model"
    assert load_value(ModelConfig(path=str(trained))).get_submodule("score").state_dict()["weight"].any()
    config = ModelConfig(path=str(trained), dtype="float32")
    assert accuracy(RewardModel(config, 1024, "cpu")) >= 0.9
    plain = AutoModelForSequenceClassification.from_pretrained(trained)
    assert plain.config.num_labels == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stage", [0, 3])
async def test_a_reward_model_exports_both_heads_as_trained(shared: SharedWorkers, untied: Path, stage: int) -> None:
    """Evaluating the exported model gives exactly the metrics of the run's last evaluation."""
    zero = f"roles.policy.zero_stage={stage}"
    overrides = (f"model.path={untied}", "schedule.steps=2", zero)
    run = await shared.train("tiny-reward-model", *overrides, folder=f"untied-{stage}")
    trained = run.out / "checkpoints" / "step-000002" / "model"
    base, exported = (load_causal(ModelConfig(path=str(path))).state_dict() for path in (untied, trained))
    assert not torch.equal(base["lm_head.weight"], exported["lm_head.weight"])
    alone = await shared.evaluate("tiny-reward-model", f"model.path={trained}", zero)
    assert {"eval/loss", "eval/lm_loss", "eval/accuracy"} <= alone.keys()
    assert alone == {name: value for name, value in run.metrics[-1].items() if name.startswith("eval/")}


def test_troupe_eval_of_a_checkpoint_gives_the_metrics_of_its_run(dpo: FinishedRun, folder: Path) -> None:
    trained = dpo.out / "checkpoints" / "step-000005" / "model"
    with running(Command(folder, troupe_command("eval", str(DPO), "--model", str(trained), "--json"))) as command:
        assert command.wait() == 0, command.output
    expected = {name: value for name, value in dpo.metrics[5].items() if name.startswith("eval/")}
    assert json.loads(command.stdout) == pytest.approx(expected, rel=1e-5)
    assert expected["eval/accuracy"] > 0.5


def two_steps(name: str, tied: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides for two steps of a spec, on tied answers where it ranks them."""
    source: Any = shipped(name).data.train
    data = (f"data.train.path={tied}",) if source.answers is not None else ()
    return ("schedule.steps=2", "evaluation.at_end=false", *data, *overrides)


def assert_same_updates(run: FinishedRun, other: FinishedRun, name: str) -> None:
    """Check that two runs of a spec have the same metrics and no skipped update."""
    trains = shipped(name).row.trains
    for metric in (f"{trains}/{what.partition('/')[2]}" for what in LEARNING):
        for line, expected in zip(run.metrics[1:], other.metrics[1:], strict=True):
            assert line[metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-5), metric
            assert line[f"{trains}/skipped_updates"] == 0.0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "options"), [(name, options) for name, *options in (RANKED, BOUNDED, BY_TOKEN)])
async def test_smaller_micro_batches_on_two_ranks_give_the_same_updates(
    name: str, options: list[str], shared: SharedWorkers, tied: Path
) -> None:
    """All examples in one micro-batch of one rank, and in many of each of two ranks."""
    overrides, two = two_steps(name, tied, *options), ("roles.policy.workers=2", "roles.policy.micro_batch_tokens=384")
    whole = await shared.train(name, *overrides, "roles.policy.micro_batch_tokens=4096", folder=f"{name}-whole")
    assert_same_updates(await shared.train(name, *overrides, *two, folder=f"{name}-two"), whole, name)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_resumed_run_equals_an_uninterrupted_one(dpo: FinishedRun, shared: SharedWorkers) -> None:
    overrides = ("schedule.steps=5", "checkpoint.every_steps=0", "evaluation.at_end=false")
    resumed = await shared.train_in_two_parts("tiny-dpo", *overrides, folder="resumed", first=2)
    assert [line["step"] for line in resumed.metrics] == list(range(6))
    for expected, line in zip(dpo.metrics[1:], resumed.metrics[1:], strict=False):
        assert {name: line[name] for name in LEARNING} == {name: expected[name] for name in LEARNING}
    expected, weights = checkpoint_weights(dpo.out, 5), checkpoint_weights(resumed.out, 5)
    assert [name for name in expected if not torch.equal(expected[name], weights[name])] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_resumed_mixture_of_preference_data_equals_an_uninterrupted_one(shared: SharedWorkers) -> None:
    """Of three examples, two are pairs, and one has ranked answers."""
    pairs = {"name": "pairs", "weight": 2, "kind": "jsonl", "path": "deploy/specs/data/pairs-train.jsonl"}
    path = "deploy/specs/data/ranked-train.jsonl"
    ranked = {"name": "ranked", "kind": "jsonl", "path": path, "answers": "answers", "limit": 4}
    overrides = (f"data.train={json.dumps([pairs, ranked])}", "schedule.steps=4", "schedule.examples_per_step=6")
    overrides += ("checkpoint.every_steps=0", "evaluation=null", "roles.policy.micro_batch_tokens=2048")
    whole = await shared.train("tiny-dpo", *overrides, folder="mixture")
    parts = await shared.train_in_two_parts("tiny-dpo", *overrides, folder="mixture-resumed", first=1)
    names = (*LEARNING, "source/pairs/share", "source/ranked/share", "source/ranked/epoch", "source/pairs/rows")
    for expected, line in zip(whole.metrics, parts.metrics, strict=True):
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
    assert [line["source/pairs/share"] for line in whole.metrics] == pytest.approx([4 / 6] * 4)
    assert [line["source/ranked/epoch"] for line in whole.metrics] == [0, 0, 1, 1]  # of 4 examples, 2 in a step


@pytest.mark.asyncio(loop_scope="module")
async def test_two_policy_workers_give_the_same_updates_and_are_repeated(
    dpo: FinishedRun, shared: SharedWorkers
) -> None:
    """ZeRO-2. Pairs stay together, and the replay's batch has the reference's log-probs."""
    ranks = ("roles.policy.workers=2", "roles.policy.zero_stage=2", "roles.policy.micro_batch_tokens=256")
    overrides = (*ranks, "schedule.steps=2", "checkpoint.every_steps=1", "evaluation=null")
    run = await shared.train("tiny-dpo", *overrides, folder="two-workers")
    for name in LEARNING:
        assert run.metrics[-2][name] == pytest.approx(dpo.metrics[1][name], rel=1e-3, abs=1e-5), name
    shipped("tiny-dpo", *overrides).write(run.out / RESOLVED_SPEC)
    assert equal_steps(await asyncio.to_thread(replayed, run.out, 2)) == [2]


def accuracy(model: RewardModel) -> float:
    """Share of held-out pairs that the reward role ranks correctly, on responses tokenized as engines do."""
    source: Any = shipped("tiny-reward-model").data.eval
    rows = []
    for line in (ROOT / source.path).read_text().splitlines():
        pair = json.loads(line)
        messages = json.dumps(chat_messages(pair["prompt"], source))
        prompt = encode_prompt(model.tokenizer, messages, 96)
        for response in (pair["chosen"], pair["rejected"]):
            ids = encode_response(model.tokenizer, messages, prompt, response)
            rows.append(
                {"messages": messages, "conversation": "", "response": response, "prompt_ids": prompt}
                | {"response_ids": ids}
            )
    scores = [outcome.value or 0.0 for outcome in model.score(pa.Table.from_pylist(rows))]
    return fmean(better > worse for better, worse in zip(scores[::2], scores[1::2], strict=True))
