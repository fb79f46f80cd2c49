"""Trainers that are lost while they start or load are started again in place."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.clock import on_virtual_time
from tests.conftest import ROOT
from tests.fakes import FakePolicy, fake_spec, fakes_of, policy_group, restart_fakes
from tests.orchestrator.plan.test_worker_memory import spec_of
from tests.orchestrator.training.test_recovery import RecoveringRun
from troupe.orchestrator.cluster.actors import RunActors, WorkerPlacements
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.errors import WorkerDied, WorkerRaised
from troupe.orchestrator.insight.event_texts import event_text
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.placement import place, role_sizes
from troupe.orchestrator.plan.plan import described_nodes, plan
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.training.checkpoint import CheckpointStore, load_checkpoint
from troupe.workers.contract.units import GIB

QWEN_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


class _Launcher(WorkerLauncher):
    restarts = 0

    async def restart(self, groups: Any) -> None:
        self.restarts += 1
        await restart_fakes(groups)


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.parametrize("first", ["the rank that died", "another rank"])
def test_a_trainer_that_dies_while_it_starts_is_started_again(allowed: int, first: str) -> None:
    """Its death may be told first by another rank, which loses its connection."""
    launcher = _Launcher(fake_spec(failures={"trainer_restarts": allowed}), cast(Cluster, None))
    group = policy_group(FakePolicy(0), FakePolicy(1))
    dying, other = fakes_of(group)

    async def die(*_: Any) -> Any:
        dying.kill()
        await asyncio.sleep(0.1)

    async def lose(*_: Any) -> Any:
        if first == "another rank":
            raise WorkerRaised("policy-1", "start", "Connection closed by peer")
        await asyncio.sleep(1)

    dying.target.start, other.target.start = die, lose
    if allowed:
        on_virtual_time(launcher._start_trainers(group))
        assert launcher.restarts == 1 and fakes_of(group)[0] is not dying
    else:
        with pytest.raises((WorkerDied, WorkerRaised)):
            on_virtual_time(launcher._start_trainers(group))


def test_the_network_between_the_nodes_of_a_group_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, among the events, and for `troupe why`; on one node there is nothing to say."""
    cluster = SimpleNamespace(events=EventLog())
    launcher = _Launcher(fake_spec(), cast(Cluster, cluster))
    group = policy_group(FakePolicy(0), FakePolicy(1))
    with caplog.at_level("INFO"):
        on_virtual_time(launcher._start_trainers(group))
        assert not cluster.events.networks
        for rank in fakes_of(group):
            health = rank.target.health

            async def start(rendezvous: Any, health: Any = health) -> Any:
                return replace(await health(), network="9 GB/s (TCP: no RDMA device)")

            rank.target.start = start
        on_virtual_time(launcher._start_trainers(group))
    assert caplog.messages[-1:] == ["policy: 9 GB/s (TCP: no RDMA device)"]
    (tmp_path / "spec.yaml").touch()
    cluster.events.open(tmp_path, 0)
    cluster.events.close()
    (event,) = RunFolder(tmp_path).events()
    assert event_text(event) == "policy: 9 GB/s (TCP: no RDMA device)"
    assert cluster.events.networks == {"policy": "9 GB/s (TCP: no RDMA device)"}


def test_a_trainer_that_raises_while_it_starts_is_not_started_again() -> None:
    launcher = _Launcher(fake_spec(failures={"trainer_restarts": 3}), cast(Cluster, None))
    group = policy_group(FakePolicy(0))

    async def fail(*_: Any) -> Any:
        raise WorkerRaised("policy-0", "start", "OSError: no such model")

    fakes_of(group)[0].target.start = fail
    with pytest.raises(WorkerRaised, match="no such model"):
        on_virtual_time(launcher._start_trainers(group))
    assert launcher.restarts == 0


def test_a_trainer_that_dies_while_a_resume_loads_is_restarted_and_loads(tmp_path: Path) -> None:
    RecoveringRun(tmp_path, schedule={"steps": 2}).run()
    run = RecoveringRun(tmp_path, ("policy-0", "load", 1), resume=True)

    async def load() -> None:
        controller = run.build()
        found = CheckpointStore(tmp_path / "checkpoints", 1).latest()
        assert found is not None
        await controller.components.recovery.calls.retry(lambda: load_checkpoint(found, run.groups, 60.0))
        assert [len(learned) for learned in run.learned] == [2, 2, 4]
        assert controller.components.recovery.budget.total == 1

    asyncio.run(load())


class _Ordered(WorkerLauncher):
    """Records when roles begin and end to start."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec, cast(Cluster, None))
        self.events: list[str] = []
        self._placements.roles = lambda: {"rollout", "policy", "reward"}

    async def _role(self, role: str) -> Any:
        self.events.append(f"{role} begins")
        await asyncio.sleep(0.02)
        self.events.append(f"{role} has started")


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_starts_after_the_trainer_on_its_gpu(shared: bool) -> None:
    """vLLM sizes its KV cache by the memory that is free while it starts."""
    changes = ["roles.policy.gpus=0.5", "schedule.max_staleness=0", "weight_sync.backend=auto"]
    where = "colocate_with: policy, gpus: 0.5" if shared else "gpus: 1"
    changes.append(f"roles.rollout={{workers: 8, {where}, gpu_memory_utilization: 0.3, max_model_len: 4096}}")
    spec = spec_of(ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml", *changes, "roles.policy.workers=8")
    launcher = _Ordered(spec)
    on_virtual_time(launcher._start())
    begins, ended = launcher.events.index("rollout begins"), launcher.events.index("policy has started")
    assert (begins > ended) is shared
    assert launcher.events.index("reward begins") < ended


_TEACHER = (
    "algorithm={name: gkd}",
    "roles.teacher={one: {kind: engine, colocate_with: policy, model: {path: m}, max_model_len: 4097, "
    "gpu_memory_utilization: 0.2}}",
)


def test_engines_on_one_gpu_start_in_turn() -> None:
    changes = ["schedule.max_staleness=0", "weight_sync.backend=auto", "roles.policy.workers=8"]
    where = "colocate_with: policy, max_model_len: 4096, gpu_memory_utilization: 0.3"
    node = ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"
    launcher = _Ordered(spec_of(node, *changes, f"roles.rollout={{{where}}}", *_TEACHER))
    launcher._placements.roles = lambda: {"teacher.one", "rollout", "policy", "reward"}
    on_virtual_time(launcher._start())
    engines = [event for event in launcher.events if event.startswith(("rollout", "teacher"))]
    assert [event.partition(" ")[2] for event in engines] == 2 * ["begins", "has started"]
    assert launcher.events.index(engines[0]) > launcher.events.index("policy has started")


class _Spawning(SimpleNamespace):
    """A cluster of H100s that keeps the configuration of every actor."""

    def __init__(self, gpu: int) -> None:
        super().__init__(configs=[])
        self.visible: str | None = None
        self.gpu = gpu

    def gpu_memory(self) -> int:
        return self.gpu

    def spawn(self, placement: Any, placed: Any, name: str, actor: Any) -> Any:
        self.configs.append(actor.args[0])
        self.visible = actor.env.get("CUDA_VISIBLE_DEVICES")


def test_an_engine_of_several_gpus_sees_those_of_the_ranks_in_its_bundle() -> None:
    changes = ["schedule.max_staleness=0", "weight_sync.backend=auto", "roles.policy.workers=8"]
    where = "colocate_with: policy, tensor_parallel_size: 4, max_model_len: 4096, gpu_memory_utilization: 0.3"
    node = ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"
    spec = spec_of(node, *changes, f"roles.rollout={{{where}}}")
    cluster = _Spawning(0)
    placements = WorkerPlacements(spec, cast(Cluster, cluster))
    placements._placements = {
        f"{placed.role}-{placed.index}": (one, placed) for one in place(role_sizes(spec)) for placed in one.workers
    }
    actors = RunActors(spec, cast(Cluster, cluster), placements, None)
    actors.policy_started(0, {f"policy-{rank}": str(7 - rank) for rank in range(8)})
    seen: list[str | None] = []
    for name in ("rollout-0", "rollout-1", "policy-0"):
        actors.spawn(name)
        seen.append(cluster.visible)
    assert seen == ["7,6,5,4", "3,2,1,0", None]


@pytest.mark.parametrize("kind", ["teacher", "reference"])
@pytest.mark.parametrize("shared", [True, False])
def test_each_role_on_a_shared_gpu_has_its_own_cache(kind: str, shared: bool, tmp_path: Path) -> None:
    """And an engine of another model on separate GPUs has none that is given."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    changes = ["schedule.max_staleness=0", "weight_sync.backend=auto", "roles.policy.workers=8"]
    changes += ["roles.rollout={colocate_with: policy, max_model_len: 4096}", f"model.path={tmp_path}"]
    own = "colocate_with: policy, gpu_memory_utilization: 0.4, enforce_eager: true" if shared else "gpus: 1"
    engine = f"{{max_model_len: 4097, {own}}}"
    if kind == "teacher":
        role = "teacher.one"
        changes += [_TEACHER[0], f"roles.teacher={{one: {{kind: engine, model: {{path: {tmp_path}}}, {engine[1:]}}}"]
    else:
        role = "reference_engine"
        changes += ["algorithm={name: xpo}", "roles.reference={gpus: 1}", f"roles.reference_engine={engine}"]
    spec = spec_of(ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml", *changes)
    cluster = _Spawning(80 * GIB)
    placements = WorkerPlacements(spec, cast(Cluster, cluster))
    placements._placements = {
        f"{placed.role}-{placed.index}": (one, placed) for one in place(role_sizes(spec)) for placed in one.workers
    }
    actors = RunActors(spec, cast(Cluster, cluster), placements, None)
    for name in ("rollout-0", f"{role}-0"):
        actors.spawn(name)
    caches = plan(spec, described_nodes("2x8xA100", 128), Sizes()).memory.caches
    given = [config.kv_cache_bytes for config in cluster.configs]
    assert given == [caches["rollout-0"].bytes, caches[f"{role}-0"].bytes if shared else None]
    assert [config.sleep for config in cluster.configs] == ["kv_cache", "kv_cache" if shared else "none"]


@pytest.mark.parametrize(("shared", "gpu", "reported"), [(True, 80, 0), (True, 160, 80), (True, 0, 0), (False, 80, 0)])
def test_an_engine_on_a_shared_gpu_has_the_cache_of_the_plan_also_as_a_replacement(
    shared: bool, gpu: int, reported: int, tmp_path: Path
) -> None:
    """What it finds free while it starts says nothing: trainers hold or release memory meanwhile.

    What the trainer there reports counts, not the memory of the largest GPU with the name that Ray gives.
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    changes = ["roles.policy.gpus=0.5", "schedule.max_staleness=0", "weight_sync.backend=auto"]
    where = "colocate_with: policy, gpus: 0.5" if shared else "gpus: 1"
    changes.append(f"roles.rollout={{workers: 8, {where}, gpu_memory_utilization: 0.5, max_model_len: 4096}}")
    spec = spec_of(
        ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml",
        *changes,
        "roles.policy.workers=8",
        f"model.path={tmp_path}",
    )
    cluster = _Spawning(gpu * GIB)
    placements = WorkerPlacements(spec, cast(Cluster, cluster))
    placements._placements = {
        f"{placed.role}-{placed.index}": (one, placed) for one in place(role_sizes(spec)) for placed in one.workers
    }
    actors = RunActors(spec, cast(Cluster, cluster), placements, None)
    actors.policy_started(reported * GIB, {})
    for _ in range(2):
        actors.spawn("rollout-3")
    first, replacement = (config.kv_cache_bytes for config in cluster.configs)
    assert first == replacement
    if not (shared and gpu):
        assert first is None
        return
    caches = plan(spec, described_nodes("1x8xA100", 128), Sizes()).memory.caches
    assert first == caches["rollout-3"].bytes > GIB
    assert {config.engine.gpu_memory_utilization for config in cluster.configs} == {0.5}
