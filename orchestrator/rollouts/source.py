"""Batches of rollouts: scored groups within the staleness limit, prepared for training by the policy worker."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import Scores, ScoreTokens, TrainerGroup
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptOrder
from troupe.orchestrator.data.texts import TextOrder
from troupe.orchestrator.errors import BatchFailed, DataLost, TroupeError, WorkerError
from troupe.orchestrator.pools.engines import EnginePool, finished_samples
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.rollouts.kept_samples import read_samples, write_samples
from troupe.orchestrator.rollouts.open_groups import GroupProgress
from troupe.orchestrator.rollouts.players import player_metrics
from troupe.orchestrator.rollouts.reward_pool import FaultLog, RewardPool
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler
from troupe.orchestrator.rollouts.scoring import ScoredGroup, row_lengths
from troupe.orchestrator.rollouts.step_counts import add, sample_counts
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.spec.derived.training import old_logprobs_at_batch, values_at_batch
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.metrics import PhaseTimers, std
from troupe.orchestrator.training.batch import Batch, BatchSource, SourceSnapshot, plan_rows, unless_stopped
from troupe.orchestrator.training.checkpoint import SAMPLES, Checkpoint
from troupe.orchestrator.training.ledger import Ledger
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.config import BUDGETS
from troupe.workers.contract.messages import (
    Fault,
    PrepareRequest,
    SampleKey,
    SampleSummary,
    Unscored,
    engine_prompt_tokens,
    sampled_tokens,
)
from troupe.workers.contract.rewards import is_solved
from troupe.workers.contract.roles import TableRef

logger = logging.getLogger(__name__)

Untaught = Mapping[str, frozenset[SampleKey]]
"""The samples that a teacher which reads feedback or demonstrations does not teach, by its role."""


@dataclass(frozen=True)
class RolloutComponents:
    """The parts that produce a batch of rollouts."""

    workers: Workers
    pool: EnginePool
    scheduler: RolloutScheduler
    rewards: RewardPool
    prompts: PromptOrder
    ledger: Ledger
    texts: TextOrder | None = None
    """Plain texts on which the policy trains along with every batch (PPO-ptx)."""
    curriculum: Curriculum | None = None
    """Learns from the rewards of every batch which prompts `prompts` draws next."""


@dataclass(frozen=True)
class _BatchScorer:
    """A trainer that scores the tokens of a whole batch, between the updates of two steps."""

    what: str
    """Name of its result, for the console."""
    group: TrainerGroup[Any]
    score: ScoreTokens
    """A method of the group."""
    role: str
    """The role whose scores they are."""
    sources: Sequence[str] | None = None
    """The sources whose samples it scores, or None for all."""
    reads_rewards: bool = False
    """Whether it reads feedback or demonstrations, which come with the rewards of the samples."""


def _batch_scorers(spec: RolloutSpec, workers: Workers) -> list[_BatchScorer]:
    """The trainers whose scores must precede the step's updates, if they train during generation."""
    found: list[_BatchScorer] = []
    if old_logprobs_at_batch(spec):
        policy = workers.require_policy()
        found.append(_BatchScorer("old log-probs", policy, policy.compute_logprobs, policy.role))
    if values_at_batch(spec):
        critic = workers.require_critic()
        found.append(_BatchScorer("values", critic, critic.compute_values, critic.role))
    for name, teacher in spec.roles.teachers().items():
        if name in spec.in_policy:
            policy = workers.require_policy()
            score, reads = policy.teacher(name), teacher.reads_rewards
            found.append(_BatchScorer(name, policy, score, name, teacher.sources, reads_rewards=reads))
    return found


class RolloutSource(BatchSource):
    """Batches of rollouts: takes groups from the scheduler and computes their advantages."""

    def __init__(
        self, spec: RolloutSpec, out: Path, components: RolloutComponents, console: Console, stop: asyncio.Event
    ) -> None:
        """Writes samples to the run folder `out`, if the spec says so."""
        self._spec = spec
        self._trajectories = out / "trajectories" if spec.output.trajectories else None
        self._components = components
        self._batch_scorers = _batch_scorers(spec, components.workers)
        self._faults = FaultLog("role")
        self._console = console
        self._stop = stop
        self._advantage_state = AdvantageState()
        """State of the advantage computation after the last batch."""
        self._groups: Sequence[ScoredGroup] = ()
        self._train: TableRef | None = None
        """TRAIN table of the last batch, until its samples are written."""
        self._writing: asyncio.Task[None] | None = None

    async def restore(self, found: Checkpoint) -> int:
        parts = self._components
        groups = await read_samples(found, self._spec, parts.rewards)
        with found.restoring():
            state = found.state["source"]
            parts.prompts.restore(state["prompts"])
            if parts.texts is not None:
                parts.texts.restore(state["texts"])
            self._advantage_state = AdvantageState.model_validate(state["advantages"])
            return parts.scheduler.restore(state.get("scheduler", {}), groups)

    def start(self) -> None:
        self._components.scheduler.start()

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """Waits for the groups of the next step, then computes their advantages.

        Unblocked by the scheduler when enough groups are scored, by its errors, and by a stop request. Groups whose
        data were lost with a node are sampled again. Raises StopRequested if the run is to stop; TroupeError if a
        sample is older than the staleness limit, or the scheduler or a worker failed.
        """
        while True:
            with timers.phase("generate"):
                self._groups = await unless_stopped(self._stop, self._components.scheduler.next_batch(self._on_groups))
            try:
                with timers.phase("prepare"):
                    return await self._prepare(version, self._groups)
            except DataLost as error:
                logger.warning("%s; sampling the batch again", error)
                self._components.scheduler.resample(self._groups)

    def groups(self) -> Sequence[ScoredGroup]:
        """The groups of the last batch."""
        return self._groups

    def mark_trained(self, version: int) -> None:
        """Records the batch in the ledger and the curriculum and lets the scheduler open the next groups."""
        ledger = self._components.ledger
        for group in self._groups:
            uid, masked = group.summary.prompt_uid, self._masked(group)
            ledger.mark_trained(uid, *[i for i in group.rewarded if i not in masked])
            for i in masked:
                ledger.mark_dropped(uid, i, "truncated: it carries no loss")
        if self._components.texts is not None:
            self._components.texts.mark_trained()
        if self._components.curriculum is not None:
            for group in self._groups:
                self._components.curriculum.observe(group.row, group.rewards)
            self._components.curriculum.mark_trained()
        self._components.scheduler.advance(version)

    def mark_served(self, version: int) -> None:
        """Lets the scheduler open the groups that start at this version."""
        self._components.scheduler.serve(version)

    def metrics(self, version: int, seconds: float) -> dict[str, float]:
        metrics = batch_metrics(self._groups, version - 1, seconds) | candidate_metrics(self._groups)
        metrics |= episode_metrics(self._groups, self._components.scheduler.settings) | self._source_metrics()
        metrics |= player_metrics(self._groups, self._components.scheduler.settings)
        metrics |= self._sample_counts() | self._advantage_state.normalization()
        metrics["rollout/tokens_per_s"], metrics["utilisation/rollout"] = self._components.pool.meter.read()
        if any(one.mask_truncated for one in self._components.scheduler.settings.entries):
            metrics["masked_samples"] = float(sum(len(self._masked(group)) for group in self._groups))
        curriculum = self._components.curriculum
        return metrics if curriculum is None else metrics | curriculum.metrics()

    def _sample_counts(self) -> dict[str, float]:
        """Samples of the step and time of scoring: of the batch, and of the groups replaced on the way to it."""
        scheduler = self._components.scheduler
        counts = dict(scheduler.counts.replaced)
        for group in self._groups:
            add(counts, sample_counts(group, scheduler.settings[group.row].environment))
        return counts

    def _source_metrics(self) -> dict[str, float]:
        """Metrics by source of a mixture, or empty for a single source."""
        if not self._spec.data.mixture:
            return {}
        curriculum = self._spec.data.curriculum
        component = None if curriculum is None else curriculum.component
        metrics = source_metrics(self._groups, self._components.scheduler.settings, component)
        for name, counts in self._components.ledger.source_counts().items():
            metrics |= {f"source/{name}/{what}": float(count) for what, count in counts.items()}
        return metrics

    async def save_trajectories(self, version: int) -> None:
        """Makes a reward worker write the step's samples in the background; waits for the previous step's."""
        await self.flush()
        folder, train, self._train = self._trajectories, self._train, None
        if folder is None:
            return
        tables = [ref for group in self._groups for ref in (group.rollouts, group.reward_table)]
        tables += [] if train is None else [train]
        unscored = {(group.summary.prompt_uid, i): why for group in self._groups for i, why in group.unscored.items()}
        writing = self._write_samples(folder, version, tables, unscored)
        self._writing = asyncio.create_task(writing, name=f"step {version}")
        self._writing.add_done_callback(_retrieve)  # a run that ends with an error does not flush

    async def _write_samples(self, folder: Path, version: int, tables: list[TableRef], unscored: Unscored) -> None:
        """Writes the tables of a step with the policy's results in its updates. Raises WorkerError."""
        timeout_s = self._spec.schedule.train_timeout_s
        try:
            tables = tables + await self._components.workers.require_policy().token_records(timeout_s=timeout_s)
        except WorkerError as error:
            logger.warning("the samples of step %d have no log-probs of its updates: %s", version, error)
        path = str(folder / f"step-{version:06d}.parquet")
        await self._components.rewards.write(path, version, tables, timeout_s, unscored)

    async def flush(self) -> None:
        """Waits until the samples of the last step are written."""
        if self._writing is not None:
            try:
                await self._writing
            except WorkerError as error:
                logger.error("the trajectories of %s were not written: %s", self._writing.get_name(), error)
            self._writing = None

    async def snapshot(self) -> SourceSnapshot:
        """Order of prompts (and of texts), state of the advantages, and finished samples of the groups in flight, once
        the samples of all steps so far are written."""
        await self.flush()
        parts = self._components
        keeps = self._spec.checkpoint.samples_mib > 0
        engines, timeout_s = list(parts.pool.workers), self._spec.failures.health_interval_s
        running = await finished_samples(engines, timeout_s) if keeps else []
        # From here to the end nothing is awaited, so that all of it is of one moment.
        groups = parts.scheduler.groups.progress(running) if keeps else []
        state = {
            "prompts": parts.prompts.state(),
            "advantages": self._advantage_state.model_dump(mode="json"),
            "scheduler": parts.scheduler.state(),
        }
        if parts.texts is not None:
            state["texts"] = parts.texts.state()
        samples = sum(group.samples for group in groups)
        write = partial(self._write_open, groups) if groups else None
        return SourceSnapshot(state, parts.ledger.state(), samples, write)

    async def _write_open(self, groups: Sequence[GroupProgress], folder: Path) -> int:
        """Writes finished samples of open groups into a checkpoint; returns how many, or 0 if that failed."""
        try:
            kept, left = await write_samples(folder, self._spec, groups, self._components.rewards)
        except WorkerError as error:
            logger.warning("the checkpoint holds no samples of open groups: %s", error)
            await asyncio.to_thread(shutil.rmtree, folder / SAMPLES, ignore_errors=True)
            return 0
        if left:
            bound = f"checkpoint.samples_mib ({self._spec.checkpoint.samples_mib})"
            logger.warning(
                "%d finished samples of open groups exceed %s: a resumed run samples them again", left, bound
            )
        return kept

    async def probe(self) -> None:
        await self._components.pool.probe_all()

    async def close(self) -> None:
        """Cancels the groups in flight."""
        await self._components.scheduler.close()

    async def _prepare(self, version: int, groups: Sequence[ScoredGroup]) -> Batch:
        """Joins rollouts, rewards and token scores into a TRAIN table, on a policy worker."""
        self._check_staleness(version, groups)
        rollouts = [group.rollouts for group in groups]
        tables = [*rollouts, *(group.reward_table for group in groups), *_unique(groups)]
        policy, timeout_s = self._components.workers.require_policy(), self._spec.schedule.train_timeout_s
        untaught: Untaught = {}
        if self._batch_scorers:
            scores, unscored, untaught = await self._score_batch(groups)
            tables += scores
            if unscored:
                groups = self._groups = self._drop(unscored, groups)
        request = self._prepare_request(groups, untaught)
        summary, table = await policy.prepare(request, *tables, timeout_s=timeout_s)
        policy_trains = version >= self._spec.critic_warmup
        self._advantage_state = self._advantage_state.after(summary.state, policy_trains=policy_trains)
        self._train = table
        texts = None if self._components.texts is None else self._components.texts.pick()
        return Batch(summary, table, texts=texts)

    async def _score_batch(self, groups: Sequence[ScoredGroup]) -> tuple[list[TableRef], Unscored, Untaught]:
        """Token scores of the batch by every trainer that scores whole batches, the samples without finite ones, and
        those without what a teacher reads of them."""
        self._console.phase(" and ".join(scorer.what for scorer in self._batch_scorers))
        timeout_s, settings = self._spec.schedule.train_timeout_s, self._components.scheduler.settings

        async def score(scorer: _BatchScorer) -> Scores:
            own = [one for one in groups if scorer.sources is None or settings[one.row].source in scorer.sources]
            if not own:
                return []
            plans = plan_rows([length for group in own for length in row_lengths(group.summary)], scorer.group)
            tables = [group.rollouts for group in own]
            tables += [group.reward_table for group in own] if scorer.reads_rewards else []
            return await scorer.score(plans, *tables, timeout_s=timeout_s)

        scored = await gather_all(score(scorer) for scorer in self._batch_scorers)
        unscored = {
            key: f"{scorer.role}: {why}"
            for scorer, parts in zip(self._batch_scorers, scored, strict=True)
            for summary, _ in parts
            for key, why in summary.failed.items()
        }
        untaught = {
            scorer.role: frozenset(key for summary, _ in parts for key in summary.untaught)
            for scorer, parts in zip(self._batch_scorers, scored, strict=True)
            if scorer.reads_rewards
        }
        return [table for parts in scored for _, table in parts], unscored, untaught

    def _drop(self, unscored: Unscored, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups without the samples that have no finite score, which are accounted for.

        Raises:
            BatchFailed: Too many samples have failed, or too few of a group are left.
        """
        found: list[ScoredGroup] = []
        scheduler, ledger = self._components.scheduler, self._components.ledger
        for group in groups:
            uid, rewarded = group.summary.prompt_uid, (*group.rewarded, *group.rewarded_candidates)
            failed = {i: unscored[uid, i] for i in rewarded if (uid, i) in unscored}
            left = group.without(failed) if failed else group
            found.append(left.paired() if scheduler.compares else left)
            self._faults.note(Fault(why, f"{uid}[{i}]", 1) for i, why in failed.items())
            lost = {*group.rewarded}.difference(found[-1].rewarded)
            for i in lost:
                ledger.mark_dropped(uid, i, found[-1].rewards.statuses[i])
            if found[-1].least_rewarded < scheduler.min_group:
                why = next(iter(failed.values()))
                raise BatchFailed(f"{uid}: too few samples have finite scores ({found[-1].least_rewarded}): {why}")
            scheduler.counts.fail(len(lost))
        return found

    def _prepare_request(self, groups: Sequence[ScoredGroup], untaught: Untaught) -> PrepareRequest:
        """Arguments of `PolicyGroup.prepare` besides the tables."""
        rows = {group.summary.prompt_uid: group.row for group in groups}
        greedy = {g.summary.prompt_uid: g.greedy_reward for g in groups if g.greedy_reward is not None}
        # Lists cost no call for each of thousands of samples, as generators do.
        keep = [(group.summary.prompt_uid, i) for group in groups for i in group.rewarded]
        masked = [(group.summary.prompt_uid, i) for group in groups for i in self._masked(group)]
        candidates = [(group.summary.prompt_uid, i) for group in groups for i in group.rewarded_candidates]
        state = self._advantage_state.of_rows(rows.values())
        settings = {uid: self._components.scheduler.settings[row] for uid, row in rows.items()}
        sources = {uid: own.source for uid, own in settings.items() if own.source}
        by_source = sources if self._spec.algorithm.by_source else {}
        teachers = {uid: own.teachers for uid, own in settings.items()} if self._spec.roles.teacher else {}
        algorithms = {uid: own.source for uid, own in settings.items() if own.own_algorithm}
        compared = (
            {g.summary.prompt_uid: len(g.rewards.rewards) for g in groups}
            if self._components.scheduler.compares
            else {}
        )
        kept, others = tuple(keep + candidates), tuple(candidates)
        own = by_source, teachers, untaught, algorithms, compared
        return PrepareRequest(kept, state, rows, greedy, tuple(masked), others, *own)

    def _masked(self, group: ScoredGroup) -> list[int]:
        """Indices of the samples that have a reward and carry no loss."""
        if not self._components.scheduler.settings[group.row].mask_truncated:
            return []
        return [i for i in group.rewarded if i in group.truncated]

    def _check_staleness(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Raises TroupeError if a sample is older than the staleness limit (an invariant of the scheduler)."""
        for group in groups:
            for sample in group.summary.samples:
                if version - sample.oldest_version > self._spec.schedule.max_staleness:
                    raise TroupeError(
                        f"{group.summary.prompt_uid} sample {sample.sample_index} from {group.summary.engine} has "
                        f"tokens of version {sample.oldest_version}; the policy is at {version} and "
                        f"schedule.max_staleness is {self._spec.schedule.max_staleness}"
                    )

    def _on_groups(self, done: int, wanted: int) -> None:
        self._console.phase("generate", done, wanted, unit="groups")


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as seen."""
    if not task.cancelled():
        task.exception()


def _unique(groups: Sequence[ScoredGroup]) -> list[TableRef]:
    """Token-score tables of a batch, each once; the groups of a wave share theirs."""
    tables: dict[int, TableRef] = {id(ref): ref for group in groups for ref in group.token_scores}
    return list(tables.values())


def batch_metrics(groups: Sequence[ScoredGroup], version: int, seconds: float) -> dict[str, float]:
    """Metrics of the groups of a batch. `version`: version of the policy before the updates. Returns rewards by
    component, lengths (tokens), truncation, staleness (versions), throughput (tokens/s over `seconds`), and the share
    of prompt tokens found in the engines' prefix caches."""
    rewards = [reward for group in groups for reward in group.rewards.rewards if reward is not None]
    samples = [sample for group in groups for sample in group.summary.samples]
    prompts, responses = engine_prompt_tokens(samples), sampled_tokens(samples)
    oldest = [sample.oldest_version for sample in samples]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": std(rewards),
        "groups/mixed": fmean(map(_is_mixed, groups)),
        "prompt_tokens/mean": fmean(prompts),
        "prompt_tokens/cached": sum(group.summary.cached_tokens for group in groups) / sum(prompts),
        "response_tokens/mean": fmean(responses),
        "response_tokens/max": float(max(responses)),
        "truncated": fmean([sample.finish_reason == "length" for sample in samples]),
        "staleness/mean": version - fmean(oldest),
        "staleness/max": float(version - min(oldest)),
        "tokens": float(sum(prompts) + sum(responses)),
        "response_tokens_per_s": sum(responses) / seconds if seconds > 0 else 0.0,
    }
    for name in dict.fromkeys(name for group in groups for name in group.rewards.components):
        values = [v for group in groups for v in group.rewards.components.get(name, ()) if v is not None]
        if values:
            metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": std(values)}
    return metrics


def _is_mixed(group: ScoredGroup) -> bool:
    """Whether the rewards of its samples differ."""
    return group.differs(group.rewards.rewards)


def source_metrics(
    groups: Sequence[ScoredGroup], settings: RowTable[GroupSettings], component: str | None
) -> dict[str, float]:
    """Metrics of the groups of a batch by the source of their prompt. `component`: reward component that defines solved
    samples, or None for the reward. Returns of every source its share of the groups; and if it has groups, mean reward,
    mean response (tokens), the shares of truncated samples and of groups whose rewards differ, and the pass rate (share
    of samples that are solved) if the reward defines them."""
    by_source: dict[str, list[ScoredGroup]] = {one.source: [] for one in settings.entries}
    for group in groups:
        by_source[settings[group.row].source].append(group)
    metrics: dict[str, float] = {}
    for own in settings.entries:
        name, members = f"source/{own.source}", by_source[own.source]
        metrics[f"{name}/share"] = len(members) / len(groups)
        if not members:
            continue
        samples = [sample for group in members for sample in group.summary.samples]
        rewards = [reward for group in members for reward in group.rewards.rewards if reward is not None]
        metrics |= {
            f"{name}/reward": fmean(rewards),
            f"{name}/response_tokens": fmean(sampled_tokens(samples)),
            f"{name}/truncated": fmean(sample.finish_reason == "length" for sample in samples),
            f"{name}/mixed": fmean(_is_mixed(group) for group in members),
        }
        if own.solved_at is not None:
            solved = [is_solved(v, own.solved_at) for group in members for v in _measured(group, component)]
            metrics[f"{name}/pass_rate"] = fmean(solved) if solved else 0.0
    return metrics


def _measured(group: ScoredGroup, component: str | None) -> list[float]:
    """The reward, or a component of it, of the group's samples that have a reward."""
    values = group.rewards.rewards if component is None else group.rewards.components[component]
    pairs = zip(values, group.rewards.rewards, strict=True)
    return [value for value, reward in pairs if value is not None and reward is not None]


def episode_metrics(groups: Sequence[ScoredGroup], settings: RowTable[GroupSettings]) -> dict[str, float]:
    """Turns, ends and waits of the episodes of a batch, and the means of the numbers that environments report. Returns
    metrics of all episodes, and of each named environment, with its name in theirs. Numbers that an environment reports
    are never averaged over environments."""
    by_name: dict[str, list[SampleSummary]] = {}
    for group in groups:
        name = settings[group.row].environment
        played = [sample for sample in group.summary.samples if sample.episode is not None]
        if name is not None and played:
            by_name.setdefault(name, []).extend(played)
    if not by_name:
        return {}
    samples = [sample for members in by_name.values() for sample in members]
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    metrics = _of_episodes("", samples) | {
        "episodes/forked": float(sum(len(sample.segments) > 1 for sample in samples)),
        "episodes/cut_observations": float(sum(episode.cut_observations for episode in episodes)),
        "episodes/compactions": float(sum(episode.compactions for episode in episodes)),
    }
    for name, members in sorted(by_name.items()):
        part = f"/{name}" if name else ""
        metrics |= _of_episodes(part, members) if name else {}
        reported: dict[str, list[float]] = {}
        for sample in members:
            for number, value in ({} if sample.episode is None else sample.episode.info).items():
                reported.setdefault(number, []).append(value)
        metrics |= {f"environment{part}/{number}": fmean(values) for number, values in reported.items()}
    return metrics


def _of_episodes(part: str, samples: Sequence[SampleSummary]) -> dict[str, float]:
    """Metrics of some episodes; `part` goes into their names."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    return {
        f"episodes{part}/turns": fmean(episode.turns for episode in episodes),
        f"seconds/environment{part}": fmean(episode.environment_s for episode in episodes),
    } | {f"episodes{part}/{budget}": fmean(sample.finish_reason == budget for sample in samples) for budget in BUDGETS}


def candidate_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean reward of the answers from other sources, and how often one is the best of its group."""
    ranked = [(group.rewards.rewards, group.candidates.rewards) for group in groups if group.candidates is not None]
    if not ranked:
        return {}
    given = [reward for _, candidates in ranked for reward in candidates]
    rewards = [reward for reward in given if reward is not None]
    chosen = [
        max((r for r in candidates if r is not None), default=-math.inf) > max(r for r in own if r is not None)
        for own, candidates in ranked
    ]
    return {"candidates/reward": fmean(rewards) if rewards else 0.0, "candidates/chosen": fmean(chosen)}
