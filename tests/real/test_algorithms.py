"""Every algorithm of the table, and what else an algorithm can use, by the shipped specs on the real stack.

Only the start of the workers differs from `troupe run`: all algorithms share one cluster and one rollout engine, and
the trainers and the reward worker are reconfigured for the next algorithm instead of being restarted. Algorithms that
differ in the loss and the advantages alone share a trainer, which starts each from the same checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from docs.tooling.algorithm_reference import spec_of
from tests.conftest import ROOT
from tests.real.commands import (
    Command,
    as_after,
    checkpoint_weights,
    ledger_balances,
    metrics_lines,
    running,
    trajectories,
    troupe_command,
)
from tests.real.poison import Canary
from tests.real.warm import forked_import_servers
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.cluster.worker_group import CriticGroup, PolicyGroup
from troupe.orchestrator.cluster.worker_server import server_of
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.settings import critic_config, policy_config, reward_config, rollout_config
from troupe.orchestrator.runs.checkpoints import folder_checkpoints
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.runs.rollouts import RolloutRun
from troupe.orchestrator.runs.session import RunRequest, Session
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.workers.contract.config import CriticConfig, PolicyConfig, RolloutConfig
from troupe.workers.contract.reward_config import RewardConfig
from troupe.workers.critic import CriticWorker
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.policy import PolicyWorker
from troupe.workers.reward import RewardWorker
from troupe.workers.rollout import RolloutWorker

pytestmark = pytest.mark.long

TIMEOUT_S = 240.0
PLACEMENT = Placement(
    "reusable",
    ({"CPU": 1.0},),
    "PACK",
    (WorkerPlacement("policy", 0, 0, 0.5, 0.0), WorkerPlacement("critic", 0, 0, 0.5, 0.0)),
)
_ONE_ENGINE = [name for name, row in ALGORITHMS.items() if not row.advantage.compares_reference]
SPECS = (*sorted(_ONE_ENGINE, key=lambda name: spec_of(name).path), "tiny-grpo-process")
"""Rows with the same spec follow each other. One with an engine of the reference is in test_reference_pairs_run.py."""
ASYNCHRONOUS = (
    *("sapo", "gmpo", "gspo", "dppo_tv", "dppo_kl", "maxrl", "pass_at_k", "clip_cov", "gdpo", "cispo", "dcpo"),
    "score_centering",
)
"""Rows whose second step learns from samples of the policy before the first: one of every objective and estimator."""
DAPO_STEPS = 5
DAPO = (f"schedule.steps={DAPO_STEPS}", "checkpoint={every_steps: 1, keep: 10}")
DAPO_LEARNING = ("policy/loss", "policy/grad_norm", "reward/mean", "masked_samples", "ledger/trained", "ledger/dropped")
"""Metrics that are equal in a run of DAPO and in one that is resumed."""
GUIDE = ROOT / "docs" / "guides" / "algorithm.md"
GUIDES_ALGORITHM = "my_algorithms:median_grpo"


class ReusableRollout(RolloutWorker):
    """A rollout worker whose sampling and chat template can be reconfigured."""

    async def reconfigure(self, config: RolloutConfig) -> None:
        """Render and sample as another configuration says."""
        update = {name: getattr(config, name) for name in ("model", "sampling", "seed", "top_logprobs")}
        self.generation.config = self.generation.config.model_copy(update=update)
        self.generation.tokenizer = load_chat_tokenizer(config.model)


class ReusablePolicy(PolicyWorker):
    """A policy worker that can be reconfigured."""

    _start: tempfile.TemporaryDirectory[str] | None = None

    def reconfigure(self, config: PolicyConfig, anew: bool) -> None:
        """Start again by another configuration, with the same model and optimizer if it has them and not `anew`."""
        swapped = {name: getattr(config, name) for name in ("loss", "advantage", "run_id", "total_updates")}
        same_graph = (config.loss.entropy_coef > 0) == (self._config.loss.entropy_coef > 0)
        if self._start is not None and same_graph and not anew and self._config.model_copy(update=swapped) == config:
            self._config = config
            if self._publisher is not None:
                self._publisher.close()
                self._publisher = None
            self.discard_stored()
            self.load(self._start.name)
            return
        self.release()
        PolicyWorker.__init__(self, config, self._name)
        self.build()
        self._start = tempfile.TemporaryDirectory()
        self.save(self._start.name)


class ReusableCritic(CriticWorker):
    """A critic worker that can be reconfigured."""

    _start: tempfile.TemporaryDirectory[str] | None = None

    def reconfigure(self, config: CriticConfig, anew: bool) -> None:
        """Start again by another configuration, with the same model and optimizer if it has them and not `anew`."""
        swapped = {name: getattr(config, name) for name in ("loss", "total_updates")}
        if self._start is not None and not anew and self._config.model_copy(update=swapped) == config:
            self._config = config
            self.load(self._start.name)
            return
        self.release()
        CriticWorker.__init__(self, config, self._name)
        self.build()
        self._start = tempfile.TemporaryDirectory()
        self.save(self._start.name)


class ReusableReward(RewardWorker):
    """A reward worker that can be reconfigured."""

    def reconfigure(self, config: RewardConfig) -> None:
        """Load the functions of another configuration if it differs."""
        if config != self.config:
            self.close()
            RewardWorker.__init__(self, config, self.name, self.device, self.policy)
            self.start()


def steps_of(name: str) -> int:
    """Two where a second step uses what the first has left: statistics, coefficients, a critic, older samples."""
    row = ALGORITHMS.get(name)
    if row is None:
        return 1
    how = row.advantage
    remembers = how.baseline == "running_mean" or how.reward_scale == "running" or how.estimator == "smooth_group"
    carried = row.critic_loss is not None or row.kl_penalty is not None
    return 2 if remembers or carried or name in ASYNCHRONOUS else 1


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    out: Path
    outcome: RunOutcome

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return metrics_lines(self.out)


@dataclass
class SharedWorkers:
    """Workers that all algorithms share."""

    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    policy: ActorWorker[ReusablePolicy]
    critic: ActorWorker[ReusableCritic]

    async def run_in_two_parts(self, spec: RolloutSpec, out: Path, first: int) -> FinishedRun:
        """Run a spec that is asked to stop after some steps, and resume it on trainers that are built anew."""
        stop = asyncio.Event()
        running = asyncio.create_task(self.run(spec, out, stop))
        while len(metrics_lines(out)) < first:
            assert not running.done()
            await asyncio.sleep(0.02)
        stop.set()
        outcome = (await running).outcome
        assert outcome.stopped and first <= outcome.steps_done < spec.schedule.steps
        return await self.run(spec, out, anew=True)

    async def run(
        self, spec: RolloutSpec, out: Path, stop: asyncio.Event | None = None, anew: bool = False
    ) -> FinishedRun:
        """Run a spec, from the newest checkpoint in the folder if there is one, until `stop` is set."""
        await self.policy.call(ReusablePolicy.reconfigure, TIMEOUT_S, policy_config(spec), anew)
        policy = PolicyGroup("policy", [self.policy], spec.roles.policy.micro_batch_tokens)
        policy.packs = await self.policy.call(ReusablePolicy.packs, TIMEOUT_S)
        policy.shares_prompts = await self.policy.call(ReusablePolicy.shares_prompts, TIMEOUT_S)
        critic, config = None, critic_config(spec)
        if config is not None:
            await self.critic.call(ReusableCritic.reconfigure, TIMEOUT_S, config, anew)
            critic = CriticGroup("critic", [self.critic], spec.roles.trainers()["critic"].micro_batch_tokens)
            critic.packs = await self.critic.call(ReusableCritic.packs, TIMEOUT_S)
        for worker in cast("Sequence[ActorWorker[ReusableReward]]", self.workers.reward):
            await worker.call(ReusableReward.reconfigure, TIMEOUT_S, reward_config(spec))
        for engine in cast("Sequence[Engine]", self.workers.engines):
            handle = cast("ActorWorker[ReusableRollout]", engine.handle)
            await handle.call(ReusableRollout.reconfigure, TIMEOUT_S, rollout_config(spec))
        engines = tuple(Engine(engine.handle, engine.host) for engine in self.workers.engines)
        trainers = {"policy": policy} | ({} if critic is None else {"critic": critic})
        workers = Workers({**self.workers.by_role, **trainers, "rollout": engines})
        out.mkdir(exist_ok=True)
        checkpoints = folder_checkpoints(spec, out)
        context = Session(
            RunRequest(spec, out, False, None),
            spec,
            self.cluster,
            self.launcher,
            workers,
            Console(io.StringIO()),
            stop or asyncio.Event(),
            checkpoints,
            read=load_data(spec),
        )
        pools = RunPools(spec, context)
        try:
            controller = await RolloutRun(context, pools).controller()
            assert controller.components.sync is not None
            if checkpoints.found is None:
                await controller.components.sync.push(0)  # the engine still serves the previous policy
            return FinishedRun(out, await controller.run())
        finally:
            await pools.close()


def guides_module() -> str:
    """The module of the page on custom algorithms."""
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) < 30
    return code


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedWorkers]:
    """A cluster with an engine, a reward worker and trainers that all algorithms share.

    They start in the root of the checkout, with the guide's module on their path.
    """
    modules = tmp_path_factory.mktemp("modules")
    (modules / "my_algorithms.py").write_text(guides_module())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(str(modules))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH", "")])))
        async for workers in started():
            yield workers


async def started() -> AsyncIterator[SharedWorkers]:
    """The workers, until they are no longer needed."""
    spec, with_critic = shipped("dapo"), shipped("ppo")
    with forked_import_servers():
        server = server_of(spec)
    cluster = Cluster.connect({"CPU": 4.0, "GPU": 0.0}, server=server)
    try:
        launcher = WorkerLauncher(spec, cluster, classes={"reward": ReusableReward, "rollout": ReusableRollout})
        cluster.watch(TIMEOUT_S)
        workers = await launcher.open(frozenset({"rollout", "reward"}))
        await cluster.reserve([PLACEMENT], TIMEOUT_S)
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        actors = (
            ActorSpec(ReusablePolicy, (policy_config(spec), "policy-0"), environment),
            ActorSpec(ReusableCritic, (critic_config(with_critic), "critic-0"), environment),
        )
        policy, critic = (
            cluster.spawn(PLACEMENT, placed, f"{placed.role}-0", actor)
            for placed, actor in zip(PLACEMENT.workers, actors, strict=True)
        )
        await PolicyGroup("policy", [policy], 1).start(TIMEOUT_S)
        await CriticGroup("critic", [critic], 1).start(TIMEOUT_S)
        yield SharedWorkers(cluster, launcher, workers, policy, critic)
    finally:
        await cluster.close(10.0)
        cluster.abandon()


def shipped(name: str, *overrides: str) -> RolloutSpec:
    """The shipped spec of an algorithm, or another one of deploy/specs/."""
    if name not in ALGORITHMS:
        return load_rollout_spec(ROOT / "deploy" / "specs" / f"{name}.yaml", overrides)
    spec = spec_of(name)
    own = () if spec.name == name else (f"algorithm.name={name}",)
    return load_rollout_spec(ROOT / spec.path, (*own, *overrides))


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_say_what_they_do_while_they_start(shared: SharedWorkers) -> None:
    names = ("rollout-0", "policy-0", "critic-0")
    last = await shared.cluster.activities(names)  # the last that each has announced
    assert last == {"rollout-0": "engine warm-up", "policy-0": "DeepSpeed", "critic-0": "DeepSpeed"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SPECS)
async def test_the_shipped_spec_of_every_algorithm_trains(name: str, shared: SharedWorkers, tmp_path: Path) -> None:
    steps = steps_of(name)
    spec = shipped(name, f"schedule.steps={steps}", *(("schedule.max_staleness=1",) if name in ASYNCHRONOUS else ()))
    run = await shared.run(spec, tmp_path / name)
    outcome, lines = run.outcome, run.metrics
    assert outcome.steps_done == steps == len(lines)
    assert outcome.ledger["in_flight"] == 0
    assert outcome.ledger["dispatched"] == outcome.ledger["trained"] + outcome.ledger["dropped"]
    assert outcome.ledger["trained"] == steps * spec.samples_per_step
    for line in lines:
        # Every step has a finite, non-zero gradient.
        assert line["policy/grad_norm"] > 0 and line["policy/skipped_updates"] == 0
        stale = line["staleness/max"] > 0
        assert stale == (name in ASYNCHRONOUS and line["step"] == 2)
        if policy_config(spec).loss.has_ratio:
            # Without staleness, engine and trainer hold the same weights.
            assert (line["policy/rollout_logprob_gap_max"] > 1e-3) == stale
        assert line["policy/kl_exact"] > 0
        assert ("policy/ptx_loss" in line) == (spec.algorithm.ptx_coef > 0)
    if spec.roles.critic is not None:
        assert all(line["critic/grad_norm"] > 0 for line in lines)
    table = pq.read_table(run.out / "trajectories")
    assert table.num_rows == steps * spec.samples_per_step
    process = any(function.process for function in spec.roles.reward.functions)
    assert any(table["reward_spans"].to_pylist()) == process


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_of_truncated_samples_leaves_the_policy_as_it_is(shared: SharedWorkers, tmp_path: Path) -> None:
    """The random model does not end a response in six tokens, so no sample carries a loss."""
    spec = shipped("grpo", "algorithm.mask_truncated=true", "schedule.steps=2")
    run = await shared.run(spec, tmp_path / "truncated")
    assert run.outcome.steps_done == 2
    assert run.outcome.ledger["trained"] == 0
    assert run.outcome.drop_reasons == {"truncated: it carries no loss": 2 * spec.samples_per_step}
    for line in run.metrics:
        assert line["masked_samples"] == spec.samples_per_step
        assert line["policy/empty_updates"] == 1.0 and "policy/grad_norm" not in line


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dapo(shared: SharedWorkers, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """DAPO with its filters (of truncated samples, of groups and of prompts), until prompts are drawn again."""
    return await shared.run(shipped("tiny-dapo", *DAPO), tmp_path_factory.mktemp("dapo") / "run")


@pytest.mark.asyncio(loop_scope="module")
async def test_truncated_samples_carry_no_loss(dapo: FinishedRun) -> None:
    spec = shipped("tiny-dapo")
    masked = 0
    for line in dapo.metrics:
        truncated = trajectories(dapo.out, line["step"])["finish_reason"].to_pylist().count("length")
        masked += truncated
        assert line["masked_samples"] == truncated
        assert line["policy/sequences"] <= spec.samples_per_step - truncated
        assert line["policy/grad_norm"] > 0
    assert 0 < masked < DAPO_STEPS * spec.samples_per_step
    last = dapo.metrics[-1]
    assert last["ledger/trained"] == DAPO_STEPS * spec.samples_per_step - masked
    assert dapo.outcome.drop_reasons["truncated: it carries no loss"] == masked


@pytest.mark.asyncio(loop_scope="module")
async def test_groups_are_replaced_by_the_values_of_one_component(dapo: FinishedRun) -> None:
    """Letter shares differ in every group: on the reward, no group would be replaced."""
    values: dict[str, set[float]] = {}
    for line in dapo.metrics:
        for row in trajectories(dapo.out, line["step"]).to_pylist():
            found = {component["name"]: component["value"] for component in row["components"]}
            values.setdefault(row["prompt_uid"], set()).add(found["has_ing"])
    assert set(map(frozenset, values.values())) == {frozenset({0.0, 1.0})}
    assert "no signal: all values of has_ing in the group are equal" in dapo.outcome.drop_reasons


@pytest.mark.asyncio(loop_scope="module")
async def test_results_of_all_groups_are_remembered(dapo: FinishedRun) -> None:
    """Of trained and of replaced groups alike, with the truncated samples."""
    last = dapo.metrics[-1]
    groups = last["ledger/dispatched"] / shipped("tiny-dapo").group_size
    state = json.loads((dapo.out / "checkpoints" / f"step-{DAPO_STEPS:06d}" / "state.json").read_text())
    results = state["source"]["prompts"]["curriculum"]["results"]
    assert len(results) == last["curriculum/seen"] == min(groups, 12)  # the first pass over the 12 prompts
    assert 0 < last["curriculum/pass_rate"] < 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_resumed_run_draws_and_learns_as_an_uninterrupted_one(
    dapo: FinishedRun, shared: SharedWorkers, tmp_path: Path
) -> None:
    """Across the second pass over the data, in which the curriculum skips prompts."""
    second = await shared.run_in_two_parts(shipped("tiny-dapo", *DAPO), tmp_path / "part", first=2)
    assert second.outcome.steps_done == DAPO_STEPS
    assert any(line["curriculum/skipped"] for line in dapo.metrics)
    for expected, line in zip(dapo.metrics, second.metrics, strict=True):
        names = [name for name in expected if name in DAPO_LEARNING or name.startswith("curriculum/")]
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
        drawn, again = (trajectories(run.out, line["step"])["prompt_uid"].to_pylist() for run in (dapo, second))
        assert again == drawn
    expected, weights = (checkpoint_weights(run.out, DAPO_STEPS) for run in (dapo, second))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_run_resumed_from_a_poisoned_checkpoint_is_refused(
    dapo: FinishedRun, shared: SharedWorkers, tmp_path: Path
) -> None:
    """Whoever changes a checkpoint also writes a manifest that fits."""
    canary, out = tmp_path / "canary", as_after(dapo.out, DAPO_STEPS, tmp_path / "poisoned")
    newest = max((out / "checkpoints").glob("step-*"))
    poisoned_files = list(newest.rglob("*.pt"))
    for file in poisoned_files:
        state = torch.load(file, weights_only=False)
        state["added"] = Canary(canary)
        torch.save(state, file)
    manifest = json.loads((newest / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (newest / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    more = (*DAPO, f"schedule.steps={DAPO_STEPS + 1}")
    with pytest.raises(TroupeError) as refused:
        await shared.run(shipped("tiny-dapo", *more), out)
    assert poisoned_files and not canary.exists()
    error = str(refused.value)
    assert "posix.system" in error and "mp_rank_00_model_states.pt cannot be read" in error
    assert "\n" not in error, "a line for the user"


@pytest.mark.asyncio(loop_scope="module")
async def test_raft_learns_the_best_answers_from_other_sources(shared: SharedWorkers, tmp_path: Path) -> None:
    """A random model writes no true equation, so a candidate wins every group, and its likelihood rises."""
    spec = shipped("tiny-raft", "schedule.steps=2")
    run = await shared.run(spec, tmp_path / "raft")
    first, second = run.metrics
    assert second["ledger/trained"] == second["ledger/dispatched"] == 2 * spec.samples_per_step
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


@pytest.mark.asyncio(loop_scope="module")
async def test_plain_text_is_sampled_as_it_is(shared: SharedWorkers, tiny_model: Path, tmp_path: Path) -> None:
    """Although the model has a chat template."""
    data = tmp_path / "plain.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(8)))
    overrides = ("model.chat_template=none", f"data.train={{kind: jsonl, path: {data}, answer: null}}")
    run = await shared.run(shipped("tiny-grpo", *overrides, "schedule.steps=1"), tmp_path / "plain")
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.chat_template is not None
    rows = trajectories(run.out, 1).to_pylist()
    assert len(rows) == run.outcome.ledger["trained"] > 0
    for row in rows:
        text = json.loads(row["messages"])[-1]["content"]
        assert text.endswith("+ 1 =") and row["prompt_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_guides_algorithm_learns(shared: SharedWorkers, tmp_path: Path) -> None:
    overrides = (f"algorithm.name={GUIDES_ALGORITHM}", "algorithm.args={width: 0.3}", "schedule.minibatches=2")
    overrides += ("roles.policy.learning_rate=0.1", "roles.policy.warmup_updates=0")  # six steps are enough then
    run = await shared.run(shipped("tiny-grpo", *overrides, "schedule.steps=6"), tmp_path / "custom")
    rewards = [line["reward/mean"] for line in run.metrics]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.1
    assert any(line["policy/beyond_width"] > 0 for line in run.metrics)
    assert ledger_balances(run.metrics[-1])


def test_the_guides_output_of_the_checks_is_the_commands(tmp_path: Path) -> None:
    (tmp_path / "my_algorithms.py").write_text(guides_module())
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (shown,) = re.findall(r"--check --args '\{width: 0.3\}'\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    arguments = troupe_command("algorithms", GUIDES_ALGORITHM, "--check", "--args", "{width: 0.3}")
    with running(Command(tmp_path, arguments, {"PYTHONPATH": path})) as command:
        assert command.wait() == 0, command.output
        assert command.stdout == shown
