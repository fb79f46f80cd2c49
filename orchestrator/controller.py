"""The loop. Every algorithm, synchronous or not, runs through :meth:`Controller.step`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.algorithm_table import KlPenalty
from orchestrator.batch_source import Batch, BatchSource, HeldOut, unless_stopped
from orchestrator.batching import minibatches, pick_states, plan_texts, plan_units, plan_update
from orchestrator.checkpoint import AVERAGE, MODEL, CheckpointStore
from orchestrator.console import Console
from orchestrator.errors import StopRequested, TrainingDiverged, TroupeError
from orchestrator.garbage import rare_collections
from orchestrator.handles import Gang, TableRef
from orchestrator.ledger import Ledger
from orchestrator.metrics import MetricSinks, PhaseTimers, merge_update_metrics
from orchestrator.peak_memory import PeakMemory
from orchestrator.rollout_metrics import mean_of
from orchestrator.scaling import Crew
from orchestrator.spec_sections import AlarmConfig
from orchestrator.train_memory import TrainMemory
from orchestrator.weight_sync import WeightSync
from workers.messages import RankPlan, UpdateMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainPlan:
    """What the controller is held to."""

    steps: int
    epochs: int
    minibatches: int
    skip_silent: bool
    """Rows without advantage need no work: the loss has no other term for them."""
    seed: int
    critic_warmup: int
    """Steps at the start in which the policy stays as it is."""
    train_timeout_s: float
    step_timeout_s: float
    probe_every_s: float
    checkpoint_every: int
    evaluate_every: int
    evaluate_at_start: bool
    evaluate_at_end: bool
    nonfinite_limit: int
    averages: bool = False
    """The policy keeps a moving average of its weights; checkpoints hold it."""
    kl_stop: float | None = None
    """KL(old || new) per token above which the rest of a step's policy updates is left out."""
    kl_states: int = 0
    """Tokens of a batch at which KL(old || new) is measured over the whole vocabulary after the updates."""
    kl_penalty: KlPenalty | None = None
    """Penalty on KL(old || new), where the objective has one."""
    alarm: AlarmConfig | None = None
    """When a rising reward looks hacked."""


@dataclass(frozen=True)
class Cast:
    """Everybody on stage."""

    policy: Gang
    critic: Gang | None
    source: BatchSource
    sync: WeightSync | None
    """None: nobody but the trainers needs the weights."""
    evaluator: HeldOut | None
    ledger: Ledger
    crew: Crew | None = None
    """Brings in and lets go workers while the run goes on; None: nobody comes or goes."""
    peaks: PeakMemory = field(default_factory=PeakMemory)
    """What the workers say of their memory."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    steps_done: int
    stopped: bool
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    ledger: dict[str, int]
    drop_reasons: dict[str, int]
    peak_memory: str
    """Per role, in one line."""

    def summary(self, out: Path) -> dict[str, str]:
        """What to tell the user at the end."""
        books = self.ledger
        lines = {"steps": f"{self.steps_done}{' (stopped; --resume goes on)' if self.stopped else ''}"}
        for name in ("accuracy", "reward", "loss"):
            before, after = self.first_eval.get(f"eval/{name}"), self.last_eval.get(f"eval/{name}")
            if after is not None:
                first = f"{before:.3f} before, " if before is not None else ""
                lines[f"held-out {name}"] = f"{first}{after:.3f} after"
        lines["samples"] = f"{books['dispatched']} dispatched, {books['trained']} trained, {books['dropped']} dropped"
        lines |= {f"dropped: {reason}": str(count) for reason, count in self.drop_reasons.items()}
        lines["peak memory"] = self.peak_memory
        for name in ("metrics.jsonl", "trajectories", "checkpoints", "tensorboard"):
            if (out / name).exists():
                lines[name] = str(out / name)
        return lines


class Controller:
    """One process that sees scalars and references only."""

    def __init__(
        self,
        plan: TrainPlan,
        cast: Cast,
        store: CheckpointStore,
        sinks: MetricSinks,
        console: Console,
        stop: asyncio.Event,
        done: int = 0,
        memory: TrainMemory | None = None,
    ) -> None:
        self.plan = plan
        self.cast = cast
        self.store = store
        self.sinks = sinks
        self.console = console
        self.version = done
        self.stop = stop
        self._timers = PhaseTimers()
        self._nonfinite_in_a_row = 0
        self._saved_at = done
        self._alarm = ""
        self.memory = memory or TrainMemory(kl_old_coef=plan.kl_penalty.coef if plan.kl_penalty else 0.0)

    async def run(self) -> RunOutcome:
        """Train to the last step, or to the step during which a stop was asked for (then saved and left)."""
        async with rare_collections():
            return await self._run()

    async def _run(self) -> RunOutcome:
        heartbeat = asyncio.create_task(self._heartbeat())
        first_eval: dict[str, float] = {}
        last_eval: dict[str, float] = {}
        try:
            if self.version and self.cast.sync is not None:
                await self.cast.sync.push(self.version)
            if self.plan.evaluate_at_start and not self.version:
                first_eval = last_eval = await unless_stopped(self.stop, self._evaluate())
            self.cast.source.start()
            self._timers = PhaseTimers()
            while self.version < self.plan.steps and not self._alarm_stops():
                async with asyncio.timeout(self.plan.step_timeout_s):
                    last_eval = await self.step(self.version) or last_eval
        except StopRequested:
            log.warning("stopping after step %d", self.version)
        except TimeoutError:
            raise TroupeError(
                f"step {self.version + 1} took longer than schedule.step_timeout_s ({self.plan.step_timeout_s:g} s)"
            ) from None
        finally:
            heartbeat.cancel()
            await self.cast.source.close()
        await self.cast.source.flush()
        await self._save()
        self.sinks.close()
        self.cast.ledger.check()
        books = self.cast.ledger
        return RunOutcome(
            self.version,
            self.version < self.plan.steps,
            first_eval,
            last_eval,
            books.counts(),
            books.drop_reasons(),
            self.cast.peaks.summary(),
        )

    def _alarm_stops(self) -> bool:
        """Whether the alarm ends the run; what is done is saved, as at any stop."""
        return bool(self._alarm) and self.plan.alarm is not None and self.plan.alarm.action == "stop"

    async def step(self, step: int) -> dict[str, float]:
        """One step: take a batch, update on it, hand the weights over, write down what happened."""
        timers, source = self._timers, self.cast.source
        # 1. A batch, ready to be trained on.
        batch = await source.next_batch(self.version, timers)
        # 2. Policy and critic learn from it.
        with timers.phase("update"):
            updates = await self._update(step, batch)
        # 3. Every engine takes the new weights and proves it.
        if self.cast.sync is not None:
            with timers.phase("sync"):
                self.console.phase("weight sync", 0, 1)
                await self.cast.sync.push(step + 1)
            await asyncio.sleep(0)  # thousands of engines have answered, and groups wait for some of them
        # 4. The books: these samples are trained; the next ones may start.
        self.version = step + 1
        source.trained(self.version)
        await asyncio.sleep(0)  # groups that wait for an engine come before the step's figures
        # 5. What a run leaves.
        with timers.phase("evaluate"):
            evaluation = await self._evaluate_if_due()
        await self._report(batch, updates, timers, evaluation)
        self._timers = PhaseTimers()  # a checkpoint's time is part of the next step's line: this one is written first
        with self._timers.phase("checkpoint"):
            await self._save_if_due()
        await source.written(self.version)
        return evaluation

    async def _update(self, step: int, batch: Batch) -> list[dict[str, float]]:
        """All epochs and mini-batches of this batch; policy and critic side by side. One dict per update."""
        updates: list[dict[str, float]] = []
        plan, total = self.plan, self.plan.epochs * self.plan.minibatches
        policy_moves = step >= plan.critic_warmup
        held = policy_moves and await self._hold_states(step, batch)
        texts = () if batch.texts is None else batch.texts.rows
        for epoch in range(plan.epochs):
            seed = (plan.seed, step, epoch)
            learnt = minibatches(len(texts), plan.minibatches, seed)
            for chosen, pieces in zip(minibatches(batch.parts, plan.minibatches, seed), learnt, strict=True):
                self.console.phase("update", len(updates), total)
                calls = []
                if policy_moves:
                    calls.append(self._update_policy(batch, chosen, [texts[piece] for piece in pieces]))
                if self.cast.critic is not None:
                    plans = self._plans(self.cast.critic, batch, chosen, skip_silent=False)
                    calls.append(self._update_gang(self.cast.critic, plans, batch))
                if not calls:
                    break
                updates.append({k: v for metrics in await asyncio.gather(*calls) for k, v in metrics.items()})
                divergence = updates[-1].get("policy/kl_old", 0.0)
                policy_moves = policy_moves and (plan.kl_stop is None or divergence <= plan.kl_stop)
        if held:
            updates[-1]["policy/kl_exact"] = await self._exact_divergence()
        self._adapt_penalty(updates)
        return updates

    async def _hold_states(self, step: int, batch: Batch) -> bool:
        """Have the policy remember what it makes of some states of the batch; whether there are any."""
        rows, stride = pick_states(batch.summary.rows, self.plan.kl_states, (self.plan.seed, step))
        if not rows:
            return False
        gang, bound = self.cast.policy, self.plan.train_timeout_s
        bounds = gang.ranks, gang.micro_batch_tokens
        plans = plan_update(batch.summary.rows, rows, *bounds, skip_silent=False, share_prompts=gang.shares_prompts)
        await gang.scatter("hold_distributions", plans, batch.table, stride, timeout_s=bound)
        return True

    async def _exact_divergence(self) -> float:
        """KL(old || new) per token at the states held, in nats."""
        parts = await self.cast.policy.broadcast("divergence", timeout_s=self.plan.train_timeout_s)
        return sum(total for total, _ in parts) / max(1, sum(states for _, states in parts))

    def _adapt_penalty(self, updates: list[dict[str, float]]) -> None:
        """Once a batch, by the divergence that the last update of the policy found before its own step."""
        found = [update for update in updates if "policy/kl_old" in update]
        if self.plan.kl_penalty is not None and found:
            found[-1]["policy/kl_old_coef"] = self.memory.kl_old_coef
            self.memory = self.memory.after_updates(found[-1]["policy/kl_old"], self.plan.kl_penalty)

    def _plans(self, gang: Gang, batch: Batch, chosen: Sequence[int], *, skip_silent: bool) -> list[RankPlan]:
        rows, bounds = batch.summary.rows, (gang.ranks, gang.micro_batch_tokens)
        if batch.units is None:
            return plan_update(rows, chosen, *bounds, skip_silent=skip_silent, share_prompts=gang.shares_prompts)
        return plan_units(rows, [batch.units[unit] for unit in chosen], *bounds)

    async def _update_policy(self, batch: Batch, chosen: Sequence[int], pieces: Sequence[int]) -> dict[str, float]:
        """One update; `pieces` of text are learnt in the same one."""
        gang, texts = self.cast.policy, batch.texts
        plans = self._plans(gang, batch, chosen, skip_silent=self.plan.skip_silent)
        if texts is not None:
            learnt = plan_texts(texts.tokens, pieces, gang.ranks, gang.micro_batch_tokens)
            plans = [replace(plan, texts=part) for plan, part in zip(plans, learnt, strict=True)]
            return await self._update_gang(gang, plans, batch, self.memory.kl_old_coef, texts.table)
        penalty = () if self.plan.kl_penalty is None else (self.memory.kl_old_coef,)
        return await self._update_gang(gang, plans, batch, *penalty)

    async def _update_gang(
        self, gang: Gang, plans: Sequence[RankPlan], batch: Batch, *extra: float | TableRef
    ) -> dict[str, float]:
        if not any(plan.micro_batches or plan.texts for plan in plans):
            # No row has anything to teach: a step on zero gradients would still move weights by momentum.
            return {f"{gang.role}/empty_updates": 1.0}
        metrics: list[UpdateMetrics] = await gang.scatter(
            "update", plans, batch.table, *extra, timeout_s=self.plan.train_timeout_s
        )
        try:
            merged = merge_update_metrics(metrics)
        except ValueError as error:
            raise TrainingDiverged(f"{gang.role}: {error}") from error
        skipped = metrics[0].skipped
        self._nonfinite_in_a_row = self._nonfinite_in_a_row + 1 if skipped else 0
        if self._nonfinite_in_a_row >= self.plan.nonfinite_limit:
            raise TrainingDiverged(
                f"{gang.role}: {self._nonfinite_in_a_row} updates in a row had a gradient that was not finite "
                "(failures.nonfinite_steps); no parameter was changed by them"
            )
        return {f"{gang.role}/{name}": value for name, value in (merged | {"skipped_updates": float(skipped)}).items()}

    async def _evaluate_if_due(self) -> dict[str, float]:
        last = self.version == self.plan.steps
        due = self.plan.evaluate_every and self.version % self.plan.evaluate_every == 0
        return await self._evaluate() if due or (last and self.plan.evaluate_at_end) else {}

    async def _evaluate(self) -> dict[str, float]:
        if self.cast.evaluator is None:
            return {}
        metrics = await self.cast.evaluator.run(lambda done, total: self.console.phase("evaluate", done, total))
        if not self.version:
            self.sinks.write(0, metrics)
        troubles = ("eval/refused", "eval/failed_samples")  # news only where there are any
        shown = ", ".join(f"{k[5:]} {v:.3g}" for k, v in metrics.items() if v or k not in troubles)
        self.console.message(f"held-out after step {self.version}: {shown}")
        return metrics

    async def _save_if_due(self) -> None:
        every = self.plan.checkpoint_every
        if every and self.version % every == 0:
            await self._save()

    async def _save(self) -> None:
        """One atomic checkpoint of everything a resumed run needs; nothing to do if this step is saved."""
        if self._saved_at == self.version:
            return
        state = {"step": self.version, "source": self.cast.source.state(), "ledger": self.cast.ledger.state()}
        state["memory"] = self.memory.model_dump(mode="json")
        folder = self.store.begin(self.version)
        gangs = [self.cast.policy] if self.cast.critic is None else [self.cast.policy, self.cast.critic]
        for number, gang in enumerate(gangs):
            self.console.phase("checkpoint", number, len(gangs))
            await gang.broadcast("save", str(folder / gang.role), timeout_s=self.plan.train_timeout_s)
        await self.cast.policy.broadcast("export", str(folder / MODEL), timeout_s=self.plan.train_timeout_s)
        if self.plan.averages:
            path = str(folder / AVERAGE)
            await self.cast.policy.broadcast("export_average", path, timeout_s=self.plan.train_timeout_s)
        await asyncio.to_thread(self.store.commit, folder, state)
        self._saved_at = self.version

    async def _report(
        self,
        batch: Batch,
        updates: Sequence[dict[str, float]],
        timers: PhaseTimers,
        evaluation: dict[str, float],
    ) -> None:
        metrics = self.cast.source.metrics(self.version, timers.total())
        await asyncio.sleep(0)  # going through thousands of samples is enough for one turn of the loop
        metrics |= batch.summary.metrics
        metrics |= mean_of(updates)
        metrics |= {"seconds/step": timers.total()}
        metrics |= {f"seconds/{name}": seconds for name, seconds in timers.seconds().items()}
        metrics |= {f"utilisation/{name}": share for name, share in timers.shares().items()}
        metrics |= {f"ledger/{name}": float(count) for name, count in self.cast.ledger.counts().items()}
        metrics |= {"updates": float(len(updates))}
        metrics |= self.cast.peaks.metrics()
        metrics |= evaluation
        metrics |= self._watch(metrics)
        if self.cast.crew is not None:
            metrics |= self.cast.crew.after_step(timers.shares().get("generate", 0.0))
        self.sinks.write(self.version, metrics)
        self.console.step(self.version, metrics)

    def _watch(self, metrics: dict[str, float]) -> dict[str, float]:
        """Reward up while text or policy goes astray is a reward that is being hacked, not earned."""
        if self.plan.alarm is None:
            return {}
        self.memory, reasons = self.memory.watched(metrics, self.plan.alarm)
        if reasons:
            self._alarm = f"step {self.version}: the reward rises while {' and '.join(reasons)} (failures.alarm)"
            log.warning("%s", self._alarm)
        return {"alarm/reward_hacking": float(bool(reasons))}

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.plan.probe_every_s)
            try:
                await self.cast.source.probe()
            except Exception:
                log.exception("a round of probes failed")
