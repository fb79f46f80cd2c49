"""The optimizer updates of one step: epochs and mini-batches of a batch, distributed over the ranks that train."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.algorithms.table import KlPenalty
from troupe.orchestrator.cluster.worker_group import CriticGroup, ExampleGroup, PolicyGroup, TrainerGroup
from troupe.orchestrator.errors import TrainingDiverged, WorkerError
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.training import kl_penalty, needs_whole_samples, skips_zero_advantage
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import ProfileConfig
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.metrics import merge_update_metrics
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.micro_batches import (
    minibatches,
    pick_states,
    plan_texts,
    plan_units,
    plan_update,
    sample_rows,
)
from troupe.orchestrator.training.parts import Metrics, RunPart
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.contract.messages import RankPlan, UpdateMetrics

PROFILES = "profile"
"""Folder of the traces in the run folder."""


class Penalty(RunPart):
    """The penalty on KL(old || new), whose coefficient adapts after each batch."""

    name = "penalty"
    state: PenaltyState

    def __init__(self, penalty: KlPenalty | None) -> None:
        """`penalty`: the spec's, or None if the algorithm has none."""
        self._penalty = penalty
        self.state = PenaltyState().for_penalty(penalty)

    def restore(self, state: Any) -> None:
        self.state = PenaltyState.model_validate(state).for_penalty(self._penalty)


class UpdateProfiles:
    """Names a trace of torch's profiler for the first update of each role in the chosen steps."""

    def __init__(self, config: ProfileConfig | None, out: Path) -> None:
        self._config = config
        self._folder = out.absolute() / PROFILES
        self._done: set[tuple[int, str]] = set()

    def traced(self, step: int, role: str, plans: Sequence[RankPlan]) -> list[RankPlan]:
        """The plans of an update of this role in this step, with the files that its chosen ranks write."""
        config = self._config
        if config is None or step not in config.steps or (step, role) in self._done:
            return list(plans)
        self._done.add((step, role))
        names = [str(self._folder / f"step-{step:06d}-{role}-{rank}.json.gz") for rank in range(len(plans))]
        chosen = [name if rank in config.ranks else "" for rank, name in enumerate(names)]
        return [replace(plan, trace=trace) for plan, trace in zip(plans, chosen, strict=True)]


class Updates(ABC):
    """Trains on one batch after another."""

    def __init__(self, spec: RunSpec, console: Console, profiles: UpdateProfiles | None = None) -> None:
        """`profiles`: updates to record, if any."""
        self._spec = spec
        self._profiles = profiles
        self._console = console
        self._nonfinite: Counter[str] = Counter()
        """Consecutive non-finite updates of each role."""

    @property
    @abstractmethod
    def trainers(self) -> Sequence[TrainerGroup[Any]]:
        """The groups that train, the policy first; a checkpoint saves each of them."""

    async def run(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        """All updates on this batch: the metrics of each, named `ROLE/METRIC`, and the state after them. Raises
        TrainingDiverged if a loss is not finite, or too many gradients in a row; WorkerError (none is counted)."""
        before = self._nonfinite.copy()
        try:
            return await self._run(step, batch, state)
        except (WorkerError, asyncio.CancelledError):  # a restart of the trainers cancels it
            self._nonfinite = before
            raise

    async def repeat(self, step: int, batch: Batch, state: PenaltyState) -> None:
        """The updates of a step that was trained before, on trainers that have lost them."""
        before, self._nonfinite = self._nonfinite, Counter()
        try:
            await self._run(step, batch, state)
        finally:
            self._nonfinite = before

    @abstractmethod
    async def _run(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        """Runs the updates of a step (see `run`)."""

    async def _update(
        self,
        step: int,
        group: TrainerGroup[Any],
        plans: Sequence[RankPlan],
        update: Callable[[Sequence[RankPlan]], Awaitable[list[UpdateMetrics]]],
    ) -> Metrics:
        """One update of a group by these plans in step `step`, from 0; merges the metrics of its ranks."""
        if not any(plan.micro_batches or plan.texts for plan in plans):
            # No row to train on, no update: with zero gradients, momentum would still change the weights.
            return {f"{group.role}/empty_updates": 1.0}
        if self._profiles is not None:
            plans = self._profiles.traced(step + 1, group.role, plans)
        results = await update(plans)
        try:
            merged = merge_update_metrics(results)
        except ValueError as error:
            raise TrainingDiverged(f"{group.role}: {error}") from error
        skipped, overflowed = results[0].skipped, bool(merged.get("overflows"))
        # After an overflow the loss scale is halved. At a scale of 1 none is one, so this ends.
        self._nonfinite[group.role] = self._nonfinite[group.role] + 1 if skipped and not overflowed else 0
        if self._nonfinite[group.role] >= self._spec.failures.nonfinite_steps:
            raise TrainingDiverged(
                f"{group.role}: {self._nonfinite[group.role]} consecutive updates had a non-finite gradient "
                "(failures.nonfinite_steps); they changed no parameter"
            )
        return {f"{group.role}/{name}": value for name, value in (merged | {"skipped_updates": float(skipped)}).items()}


class OfflineUpdates(Updates):
    """Updates of one model on offline data."""

    def __init__(
        self, spec: RunSpec, trainer: ExampleGroup, console: Console, profiles: UpdateProfiles | None = None
    ) -> None:
        super().__init__(spec, console, profiles)
        self._trainer = trainer

    @property
    def trainers(self) -> Sequence[TrainerGroup[Any]]:
        return (self._trainer,)

    async def _run(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        """See `Updates.run`; the state stays as it is."""
        schedule, trainer, updates = self._spec.schedule, self._trainer, []
        units = batch.units or ()
        for epoch in range(schedule.epochs):
            for chosen in minibatches(len(units), schedule.minibatches, (self._spec.seed, step, epoch)):
                self._console.phase("update", len(updates), schedule.updates_per_step, unit="updates")
                rows = [units[unit] for unit in chosen]
                size = trainer.data_parallel_size, trainer.micro_batch_tokens
                plans = plan_units(batch.summary.rows, rows, *size, packed=trainer.packs)
                update = partial(trainer.update, batch=batch.table, timeout_s=schedule.train_timeout_s)
                updates.append(await self._update(step, trainer, plans, update))
        return updates, state


class RolloutUpdates(Updates):
    """Updates of policy and critic on rollouts: at once, or in float16 one after the other: a policy's overflow
    skips the critic's too. DeepSpeed-Chat's `--align_overflow` (`ppo_trainer.py`) has both gradients before either
    step, and skips both if one overflows. Here an overflow of the critic comes after the policy's step, which stays."""

    def __init__(
        self,
        spec: RolloutSpec,
        policy: PolicyGroup,
        critic: CriticGroup | None,
        console: Console,
        profiles: UpdateProfiles | None = None,
    ) -> None:
        super().__init__(spec, console, profiles)
        self._algorithm = spec.algorithm
        self._critic_warmup = spec.critic_warmup
        self._skips_zero_advantage = skips_zero_advantage(spec)
        self._kl_penalty = kl_penalty(spec)
        self._needs_whole_samples = needs_whole_samples(spec)
        self._trust_region = algorithms.trust_region(spec.algorithm)
        self._aligns = spec.model.dtype == "float16"
        self._policy = policy
        self._critic = critic

    @property
    def trainers(self) -> Sequence[TrainerGroup[Any]]:
        return (self._policy,) if self._critic is None else (self._policy, self._critic)

    async def _run(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        """See `Updates.run`; the state gets the adapted coefficient of the KL penalty."""
        schedule, kl_stop = self._spec.schedule, self._algorithm.kl_stop
        updates: list[Metrics] = []
        trains_policy = step >= self._critic_warmup
        measures_kl = trains_policy and await self._hold_states(step, batch)
        texts = () if batch.texts is None else batch.texts.rows
        samples = sample_rows(batch.summary.rows, range(len(batch.summary.rows)))
        for epoch in range(schedule.epochs):
            seed = (self._spec.seed, step, epoch)
            of_texts = minibatches(len(texts), schedule.minibatches, seed)
            of_samples = minibatches(len(samples), schedule.minibatches, seed)
            for chosen, pieces in zip(of_samples, of_texts, strict=True):
                rows = [row for sample in chosen for row in samples[sample]]
                self._console.phase("update", len(updates), schedule.updates_per_step, unit="updates")
                calls: list[asyncio.Task[Metrics]] = []
                if trains_policy:
                    own = [texts[i] for i in pieces]
                    calls.append(asyncio.create_task(self._update_policy(step, batch, rows, own, state.kl_old_coef)))
                if self._critic is not None:
                    first = calls[0] if calls and self._aligns else None
                    calls.append(asyncio.create_task(self._update_critic(step, self._critic, batch, rows, first)))
                if not calls:
                    break
                updates.append({k: v for metrics in await asyncio.gather(*calls) for k, v in metrics.items()})
                divergence = updates[-1].get("policy/kl_old", 0.0)
                trains_policy = trains_policy and (not kl_stop or divergence <= kl_stop)
        if measures_kl:
            updates[-1] |= await self._divergence()
        return updates, self._adapt_penalty(updates, state)

    async def _update_policy(
        self, step: int, batch: Batch, rows: Sequence[int], pieces: Sequence[int], kl_old_coef: float
    ) -> Metrics:
        """One update on rows of the batch and on pieces of text (PPO-ptx)."""
        policy, texts = self._policy, batch.texts
        plans = plan_update(
            batch.summary.rows,
            rows,
            policy.data_parallel_size,
            policy.micro_batch_tokens,
            skip_zero_advantage=self._skips_zero_advantage,
            packed=policy.packs,
            share_prompts=policy.shares_prompts,
            whole_samples=self._needs_whole_samples,
        )
        table = None
        if texts is not None:
            size = policy.data_parallel_size, policy.micro_batch_tokens
            text_plans = plan_texts(texts.tokens, pieces, *size, packed=policy.packs)
            plans = [replace(plan, texts=part) for plan, part in zip(plans, text_plans, strict=True)]
            table = texts.table
        timeout_s = self._spec.schedule.train_timeout_s
        update = partial(policy.update, batch=batch.table, kl_old_coef=kl_old_coef, texts=table, timeout_s=timeout_s)
        return await self._update(step, policy, plans, update)

    async def _update_critic(
        self, step: int, critic: CriticGroup, batch: Batch, rows: Sequence[int], policy: Awaitable[Metrics] | None
    ) -> Metrics:
        """One update on rows of the batch, unless the policy's update that it waits for overflows."""
        if policy is not None and (await policy).get("policy/overflows"):
            return {"critic/aligned_skips": 1.0}
        size = critic.data_parallel_size, critic.micro_batch_tokens
        plans = plan_update(batch.summary.rows, rows, *size, skip_zero_advantage=False, packed=critic.packs)
        update = partial(critic.update, batch=batch.table, timeout_s=self._spec.schedule.train_timeout_s)
        metrics = await self._update(step, critic, plans, update)
        return metrics if policy is None else metrics | {"critic/aligned_skips": 0.0}

    async def _hold_states(self, step: int, batch: Batch) -> bool:
        """Makes the policy keep its distributions at some states of the batch; returns whether there are any."""
        policy, spec = self._policy, self._spec
        rows, stride = pick_states(batch.summary.rows, self._algorithm.kl_states, (spec.seed, step))
        if not rows:
            return False
        plans = plan_update(
            batch.summary.rows,
            rows,
            policy.data_parallel_size,
            policy.micro_batch_tokens,
            skip_zero_advantage=False,
            packed=policy.packs,
            share_prompts=policy.shares_prompts,
        )
        weights = self._trust_region is not None
        await policy.store_distributions(plans, batch.table, stride, weights, timeout_s=spec.schedule.train_timeout_s)
        return True

    async def _divergence(self) -> Metrics:
        """KL(old || new) after the batch's updates; with a trust region, the step is shortened until it is within."""
        policy, region, timeout_s = self._policy, self._trust_region, self._spec.schedule.train_timeout_s
        proposed = divergence = await policy.divergence(timeout_s=timeout_s)
        if region is None:
            return {"policy/kl_exact": divergence}
        length, factors = 1.0, iter([*[region.backtrack] * region.attempts, 0.0])
        # A divergence that is not a number is not within the limit either.
        while not divergence <= region.max_kl and length > 0.0:
            factor = next(factors)
            length, divergence = length * factor, await policy.shorten_step(factor, timeout_s=timeout_s)
        await policy.discard_stored(timeout_s=timeout_s)
        return {"policy/kl_exact": divergence, "policy/kl_proposed": proposed, "policy/step_length": length}

    def _adapt_penalty(self, updates: list[Metrics], state: PenaltyState) -> PenaltyState:
        """Adapts the penalty once per batch, to KL(old || new) after the batch's updates."""
        if self._kl_penalty is None or "policy/kl_exact" not in updates[-1]:
            return state
        updates[-1]["policy/kl_old_coef"] = state.kl_old_coef
        return state.after_updates(updates[-1]["policy/kl_exact"], self._kl_penalty)
