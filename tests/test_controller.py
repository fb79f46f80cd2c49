"""The controller against fakes: one loop, whatever the staleness; stops, failures, resumption."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.algorithm_table import KlPenalty
from orchestrator.checkpoint import CheckpointStore
from orchestrator.console import Console
from orchestrator.controller import Cast, Controller, RunOutcome, TrainPlan
from orchestrator.errors import TrainingDiverged, TroupeError, WorkerDied
from orchestrator.ledger import Ledger
from orchestrator.metrics import MetricSinks
from orchestrator.prompts import PromptPick
from orchestrator.rollout_source import RolloutCast, RolloutPlan, RolloutSource
from orchestrator.scaling import Crew
from orchestrator.scheduler import RolloutScheduler, SchedulePlan
from orchestrator.scoring import RewardPool, Scorer, TokenScorer
from orchestrator.spec_sections import AlarmConfig
from orchestrator.texts import Pieces, TextOrder
from orchestrator.weight_sync import FileSync
from tests.fakes import PLAN, FakeEngine, FakeHandle, FakePolicy, FakeReward, FakeTable, fake_pool, gang
from workers.messages import GroupRequest, GroupSummary, WeightUpdate

ROLLOUTS = RolloutPlan(old_logprobs_at_batch=False, max_staleness=0, train_timeout_s=5.0, trajectories=None)


class _Prompts:
    """A prompt source that counts; the part of the real one that the controller sees."""

    def __init__(self, position: int = 0) -> None:
        self._rows = itertools.count(position)
        self._position = position

    def next(self) -> PromptPick:
        self._position = next(self._rows) + 1
        return PromptPick(f"e0-r{self._position - 1}", self._position - 1)

    def state(self) -> dict[str, int]:
        return {"position": self._position}


class Theatre:
    """A controller with everything around it."""

    def __init__(
        self, out: Path, plan: TrainPlan = PLAN, policies: int = 1, resume: bool = False, staleness: int = 0
    ) -> None:
        self.policies = [FakePolicy(rank) for rank in range(policies)]
        self.critic = FakePolicy()
        self.reward = FakeReward()
        self.engines: list[FakeEngine] = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]
        self.plan = plan
        self.rollouts = replace(ROLLOUTS, max_staleness=staleness)
        self.out = out
        self.resume = resume
        self.texts: tuple[int, ...] = ()
        self.texts_per_step = 6

    def build(self) -> Controller:
        """Made inside the running loop."""
        store = CheckpointStore(self.out / "checkpoints", 2)
        store.prepare()
        found = store.latest() if self.resume else None
        done = found.step if found else 0
        ledger = Ledger.restore(found.state["ledger"]) if found else Ledger()
        prompts = _Prompts(found.state["source"]["prompts"]["position"] if found else 0)
        pool = self.pool = fake_pool(self.engines)
        policy = gang(*self.policies)
        rewards = self.rewards = RewardPool([FakeHandle("reward-0", self.reward)], 1.0)
        schedule = SchedulePlan(5, 4, self.rollouts.max_staleness, self.plan.steps, 3, 0.5, 2, 17)
        scorer = Scorer(rewards, [TokenScorer(policy, "compute_logprobs", 1.0)])
        self.stop = asyncio.Event()
        console = Console(io.StringIO())
        texts = None
        if self.texts:
            texts = TextOrder(Pieces(FakeTable("texts", ()), self.texts, "digest"), self.texts_per_step, 3)
            if found:
                texts.restore(found.state["source"]["texts"])
        scheduler = RolloutScheduler(schedule, pool, scorer, ledger, prompts.next, None, done)
        makers = RolloutCast(
            policy,
            pool,
            scheduler,
            rewards,
            prompts,  # pyright: ignore[reportArgumentType]  (counts instead of reading data)
            ledger,
            texts,
        )
        cast = Cast(
            policy=policy,
            critic=gang(self.critic) if self.plan.critic_warmup else None,
            source=RolloutSource(self.rollouts, makers, console, self.stop),
            sync=FileSync(policy, pool, 1.0),
            evaluator=None,
            ledger=ledger,
            crew=self.crew(console),
        )
        sinks = MetricSinks.open(self.out, tensorboard=False, resume_at=done)
        self.controller = Controller(self.plan, cast, store, sinks, console, self.stop, done)
        return self.controller

    def crew(self, console: Console) -> Crew | None:
        """Whoever lets workers come and go; here nobody does."""
        return None

    def run(self) -> RunOutcome:
        """The whole run."""

        async def go() -> RunOutcome:
            return await self.build().run()

        return asyncio.run(go())

    def lines(self) -> list[dict[str, float]]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("staleness", [0, 2])
def test_one_loop_trains_every_sample_once_whatever_the_staleness(tmp_path: Path, staleness: int) -> None:
    """Synchronous and asynchronous runs differ by a number."""
    theatre = Theatre(tmp_path, staleness=staleness)
    outcome = theatre.run()
    assert (outcome.steps_done, outcome.stopped) == (4, False)
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    assert [line["step"] for line in theatre.lines()] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in theatre.lines()) <= staleness
    assert len(theatre.policies[0].updates) == 4
    assert {e.version for e in theatre.engines} == {4}


def test_rows_without_signal_get_no_work_and_count_in_the_totals(tmp_path: Path) -> None:
    """The fake's first row has no advantage."""
    theatre = Theatre(tmp_path)
    theatre.run()
    plan = theatre.policies[0].updates[0]
    assert sorted(r for mb in plan.micro_batches for r in mb) == list(range(1, 20))
    assert (plan.total_loss_tokens, plan.total_sequences) == (100, 20)


def test_epochs_and_minibatches_make_that_many_updates(tmp_path: Path) -> None:
    """Two epochs of two mini-batches on two ranks: four updates a step, each row twice."""
    theatre = Theatre(tmp_path, replace(PLAN, steps=1, epochs=2, minibatches=2, skip_silent=False), policies=2)
    theatre.run()
    assert [len(p.updates) for p in theatre.policies] == [4, 4]
    rows = [r for p in theatre.policies for plan in p.updates for mb in plan.micro_batches for r in mb]
    assert sorted(rows) == sorted(list(range(20)) * 2)


def test_critic_warms_up_while_the_policy_stands_still(tmp_path: Path) -> None:
    """Two of four steps teach the critic only."""
    theatre = Theatre(tmp_path, replace(PLAN, critic_warmup=2))
    theatre.run()
    assert len(theatre.policies[0].updates) == 2
    assert len(theatre.critic.updates) == 4


def test_kl_stop_leaves_out_the_rest_of_a_steps_updates(tmp_path: Path) -> None:
    """The second update of the first step finds the policy too far away; the second step has all four."""
    theatre = Theatre(tmp_path, replace(PLAN, steps=2, epochs=2, minibatches=2, kl_stop=0.1))
    theatre.policies[0].kl_old = (0.0, 0.2)
    theatre.run()
    assert len(theatre.policies[0].updates) == 2 + 4
    assert [line["updates"] for line in theatre.lines()] == [2, 4]


def test_the_kl_penalty_follows_the_divergence_of_a_steps_last_update(tmp_path: Path) -> None:
    """PPO, sec. 4: doubled above 1.5 times the target, halved below a 1.5th; once a batch, and saved with the run."""
    plan = replace(PLAN, steps=3, minibatches=2, kl_penalty=KlPenalty(coef=0.5, target=0.1), checkpoint_every=0)
    theatre = Theatre(tmp_path, plan)
    theatre.policies[0].kl_old = (0.0, 0.2, 0.0, 0.1, 0.0, 0.01)
    theatre.run()
    assert theatre.policies[0].kl_old_coefs == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert theatre.controller.memory.kl_old_coef == 0.5
    state = json.loads((tmp_path / "checkpoints" / "step-000003" / "state.json").read_text())
    assert state["memory"]["kl_old_coef"] == 0.5


def test_the_exact_divergence_is_measured_around_a_steps_updates(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, replace(PLAN, kl_states=12, minibatches=2), policies=2)
    theatre.run()
    assert [line["policy/kl_exact"] for line in theatre.lines()] == [0.25] * 4
    for policy in theatre.policies:
        assert len(policy.held) == 4  # once a step, however many updates
    first = [policy.held[0][0] for policy in theatre.policies]
    assert sum(len(part) for plan in first for part in plan.micro_batches) == 3  # of five loss tokens each


def test_texts_are_dealt_to_the_minibatches_and_go_on_after_a_resumption(tmp_path: Path) -> None:
    plan = replace(PLAN, minibatches=2)
    theatre = Theatre(tmp_path, plan, policies=2)
    theatre.texts = (9,) * 7
    theatre.run()
    rows: list[int] = []
    for one, other in zip(*(policy.updates for policy in theatre.policies), strict=True):
        assert one.texts is not None and other.texts is not None
        assert one.texts.total_loss_tokens == other.texts.total_loss_tokens == 8 * 3
        rows += [row for part in (*one.texts.micro_batches, *other.texts.micro_batches) for row in part]
    assert len(rows) == 4 * 6  # four steps of six pieces
    assert {rows.count(piece) for piece in range(7)} <= {3, 4}
    assert all(texts == FakeTable("texts", ()) for texts in theatre.policies[0].learnt_texts)
    again = Theatre(tmp_path, replace(plan, steps=6), policies=2, resume=True)
    again.texts = theatre.texts
    again.run()
    later = [
        row
        for policy in again.policies
        for update in policy.updates
        if update.texts is not None
        for part in update.texts.micro_batches
        for row in part
    ]
    assert sorted(rows + later) == sorted([*range(7)] * 5 + [row for row in range(7) if (rows + later).count(row) == 6])


def test_texts_are_learnt_where_no_row_has_anything_to_teach(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, replace(PLAN, minibatches=20))
    theatre.texts = (9,) * 40
    theatre.texts_per_step = 20
    theatre.run()
    assert len(theatre.policies[0].updates) == 4 * 20
    assert not any("policy/empty_updates" in line for line in theatre.lines())


def test_an_alarm_is_a_metric_and_can_stop_the_run(tmp_path: Path) -> None:
    """Every step's reward equals the mean so far, so nothing rises and nothing is wrong; then one does."""
    plan = replace(PLAN, alarm=AlarmConfig(response_tokens=1.0, action="stop"))
    calm = Theatre(tmp_path / "calm", plan)
    assert calm.run().steps_done == 4
    assert [line["alarm/reward_hacking"] for line in calm.lines()] == [0.0] * 4
    rising = Theatre(tmp_path / "rising", plan)
    rising.reward.silent = frozenset(f"e0-r{row}" for row in range(5))  # rewards of the first step: all 0
    outcome = rising.run()
    assert (outcome.steps_done, outcome.stopped) == (2, True)
    assert [line["alarm/reward_hacking"] for line in rising.lines()] == [0.0, 1.0]


def test_stop_saves_the_last_whole_step_and_resume_goes_on(tmp_path: Path) -> None:
    """A stop in the middle of generation: what was in flight runs again, nothing is lost or trained twice."""
    first = Theatre(tmp_path, replace(PLAN, steps=6, checkpoint_every=0), staleness=1)

    async def stopped() -> RunOutcome:
        controller = first.build()

        async def stop_after_two() -> None:
            while controller.version < 2:
                await asyncio.sleep(0.001)
            first.stop.set()

        stopper = asyncio.create_task(stop_after_two())
        outcome = await controller.run()
        await stopper
        return outcome

    outcome = asyncio.run(stopped())
    assert outcome.stopped
    assert 2 <= outcome.steps_done < 6
    second = Theatre(tmp_path, replace(PLAN, steps=6, checkpoint_every=0), staleness=1, resume=True)
    final = second.run()
    assert final.steps_done == 6
    assert final.ledger["trained"] == 120
    assert final.ledger["in_flight"] == 0
    assert [line["step"] for line in second.lines()] == [1, 2, 3, 4, 5, 6]
    prepared = [uid for t in (first, second) for keep in t.policies[0].prepared for uid, _ in keep]
    trained_once = {uid: prepared.count(uid) for uid in prepared}
    assert set(trained_once.values()) == {4}


def test_gradients_that_are_not_finite_stop_the_run_after_the_limit(tmp_path: Path) -> None:
    """Two skipped updates in a row; the error says where to look."""
    theatre = Theatre(tmp_path)
    theatre.policies[0].skip_updates = True
    with pytest.raises(TrainingDiverged, match="2 updates in a row had a gradient that was not finite"):
        theatre.run()


def test_dead_trainer_is_a_typed_error_naming_role_and_worker(tmp_path: Path) -> None:
    """The run ends; checkpoints of earlier steps stay valid."""
    theatre = Theatre(tmp_path)

    async def go() -> RunOutcome:
        controller = theatre.build()

        async def kill() -> None:
            while controller.version < 3:
                await asyncio.sleep(0.001)
            controller.cast.policy.workers[0].kill()

        killer = asyncio.create_task(kill())
        try:
            return await controller.run()
        finally:
            await killer

    with pytest.raises(WorkerDied, match=r"policy-0\.\w+: the process is gone"):
        asyncio.run(go())
    found = CheckpointStore(tmp_path / "checkpoints", 2).latest()
    assert found is not None
    assert found.step == 2


def test_step_has_a_bound(tmp_path: Path) -> None:
    """An update that never ends."""
    theatre = Theatre(tmp_path, replace(PLAN, step_timeout_s=0.2))
    theatre.policies[0].update_s = 4.0
    with pytest.raises(TroupeError, match=r"step 1 took longer than schedule\.step_timeout_s"):
        theatre.run()


def test_tokens_older_than_the_bound_are_never_trained(tmp_path: Path) -> None:
    """An engine that lies low with an old version is found before its samples reach an update."""
    theatre = Theatre(tmp_path)

    class Stale(FakeEngine):
        async def generate(self, request: GroupRequest, prompts: object) -> tuple[GroupSummary, FakeTable]:
            self.version = max(0, self.version - 1)
            return await super().generate(request, prompts)

    theatre.engines = [Stale("rollout-0", random.Random(0))]
    with pytest.raises(TroupeError, match=r"tokens of version 0; the policy is at 1 and schedule.max_staleness is 0"):
        theatre.run()
    assert len(theatre.policies[0].updates) == 1


def test_the_collectors_settings_are_back_after_a_run(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    class Looking(FakePolicy):
        async def publish_weights(self, version: int) -> WeightUpdate | None:
            seen.append(gc.get_threshold())
            return await super().publish_weights(version)

    before = gc.get_threshold()
    theatre = Theatre(tmp_path)
    theatre.policies[0] = Looking()
    theatre.run()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    assert set(seen) != {before} and len(set(seen)) == 1
