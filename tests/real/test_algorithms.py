"""Every algorithm of the table, and GRPO with process rewards, by its shipped spec on the real stack.

Only the start of the workers differs from `troupe run`: all algorithms share one cluster and one rollout engine, and
the trainers and the reward worker are reconfigured for the next algorithm instead of being restarted.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from tests.conftest import ROOT
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.capacity.placement import Placement, Seat
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.cluster.worker_group import CriticGroup, PolicyGroup
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.launcher import RunContext, WorkerLauncher
from troupe.orchestrator.pools.engines import Engine
from troupe.orchestrator.reporting.console import Console
from troupe.orchestrator.rollout_run import RolloutRun, load_data
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.started_workers import Workers
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.workers.contract.config import CriticConfig, PolicyConfig, RewardConfig
from troupe.workers.critic import CriticWorker
from troupe.workers.policy import PolicyWorker
from troupe.workers.reward import RewardWorker

TIMEOUT_S = 240.0
SEATS = Placement("reusable", ({"CPU": 1.0},), "PACK", (Seat("policy", 0, 0, 0.5, 0.0), Seat("critic", 0, 0, 0.5, 0.0)))
STEPS = 2
SPECS = {name: f"algorithms/{name}" for name in ALGORITHMS} | {"grpo_process": "tiny-grpo-process"}
"""File of each spec in deploy/."""


class ReusablePolicy(PolicyWorker):
    """A policy worker that can be reconfigured."""

    def reconfigure(self, config: PolicyConfig) -> None:
        """Build the model of another configuration in the same process group."""
        self.release()
        PolicyWorker.__init__(self, config, self._name)
        self.build()


class ReusableCritic(CriticWorker):
    """A critic worker that can be reconfigured."""

    def reconfigure(self, config: CriticConfig) -> None:
        """Build the model of another configuration in the same process group."""
        self.release()
        CriticWorker.__init__(self, config, self._name)
        self.build()


class ReusableReward(RewardWorker):
    """A reward worker that can be reconfigured."""

    def reconfigure(self, config: RewardConfig) -> None:
        """Load the functions of another configuration if it differs."""
        if config != self.config:
            self.close()
            RewardWorker.__init__(self, config, self.name, self.device, self.policy)
            self.start()


@dataclass
class SharedWorkers:
    """Workers that all algorithms share."""

    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    policy: ActorWorker[ReusablePolicy]
    critic: ActorWorker[ReusableCritic]

    async def run(self, spec: RolloutSpec, out: Path) -> RunOutcome:
        """Run a spec."""
        await self.policy.call(ReusablePolicy.reconfigure, TIMEOUT_S, spec.policy_config())
        policy = PolicyGroup("policy", [self.policy], spec.roles.policy.micro_batch_tokens)
        policy.shares_prompts = await self.policy.call(ReusablePolicy.shares_prompts, TIMEOUT_S)
        critic, critic_config = None, spec.critic_config()
        if critic_config is not None:
            await self.critic.call(ReusableCritic.reconfigure, TIMEOUT_S, critic_config)
            critic = CriticGroup("critic", [self.critic], spec.roles.trainers()["critic"].micro_batch_tokens)
        for worker in cast("Sequence[ActorWorker[ReusableReward]]", self.workers.reward):
            await worker.call(ReusableReward.reconfigure, TIMEOUT_S, spec.reward_config())
        engines = tuple(Engine(engine.handle, engine.host) for engine in self.workers.engines)
        trainers = {"policy": policy} | ({} if critic is None else {"critic": critic})
        workers = Workers({**self.workers.by_role, **trainers, "rollout": engines})
        out.mkdir()
        store = CheckpointStore(out / "checkpoints", keep=1)
        store.prepare()
        context = RunContext(self.cluster, self.launcher, workers, Console(io.StringIO()), asyncio.Event())
        parts = RolloutRun(spec, out, context, load_data(spec))
        try:
            controller = await parts.controller(store, None)
            assert controller.components.sync is not None
            await controller.components.sync.push(0)  # the engine still serves the previous policy
            return await controller.run()
        finally:
            await parts.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedWorkers]:
    """A cluster with an engine, a reward worker and trainers that all algorithms share."""
    spec, with_critic = shipped("dapo"), shipped("ppo")
    cluster = Cluster.connect({"CPU": 4.0, "GPU": 0.0})
    try:
        launcher = WorkerLauncher(spec, cluster, classes={"reward": ReusableReward})
        cluster.watch(TIMEOUT_S)
        workers = await launcher.open(frozenset({"rollout", "reward"}))
        await cluster.reserve([SEATS], TIMEOUT_S)
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        actors = (
            ActorSpec(ReusablePolicy, (spec.policy_config(), "policy-0"), environment),
            ActorSpec(ReusableCritic, (with_critic.critic_config(), "critic-0"), environment),
        )
        policy, critic = (
            cluster.spawn(SEATS, seat, f"{seat.role}-0", actor) for seat, actor in zip(SEATS.seats, actors, strict=True)
        )
        await PolicyGroup("policy", [policy], 1).start(TIMEOUT_S)
        await CriticGroup("critic", [critic], 1).start(TIMEOUT_S)
        yield SharedWorkers(cluster, launcher, workers, policy, critic)
    finally:
        await cluster.close(10.0)
        cluster.abandon()


def shipped(name: str, *overrides: str) -> RolloutSpec:
    """The shipped spec of an algorithm, shortened to `STEPS` steps."""
    return load_rollout_spec(ROOT / "deploy" / "specs" / f"{SPECS[name]}.yaml", [f"schedule.steps={STEPS}", *overrides])


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_say_what_they_do_while_they_start(shared: SharedWorkers) -> None:
    names = ("rollout-0", "policy-0", "critic-0")
    last = await shared.cluster.stages(names)  # the last stage that each has announced
    assert last == {"rollout-0": "engine warm-up", "policy-0": "DeepSpeed", "critic-0": "DeepSpeed"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SPECS)
async def test_the_shipped_spec_of_every_algorithm_trains(
    name: str, shared: SharedWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    spec = shipped(name)
    outcome = await shared.run(spec, tmp_path / name)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert outcome.steps_done == STEPS == len(lines)
    assert outcome.ledger["in_flight"] == 0
    assert outcome.ledger["dispatched"] == outcome.ledger["trained"] + outcome.ledger["dropped"]
    assert outcome.ledger["trained"] == STEPS * spec.samples_per_step
    for line in lines:
        # Every step has a finite, non-zero gradient.
        assert line["policy/grad_norm"] > 0 and line["policy/skipped_updates"] == 0
        if spec.policy_config().loss.has_ratio:
            assert line["policy/rollout_logprob_gap_max"] < 1e-3  # engine and trainer hold the same weights
        assert line["policy/kl_exact"] > 0
        assert ("policy/ptx_loss" in line) == (spec.algorithm.ptx_coef > 0)
    if spec.roles.critic is not None:
        assert all(line["critic/grad_norm"] > 0 for line in lines)
    trajectories = pq.read_table(tmp_path / name / "trajectories")
    assert trajectories.num_rows == STEPS * spec.samples_per_step
    process = any(function.process for function in spec.roles.reward.functions)
    assert any(trajectories["reward_spans"].to_pylist()) == process


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_of_truncated_samples_leaves_the_policy_as_it_is(
    shared: SharedWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random model does not end a response in six tokens, so no sample carries a loss."""
    monkeypatch.chdir(ROOT)
    spec, out = shipped("grpo", "algorithm.mask_truncated=true"), tmp_path / "truncated"
    outcome = await shared.run(spec, out)
    assert outcome.steps_done == STEPS
    assert outcome.ledger["trained"] == 0
    assert outcome.drop_reasons == {"truncated: it carries no loss": STEPS * spec.samples_per_step}
    for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        assert line["masked_samples"] == spec.samples_per_step
        assert line["policy/empty_updates"] == 1.0 and "policy/grad_norm" not in line
