"""The pools of a run: one for each role that the table gives a pool, replaced within its restarts and connected."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.clock import on_virtual_time
from tests.conftest import ROOT
from tests.fakes import FakeCritic, FakePolicy, critic_group, policy_group
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_group import ReferenceGroup
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.roles.table import row_of
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.runs.rollouts import RolloutRun
from troupe.orchestrator.runs.session import RunRequest, Session
from troupe.orchestrator.spec.derived.sizes import engine_load
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console

SPECS = ROOT / "deploy" / "specs"


@dataclass(eq=False)
class Handle:
    """A worker that records its calls and serves until it is killed."""

    name: str
    calls: list[str] = field(default_factory=list)

    async def call(self, method: Callable[..., Any], timeout_s: float, *_: Any) -> Any:
        self.calls.append(method.__name__)
        if method.__name__ == "watch":
            await asyncio.sleep(timeout_s)

    def kill(self) -> None:
        self.calls.append("kill")


class Launcher:
    """Starts handles, and records which."""

    def __init__(self) -> None:
        self.started: dict[str, Handle] = {}

    async def engine(self, name: str) -> Engine:
        return Engine(cast("Any", await self.replica(name)), "host")

    async def replica(self, name: str) -> Handle:
        self.started[name] = Handle(name)
        return self.started[name]

    async def make_room(self, name: str) -> None:
        """As `WorkerResources`: there is room for any worker."""


class Links:
    """The cluster's part: a link for callers."""

    def environment_link(self, *_: Any) -> str:
        return "environments"

    def judge_link(self, name: str, *_: Any) -> str:
        self.judge = name
        return "judges"

    def reference_link(self, *_: Any) -> str:
        return "references"


def pools_of(spec: RolloutSpec) -> tuple[RunPools, Launcher]:
    context, launcher = context_of(spec)
    return RunPools(spec, context), launcher


def context_of(spec: RolloutSpec, folder: Path = Path()) -> tuple[Session, Launcher]:
    launcher = Launcher()
    first = {role: [Handle(f"{role}-0")] for role in spec.roles.present() if row_of(spec, role).pool is not None}
    engines = [Engine(cast("Any", handle), "host") for handle in first.pop("rollout")]
    context = Session(
        RunRequest(spec, folder, False, None),
        spec,
        cast("Cluster", Links()),
        cast("WorkerLauncher", launcher),
        Workers({**first, "rollout": engines}),
        Console(),
        asyncio.Event(),
        cast("RunCheckpoints", None),
    )
    return context, launcher


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("tiny-ppo", {"rollout", "reward", "reference"}),
        ("tiny-environment", {"rollout", "reward", "environment"}),
        ("tiny-judge", {"rollout", "reward", "judge"}),
        ("algorithms/xpo", {"rollout", "reward", "reference", "reference_engine"}),
    ],
)
def test_every_worker_with_a_pool_is_replaced_until_its_restarts_are_used(name: str, roles: set[str]) -> None:
    changes = {role: f"failures.{prefix}_restarts=1" for role, prefix in PREFIXES.items() if role in roles}
    spec = load_rollout_spec(SPECS / f"{name}.yaml", list(changes.values()))

    async def run() -> None:
        pools, launcher = pools_of(spec)
        assert set(pools.by_role) == roles
        await pools.start()
        for role, pool in pools.by_role.items():
            assert pool.names == [f"{role}-0"]
            await pool.lose(pool.workers[0], WorkerDied(f"{role}-0", "call", "it is dead"))
            await pool.until_started(f"{role}-0")
            assert pool.names == [f"{role}-0"] and f"{role}-0" in launcher.started
            assert str(pool.budget) == f"1 of 1 restarts used: failures.{PREFIXES[role]}_restarts"
            await pool.lose(pool.workers[0], WorkerDied(f"{role}-0", "call", "it is dead again"))
            assert pool.names == []
        await pools.close()

    on_virtual_time(run())


AGAINST_A_JUDGE = (
    "roles.environment.players={first: policy, second: judge}",
    "roles.judge={model: {path: .cache/models/tiny-llama}, max_model_len: 128, max_tokens: 2}",
)
PREFIXES = {
    "rollout": "engine",
    "reward": "reward",
    "reference": "reference",
    "reference_engine": "reference",
    "environment": "environment",
    "judge": "judge",
}
"""Fields of `failures` with the restarts of each role."""


@pytest.mark.parametrize(
    ("staleness", "methods"), [(0, ["score", "compute_values", "compute_logprobs"]), (1, ["score"])]
)
def test_trainers_score_groups_during_generation_only_while_they_do_not_train(
    staleness: int, methods: list[str]
) -> None:
    """Beside updates only the frozen reference does: scores of the trainers are those before a step's updates."""
    pools, _ = pools_of(load_rollout_spec(SPECS / "tiny-ppo.yaml", [f"schedule.max_staleness={staleness}"]))
    reference = ReferenceGroup("reference", [Handle("reference-0")], 1024)  # pyright: ignore[reportArgumentType]
    groups = {"policy": policy_group(FakePolicy()), "critic": critic_group(FakeCritic()), "reference": reference}
    pools.session = replace(pools.session, workers=Workers({**pools.session.workers.by_role, **groups}))
    assert [cast("Any", scorer._score_tokens).__name__ for scorer in pools.token_scorers()] == methods


@pytest.mark.parametrize(
    ("name", "caller", "methods"),
    [
        ("tiny-environment", "rollout", ["connect_environments"]),
        ("tiny-judge", "reward", ["connect_judge"]),
        ("tiny-self-play", "rollout", ["connect_environments", "connect_judge"]),
        ("algorithms/xpo", "rollout", ["connect_reference"]),
    ],
)
def test_a_replacement_is_connected_before_it_serves(name: str, caller: str, methods: list[str]) -> None:
    """To the workers that it calls, as the first workers are at the start."""
    spec = load_rollout_spec(SPECS / f"{name}.yaml", AGAINST_A_JUDGE if name == "tiny-self-play" else ())

    async def run() -> None:
        pools, launcher = pools_of(spec)
        await pools.start()
        pool = pools.by_role[cast("Any", caller)]
        await pool.lose(pool.workers[0], WorkerDied(f"{caller}-0", "call", "it is dead"))
        await pool.until_started(f"{caller}-0")
        assert launcher.started[f"{caller}-0"].calls[: len(methods)] == methods
        await pools.close()

    on_virtual_time(run())


_GUEST = "colocate_with: policy, gpu_memory_utilization: 0.2, max_model_len: 1024"


@pytest.mark.parametrize(
    ("name", "role", "given"),
    [
        (
            "tiny-grpo",
            "teacher.one",
            (
                "algorithm={name: gkd}",
                f"roles.teacher={{one: {{kind: engine, model: {{path: .cache/models/tiny-llama}}, {_GUEST}}}}}",
            ),
        ),
        ("algorithms/xpo", "reference_engine", (f"roles.reference_engine={{{_GUEST}}}",)),
    ],
)
@pytest.mark.parametrize("where", ["colocate_with: policy", "gpus: 1"])
def test_engines_of_other_models_on_the_policys_gpus_sleep_and_do_not_start_while_it_trains(
    name: str, role: str, given: tuple[str, ...], where: str
) -> None:
    """With or without the rollout engines there."""
    rollout = f"roles.rollout={{{where}, max_model_len: 512}}"
    spec = load_rollout_spec(SPECS / f"{name}.yaml", [*given, rollout, "weight_sync.backend=shm"])

    async def run() -> None:
        context, launcher = context_of(spec)
        workers = Workers({**context.workers.by_role, "policy": policy_group(FakePolicy())})
        pools = RunPools(spec, replace(context, workers=workers))
        pool, engine = pools.by_role[role], cast("Handle", pools.engines.workers[0].handle)
        first, trainer_memory = cast("Handle", pool.workers[0]), pools.trainer_memory
        assert trainer_memory is not None
        async with trainer_memory():
            assert first.calls == ["sleep"] and engine.calls == (["sleep"] if where != "gpus: 1" else [])
            await pool.lose(first, WorkerDied(first.name, "score", "it is dead"))
            await asyncio.sleep(60)
            assert not launcher.started
        await pool.until_started(first.name)
        async with trainer_memory():
            pass
        calls = [call for call in launcher.started[first.name].calls if call != "watch"]
        assert calls == ["sleep", "wake"]
        await pools.close()

    on_virtual_time(run())


async def test_engines_have_room_for_the_episodes_of_environments_that_are_added(tmp_path: Path) -> None:
    """Where episodes, not sequences, bound the samples of an engine: one engine, and 40 episodes for each worker."""
    few = ["roles.environment.episodes=40", "roles.rollout.max_num_seqs=8", "algorithm.group_size=4"]
    spec = load_rollout_spec(SPECS / "tiny-environment.yaml", few)
    context, launcher = context_of(spec, tmp_path)
    pools = RunPools(spec, context)
    run = RolloutRun(context, pools)
    pool, scaler = pools.engines, run.scaler
    assert pool.dispatch.max_load == engine_load(spec) == 40 + 8
    async with asyncio.timeout(60):
        await pool.acquire(48)
        waiting = asyncio.create_task(pool.acquire(72))
        await asyncio.sleep(0)
        assert not waiting.done()
        scaler.change({"roles.environment.workers": 3})
        assert pool.dispatch.max_load == engine_load(scaler.spec) == 120 + 8
        assert (await waiting).load == 120
        while any(state.scaling for state in scaler.states()):
            await asyncio.sleep(0)
        scaler.change({"roles.rollout.workers": 2})  # the second engine has yet to start
        assert pool.dispatch.max_load == 128 > engine_load(scaler.spec)
        await scaler.close()
    assert {"environment-1", "environment-2"} <= launcher.started.keys()


def judge_named(model: Path, *changes: str) -> str:
    """The name under which answers of the judge in this folder are cached."""
    spec = load_rollout_spec(SPECS / "tiny-judge.yaml", [f"roles.judge.model.path={model}", *changes])

    async def run() -> str:
        context, _ = context_of(spec)
        pools = RunPools(spec, context)
        await pools.start()
        await pools.close()
        return cast("Links", context.cluster).judge

    return on_virtual_time(run())


def test_answers_are_cached_by_the_content_of_the_judges_folder(tmp_path: Path) -> None:
    model = tmp_path / "judge"
    shutil.copytree(ROOT / ".cache" / "models" / "tiny-llama", model)
    name = judge_named(model)
    assert judge_named(model) == judge_named(model, "roles.judge.workers=2") == name
    assert judge_named(model, "roles.judge.max_tokens=7") != name
    (weights,) = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert judge_named(model) != name
