"""Workers that come and go while a run goes on, against fakes: no sample lost or trained twice, no old weights."""

from __future__ import annotations

import asyncio
import io
import os
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from orchestrator import control
from orchestrator.console import Console
from orchestrator.control import ControlServer, ask
from orchestrator.controller import RunOutcome
from orchestrator.errors import DataLost, DoesNotFit, TroupeError, UsageError, WorkerDied
from orchestrator.handles import Gang
from orchestrator.live_spec import changed, differences, worker_changes
from orchestrator.scaling import (
    Crew,
    LeaveBounds,
    RoleState,
    ScaledEngines,
    ScaledRewardWorkers,
    ScaledScorers,
    ScaledWorkers,
    step_of,
)
from orchestrator.scoring import RewardPool, TokenScorer
from orchestrator.spec import Spec, load_spec
from orchestrator.spec_errors import SpecError
from orchestrator.spec_files import RESOLVED_SPEC
from orchestrator.spec_sections import AutoscaleConfig, RoleName
from tests.conftest import ROOT
from tests.fakes import PLAN, FakeEngine, FakeHandle, FakePolicy, FakeReward, FakeTable, fake_pool
from tests.test_cli import troupe
from tests.test_controller import Theatre
from workers.messages import (
    GroupRequest,
    GroupSummary,
    PrepareRequest,
    RankPlan,
    RewardSummary,
    TrainSummary,
    UpdateMetrics,
)

T = TypeVar("T")
BOUNDS = LeaveBounds(finish_s=1.0, close_s=0.1)


def tiny(*overrides: str) -> Spec:
    """The shipped spec of two engines at most four."""
    sets = ("roles.rollout.workers=2", "roles.rollout.max_workers=4", "roles.reward.max_workers=3")
    return load_spec(ROOT / "deploy" / "tiny-grpo.yaml", (*sets, *overrides))


class FakeSeats:
    """Room for so many workers."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.taken: set[str] = set()
        self.log: list[str] = []

    async def make_room(self, name: str) -> None:
        await asyncio.sleep(0.001)
        if len(self.taken) == self.room:
            raise DoesNotFit(f"no room for {name}")
        self.taken.add(name)

    async def replica(self, name: str) -> FakeHandle:
        await asyncio.sleep(0.001)
        return FakeHandle(name, FakeReward())

    async def dismiss(self, name: str, timeout_s: float) -> None:
        self.log.append(name)
        self.taken.discard(name)


class Scaled(Theatre):
    """A run whose engines and reward workers come and go: `script` maps a version to changes made once it is there."""

    def __init__(self, out: Path, script: dict[int, dict[str, Any]], spec: Spec | None = None, **options: Any) -> None:
        super().__init__(out, **options)
        self.spec = spec or tiny()
        self.script = script
        self.seats = FakeSeats()
        self.told = io.StringIO()
        self.saved: list[Spec] = []

    def crew(self, console: Console) -> Crew:
        engines = ScaledEngines(self.pool, self.seats, BOUNDS)
        rewards = ScaledRewardWorkers(self.rewards, self.seats, BOUNDS)
        told = Console(self.told)
        self.company = Crew(self.spec, {"rollout": engines, "reward": rewards}, told, self.saved.append, "spec.yaml")
        return self.company

    def run(self) -> RunOutcome:
        self.policies[0] = _Paced(self)

        async def go() -> RunOutcome:
            controller = self.build()
            if 0 in self.script:
                self.company.change(self.script[0])
            try:
                return await controller.run()
            finally:
                await self.company.close()

        return asyncio.run(go())


class _Paced(FakePolicy):
    """Makes the script's changes while it trains. What one asked for is there before the next one, and before the end;
    the steps between go on meanwhile."""

    def __init__(self, theatre: Scaled) -> None:
        super().__init__()
        self._theatre = theatre

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        theatre, version = self._theatre, self._theatre.controller.version
        if version + 1 in {*theatre.script, theatre.plan.steps} or theatre.spec.roles.rollout.autoscale is not None:
            while any(state.moving for state in theatre.company.states()):
                await asyncio.sleep(0.0005)
        if version > 0 and version in theatre.script:
            theatre.company.change(theatre.script[version])
        return await super().update(plan, batch, kl_old_coef, texts)


@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_come_and_go_and_every_sample_is_trained_once(tmp_path: Path, staleness: int) -> None:
    script = {1: {"roles.rollout.workers": 4}, 4: {"roles.rollout.workers": 1}, 6: {"roles.rollout.workers": 3}}
    theatre = Scaled(tmp_path, script, plan=replace(PLAN, steps=9), staleness=staleness)
    outcome = theatre.run()
    assert outcome.steps_done == 9
    assert outcome.ledger["trained"] == outcome.ledger["dispatched"] == 9 * 20
    trained = [uid for policy in theatre.policies for keep in policy.prepared for uid in keep]
    assert len(trained) == len(set(trained)) == 9 * 20
    there = [line["workers/rollout"] for line in theatre.lines()]
    assert there[0] == 2 and max(there) == 4 and min(there) == 1
    assert [spec.roles.rollout.workers for spec in theatre.saved] == [4, 1, 3]
    assert "rollout: 2 -> 4 workers: rollout-2, rollout-3 starting" in theatre.told.getvalue()


def test_a_new_engine_has_the_current_weights_before_its_first_token() -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        pool = fake_pool([FakeEngine("rollout-0", random.Random(0))])
        version = 7

        async def bring_up(engine: Any) -> None:
            assert pool.moving.locked()
            assert engine not in pool.engines
            await asyncio.sleep(0.01)
            engine.version = version

        pool.bring_up = bring_up
        joining = asyncio.create_task(pool.join("rollout-1"))
        while pool.names == ["rollout-0"]:
            await asyncio.sleep(0)
        assert pool.awaited
        assert [e.name for e in pool.serving] == ["rollout-0"]
        await joining
        seen.extend((len(pool.serving), e.version) for e in pool.engines if e.name == "rollout-1")

    asyncio.run(run())
    assert seen == [(2, 7)]


def test_a_leaving_engine_is_given_nothing_more_and_finishes_what_it_has() -> None:
    async def run() -> list[str]:
        pool = fake_pool([FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(2)])
        order: list[str] = []
        first, second = await pool.acquire(4), await pool.acquire(4)
        assert {first.name, second.name} == {"rollout-0", "rollout-1"}

        async def leave() -> None:
            await pool.retire("rollout-1", 5.0)
            order.append("gone")

        leaving = asyncio.create_task(leave())
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await pool.acquire(4)).name == "rollout-0"
        assert pool.names == ["rollout-0"]
        order.append("finished")
        await pool.release(next(e for e in (first, second) if e.name == "rollout-1"), 4)
        await leaving
        assert [engine.name for engine in pool.engines] == ["rollout-0"]
        return order

    assert asyncio.run(run()) == ["finished", "gone"]


def test_what_a_leaving_engine_does_not_finish_goes_to_the_others_and_counts_as_no_failure(tmp_path: Path) -> None:
    theatre = Scaled(tmp_path, {0: {"roles.rollout.workers": 1}}, plan=replace(PLAN, steps=2))
    theatre.engines[1].mean_s = 1e6

    class Ending(FakeSeats):
        """Ends the process, as the real one does."""

        async def dismiss(self, name: str, timeout_s: float) -> None:
            await super().dismiss(name, timeout_s)
            handles[name].kill()

    theatre.seats = Ending()
    build = theatre.build
    handles: dict[str, FakeHandle] = {}

    def built() -> Any:
        controller = build()
        for engine in theatre.pool.engines:
            assert isinstance(engine.handle, FakeHandle)
            handles[engine.name] = engine.handle
        theatre.pool.bounds = replace(theatre.pool.bounds, restarts=0)
        return controller

    theatre.build = built
    outcome = theatre.run()
    assert outcome.ledger["trained"] == outcome.ledger["dispatched"] == 2 * 20
    assert outcome.ledger["retries"] > 0
    assert outcome.drop_reasons == {}


def test_no_room_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    theatre = Scaled(tmp_path, {1: {"roles.rollout.workers": 4}}, plan=replace(PLAN, steps=6))
    theatre.seats.room = 1
    assert theatre.run().steps_done == 6
    assert "could not be added: no room for rollout-" in theatre.told.getvalue()
    assert theatre.lines()[-1]["workers/rollout"] == 3


def test_reward_workers_come_and_go(tmp_path: Path) -> None:
    script = {1: {"roles.reward.workers": 3}, 3: {"roles.reward.workers": 1}}
    theatre = Scaled(tmp_path, script, plan=replace(PLAN, steps=6))
    outcome = theatre.run()
    assert outcome.ledger["trained"] == 6 * 20
    assert [line["workers/reward"] for line in theatre.lines()][-1] == 1
    assert sorted(theatre.seats.log) == ["reward-1", "reward-2"]


def test_a_dead_reward_worker_is_given_nothing_more_while_another_is_there() -> None:
    async def run() -> tuple[list[str], int]:
        handles = [FakeHandle(f"reward-{i}", FakeReward()) for i in range(3)]
        pool = RewardPool(handles, 1.0)
        handles[0].kill()
        handles[1].kill()
        await pool.score(FakeTable("rollouts", ("a",)))
        names = pool.names
        handles[2].kill()
        with pytest.raises(WorkerDied):
            await pool.score(FakeTable("rollouts", ("b",)))
        return names, len(handles[2].calls)

    assert asyncio.run(run()) == (["reward-2"], 3)


def test_scorers_change_between_two_waves() -> None:
    async def run() -> list[list[str]]:
        handles = [FakeHandle(f"reference-{i}", FakePolicy(i)) for i in range(2)]
        scorer = TokenScorer(Gang("reference", handles[:1], 64), "compute_logprobs", 1.0)

        class Seats(FakeSeats):
            async def replica(self, name: str) -> FakeHandle:
                return handles[1]

        scaled = ScaledScorers(scorer, Seats(), BOUNDS)
        names = [scaled.names]
        wave = asyncio.create_task(scorer.score([8, 8], FakeTable("rollouts", ("a",))))
        await asyncio.sleep(0)
        await scaled.add("reference-1")
        await wave
        names.append(scaled.names)
        assert len(await scorer.score([8, 8], FakeTable("rollouts", ("b",)))) == 2
        await scaled.remove("reference-0")
        names.append(scaled.names)
        return names

    expected = [["reference-0"], ["reference-0", "reference-1"], ["reference-1"]]
    assert asyncio.run(run()) == expected


def test_engines_follow_the_trainers_wait(tmp_path: Path) -> None:
    """Steps that are all waiting add engines up to the bound; the rule starts counting anew after each change."""
    rule = "roles.rollout.autoscale={max_wait: 0.0001, steps: 2}"  # every step waits for more than that
    theatre = Scaled(tmp_path, {}, spec=tiny(rule), plan=replace(PLAN, steps=16, checkpoint_every=0))
    assert theatre.run().steps_done == 16
    assert [spec.roles.rollout.workers for spec in theatre.saved] == [3, 4]
    assert theatre.lines()[-1]["workers/rollout"] == 4


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [([0.9], 0), ([0.9, 0.9], 1), ([0.2, 0.9], 0), ([0.5, 0.5], 0), ([0.01, 0.02], -1), ([0.9, 0.01, 0.02], -1)],
)
def test_the_last_steps_must_agree(waits: list[float], wanted: int) -> None:
    assert step_of(waits, AutoscaleConfig(max_wait=0.5, min_wait=0.1, steps=2)) == wanted


def test_what_a_node_took_with_it_is_sampled_anew(tmp_path: Path) -> None:
    """Once while a group is scored, once while the batch is made ready; dropped samples of it are open again."""
    theatre = Theatre(tmp_path)

    class Reward(FakeReward):
        lost = False

        async def score(self, rollouts: FakeTable) -> tuple[RewardSummary, FakeTable]:
            if not self.lost and rollouts.uids == ("e0-r3",):
                self.lost = True
                raise DataLost("reward-0", "score", "the node is gone")
            return await super().score(rollouts)

    class Policy(FakePolicy):
        lost = False

        async def prepare(self, request: PrepareRequest, *tables: FakeTable) -> tuple[TrainSummary, FakeTable]:
            if not self.lost:
                self.lost = True
                raise DataLost("policy-0", "prepare", "the node is gone")
            return await super().prepare(request, *tables)

    theatre.reward = Reward(fail={("e0-r1", 0): "timeout"})
    theatre.policies[0] = Policy()
    outcome = theatre.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 79, "dropped": 1, "in_flight": 0, "retries": 6}
    assert outcome.drop_reasons == {"reward: timeout": 1}


def test_an_engine_that_dies_while_it_leaves_is_not_replaced() -> None:
    class Dying(FakeEngine):
        async def generate(self, request: GroupRequest, prompts: object) -> tuple[GroupSummary, FakeTable]:
            raise WorkerDied(self.name, "generate", "killed")

    async def run() -> tuple[list[str], int]:
        pool = fake_pool([FakeEngine("rollout-0", random.Random(0)), Dying("rollout-1", random.Random(1))])
        engine = next(e for e in pool.engines if e.name == "rollout-1")
        engine.outstanding = 4
        leaving = asyncio.create_task(pool.retire("rollout-1", 5.0))
        await asyncio.sleep(0.001)
        await pool.report_failure(engine, WorkerDied("rollout-1", "generate", "killed"))
        await pool.release(engine, 4)
        await leaving
        return pool.names, pool.restarts_used

    assert asyncio.run(run()) == (["rollout-0"], 0)


# --- what may change


def test_differences_say_what_can_change_and_why_the_rest_cannot() -> None:
    wanted = tiny("roles.rollout.workers=3", "roles.policy.learning_rate=0.5", "roles.reward.min_workers=1")
    assert [str(difference) for difference in differences(tiny(), wanted)] == [
        "roles.policy.learning_rate: 0.1 -> 0.5: refused: it is read when a run starts: stop this one, which saves "
        "it, and go on with --resume",
        "roles.rollout.workers: 2 -> 3",
    ]


def test_a_path_may_be_written_relative_or_absolute() -> None:
    assert differences(tiny(f"model.path={ROOT / tiny().model.path}"), tiny()) == ()


def test_a_rule_changes_as_a_whole() -> None:
    (found,) = differences(tiny(), tiny("roles.rollout.autoscale={max_wait: 0.5}"))
    assert (found.field, found.old, found.refused) == ("roles.rollout.autoscale", None, "")
    assert changed(tiny(), {found.field: found.new}, "x").roles.rollout.autoscale == AutoscaleConfig(max_wait=0.5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"roles.rollout.workers": 5}, "spec.yaml: roles.rollout.max_workers: 4 is less than workers, 5"),
        ({"roles.rollout.workers": 0}, "spec.yaml: roles.rollout.workers: "),
        ({"roles.rollout.min_workers": 3}, "spec.yaml: roles.rollout.min_workers: 3 is more than workers, 2"),
        ({"roles.nobody.workers": 1}, "spec.yaml: roles.nobody: "),
    ],
)
def test_a_changed_spec_is_held_to_every_rule(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError) as caught:
        changed(tiny(), changes, "spec.yaml")
    assert str(caught.value).startswith(why)


@pytest.mark.parametrize("text", ["rollout", "rollout=", "rollout=-1", "rollout=two", "=2", "roles.rollout=2"])
def test_workers_are_given_by_role_and_number(text: str) -> None:
    with pytest.raises(UsageError):
        worker_changes([text])


# --- how a command reaches a run


class _Office:
    """A server over a crew without workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        roles: dict[RoleName, ScaledWorkers] = {"rollout": _Still(2), "reward": _Still(1)}
        self.crew = Crew(tiny(), roles, Console(io.StringIO()), _ignore, "spec.yaml")

    def ask(self, changes: dict[str, Any]) -> tuple[RoleState, ...]:
        return self.during(lambda: ask(self.folder, changes, 10.0))

    def during(self, action: Callable[[], T]) -> T:
        """Do something in another thread while the server answers."""

        async def go() -> T:
            server = ControlServer(self.folder, self.crew)
            server.open()
            try:
                return await asyncio.to_thread(action)
            finally:
                await server.close()
                await self.crew.close()

        return asyncio.run(go())


class _Still(ScaledWorkers):
    """A role whose workers are there at once."""

    def __init__(self, workers: int) -> None:
        super().__init__(FakeSeats(), BOUNDS)
        self._workers = {f"x-{i}" for i in range(workers)}

    @property
    def names(self) -> list[str]:
        return sorted(self._workers)

    async def _join(self, name: str) -> None:
        self._workers.add(name)

    async def _leave(self, name: str) -> None:
        self._workers.discard(name)


def _ignore(spec: Spec) -> None:
    pass


def test_a_run_answers_how_it_stands(tmp_path: Path) -> None:
    states = _Office(tmp_path).ask({})
    assert [str(state) for state in states] == ["rollout: 2 workers (from 1 to 4)", "reward: 1 worker (from 1 to 3)"]
    assert not (tmp_path / control.FOLDER).exists()


def test_a_run_takes_a_change(tmp_path: Path) -> None:
    states = _Office(tmp_path).ask({"roles.rollout.workers": 3})
    assert (states[0].wanted, states[0].moving) == (3, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"roles.rollout.workers": 9}, "max_workers: 4 is less than workers, 9"),
        ({"seed": 5}, "seed: 7 -> 5: refused: it is read when a run starts"),
        (worker_changes(["policy=2"]), "roles.policy.workers: 1 -> 2: refused: it is read when a run starts"),
        (worker_changes(["rollouts=2"]), "spec.yaml: roles.rollouts: "),
        ({"roles.rollout.autoscale": {"max_wait": 2.0}}, "roles.rollout.autoscale.max_wait: "),
    ],
)
def test_a_run_refuses_what_cannot_be(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        _Office(tmp_path).ask(changes)
    assert why in str(caught.value)


def test_the_commands_show_and_change_a_run(tmp_path: Path) -> None:
    """`troupe scale` and `troupe apply`, as a user types them, beside a run that answers."""
    office = _Office(tmp_path)
    (tmp_path / RESOLVED_SPEC).write_text(yaml.safe_dump(tiny().model_dump(mode="json")))
    scaled = office.during(lambda: troupe("scale", str(tmp_path), "rollout=3"))
    assert (scaled.code, scaled.errors) == (0, [])
    assert scaled.stdout.splitlines()[0].startswith("rollout: 3 workers")

    sets = ("roles.rollout.workers=1", "roles.rollout.max_workers=4", "roles.reward.max_workers=3", "seed=9")
    spec = [str(ROOT / "deploy" / "tiny-grpo.yaml"), *(word for text in sets for word in ("--set", text))]
    applied = office.during(lambda: troupe("apply", *spec, "--out", str(tmp_path)))
    assert applied.stdout.splitlines()[:2] == [
        "roles.rollout.workers: 2 -> 1",
        "seed: 7 -> 9: refused: it is read when a run starts: stop this one, which saves it, and go on with --resume",
    ]
    assert office.crew.spec.roles.rollout.workers == 1 and office.crew.spec.seed == 7
    assert (applied.code, applied.errors) == (2, ["1 of 2 difference(s) refused"])


@pytest.mark.parametrize(("word", "why"), [("rollout", "expected ROLE=WORKERS"), ("rollout=2", "no run goes on there")])
def test_the_command_refuses_in_one_line(tmp_path: Path, word: str, why: str) -> None:
    answer = troupe("scale", str(tmp_path), word)
    assert answer.code == 2 and len(answer.errors) == 1 and why in answer.errors[0]


def test_a_request_that_is_none_is_answered_too(tmp_path: Path) -> None:
    async def go() -> list[str]:
        server = ControlServer(tmp_path, _Office(tmp_path).crew)
        server.open()
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
    assert "cannot be read" in first and "cannot be read" in second and "at most 65536 bytes" in third


def test_a_run_that_is_not_there_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        ask(tmp_path / "nothing", {}, 10.0)
    with pytest.raises(UsageError, match="no run goes on there"):
        ask(tmp_path, {}, 10.0)
    folder = tmp_path / control.FOLDER
    folder.mkdir()
    host = socket.gethostname()
    (folder / "run.json").write_text(f'{{"host": "{host}", "pid": {2**22 + 1}}}')
    with pytest.raises(UsageError, match="is gone"):
        ask(tmp_path, {}, 10.0)
    (folder / "run.json").write_text(f'{{"host": "{host}", "pid": {os.getpid()}}}')
    with pytest.raises(TroupeError, match=r"has not answered within 0\.2 s"):
        ask(tmp_path, {}, 0.2)
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]
