"""Every row of the algorithm table, and GRPO with process rewards, by its shipped spec, on real engines and trainers
that all rows share.

What differs from `troupe run` is only who starts the workers: one cluster and one rollout engine for all rows, and
trainers and a reward worker that become the next row's instead of being started anew.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from orchestrator.actor_group import ActorSpec, ActorWorker, Cluster
from orchestrator.algorithm_table import ALGORITHMS
from orchestrator.cast import Casting, Scene, Stage, WorkerClasses
from orchestrator.checkpoint import CheckpointStore
from orchestrator.console import Console
from orchestrator.controller import RunOutcome
from orchestrator.engine_pool import Engine
from orchestrator.handles import Gang
from orchestrator.placement import Placement, Seat
from orchestrator.run import Company, load_data
from orchestrator.spec import Spec, load_spec
from tests.conftest import ROOT
from workers.config import CriticConfig, PolicyConfig, Rendezvous, RewardConfig
from workers.critic import CriticWorker
from workers.policy import PolicyWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.rollout import RolloutWorker

BOUND_S = 240.0
SEATS = Placement(
    "understudies", ({"CPU": 1.0},), "PACK", (Seat("policy", 0, 0, 0.5, 0.0), Seat("critic", 0, 0, 0.5, 0.0))
)
STEPS = 2
SPECS = {name: f"algorithms/{name}" for name in ALGORITHMS} | {"grpo_process": "tiny-grpo-process"}
"""File of each spec in deploy/."""


class PolicyUnderstudy(PolicyWorker):
    """A policy that can be another row's next."""

    def become(self, config: PolicyConfig) -> None:
        """Forget the last row, and stay in the group."""
        self.release()
        PolicyWorker.__init__(self, config, self._name)
        self.build()


class CriticUnderstudy(CriticWorker):
    """A critic that can be another row's next."""

    def become(self, config: CriticConfig) -> None:
        """Forget the last row, and stay in the group."""
        self.release()
        CriticWorker.__init__(self, config, self._name)
        self.build()


class RewardUnderstudy(RewardWorker):
    """A reward worker that can be another row's next."""

    def become(self, config: RewardConfig) -> None:
        """Judge by other functions, where they are others."""
        if config != self.config:
            self.close()
            RewardWorker.__init__(self, config, self.name, self.device, self.policy)
            self.start()


@dataclass
class Troupe:
    """Who stays for all rows."""

    cluster: Cluster
    casting: Casting
    stage: Stage
    policy: ActorWorker
    critic: ActorWorker

    async def perform(self, spec: Spec, out: Path) -> RunOutcome:
        """One run of a spec."""
        policy = await self._gang("policy", self.policy, spec.policy_config(), spec)
        critic_config = spec.critic_config()
        critic = None if critic_config is None else await self._gang("critic", self.critic, critic_config, spec)
        for worker in self.stage.reward:
            await worker.call("become", spec.reward_config(), timeout_s=BOUND_S)
        engines = tuple(Engine(engine.handle, engine.host) for engine in self.stage.engines)
        stage = replace(self.stage, policy=policy, critic=critic, engines=engines)
        out.mkdir()
        store = CheckpointStore(out / "checkpoints", keep=1)
        store.prepare()
        console = Console(io.StringIO())
        scene = Scene(self.cluster, self.casting, stage, console, asyncio.Event())
        company = Company(spec, out, scene, load_data(spec))
        try:
            controller = await company.controller(store, None)
            assert controller.cast.sync is not None
            await controller.cast.sync.push(0)  # the engine still serves the last row's policy
            return await controller.run()
        finally:
            await company.close()

    @staticmethod
    async def _gang(
        role: Literal["policy", "critic"], worker: ActorWorker, config: PolicyConfig | CriticConfig, spec: Spec
    ) -> Gang:
        await worker.call("become", config, timeout_s=BOUND_S)
        shares = role == "policy" and await worker.call("shares_prompts", timeout_s=BOUND_S)
        return Gang(role, [worker], spec.roles.trainers()[role].micro_batch_tokens, shares)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def troupe() -> AsyncIterator[Troupe]:
    """A cluster, an engine, a reward worker, and trainers without a part yet."""
    spec, critical = shipped("dapo"), shipped("ppo")
    cluster = Cluster.connect({"CPU": 4.0, "GPU": 0.0})
    try:
        classes = WorkerClasses(RolloutWorker, PolicyWorker, CriticWorker, ReferenceWorker, RewardUnderstudy)
        casting = Casting(spec, cluster, classes)
        stage = await casting.open(frozenset({"rollout", "reward"}))
        await cluster.reserve([SEATS], BOUND_S)
        environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        policy = ActorSpec(PolicyUnderstudy, (spec.policy_config(), "policy-0"), environment)
        critic = ActorSpec(CriticUnderstudy, (critical.critic_config(), "critic-0"), environment)
        trainers = [
            cluster.spawn(SEATS, seat, f"{seat.role}-0", actor)
            for seat, actor in zip(SEATS.seats, (policy, critic), strict=True)
        ]
        for trainer in trainers:
            address, port = await trainer.call("rendezvous", timeout_s=BOUND_S)
            place = Rendezvous(address=address, port=port, rank=0, world_size=1)
            await trainer.call("start", place, timeout_s=BOUND_S)
        yield Troupe(cluster, casting, stage, *trainers)
    finally:
        await cluster.close(10.0)
        cluster.abandon()


def shipped(name: str) -> Spec:
    """The row's spec, made short."""
    return load_spec(ROOT / "deploy" / f"{SPECS[name]}.yaml", [f"schedule.steps={STEPS}"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SPECS)
async def test_the_shipped_spec_of_every_row_trains(
    name: str, troupe: Troupe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    spec = shipped(name)
    outcome = await troupe.perform(spec, tmp_path / name)
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert outcome.steps_done == STEPS == len(lines)
    assert outcome.ledger["in_flight"] == 0
    assert outcome.ledger["dispatched"] == outcome.ledger["trained"] + outcome.ledger["dropped"]
    assert outcome.ledger["trained"] == STEPS * spec.samples_per_step
    for line in lines:
        # Every row finds something to teach in every step, and its gradient is a number.
        assert line["policy/grad_norm"] > 0 and line["policy/skipped_updates"] == 0
        assert line["policy/rollout_logprob_gap_max"] < 1e-3  # sampler and trainer hold the same policy
        assert line["policy/kl_exact"] > 0
        assert ("policy/ptx_loss" in line) == (spec.algorithm.ptx_coef > 0)
    if spec.roles.critic is not None:
        assert all(line["critic/grad_norm"] > 0 for line in lines)
    trajectories = pq.read_table(tmp_path / name / "trajectories")
    assert trajectories.num_rows == STEPS * spec.samples_per_step
    process = any(function.process for function in spec.roles.reward.functions)
    assert any(trajectories["reward_spans"].to_pylist()) == process
