"""Trainers that are lost in any phase of a run are restarted, and end with the weights of a run without a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FaultyWorker, fakes_of, restart_fakes
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.errors import WorkerDied, WorkerError
from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.orchestrator.spec.derived.training import old_logprobs_at_batch, values_at_batch
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.updates import Metrics

METHODS = ("compute_logprobs", "prepare", "update", "publish_weights", "save", "export")


class RecoveringRun(RolloutRun):
    """A run whose policy (two ranks) or critic dies in given calls."""

    def __init__(self, out: Path, *deaths: tuple[str, str, int], **options: Any) -> None:
        """`deaths`: (worker, method, which of its calls, counted over all processes of that name)."""
        super().__init__(out, policies=2, **options)
        roles = {"critic": {"warmup_steps": 1}}
        self.change(schedule={"minibatches": 2}, roles=roles, failures={"trainer_restarts": 2})
        self.deaths = dict.fromkeys(deaths)
        self.calls: dict[tuple[str, str], int] = {}

    def watch(self, group: TrainerGroup[Any]) -> None:
        """Let the ranks of a group die in their calls."""
        for worker in fakes_of(group):
            _dies_in(worker, self._dies)

    def _dies(self, worker: str, method: str) -> bool:
        number = self.calls[worker, method] = self.calls.get((worker, method), 0) + 1
        return (worker, method, number) in self.deaths

    @property
    def learned(self) -> list[list[str]]:
        """What every rank has learned."""
        return [rank.target.learned for group in self.groups for rank in fakes_of(group)]

    @property
    def groups(self) -> list[TrainerGroup[Any]]:
        """Policy and critic."""
        return [self.policy] if self.critics is None else [self.policy, self.critics]

    def build(self):
        """As the base class; the groups' processes die as told, also those that replace others."""
        controller = super().build()
        recovery = controller.components.recovery

        async def restart(groups: Any) -> None:
            await restart_fakes(groups)
            for group in groups:
                self.watch(group)

        recovery._restart_groups = restart
        for group in self.groups:
            self.watch(group)
        return controller


def _dies_in(worker: FaultyWorker[Any], dies: Callable[[str, str], bool]) -> None:
    """Have the worker die in the calls that `dies` names: half of the work is done then."""
    answer = worker._answer

    async def watched(method: str, *args: Any, **kwargs: Any) -> Any:
        if dies(worker.name, method):
            await answer(method, *args, **kwargs)
            worker.kill()
            await asyncio.Event().wait()
        return await answer(method, *args, **kwargs)

    worker._answer = watched


@pytest.fixture
def whole(tmp_path: Path) -> RecoveringRun:
    """A run without a loss."""
    run = RecoveringRun(tmp_path / "whole")
    run.run()
    return run


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_dies_in_any_phase_is_brought_back(
    tmp_path: Path, whole: RecoveringRun, method: str, number: int, staleness: int
) -> None:
    """Rank 0 dies in a call; the weights are those of a run without a loss, and every sample is trained once."""
    run = RecoveringRun(tmp_path / "run", ("policy-0", method, number), schedule={"max_staleness": staleness})
    outcome = run.run()
    assert outcome.steps_done == 4
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    assert run.controller.components.recovery.budget.total == 1
    assert run.lines()[-1]["trainer_restarts"] in (0, 1)  # 0: it died in the last save
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4]
    if not staleness:
        assert run.learned == whole.learned
    assert {len(learned) for learned in run.learned} == {6, 8}
    assert {engine.version for engine in run.engines} == {4}


@pytest.mark.parametrize("rank", ["critic-0", "policy-0"])
def test_a_trainer_that_dies_while_a_batch_is_scored_scores_it_when_it_is_brought_back(
    tmp_path: Path, rank: str
) -> None:
    """Log-probs and values of a batch that may be stale are computed concurrently, and both are repeated."""
    method = {"critic-0": "compute_values", "policy-0": "compute_logprobs"}[rank]
    sections: dict[str, Any] = {"schedule": {"max_staleness": 1}, "algorithm": {"name": "ppo_penalty", "kl_states": 12}}
    run = RecoveringRun(tmp_path, (rank, method, 3), **sections)
    assert old_logprobs_at_batch(run.spec) and values_at_batch(run.spec)
    outcome = run.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    assert run.controller.components.recovery.budget.total == 1
    before, after = run.policies[0], fakes_of(run.policy)[0].target
    versions = [versions for batch in [*before.values, *after.values] for versions in batch.values()]
    assert versions == [[2 * step] for step in range(4) for _ in range(5)]


def test_calls_under_way_are_repeated_after_a_restart_and_never_beside_it(tmp_path: Path) -> None:
    """The critic is lost while it scores groups of the next step, in the middle of the policy's updates of this one.

    The rest of these updates would reach trainers that are restarted and not yet brought to where they were.
    """
    happened: list[str] = []

    async def turns(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async def run() -> None:
        controller = RecoveringRun(tmp_path / "run").build()
        recovery, second = controller.components.recovery, asyncio.Event()

        async def restart(_: Any) -> None:
            happened.append("restart")
            await turns(200)
            happened.append("restarted")

        async def updates() -> str:
            for number in range(3):
                happened.append(f"update {number}")
                if number == 1:
                    second.set()
                await turns(20)
            return "updated"

        async def scores() -> str:
            await second.wait()
            if "restart" not in happened:
                raise WorkerDied("critic-0", "compute_values", "the process is gone")
            return "scored"

        recovery._restart_groups = restart
        assert await asyncio.gather(recovery.calls.retry(updates), recovery.calls.retry(scores)) == [
            "updated",
            "scored",
        ]
        outer = asyncio.ensure_future(recovery.calls.retry(updates))
        await turns(10)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer

    asyncio.run(run())
    whole = [f"update {number}" for number in range(3)]
    assert happened == [*whole[:2], "restart", "restarted", *whole, "update 0"]


def test_a_critic_that_dies_takes_the_policy_with_it(tmp_path: Path, whole: RecoveringRun) -> None:
    """Its second update of step 2 fails: the policy has made that update, and both repeat it once."""
    run = RecoveringRun(tmp_path / "run", ("critic-0", "update", 4), ("policy-1", "load", 1))
    run.change(checkpoint={"every_steps": 1})
    run.run()
    assert run.learned == whole.learned
    assert run.controller.components.recovery.budget.total == 2, "a rank died while the checkpoint was loaded"


def test_a_rank_that_reports_the_death_of_another_is_no_error(tmp_path: Path, whole: RecoveringRun) -> None:
    """In a collective operation the other ranks fail first, with an exception of their own."""
    run = RecoveringRun(tmp_path / "run")
    controller_of = run.build

    def build():
        controller = controller_of()
        first, second = fakes_of(run.policy)
        failing = second._answer

        async def answer(method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "update" and len(second.target.updates) == 1:
                first.kill()
                raise WorkerError(second.name, method, "connection closed by peer")
            return await failing(method, *args, **kwargs)

        second._answer = answer
        return controller

    run.build = build
    run.run()
    assert run.learned == whole.learned


def test_steps_after_the_one_that_is_being_saved_are_repeated_and_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are trained while the checkpoint of the first is written: the second is not in it."""
    repeated: list[int] = []
    published: list[int] = []

    async def run() -> None:
        recovery = RecoveringRun(tmp_path).build().components.recovery
        done = PenaltyState()

        async def ran(*_: object) -> tuple[list[Metrics], PenaltyState]:
            return [], done

        async def repeat(step: int, *_: object) -> None:
            repeated.append(step)

        async def push(version: int) -> None:
            published.append(version)

        async def load(_: WorkerError) -> None:
            assert recovery._saved == 1

        monkeypatch.setattr(recovery._updates, "run", ran)
        monkeypatch.setattr(recovery._updates, "repeat", repeat)
        monkeypatch.setattr(recovery, "_push", push)
        monkeypatch.setattr(recovery, "_load", load)
        batch: Any = None
        await recovery.train(0, batch, done)
        recovery.begin_save()
        await recovery.train(1, batch, done)
        await recovery.commit(1, lambda: None)
        await recovery._restore(WorkerDied("policy-0", "update", "the process is gone"))

    asyncio.run(run())
    assert repeated == [1]
    assert published == [2]


def test_the_budget_ends_the_run_and_says_by_what(tmp_path: Path) -> None:
    run = RecoveringRun(tmp_path, *(("policy-0", "update", number) for number in (1, 2, 3)))
    words = r"policy-0.update: the process is gone \(2 of 2 restarts used: failures.trainer_restarts\)"
    with pytest.raises(WorkerError, match=words):
        run.run()


def test_more_steps_than_are_kept_cannot_be_repeated(tmp_path: Path) -> None:
    run = RecoveringRun(tmp_path, ("policy-0", "update", 6))  # in step 4, behind three steps
    run.change(checkpoint={"every_steps": 0}, failures={"replay_steps": 2})
    with pytest.raises(WorkerError, match=r"more than failures.replay_steps \(2\) steps since the last checkpoint"):
        run.run()
    run = RecoveringRun(tmp_path / "kept", ("policy-0", "update", 6))
    run.change(checkpoint={"every_steps": 0}, failures={"replay_steps": 3})
    assert run.run().steps_done == 4


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    run = RecoveringRun(tmp_path, ("policy-0", "update", 6))  # in step 4; the checkpoint is that of step 2
    build = run.build

    def damaging():
        controller = build()
        commit = controller.components.recovery.commit

        async def damage(step: int, write: Callable[[], Any]) -> Any:
            saved = await commit(step, write)
            (tmp_path / "checkpoints" / "step-000002" / "policy" / "rank-0").write_text("[]")
            return saved

        controller.components.recovery.commit = damage
        return controller

    run.build = damaging
    with pytest.raises(WorkerError, match="the checkpoint of step 2 cannot be used"):
        run.run()


def test_a_run_that_resumed_recovers_from_the_checkpoint_it_resumed_from(tmp_path: Path, whole: RecoveringRun) -> None:
    first = RecoveringRun(tmp_path / "run")
    first.run_until(2)
    run = RecoveringRun(tmp_path / "run", ("policy-1", "update", 1), resume=True)
    run.run()
    assert run.learned == whole.learned


def test_other_errors_of_a_trainer_end_the_run(tmp_path: Path) -> None:
    run = RecoveringRun(tmp_path)
    run.policies[0].update = _raises  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="a bug"):
        run.run()


async def _raises(*_: object) -> None:
    raise ValueError("a bug")


def test_steps_without_a_loss_give_restarts_back() -> None:
    budget = RestartBudget("trainer", 2, steps_per_restart=3)
    assert budget.take() and budget.take() and not budget.take()
    for _ in range(3):
        budget.after_step()
    assert (budget.used, budget.total) == (1, 2)
    assert budget.take() and not budget.take()
    assert str(budget) == "2 of 2 restarts used: failures.trainer_restarts"


def test_a_budget_of_one_survives_losses_that_are_far_apart(tmp_path: Path, whole: RecoveringRun) -> None:
    """A restart in step 1 and one in step 4 with a budget of one, which two steps give back."""
    run = RecoveringRun(tmp_path, ("policy-0", "prepare", 1), ("policy-0", "prepare", 5))
    run.change(failures={"trainer_restarts": 1, "steps_per_restart": 2})
    run.run()
    assert run.learned == whole.learned
    assert run.controller.components.recovery.budget.total == 2
