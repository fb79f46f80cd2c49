"""Scaling of an active run with fakes: no sample is lost or trained twice, and none has stale weights."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from tests.conftest import ROOT
from tests.fakes import (
    FakePolicy,
    FakeReward,
    FakeTable,
    FaultyEngine,
    FaultyReward,
    FaultyWorker,
    fake_pool,
)
from tests.faults.stalls import may_mount, own_disk
from tests.orchestrator.test_cli import troupe
from tests.orchestrator.test_controller import RolloutRun
from tests.orchestrator.test_mailbox import messages, wait_for
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.controller import Controller, RunOutcome
from troupe.orchestrator.errors import DataLost, DoesNotFit, TroupeError, UsageError, WorkerDied
from troupe.orchestrator.live import control
from troupe.orchestrator.live.control import ControlServer, ask
from troupe.orchestrator.live.diff import changed, differences, worker_changes
from troupe.orchestrator.live.lock import LOCK_FILE, locked
from troupe.orchestrator.live.scaling import RoleState, WorkerScaler
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.pools.replicas import ReplicaPool
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scoring import TokenScorer
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.workers.contract.messages import (
    GroupRequest,
    GroupSummary,
    PrepareRequest,
    RankPlan,
    RewardSummary,
    TrainSummary,
    UpdateMetrics,
)

T = TypeVar("T")


def tiny(*overrides: str) -> RolloutSpec:
    """The shipped spec with two engines, at most four."""
    sets = ("roles.rollout.workers=2", "roles.rollout.max_workers=4", "roles.reward.max_workers=3")
    return load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml", (*sets, *overrides))


def quick() -> RolloutSpec:
    """The same with one second for a removed worker to finish its work."""
    return tiny("schedule.generate_timeout_s=1.0")


class FakeLauncher:
    """Room for a fixed number of workers."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.taken: set[str] = set()
        self.log: list[str] = []

    async def make_room(self, name: str) -> None:
        await asyncio.sleep(0.001)
        if len(self.taken) == self.room:
            raise DoesNotFit(f"no room for {name}")
        self.taken.add(name)

    async def replica(self, name: str) -> FaultyWorker:
        await asyncio.sleep(0.001)
        return FaultyWorker(name, FakeReward())

    async def dismiss(self, name: str, timeout_s: float) -> None:
        self.log.append(name)
        self.taken.discard(name)


class Scaled(RolloutRun):
    """A run whose engines and reward workers scale: `script` maps a policy version to the changes made at it."""

    def __init__(
        self, out: Path, script: dict[int, dict[str, Any]], spec: RolloutSpec | None = None, **options: Any
    ) -> None:
        super().__init__(out, **options)
        self.live = spec or quick()
        """The spec that the scaler changes."""
        self.script = script
        self.launcher = FakeLauncher()
        self.output = io.StringIO()
        self.saved: list[RolloutSpec] = []
        self.save: Callable[[RolloutSpec], None] = self.saved.append

    def scaler(self, console: Console) -> WorkerScaler:
        self.rewards._launch = self.launcher.replica
        self.worker_scaler = WorkerScaler(
            self.live,
            pools={"rollout": self.pool, "reward": self.rewards},
            resources=self.launcher,
            console=Console(self.output),
            save=self.save,
            file="spec.yaml",
        )
        return self.worker_scaler

    def run(self) -> RunOutcome:
        self.policies = [_Paced(self), *self.policies[1:]]

        async def change_first(controller: Controller) -> None:
            while not controller.components.ledger.counts()["dispatched"]:
                await asyncio.sleep(0)
            self.worker_scaler.change(self.script[0])

        async def go() -> RunOutcome:
            controller = await self.start()
            first = asyncio.create_task(change_first(controller)) if 0 in self.script else None
            try:
                return await controller.run()
            finally:
                if first is not None:
                    first.cancel()
                await self.worker_scaler.close()

        return asyncio.run(go())


class _Paced(FakePolicy):
    """Makes the script's changes during training. Each change is complete before the next one and before the end; the
    steps between them continue meanwhile."""

    def __init__(self, harness: Scaled) -> None:
        super().__init__()
        self._harness = harness

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        harness, version = self._harness, self._harness.controller.version
        if version + 1 in {*harness.script, harness.spec.schedule.steps}:
            while any(state.scaling for state in harness.worker_scaler.states()):
                await asyncio.sleep(0.0005)
        if version > 0 and version in harness.script:
            harness.worker_scaler.change(harness.script[version])
        return await super().update(plan, batch, kl_old_coef, texts)


@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_scale_and_every_sample_is_trained_once(tmp_path: Path, staleness: int) -> None:
    script = {1: {"roles.rollout.workers": 4}, 4: {"roles.rollout.workers": 1}, 6: {"roles.rollout.workers": 3}}
    harness = Scaled(tmp_path, script, schedule={"steps": 9, "max_staleness": staleness})
    outcome = harness.run()
    assert outcome.steps_done == 9
    assert outcome.ledger["trained"] == outcome.ledger["dispatched"] == 9 * 20
    trained = [uid for policy in harness.policies for keep in policy.prepared for uid in keep]
    assert len(trained) == len(set(trained)) == 9 * 20
    numbers = [line["workers/rollout"] for line in harness.lines()]
    assert numbers[0] == 2 and max(numbers) == 4 and min(numbers) == 1
    assert [spec.roles.rollout.workers for spec in harness.saved] == [4, 1, 3]
    assert "rollout: 2 -> 4 workers: rollout-2, rollout-3 starting" in harness.output.getvalue()


def test_a_new_engine_has_the_current_weights_before_its_first_token() -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        version = 7

        async def bring_up(engine: Any) -> None:
            assert pool.weights.lock.locked()
            assert engine not in pool.workers
            await asyncio.sleep(0.01)
            engine.version = version

        pool = fake_pool([FaultyEngine("rollout-0", random.Random(0))], weights=PoolWeights(bring_up))
        joining = asyncio.create_task(pool.join("rollout-1"))
        while pool.names == ["rollout-0"]:
            await asyncio.sleep(0)
        assert pool.starting
        assert [e.name for e in pool.serving] == ["rollout-0"]
        await joining
        seen.extend((len(pool.serving), e.version) for e in pool.workers if e.name == "rollout-1")

    asyncio.run(run())
    assert seen == [(2, 7)]


def test_a_removed_engine_gets_no_new_groups_and_finishes_its_own() -> None:
    async def run() -> list[str]:
        pool = fake_pool([FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)])
        order: list[str] = []
        first, second = await pool.acquire(4), await pool.acquire(4)
        assert {first.name, second.name} == {"rollout-0", "rollout-1"}

        async def remove() -> None:
            await pool.retire("rollout-1", 5.0)
            order.append("gone")

        removing = asyncio.create_task(remove())
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await pool.acquire(4)).name == "rollout-0"
        assert pool.names == ["rollout-0"]
        order.append("finished")
        pool.release(next(e for e in (first, second) if e.name == "rollout-1"), 4)
        await removing
        assert [engine.name for engine in pool.workers] == ["rollout-0"]
        return order

    assert asyncio.run(run()) == ["finished", "gone"]


def test_groups_a_removed_engine_does_not_finish_are_rescheduled_without_counting_as_failures(tmp_path: Path) -> None:
    harness = Scaled(tmp_path, {0: {"roles.rollout.workers": 1}}, schedule={"steps": 2})
    harness.engines[1].mean_s = 1e6

    class Ending(FakeLauncher):
        """Ends the process, like the real launcher."""

        async def dismiss(self, name: str, timeout_s: float) -> None:
            await super().dismiss(name, timeout_s)
            handles[name].kill()

    harness.launcher = Ending()
    build = harness.build
    handles: dict[str, FaultyWorker] = {}

    def built() -> Any:
        controller = build()
        for engine in harness.pool.workers:
            assert isinstance(engine.handle, FaultyWorker)
            handles[engine.name] = engine.handle
        return controller

    harness.build = built
    outcome = harness.run()
    assert outcome.ledger["trained"] == outcome.ledger["dispatched"] == 2 * 20
    assert outcome.ledger["retries"] > 0
    assert outcome.drop_reasons == {}


def test_without_room_the_run_continues_with_its_workers(tmp_path: Path) -> None:
    harness = Scaled(tmp_path, {1: {"roles.rollout.workers": 4}}, schedule={"steps": 6})
    harness.launcher.room = 1
    assert harness.run().steps_done == 6
    assert "could not be added: no room for rollout-" in harness.output.getvalue()
    assert harness.lines()[-1]["workers/rollout"] == 3


def test_reward_workers_scale(tmp_path: Path) -> None:
    script = {1: {"roles.reward.workers": 3}, 3: {"roles.reward.workers": 1}}
    harness = Scaled(tmp_path, script, schedule={"steps": 6})
    outcome = harness.run()
    assert outcome.ledger["trained"] == 6 * 20
    assert [line["workers/reward"] for line in harness.lines()][-1] == 1
    assert sorted(harness.launcher.log) == ["reward-1", "reward-2"]


def test_a_dead_reward_worker_gets_no_groups_while_another_one_runs() -> None:
    async def run() -> tuple[list[str], int]:
        handles = [FaultyWorker(f"reward-{i}", FakeReward()) for i in range(3)]
        pool = RewardPool(handles, 1.0)
        handles[0].kill()
        handles[1].kill()
        await pool.score(FakeTable("rollouts", ("a",)))
        names = pool.names
        handles[2].kill()
        with pytest.raises(WorkerDied):
            await pool.score(FakeTable("rollouts", ("b",)))
        return names, len(handles[2].calls)

    assert asyncio.run(run()) == (["reward-2"], 2)


def test_scorers_are_added_and_removed_between_two_waves() -> None:
    async def run() -> list[list[str]]:
        handles = [FaultyWorker(f"reference-{i}", FakePolicy(i)) for i in range(2)]
        group = PolicyGroup("reference", handles[:1], 64)

        async def launch(name: str) -> FaultyWorker:
            return handles[1]

        scaled = ReplicaPool(handles[:1], launch)
        scorer = TokenScorer(group, group.compute_logprobs, 1.0, scaled)
        names = [scaled.names]
        wave = asyncio.create_task(scorer.score([8, 8], FakeTable("rollouts", ("a",))))
        await asyncio.sleep(0)
        await scaled.join("reference-1")
        await wave
        names.append(scaled.names)
        assert len((await scorer.score([8, 8], FakeTable("rollouts", ("b",)))).tables) == 2
        await scaled.retire("reference-0", 1.0)
        names.append(scaled.names)
        return names

    expected = [["reference-0"], ["reference-0", "reference-1"], ["reference-1"]]
    assert asyncio.run(run()) == expected


def _full_disk(spec: RolloutSpec) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "spec.yaml")


def test_groups_lost_with_a_node_are_sampled_again(tmp_path: Path) -> None:
    """Data is lost once while a group is scored and once while the batch is prepared; dropped samples are open
    again."""
    harness = RolloutRun(tmp_path)

    class Reward(FaultyReward):
        async def score(
            self, rollouts: FakeTable, rewards: str = "", vote: bool = False
        ) -> tuple[RewardSummary, FakeTable]:
            if rollouts.uids == ("e0-r3",) and not rollouts.attempt:
                raise DataLost("reward-0", "score", "the node is gone")
            return await super().score(rollouts, rewards, vote)

    class Policy(FakePolicy):
        lost = False

        async def prepare(self, request: PrepareRequest, *tables: object) -> tuple[TrainSummary, FakeTable]:
            if not self.lost:
                self.lost = True
                raise DataLost("policy-0", "prepare", "the node is gone")
            return await super().prepare(request, *tables)

    harness.reward = Reward(fail={("e0-r1", 0): "timeout"})
    harness.policies = [Policy()]
    outcome = harness.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 79, "dropped": 1, "in_flight": 0, "retries": 6}
    assert outcome.drop_reasons == {"reward: timeout": 1}


def test_an_engine_that_dies_while_it_is_removed_is_not_replaced() -> None:
    class Dying(FaultyEngine):
        async def generate(
            self, request: GroupRequest, prompts: object, finished: Any = None
        ) -> tuple[GroupSummary, FakeTable]:
            raise WorkerDied(self.name, "generate", "killed")

    async def run() -> tuple[list[str], int]:
        pool = fake_pool([FaultyEngine("rollout-0", random.Random(0)), Dying("rollout-1", random.Random(1))])
        engine = next(e for e in pool.workers if e.name == "rollout-1")
        engine.outstanding = 4
        removing = asyncio.create_task(pool.retire("rollout-1", 5.0))
        await asyncio.sleep(0.001)
        await pool.report_failure(engine, WorkerDied("rollout-1", "generate", "killed"))
        pool.release(engine, 4)
        await removing
        return pool.names, pool.budget.total

    assert asyncio.run(run()) == (["rollout-0"], 0)


# Spec differences


def test_differences_say_what_can_change_and_why_the_others_cannot() -> None:
    wanted = tiny("roles.rollout.workers=3", "roles.policy.learning_rate=0.5", "roles.reward.min_workers=1")
    assert [str(difference) for difference in differences(tiny(), wanted)] == [
        "roles.policy.learning_rate: 0.04 -> 0.5: refused: it is read only when a run starts; stop this run, "
        "which saves it, and resume with --resume",
        "roles.rollout.workers: 2 -> 3",
    ]


def test_engines_on_the_policys_gpus_are_as_many_as_its_workers() -> None:
    teacher = "model: {path: .cache/models/tiny-llama}, max_model_len: 1024, gpu_memory_utilization: 0.3"
    shared = (
        "algorithm={name: gkd}",
        "roles.rollout={colocate_with: policy, max_model_len: 512}",
        f"roles.teacher={{math: {{kind: engine, colocate_with: policy, {teacher}}}}}",
    )
    why = "is colocated with the policy, whose workers set the number of engines"
    found = [str(one) for one in differences(tiny(*shared), tiny(*shared, "roles.policy.workers=2"))]
    assert found[1:] == [
        f"roles.rollout.workers: 1 -> 2: refused: rollout {why}",
        f"roles.teacher.math.workers: 1 -> 2: refused: teacher.math {why}",
    ]


def test_relative_and_absolute_paths_compare_equal() -> None:
    assert differences(tiny(f"model.path={ROOT / tiny().model.path}"), tiny()) == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"roles.rollout.workers": 5}, "spec.yaml: roles.rollout.max_workers: 4 is less than workers, 5"),
        ({"roles.rollout.workers": 0}, "spec.yaml: roles.rollout.workers: "),
        ({"roles.rollout.min_workers": 3}, "spec.yaml: roles.rollout.min_workers: 3 is more than workers, 2"),
        ({"roles.nobody.workers": 1}, "spec.yaml: roles.nobody: "),
    ],
)
def test_a_changed_spec_is_validated(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError) as caught:
        changed(tiny(), changes, "spec.yaml")
    assert str(caught.value).startswith(why)


def test_workers_are_named_by_their_role() -> None:
    numbers = worker_changes(["rollout=3", "environment.tools=2", "teacher.math=4"])
    assert numbers == {
        "roles.rollout.workers": 3,
        "roles.environment.tools.workers": 2,
        "roles.teacher.math.workers": 4,
    }


@pytest.mark.parametrize("text", ["rollout", "rollout=", "rollout=-1", "rollout=two", "=2", "roles.rollout=2"])
def test_malformed_worker_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        worker_changes([text])


def test_each_environment_scales_under_its_name() -> None:
    """Of two environments one grows; the other, and the spec's section of it, stay as they are."""
    spec = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-mixture.yaml")
    launcher = FakeLauncher()
    pools: dict[str, ReplicaPool[Any]] = {
        role: ReplicaPool([FaultyWorker(f"{role}-0", FakeReward())], launcher.replica) for role in spec.roles.scaled()
    }

    async def go() -> list[str]:
        scaler = WorkerScaler(spec, pools, launcher, Console(io.StringIO()), lambda _: None, "spec.yaml")
        scaler.change(worker_changes(["environment.guess=3"]))
        while any(state.scaling for state in scaler.states()):
            await asyncio.sleep(0.001)
        environments = scaler.spec.roles.environments()
        assert {name: role.workers for name, role in environments.items()} == {"guess": 3, "retry": 1}
        with pytest.raises(SpecError, match=r"roles\.environment\.guss"):
            scaler.change(worker_changes(["environment.guss=3"]))
        with pytest.raises(SpecError, match=r"roles\.environment\.workers"):
            scaler.change(worker_changes(["environment=3"]))
        return [str(state) for state in scaler.states()]

    states = asyncio.run(go())
    assert launcher.taken == {"environment.guess-1", "environment.guess-2"}
    assert "environment.guess: 3 workers (min 1)" in states and "environment.retry: 1 worker (min 1)" in states


# Control requests


class _Server:
    """A control server and a scaler without processes."""

    def __init__(self, folder: Path, save: Callable[[RolloutSpec], None] = lambda _: None) -> None:
        self.folder = folder
        pools: dict[str, ReplicaPool[Any]] = {"rollout": _instant(2), "reward": _instant(1)}
        self.scaler = WorkerScaler(tiny(), pools, FakeLauncher(), Console(io.StringIO()), save, "spec.yaml")

    def ask(self, changes: dict[str, Any]) -> tuple[RoleState, ...]:
        return self.during(lambda: ask(self.folder, changes, 10.0))

    def during(self, action: Callable[[], T]) -> T:
        """Run `action` in another thread while the server answers."""

        async def go() -> T:
            server = ControlServer(self.folder, self.scaler)
            with locked(self.folder):
                await server.open()
                try:
                    return await asyncio.to_thread(action)
                finally:
                    await server.close()
                    await self.scaler.close()

        return asyncio.run(go())


def _instant(workers: int) -> ReplicaPool[FaultyWorker[Any]]:
    """A role whose workers start instantly."""
    return ReplicaPool([FaultyWorker(f"x-{i}", FakeReward()) for i in range(workers)], FakeLauncher().replica)


def test_a_run_reports_its_state(tmp_path: Path) -> None:
    states = _Server(tmp_path).ask({})
    assert [str(state) for state in states] == ["rollout: 2 workers (min 1, max 4)", "reward: 1 worker (min 1, max 3)"]
    assert not (tmp_path / control.FOLDER).exists()


def test_a_run_accepts_a_change(tmp_path: Path) -> None:
    states = _Server(tmp_path).ask({"roles.rollout.workers": 3})
    assert (states[0].wanted, states[0].scaling) == (3, True)


def test_a_run_scales_on_request_where_the_spec_cannot_be_saved(tmp_path: Path) -> None:
    states = _Server(tmp_path, _full_disk).ask({"roles.rollout.workers": 3})
    assert (states[0].wanted, states[0].scaling) == (3, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"roles.rollout.workers": 9}, "max_workers: 4 is less than workers, 9"),
        ({"seed": 5}, "seed: 7 -> 5: refused: it is read only when a run starts"),
        (worker_changes(["policy=2"]), "roles.policy.workers: 1 -> 2: refused: it is read only when a run starts"),
        (worker_changes(["rollouts=2"]), "spec.yaml: roles.rollouts: "),
    ],
)
def test_a_run_refuses_an_invalid_change(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        _Server(tmp_path).ask(changes)
    assert why in str(caught.value)


def test_the_commands_show_and_change_a_run(tmp_path: Path) -> None:
    """`troupe scale` and `troupe apply` against a control server that answers."""
    server = _Server(tmp_path)
    (tmp_path / RESOLVED_SPEC).write_text(yaml.safe_dump(tiny().model_dump(mode="json")))
    scaled = server.during(lambda: troupe("scale", str(tmp_path), "rollout=3"))
    assert (scaled.code, scaled.errors) == (0, [])
    assert scaled.stdout.splitlines()[0].startswith("rollout: 3 workers")

    sets = ("roles.rollout.workers=1", "roles.rollout.max_workers=4", "roles.reward.max_workers=3", "seed=9")
    spec = [str(ROOT / "deploy" / "specs" / "tiny-grpo.yaml"), *(word for text in sets for word in ("--set", text))]
    applied = server.during(lambda: troupe("apply", *spec, "--out", str(tmp_path)))
    assert applied.stdout.splitlines()[:2] == [
        "roles.rollout.workers: 2 -> 1",
        "seed: 7 -> 9: refused: it is read only when a run starts; stop this run, which saves it, "
        "and resume with --resume",
    ]
    assert server.scaler.spec.roles.rollout.workers == 1 and server.scaler.spec.seed == 7
    assert (applied.code, applied.errors) == (2, ["1 of 2 difference(s) refused"])


@pytest.mark.parametrize(("word", "why"), [("rollout", "expected ROLE=WORKERS"), ("rollout=2", "no active run")])
def test_the_command_refuses_in_one_line(tmp_path: Path, word: str, why: str) -> None:
    answer = troupe("scale", str(tmp_path), word)
    assert answer.code == 2 and len(answer.errors) == 1 and why in answer.errors[0]


def test_an_invalid_request_is_answered(tmp_path: Path) -> None:
    async def go() -> list[str]:
        server = ControlServer(tmp_path, _Server(tmp_path).scaler)
        await server.open()
        folder = tmp_path / control.FOLDER
        (folder / "request-a.json").write_text("{")
        (folder / "request-b.json").write_text('{"changes": {}, "more": 1}')
        (folder / "request-c.json").write_text(" " * 100_000)
        answers = [folder / f"answer-{name}.json" for name in "abc"]
        while not all(path.exists() for path in answers):
            await asyncio.sleep(0.01)
        texts = [path.read_text() for path in answers]
        await server.close()
        return texts

    first, second, third = asyncio.run(go())
    assert "cannot read the request" in first and "cannot read the request" in second
    assert "exceeds 65536 bytes" in third


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount file systems")
def test_a_disk_that_hangs_delays_the_answer_and_not_the_run(tmp_path: Path) -> None:
    async def go(disk: Path) -> tuple[int, str]:
        """Turns of the event loop until the answer, and the answer."""
        server = ControlServer(disk, _Server(tmp_path).scaler)
        await server.open()
        (disk / control.FOLDER / "request-a.json").write_text('{"changes": {"seed": 1}}')
        thaw = threading.Timer(2.5, subprocess.run, (["fsfreeze", "-u", str(disk)],))
        subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
        thaw.start()  # in another thread: this one may hang
        answer, turns = disk / control.FOLDER / "answer-a.json", 0
        while not answer.exists():
            await asyncio.sleep(0.02)
            turns += 1
        text = answer.read_text()
        await server.close()
        return turns, text

    with own_disk(tmp_path / "disk", 32) as disk:
        turns, text = asyncio.run(go(disk))
    assert turns > 20
    assert "seed: 7 -> 1: refused" in text


def test_a_missing_run_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        ask(tmp_path / "nothing", {}, 10.0)
    with pytest.raises(UsageError, match="no active run"):
        ask(tmp_path, {}, 10.0)
    with locked(tmp_path), pytest.raises(UsageError, match="it has not started all its workers yet"):
        ask(tmp_path, {}, 10.0)
    folder = tmp_path / control.FOLDER
    folder.mkdir()
    with pytest.raises(UsageError, match="no active run"):
        ask(tmp_path, {}, 10.0)
    with locked(tmp_path):
        held = json.loads((tmp_path / LOCK_FILE).read_text())
        with pytest.raises(TroupeError, match=r"did not answer within 0\.2 s"):
            ask(tmp_path, {}, 0.2)
        wait_for(lambda: messages(folder) == [])
    (tmp_path / LOCK_FILE).write_text(json.dumps(held | {"pid": 2**22 + 1}))
    with pytest.raises(UsageError, match=rf"its run has ended: process {2**22 + 1} on .* was killed"):
        ask(tmp_path, {}, 10.0)
    with locked(tmp_path, "its supervisor starts it again"):
        pass
    with pytest.raises(UsageError, match=r"its run has ended, and its supervisor starts it again$"):
        ask(tmp_path, {}, 10.0)
