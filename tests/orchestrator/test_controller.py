"""The controller against fakes: updates, staleness, stops, failures and resumption."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fakes import (
    FakeCritic,
    FakePolicy,
    FakeRun,
    FakeTable,
    FaultyEngine,
    FaultyReward,
    FaultyWorker,
    critic_group,
    fake_pool,
    fake_spec,
    policy_group,
)
from tests.orchestrator.data.test_prompts import pool_of
from troupe.orchestrator.controller import Controller, RunComponents, RunOutcome
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.mixture import curriculum_of, group_settings, prompt_order
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptPick, PromptSource
from troupe.orchestrator.data.texts import Pieces, TextOrder
from troupe.orchestrator.errors import (
    BatchFailed,
    ExportFailed,
    TrainingDiverged,
    TroupeError,
    WorkerError,
    WorkerRaised,
)
from troupe.orchestrator.insight.verdicts.data import dropped_samples, failing_rewards
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler
from troupe.orchestrator.rollouts.scoring import Scorer, TokenScorer
from troupe.orchestrator.rollouts.source import RolloutComponents, RolloutSource
from troupe.orchestrator.rollouts.weight_sync import FileSync
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.parts import run_parts
from troupe.orchestrator.spec.derived.training import values_at_batch
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import CurriculumConfig
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.telemetry.sinks import LoggedRun, MetricSinks
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.orchestrator.training.batch import EvaluationBesideTraining, HeldOutEvaluation
from troupe.orchestrator.training.checkpoint import CheckpointError, CheckpointStore
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import RolloutUpdates
from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.algorithms.estimators import estimate
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.messages import (
    GroupRequest,
    GroupSummary,
    PrepareRequest,
    TrainRow,
    Unscored,
    WeightUpdate,
)


class _Prompts:
    """A prompt source that counts, with the methods that the controller uses."""

    def __init__(self) -> None:
        self._position = 0

    def next(self) -> PromptPick:
        self._position += 1
        return PromptPick(f"e0-r{self._position - 1}", self._position - 1, draw=self._position)

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class RolloutRun(FakeRun[RolloutSpec]):
    """A controller with the fakes that it needs."""

    def __init__(self, out: Path, policies: int = 1, resume: bool = False, **sections: Mapping[str, Any]) -> None:
        """`sections`: values of the spec's fields."""
        super().__init__(out, fake_spec(**sections), resume)
        self.policies: Sequence[FakePolicy] = [FakePolicy(rank) for rank in range(policies)]
        self.critic = FakeCritic()
        self.reward = FaultyReward()
        self.engines: list[FaultyEngine] = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(2)]
        self.texts: tuple[int, ...] = ()
        self.texts_per_step = 6
        self.evaluator: HeldOutEvaluation | None = None
        self.curriculum: CurriculumConfig | None = None
        """With one, prompts come from a pool of 12 instead of an endless one."""
        self.sync_timeout_s = 60.0
        self.copies: RemoteCheckpoints | None = None
        self.mixed_rows: tuple[int, ...] = ()
        """Rows of each source of a mixture."""

    def build(self) -> Controller:
        """Build the controller. Call it inside the running event loop."""
        store, found, ledger = self.open_store()
        done = found.step if found else 0
        settings = None
        if self.spec.data.mixture:
            data = pool_of(sum(self.mixed_rows))
            names = (source.name for source in self.spec.data.mixture)
            data = replace(data, parts=dict(zip(names, map(pool_of, self.mixed_rows), strict=True)))
            settings = group_settings(self.spec, data)
            ledger = Ledger.restore(ledger.state(), lambda row: settings[row].source)
            curriculum = curriculum_of(self.spec, settings)
            prompts = prompt_order(self.spec, data, curriculum)
        else:
            curriculum = None if self.curriculum is None else Curriculum(self.curriculum, 17, RowTable((0,), (1.0,)))
            prompts = _Prompts() if curriculum is None else PromptSource(pool_of(12), 17, curriculum)
        weights = PoolWeights(lambda engine: sync.bring_up(engine), lambda: self.trainer_calls.retry(sync.renew))
        pool = self.pool = self.engine_pool(weights)
        policy = self.policy = policy_group(*self.policies, calls=self.trainer_calls)
        rewards = self.rewards = RewardPool([FaultyWorker("reward-0", self.reward)], 60.0)
        scorers = [TokenScorer(policy, policy.compute_logprobs, 60.0)]
        critics = self.critics = (
            critic_group(self.critic, calls=self.trainer_calls) if self.spec.roles.critic is not None else None
        )
        if critics is not None and not values_at_batch(self.spec):
            scorers.append(TokenScorer(critics, critics.compute_values, 60.0))
        scorer = Scorer(rewards, scorers)
        console = Console(io.StringIO())
        texts = None
        if self.texts:
            texts = TextOrder(Pieces(FakeTable("texts", ()), self.texts, "digest"), self.texts_per_step, 3)
        observe = None if curriculum is None else curriculum.observe
        scheduler = RolloutScheduler(self.spec, pool, scorer, ledger, prompts.next, None, done, observe, settings)
        self.scheduler = scheduler
        makers = RolloutComponents(
            Workers({"policy": policy} if critics is None else {"policy": policy, "critic": critics}),
            pool,
            scheduler,
            rewards,
            prompts,
            ledger,
            texts,
            curriculum,
        )
        updates = RolloutUpdates(self.spec, policy, critics, console)
        sync = FileSync(policy, pool, self.sync_timeout_s)
        recovery = self.recovery(updates, sync.push, store, console, done)
        self.trainer_calls.recover_with(recovery)
        components = RunComponents(
            source=RolloutSource(self.spec, self.out, makers, console, self.stop),
            updates=updates,
            recovery=recovery,
            sync=sync,
            beside=self.beside(),
            evaluator=self.evaluator,
            ledger=ledger,
            step_recorder=StepRecorder(self.spec, self.out, updates.trainers),
            scaler=self.scaler(console),
            recorder=self.recorder(done),
        )
        sinks = MetricSinks.open(LoggedRun(self.out, resume_at=done))
        checkpoints = RunCheckpoints(store, found, self.copies)
        parts = run_parts(self.spec, components, checkpoints, sinks, console)
        self.controller = Controller(self.spec, components, parts, sinks, console, self.stop, done)
        return self.controller

    def beside(self) -> EvaluationBesideTraining | None:
        """What evaluates while training continues. None: training waits."""
        return None

    def engine_pool(self, weights: PoolWeights) -> EnginePool:
        """The pool of the engines."""
        return fake_pool(self.engines, weights=weights)

    def recorder(self, done: int) -> RunRecorder:
        """Records into the run folder, as a run does."""
        events = EventLog()
        events.open(self.out, done)
        return RunRecorder(CallLog(), events, self.out, done)

    def scaler(self, console: Console) -> WorkerScaler | None:
        """The scaler of the run. None: the number of workers is fixed."""
        return None


@pytest.mark.parametrize("truncated", [frozenset({1, 3}), frozenset(range(4))])
def test_truncated_samples_are_masked_counted_and_accounted_for(tmp_path: Path, truncated: frozenset[int]) -> None:
    """With every sample truncated, each update is empty and the run ends as any other."""
    run = RolloutRun(tmp_path)
    run.change(algorithm={"mask_truncated": True})
    for engine in run.engines:
        engine.truncated = truncated
    outcome = run.run()
    masked = 4 * 5 * len(truncated)
    assert outcome.ledger == {"dispatched": 80, "trained": 80 - masked, "dropped": masked, "in_flight": 0, "retries": 0}
    assert outcome.drop_reasons == {"truncated: it carries no loss": masked}
    (policy,) = run.policies
    for keep, without_loss in zip(policy.prepared, policy.masked, strict=True):
        assert len(keep) == 20
        assert without_loss == tuple(key for key in keep if key[1] in truncated)
    assert [line["masked_samples"] for line in run.lines()] == [5 * len(truncated)] * 4
    if len(truncated) == 4:
        assert policy.updates == []
        assert all(line["policy/empty_updates"] == 1.0 for line in run.lines())
    else:
        assert [(plan.total_loss_tokens, plan.total_sequences) for plan in policy.updates] == [(50, 10)] * 4


def test_candidates_compete_with_the_samples_and_are_not_counted_as_samples(tmp_path: Path) -> None:
    """Three answers to each prompt: rewards 0, 1, 0. One fails in one group, and that group still has its samples."""
    run = RolloutRun(tmp_path, schedule={"steps": 2}, checkpoint={"every_steps": 0})
    run.reward.fail = {("e0-r2", 5): "timeout after 5 s"}
    for engine in run.engines:
        engine.candidates = 3
    outcome = run.run()
    assert outcome.ledger == {"dispatched": 40, "trained": 40, "dropped": 0, "in_flight": 0, "retries": 0}
    (policy,) = run.policies
    first = [(f"e0-r{row}", i) for row in range(5) for i in range(4)]
    others = [(f"e0-r{row}", i) for row in range(5) for i in (4, 5, 6) if (row, i) != (2, 5)]
    assert list(policy.prepared[0]) == first + others
    assert list(policy.candidates[0]) == others
    line = run.lines()[0]
    assert line["candidates/reward"] == 4 / 14 and line["candidates/failed"] == 1
    assert line["candidates/chosen"] == 0  # a sample of the policy is as good
    assert line["reward/mean"] == 0.5 and line["response_tokens/max"] == 8 and line["failed_samples"] == 0
    assert run.lines()[1]["candidates/reward"] == 1 / 3


def test_a_step_counts_the_samples_of_groups_that_failed_as_a_whole(tmp_path: Path) -> None:
    """Two prompts of the first step have no reward for any sample, one for one: they fail whatever is sampled."""
    run = RolloutRun(tmp_path, schedule={"steps": 2}, checkpoint={"every_steps": 0})
    whole = {(f"e0-r{row}", i): "error: TypeError" for row in (1, 3) for i in range(4)}
    run.reward.fail = whole | {("e0-r2", 0): "timeout after 5 s"}
    outcome = run.run()
    assert outcome.drop_reasons == {"reward: error: TypeError": 8, "reward: timeout after 5 s": 1}
    first, second = run.lines()
    assert (first["failed_samples"], first["dispatched_samples"]) == (9.0, 28.0)
    assert (second["failed_samples"], second["dispatched_samples"]) == (0.0, 20.0)
    history = History.of(run.lines(), run.spec.model_dump(mode="json"))
    assert history.share_of_samples(history["failed_samples"]).values == (9 / 28, 0.0)
    assert [found.name for found in failing_rewards(History.of(run.lines()[:1]))] == ["failing-rewards"]
    assert not list(dropped_samples(history))


def test_truncated_samples_are_trained_unless_the_spec_masks_them(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path)
    for engine in run.engines:
        engine.truncated = frozenset({0})
    assert run.run().ledger["trained"] == 80
    assert "masked_samples" not in run.lines()[0]


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_sample_is_trained_once_at_any_max_staleness(tmp_path: Path, staleness: int) -> None:
    """Synchronous and asynchronous runs are the same loop with another `max_staleness`."""
    run = RolloutRun(tmp_path, schedule={"max_staleness": staleness})
    outcome = run.run()
    assert (outcome.steps_done, outcome.stopped) == (4, False) and outcome.how == "finished"
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in run.lines()) <= staleness
    assert len(run.policies[0].updates) == 4
    assert {e.version for e in run.engines} == {4}


@pytest.mark.parametrize("staleness", [0, 2])
def test_values_are_those_of_the_critic_before_the_steps_updates(tmp_path: Path, staleness: int) -> None:
    """Also where groups were generated while an earlier critic was in use, or between its two updates of a step."""
    run = RolloutRun(tmp_path, schedule={"max_staleness": staleness, "minibatches": 2}, roles={"critic": {}})
    run.run()
    (policy,) = run.policies
    assert [len(batch) for batch in policy.values] == [5] * 4
    for step, batch in enumerate(policy.values):
        assert set(map(tuple, batch.values())) == {(2 * step,)}, step


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_sample_without_a_finite_value_is_dropped_also_if_the_whole_batch_is_scored(
    tmp_path: Path, staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Asynchronous training scores when the batch is complete, synchronous training group by group."""
    run = RolloutRun(tmp_path, schedule={"max_staleness": staleness}, roles={"critic": {}})
    run.critic.not_finite = {("e0-r1", 2): "inf"}
    outcome = run.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 79, "dropped": 1, "in_flight": 0, "retries": 0}
    assert outcome.drop_reasons == {"critic: inf": 1} and "critic: inf: a sample has no reward: e0-r1" in caplog.text
    (policy,) = run.policies
    assert all(("e0-r1", 2) not in keep for keep in policy.prepared)
    assert sum(line["failed_samples"] for line in run.lines()) == 1


@pytest.mark.parametrize(("failed", "why"), [(range(4), "too few samples have finite"), (range(2), "samples of this")])
def test_a_batch_without_finite_values_ends_the_run(tmp_path: Path, failed: Iterable[int], why: str) -> None:
    failures = {"max_failed_fraction": 0.25}
    run = RolloutRun(tmp_path, schedule={"max_staleness": 2}, roles={"critic": {}}, failures=failures)
    run.critic.not_finite = {(f"e0-r{row}", i): "inf" for row in range(20) for i in failed}
    with pytest.raises(BatchFailed, match=rf"{why}.*critic: inf"):
        run.run()


def test_zero_advantage_rows_are_skipped_and_count_in_the_totals(tmp_path: Path) -> None:
    """The first row of the fake batch has no advantage."""
    run = RolloutRun(tmp_path)
    run.run()
    plan = run.policies[0].updates[0]
    assert sorted(r for mb in plan.micro_batches for r in mb) == list(range(1, 20))
    assert (plan.total_loss_tokens, plan.total_sequences) == (100, 20)


def test_epochs_and_minibatches_make_that_many_updates(tmp_path: Path) -> None:
    """Two epochs of two mini-batches on two ranks are four updates per step, with each row twice."""
    run = RolloutRun(
        tmp_path,
        policies=2,
        schedule={"steps": 1, "epochs": 2, "minibatches": 2},
        algorithm={"entropy_coef": 0.01},
    )
    run.run()
    assert [len(p.updates) for p in run.policies] == [4, 4]
    rows = [r for p in run.policies for plan in p.updates for mb in plan.micro_batches for r in mb]
    assert sorted(rows) == sorted(list(range(20)) * 2)


def test_every_epoch_of_every_step_divides_its_samples_anew(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path, schedule={"steps": 3, "epochs": 2, "minibatches": 2})
    run.run()
    updates = [tuple(sorted(row for part in plan.micro_batches for row in part)) for plan in run.policies[0].updates]
    assert len({frozenset(updates[at : at + 2]) for at in range(0, 12, 2)}) == 6


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_minibatches_are_divided_between_samples(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample has two rows: an update has both, and counts one sequence."""

    def forked(_: FakePolicy, request: PrepareRequest) -> tuple[TrainRow, ...]:
        return tuple(TrainRow(15, 5, True, sample=sample) for sample in range(len(request.keep)) for _ in range(2))

    monkeypatch.setattr(FakePolicy, "_rows", forked)
    run = RolloutRun(tmp_path, schedule={"steps": 1, "minibatches": 2}, algorithm={"importance": {"level": level}})
    run.run()
    updates = run.policies[0].updates
    assert len(updates) == 2
    for plan in updates:
        rows = {row for cut in plan.micro_batches for row in cut}
        assert {row // 2 * 2 for row in rows} | {row // 2 * 2 + 1 for row in rows} == rows
        assert plan.total_sequences == len(rows) / 2 == 10
        if level == "sequence":
            assert all(len({row // 2 for row in cut}) == len(cut) / 2 for cut in plan.micro_batches)


def test_the_policy_is_not_updated_during_critic_warmup(tmp_path: Path) -> None:
    """The first two of four steps update the critic only."""
    run = RolloutRun(tmp_path, roles={"critic": {"warmup_steps": 2}})
    run.run()
    assert len(run.policies[0].updates) == 2
    assert len(run.critic.updates) == 4


def test_the_kl_coefficient_in_the_reward_stays_during_critic_warmup(tmp_path: Path) -> None:
    """A frozen policy does not diverge, whatever the coefficient: it would fall at every step.

    Two of four steps update the critic only; statistics of the rewards continue.
    """
    states: list[AdvantageState] = []

    async def prepare(policy: FakePolicy, request: PrepareRequest, *tables: FakeTable) -> tuple[Any, FakeTable]:
        """As the real policy: the divergence is 0 nats, far below the target."""
        states.append(request.state)
        summary, table = await FakePolicy.prepare(policy, request, *tables)
        logprobs = torch.zeros(len(request.keep))
        batch = SampledTokens(
            rewards=logprobs.double(),
            groups=torch.zeros(len(logprobs), dtype=torch.int64),
            lengths=torch.ones(len(logprobs), dtype=torch.int64),
            rollout_logprobs=logprobs,
            old_logprobs=logprobs,
            ref_logprobs=logprobs,
            values=None,
        )
        return replace(summary, state=estimate(config, batch, request.state).state), table

    config = AdvantageConfig(estimator="returns", kl_coef=0.05, kl_target=6.0, kl_horizon=100)
    run = RolloutRun(tmp_path, roles={"critic": {"warmup_steps": 2}}, checkpoint={"every_steps": 0})
    with mock.patch.object(run.policies[0], "prepare", partial(prepare, run.policies[0])):
        run.run()
    fallen = 0.05 * (1 - 0.2 * 20 / 100)
    assert [state.kl_coef for state in states] == [None, None, None, pytest.approx(fallen)]
    assert [state.rewards.count for state in states] == [0, 20, 40, 60]


def test_kl_stop_skips_the_remaining_updates_of_a_step(tmp_path: Path) -> None:
    """The second update of step 1 exceeds the limit; step 2 has all four updates."""
    run = RolloutRun(tmp_path, schedule={"steps": 2, "epochs": 2, "minibatches": 2}, algorithm={"kl_stop": 0.1})
    run.policies[0].kl_old = (0.0, 0.2)
    run.run()
    assert len(run.policies[0].updates) == 2 + 4
    assert [line["updates"] for line in run.lines()] == [2, 4]


def test_the_adaptive_kl_penalty_follows_the_divergence_after_the_updates_of_a_step(tmp_path: Path) -> None:
    """The coefficient doubles above 1.5 times the target and halves below target / 1.5.

    It changes once per step and is saved in the checkpoint. Source: PPO, Schulman et al. 2017, section 4, where d is
    the divergence of the policy after the update; an update's own `kl_old` is that of before its step.
    """
    penalty = {"coef": 0.5, "target": 0.1}
    run = RolloutRun(tmp_path, schedule={"steps": 3, "minibatches": 2}, checkpoint={"every_steps": 0})
    run.change(algorithm={"name": "ppo_penalty", "kl_states": 12, "kl_old": penalty})
    run.policies[0].kl_old = (0.0, 0.01, 0.0, 0.9, 0.0, 0.9)
    run.policies[0].divergences = [0.2, 0.1, 0.01]
    run.run()
    assert run.policies[0].kl_old_coefs == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert run.controller.parts.penalty.state.kl_old_coef == 0.5
    state = json.loads((tmp_path / "checkpoints" / "step-000003" / "state.json").read_text())
    assert state["parts"]["penalty"]["kl_old_coef"] == 0.5


def test_the_adaptive_kl_penalty_starts_again_where_a_resumed_run_has_another_coefficient(tmp_path: Path) -> None:
    """With the coefficient that it had, a run resumes from the one that it had adapted."""

    def run_to(steps: int, coef: float, resume: bool = True) -> list[float]:
        run = RolloutRun(tmp_path, resume=resume, schedule={"steps": steps}, checkpoint={"every_steps": 1})
        penalty = {"coef": coef, "target": 0.1}
        run.change(algorithm={"name": "ppo_penalty", "kl_states": 12, "kl_old": penalty})
        run.policies[0].divergences = [0.2, 0.2]
        run.run()
        return run.policies[0].kl_old_coefs

    assert run_to(2, 0.5, resume=False) == [0.5, 1.0]
    assert run_to(3, 0.5) == [2.0]
    assert run_to(5, 0.1) == [0.1, 0.2]
    assert run_to(6, 0.1) == [0.4]


def test_the_exact_kl_divergence_is_measured_over_all_updates_of_a_step(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path, policies=2, schedule={"minibatches": 2}, algorithm={"kl_states": 12})
    run.run()
    assert [line["policy/kl_exact"] for line in run.lines()] == [0.25] * 4
    for policy in run.policies:
        assert len(policy.held) == 4  # once per step, for any number of updates
    first = [policy.held[0][0] for policy in run.policies]
    assert sum(len(part) for plan in first for part in plan.micro_batches) == 3  # three rows of five loss tokens each


@pytest.mark.parametrize(
    ("max_kl", "lengths"),
    [
        (0.3, [1.0]),  # the whole step is within the limit
        (0.25, [1.0]),
        (0.02, [1.0, 0.5, 0.25]),
        (1e-4, [1.0, 0.5, 0.25, 0.125, 0.0]),  # no attempt is within: the old policy is restored
    ],
)
def test_a_step_beyond_the_trust_region_is_shortened(tmp_path: Path, max_kl: float, lengths: list[float]) -> None:
    """The fake's divergence is a quarter nat for a whole step and falls with the square of the step's length."""
    run = RolloutRun(tmp_path, policies=2, schedule={"minibatches": 2})
    region = {"max_kl": max_kl, "backtrack": 0.5, "attempts": 3}
    run.change(algorithm={"name": "ppo_kl_limit", "kl_states": 12, "trust_region": region})
    run.run()
    for policy in run.policies:
        assert policy.step_lengths == lengths  # of the last step
        assert policy.releases == 4
    for line in run.lines():
        assert line["policy/step_length"] == lengths[-1]
        assert line["policy/kl_exact"] == pytest.approx(0.25 * lengths[-1] ** 2)
        assert line["policy/kl_proposed"] == 0.25


def test_a_divergence_that_is_not_a_number_is_beyond_the_trust_region(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path, schedule={"steps": 1})
    run.change(algorithm={"name": "ppo_kl_limit", "kl_states": 12, "trust_region": {"max_kl": 0.3, "backtrack": 0.5}})
    run.policies[0].divergences = [math.nan]
    run.run()
    assert run.policies[0].step_lengths == [1.0, 0.5]


def test_texts_are_split_over_the_minibatches_and_continue_after_a_resume(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path, policies=2, schedule={"minibatches": 2})
    run.texts = (9,) * 7
    run.run()
    rows: list[int] = []
    for one, other in zip(*(policy.updates for policy in run.policies), strict=True):
        assert one.texts is not None and other.texts is not None
        assert one.texts.total_loss_tokens == other.texts.total_loss_tokens == 8 * 3
        rows += [row for part in (*one.texts.micro_batches, *other.texts.micro_batches) for row in part]
    assert len(rows) == 4 * 6  # four steps of six pieces
    assert {rows.count(piece) for piece in range(7)} <= {3, 4}
    assert all(texts == FakeTable("texts", ()) for texts in run.policies[0].learned_texts)
    resumed = RolloutRun(tmp_path, policies=2, resume=True, schedule={"steps": 6, "minibatches": 2})
    resumed.texts = run.texts
    resumed.run()
    later = [
        row
        for policy in resumed.policies
        for update in policy.updates
        if update.texts is not None
        for part in update.texts.micro_batches
        for row in part
    ]
    assert sorted(rows + later) == sorted([*range(7)] * 5 + [row for row in range(7) if (rows + later).count(row) == 6])


def test_texts_are_trained_in_minibatches_of_zero_advantage_rows(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path, schedule={"minibatches": 20})
    run.texts = (9,) * 40
    run.texts_per_step = 20
    run.run()
    assert len(run.policies[0].updates) == 4 * 20
    assert not any("policy/empty_updates" in line for line in run.lines())


def test_a_stopped_run_saves_its_last_whole_step_and_resumes(tmp_path: Path) -> None:
    """After a stop during generation, groups in flight are rescheduled; none is lost and none is trained twice."""
    sections: dict[str, Any] = {"schedule": {"steps": 6, "max_staleness": 1}, "checkpoint": {"every_steps": 0}}
    first = RolloutRun(tmp_path, **sections)
    outcome = first.run_until(2)
    assert outcome.stopped
    assert 2 <= outcome.steps_done < 6
    second = RolloutRun(tmp_path, resume=True, **sections)
    final = second.run()
    assert final.steps_done == 6
    assert final.ledger["trained"] == 120
    assert final.ledger["in_flight"] == 0
    assert [line["step"] for line in second.lines()] == [1, 2, 3, 4, 5, 6]
    prepared = [uid for t in (first, second) for keep in t.policies[0].prepared for uid, _ in keep]
    trained_once = {uid: prepared.count(uid) for uid in prepared}
    assert set(trained_once.values()) == {4}


def test_a_run_records_its_phases_and_what_happens(tmp_path: Path) -> None:
    """Also over a resume, which drops what was recorded of later steps."""
    run = RolloutRun(tmp_path, schedule={"step_timeout_s": 60.0})
    run.reward.fail = {("e0-r2", 1): "timeout after 5 s"}
    run.engines[0].fail_next = 1
    run.run()
    folder = RunFolder(tmp_path)
    assert [phase for phase in folder.timeline(1)["phase"].to_pylist() if phase != "checkpoint"] == [
        *("generate", "prepare", "update", "sync", "evaluate")
    ]
    assert list(folder.timeline_files()) == [0, 1, 2, 3, 4]
    weights = folder.events("weights")
    assert [(e["step"], e["version"], e["digest"]) for e in weights] == [(v, v, f"d{v}") for v in (1, 2, 3, 4)]
    assert set(weights[0]["engines"].values()) == {"d1"}
    assert [(e["step"], e["ok"]) for e in folder.events("checkpoint")] == [(2, True), (4, True)]
    dropped = [(e["step"], e["reason"], e["samples"]) for e in folder.events("dropped")]
    assert dropped == [(1, "reward: timeout after 5 s", 1)]
    assert [(e["step"], e["groups"]) for e in folder.events("retry")] == [(1, 1)]
    assert [e["how"] for e in folder.events("run_ended")] == ["finished"]
    RolloutRun(tmp_path, resume=True, schedule={"steps": 6, "step_timeout_s": 60.0}).run()
    assert [e["version"] for e in folder.events("weights")] == [1, 2, 3, 4, 4, 5, 6]
    assert list(folder.timeline_files()) == [0, 1, 2, 3, 4, 5, 6]


class WritingReward(FaultyReward):
    """Notes what it is asked to write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int, list[str]]] = []
        """File, step, and the kinds of tables."""
        self.unscored: list[Unscored] = []

    async def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: FakeTable) -> int:
        """Notes the tables, and the samples without a finite score."""
        self.unscored.append(unscored)
        self.written.append((Path(path).name, step, [table.kind for table in tables]))
        return 0


class ForgetfulPolicy(FakePolicy):
    """Cannot say what its updates computed."""

    async def token_records(self) -> tuple[int, FakeTable]:
        """Fails."""
        raise WorkerRaised("policy-0", "token_records", "forgotten")


@pytest.mark.parametrize(("policy", "records"), [(FakePolicy(), ["records"]), (ForgetfulPolicy(), [])])
def test_samples_are_written_with_the_batch_and_what_the_updates_computed(
    tmp_path: Path, policy: FakePolicy, records: list[str]
) -> None:
    run = RolloutRun(tmp_path, schedule={"steps": 2})
    run.change(output={"trajectories": True})
    run.policies, reward = [policy], WritingReward()
    run.reward = reward
    policy.not_finite = {("e0-r1", 2): "inf"}
    run.run()
    assert reward.unscored == [{("e0-r1", 2): "policy: inf"}, {}]
    groups = ["rollouts", "rewards"] * 5
    assert [(name, step) for name, step, _ in reward.written] == [
        ("step-000001.parquet", 1),
        ("step-000002.parquet", 2),
    ]
    assert all(kinds == [*groups, "train", *records] for _, _, kinds in reward.written)


def test_samples_that_cannot_be_written_are_named_by_their_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(FaultyReward):
        async def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: FakeTable) -> int:
            if step == 2:
                raise WorkerRaised("reward-0", "write_trajectories", "no space left on device")
            return 0

    run = RolloutRun(tmp_path, schedule={"steps": 3})
    run.change(output={"trajectories": True})
    run.reward = FullDisk()
    assert run.run().steps_done == 3
    assert "the trajectories of step 2 were not written: " in caplog.text and "no space left" in caplog.text


def test_repeated_non_finite_gradients_stop_the_run(tmp_path: Path) -> None:
    """The limit is two consecutive skipped updates."""
    run = RolloutRun(tmp_path)
    run.policies[0].skip_updates = True
    with (
        mock.patch.object(MetricSinks, "close", autospec=True) as close,
        pytest.raises(TrainingDiverged, match="2 consecutive updates had a non-finite gradient"),
    ):
        run.run()
    close.assert_called_once_with(mock.ANY, "failed")  # what waits for a tracker is sent


def test_where_the_policy_overflows_the_critic_skips_its_update_too(tmp_path: Path) -> None:
    """Both would otherwise have learned from other samples. Overflows do not count as non-finite gradients."""
    run = RolloutRun(tmp_path, model={"dtype": "float16"}, roles={"critic": {}})
    run.policies[0].overflows = frozenset({0, 1, 2})
    assert run.spec.failures.nonfinite_steps == 2
    assert run.run().steps_done == 4
    assert (len(run.policies[0].updates), len(run.critic.updates)) == (4, 1)
    shown = [(line["policy/overflows"], line["critic/aligned_skips"]) for line in run.lines()]
    assert shown == [(1.0, 1.0)] * 3 + [(0.0, 0.0)]
    assert ["critic/loss" in line for line in run.lines()] == [False] * 3 + [True]


def test_a_dead_trainer_ends_the_run_with_an_error_that_names_it(tmp_path: Path) -> None:
    """Checkpoints of earlier steps stay valid."""
    run = RolloutRun(tmp_path)

    async def run_and_kill() -> RunOutcome:
        controller = run.build()

        async def kill() -> None:
            while controller.version < 3:
                await asyncio.sleep(0.001)
            controller.components.updates.trainers[0].workers[0].kill()

        killer = asyncio.create_task(kill())
        try:
            return await controller.run()
        finally:
            await killer

    words = r"policy-0\.\w+: the process is gone \(0 of 0 restarts used: failures.trainer_restarts\) \[step 4, \w+\]"
    with pytest.raises(WorkerError, match=words):
        asyncio.run(run_and_kill())
    found = CheckpointStore(tmp_path / "checkpoints", 2).latest()
    assert found is not None
    assert found.step == 2


def test_a_step_that_exceeds_its_timeout_ends_the_run(tmp_path: Path) -> None:
    """The update takes longer than `step_timeout_s`."""
    run = RolloutRun(tmp_path, schedule={"step_timeout_s": 0.2})
    run.policies[0].update_s = 4.0
    with pytest.raises(TroupeError, match=r"step 1 took longer than schedule\.step_timeout_s"):
        run.run()


def test_tokens_beyond_the_staleness_bound_are_never_trained(tmp_path: Path) -> None:
    """Samples of an engine that reports an old version are refused before the update."""
    run = RolloutRun(tmp_path)

    class Stale(FaultyEngine):
        async def generate(
            self, request: GroupRequest, prompts: object, finished: Any = None
        ) -> tuple[GroupSummary, FakeTable]:
            self.version = max(0, self.version - 1)
            return await super().generate(request, prompts, finished)

    run.engines = [Stale("rollout-0", random.Random(0))]
    with pytest.raises(TroupeError, match=r"tokens of version 0; the policy is at 1 and schedule.max_staleness is 0"):
        run.run()
    assert len(run.policies[0].updates) == 1


def test_garbage_collection_settings_are_restored_after_a_run(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    class Observing(FakePolicy):
        async def publish_weights(self, version: int, base: str = "") -> WeightUpdate | None:
            seen.append(gc.get_threshold())
            return await super().publish_weights(version, base)

    before = gc.get_threshold()
    run = RolloutRun(tmp_path)
    run.policies = [Observing()]
    run.run()
    assert gc.get_threshold() == before
    assert set(seen) != {before} and len(set(seen)) == 1


def test_consecutive_non_finite_gradients_are_counted_for_each_role(tmp_path: Path) -> None:
    """The critic's finite gradients do not reset the policy's count."""
    run = RolloutRun(tmp_path, roles={"critic": {"warmup_steps": 1}})
    run.policies[0].skip_updates = True
    with pytest.raises(TrainingDiverged, match="policy: 2 consecutive updates had a non-finite gradient"):
        run.run()
    assert len(run.critic.updates) == 3


class _Unexportable(FakePolicy):
    """Its state can be saved; its model cannot be exported while `broken`."""

    broken = True
    broken_at_start = False

    async def try_save(self, directory: str) -> None:
        if self.broken_at_start:
            raise _raised("the folder has no tokenizer")
        await super().try_save(directory)

    async def export(self, directory: str, average: bool = False) -> None:
        await super().export(directory, average)
        if self.broken:
            raise _raised("generation_config.json is invalid")


def _raised(problem: str) -> WorkerRaised:
    return WorkerRaised("policy-0", "export", f"ValueError: {problem}")


def test_the_trainers_state_is_kept_where_only_the_export_fails(tmp_path: Path) -> None:
    """Then the run resumes from its last step, without training anything again, and exports."""
    run = RolloutRun(tmp_path, failures={"failed_saves": 9})
    run.policies = [_Unexportable()]
    with pytest.raises(ExportFailed, match=r"generation_config.json is invalid; .*step-000004 holds .*--resume"):
        run.run()
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    found = store.latest()
    assert found is not None and (found.step, found.exported) == (4, False)
    assert len(run.lines()) == 4
    resumed = RolloutRun(tmp_path, resume=True)
    outcome = resumed.run()
    assert (outcome.steps_done, outcome.ledger["trained"]) == (4, 80)
    assert resumed.policies[0].updates == []
    again = store.latest()
    assert again is not None and (again.step, again.exported) == (4, True)
    assert (again.path / "policy" / "rank-0").read_text() == (found.path / "policy" / "rank-0").read_text()


def test_an_export_that_fails_counts_as_a_save_that_fails(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path, failures={"failed_saves": 0})
    run.policies = [_Unexportable()]
    with pytest.raises(TroupeError, match="1 checkpoints in a row were not written: the model cannot be exported"):
        run.run()
    assert len(run.lines()) == 2
    assert CheckpointStore(tmp_path / "checkpoints", 2).steps() == [2]


def test_what_cannot_be_saved_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    run = RolloutRun(tmp_path)
    policy = _Unexportable()
    policy.broken_at_start = True
    run.policies = [policy]
    with pytest.raises(WorkerRaised, match="no tokenizer"):
        run.run()
    assert policy.updates == [] and run.lines() == []
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_workers_that_write_to_another_disk_end_the_run_before_it_trains(tmp_path: Path) -> None:
    class Elsewhere(FakePolicy):
        async def try_save(self, directory: str) -> None:
            await super().try_save(str(tmp_path / "elsewhere"))

    run = RolloutRun(tmp_path)
    run.policies = [Elsewhere()]
    with pytest.raises(CheckpointError, match="1 of 1 workers write to another disk"):
        run.run()


def test_a_checkpoint_waits_for_the_samples_of_its_step(tmp_path: Path) -> None:
    """A run that is killed after it, and resumes, has the samples of every step."""
    early: list[bool] = []

    class Slow(FaultyReward):
        async def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: FakeTable) -> int:
            await asyncio.sleep(0.05)
            early.append((tmp_path / "checkpoints" / f"step-{step:06d}").exists())
            return 0

    saved = {"every_steps": 1}
    run = RolloutRun(tmp_path, checkpoint=saved, schedule={"steps": 3}, output={"trajectories": True})
    run.reward = Slow()
    run.run()
    assert early == [False] * 3
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


def test_the_order_of_the_parts(tmp_path: Path) -> None:
    """The scaler sees the metrics of what is before them."""

    async def parts() -> list[str]:
        return [type(part).__name__ for part in RolloutRun(tmp_path).build().parts.all]

    assert asyncio.run(parts()) == [
        "Penalty",
        "BestCheckpoints",
        "StepRecorder",
        "RunEvaluations",
        "StepMetrics",
        "RestartCounts",
        "StepSamples",
        "RunSaves",
        "ChangeEvents",
        "StepTimeline",
    ]
