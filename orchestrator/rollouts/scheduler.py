"""The rollout scheduler: decides which groups run when, and which groups form the next batch.

Slots bound the staleness. With P groups per step and a staleness limit of k, at most (version + k + 1) * P groups have
been opened in total when the engines serve `version`; training a batch opens the next P once the engines serve its
weights. A batch must include every group that started at version - k or earlier, and for every i < k leave at most i *
P groups that started at version - k + i or earlier, which the i batches after it can take. So they always fit: no group
is ever dropped for its age, and a step waits for a straggler only if one would otherwise exceed the limit. With k = 0
this is strictly on-policy training, by the same code.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.algorithms.custom import group_filter
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.errors import DataLost, WorkerError, WorkerRaised
from troupe.orchestrator.pools.engine import EngineState
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.rollouts.open_groups import GroupProgress, OpenGroups, ResumedGroups, Samples, ScheduledGroup
from troupe.orchestrator.rollouts.scoring import ScoredGroup, Scorer, SignalTest
from troupe.orchestrator.rollouts.step_counts import StepCounts
from troupe.orchestrator.spec.derived.sampling import GroupSettings, group_settings
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.ledger import Ledger, OpenGroup
from troupe.workers.contract.messages import FinishedSamples, GroupRequest, GroupSummary, RewardSummary, SampleSummary
from troupe.workers.contract.roles import TableRef

logger = logging.getLogger(__name__)

_OPENED_AT_ONCE = 16
"""Groups opened in one iteration of the event loop; opening a whole step at once would block thousands of engines."""


def sampling_seed(seed: int, prompt_uid: str) -> int:
    """Seed of one group's samples: the same in every run of a spec, on any engine and in any order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt_uid}".encode(), digest_size=4).digest()) >> 1


def group_request(
    seed: int,
    prompt_uid: str,
    row: int,
    settings: GroupSettings,
    *,
    attempt: int = 0,
    candidates: bool = False,
    finished: tuple[SampleSummary, ...] = (),
) -> GroupRequest:
    """The request for the samples of a prompt in a run with this seed; see `GroupRequest`."""
    return GroupRequest(
        prompt_uid=prompt_uid,
        row=row,
        attempt=attempt,
        samples=settings.samples,
        seed=sampling_seed(seed, prompt_uid),
        max_tokens=settings.max_tokens,
        environment=settings.environment,
        candidates=candidates,
        finished=finished,
    )


NextPrompt = Callable[[], PromptPick]
"""Returns the next prompt in the order of the run."""
Progress = Callable[[int, int], None]
"""Called with (finished groups, groups of the batch) while a batch is collected."""
Observe = Callable[[int, RewardSummary], None]
"""Called with the row of the prompt and the rewards of a group that is replaced although it is scored."""


class RolloutScheduler:
    """Keeps the engines busy within the staleness limit and returns batches of scored groups.

    Every free slot consumes one prompt and starts a task for its group. The task waits for an engine with room
    (`EnginePool.acquire`), for the samples and for the scores, and ends when the group is scored or dropped. Slots
    become free when a batch is trained and the engines have its weights (`advance`, `serve`), and when a group is
    dropped. `next_batch` waits until enough groups are scored; every task that ends unblocks it, including one that
    fails.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        pool: EnginePool,
        scorer: Scorer,
        ledger: Ledger,
        next_prompt: NextPrompt,
        prompt_pool: TableRef,
        version: int = 0,
        observe: Observe | None = None,
        settings: RowTable[GroupSettings] | None = None,
    ) -> None:
        """Opens no group yet.

        Args:
            ledger: Accounts for samples; its open groups are dispatched first.
            observe: Called with groups that are replaced although they are scored.
            settings: How groups are sampled, by the row of their prompt, or None if all alike.
        """
        self._schedule = spec.schedule
        self._failures = spec.failures
        self._seed = spec.seed
        self.settings = settings or RowTable.of((0,), group_settings(spec))
        self.min_group = algorithms.row_of(spec.algorithm).min_group_size
        self._greedy_baseline = algorithms.advantage(spec.algorithm).baseline == "greedy"
        """Whether a greedy response to every prompt is generated and scored as well; it is not trained on."""
        self.compares = algorithms.advantage(spec.algorithm).compares_reference
        """Whether a sample is compared with a response of the reference, without which it fails."""
        self._signal = SignalTest(group_filter(spec.algorithm))
        self.version = version
        self._served = version
        self._pool = pool
        self._scorer = scorer
        self._ledger = ledger
        self.counts = StepCounts(spec, ledger.describe_drops)
        self._resumption = ResumedGroups(ledger.open_groups())
        self._next_prompt = next_prompt
        self._prompt_pool = prompt_pool
        self._observe = observe
        self.groups = OpenGroups(spec.schedule)
        self._opened = version * spec.schedule.prompts_per_step
        self._opening = False
        """Whether a task that opens the free slots is running."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None

    def restore(self, state: Mapping[str, Any], groups: Sequence[GroupProgress]) -> int:
        """Takes over the checkpoint's progress of open groups, before the start. Returns how many finished samples are
        not sampled again.

        Args:
            groups: Progress of open groups; those that `ResumedGroups.keep` does not keep are sampled again.
        """
        again = self._resumption.keep(
            groups,
            settings=self.settings,
            schedule=self._schedule,
            version=self.version,
            failed=state.get("failed_open", {}),
        )
        self.counts.restore(state, again)
        return self._resumption.samples

    def state(self) -> dict[str, Any]:
        return self.counts.state() | {"failed_open": self.groups.failed}

    def start(self) -> None:
        """Opens all slots that the staleness limit allows; groups in flight at the last checkpoint come first."""
        resumption, left = self._resumption, deque[OpenGroup]()
        self._opened += resumption.groups
        for known in resumption.waiting:
            if (kept := resumption.take(known.prompt_uid)) is not None:
                self._continue(PromptPick(known.prompt_uid, known.row), *kept)
            elif self._free > 0:
                self._reopen(known)
            else:  # the spec has fewer slots than the checkpoint's
                left.append(known)
        resumption.waiting = left
        self._dispatch()

    async def next_batch(self, progress: Progress | None = None) -> list[ScoredGroup]:
        """Waits for the groups of the next step and returns them in order of dispatch. `progress`: called at the start
        and whenever a task of a group ends. Raises BatchFailed if too many samples failed or too many prompts were
        refused; EnginesLost if no engine is left and none is starting; WorkerError if a group could not be scored."""
        size = self._schedule.prompts_per_step
        while True:
            if self._failure is not None:
                raise self._failure
            if progress is not None:
                progress(min(self.groups.scored, size), size)
            if (batch := self.groups.next_batch(self.version)) is not None:
                self.counts.begin_batch()
                return batch
            self._progress.clear()
            await self._progress.wait()

    def resample(self, groups: Sequence[ScoredGroup]) -> None:
        """Samples groups of the last batch again, because their data were lost before training."""
        self.groups.abandon_batch()
        self.counts.batch_lost()
        for group in groups:
            uid = group.summary.prompt_uid
            self._launch(PromptPick(uid, group.row), self._ledger.retry(uid))

    def advance(self, version: int) -> None:
        """Records that the last batch is trained, which made the policy `version`, and opens the slots that this frees.
        They stay closed until `serve` has been called with the version as well."""
        self.version = version
        self.groups.mark_trained()
        self._dispatch()

    def serve(self, version: int) -> None:
        """Records that every engine serves `version`, and opens the slots that this frees; see `advance`."""
        if version > self._served:
            self._served = version
            self._dispatch()

    async def close(self) -> None:
        """Cancels all running groups; they stay open in the ledger."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _free(self) -> int:
        """Number of slots that may be opened now."""
        reached = min(self.version, self._served) + self._schedule.max_staleness + 1
        return min(reached, self._schedule.steps) * self._schedule.prompts_per_step - self._opened

    def _dispatch(self) -> None:
        """Opens the free slots in order: a few now, the rest in a background task."""
        if self._opening:
            return
        self._open_some()
        if self._free > 0:
            self._opening = True
            self._create_task("open", self._open_the_rest)

    def _open_some(self) -> None:
        """Opens up to `_OPENED_AT_ONCE` free slots with the next prompts."""
        for _ in range(min(self._free, _OPENED_AT_ONCE)):
            if self._resumption.waiting:
                self._reopen(self._resumption.waiting.popleft())
                continue
            self._opened += 1
            pick = self._next_prompt()
            samples = self.settings[pick.row].samples
            self._launch(pick, self._ledger.dispatch(pick.prompt_uid, pick.row, pick.draw, samples))

    def _reopen(self, known: OpenGroup) -> None:
        """Opens a slot for a group that was open at the checkpoint, as a new attempt."""
        self._opened += 1
        self._launch(PromptPick(known.prompt_uid, known.row), self._ledger.retry(known.prompt_uid))

    async def _open_the_rest(self) -> None:
        """Opens the remaining slots; other tasks run between two portions. Ends when no slot is free."""
        try:
            while self._free > 0:
                await asyncio.sleep(0)
                self._open_some()
        finally:
            self._opening = False

    def _launch(self, pick: PromptPick, attempt: int) -> None:
        self._create_task(pick.prompt_uid, self._run, self.groups.add(pick, attempt, self.settings[pick.row]))

    def _continue(self, pick: PromptPick, progress: GroupProgress, failed: int) -> None:
        """Opens a group with its existing progress; `failed` of its samples failed since the last batch."""
        group = self.groups.add(pick, progress.attempt, self.settings[pick.row])
        group.started_at_version, group.finished, group.failed = progress.started_at_version, progress.finished, failed
        if progress.scored is not None:
            self.groups.mark_scored(group, replace(progress.scored, row=pick.row))
        else:
            # Its samples have an age while it waits for an engine too: `next_batch` must not pass it over.
            self.groups.mark_running(group, group.started_at_version)
            self._create_task(pick.prompt_uid, self._run, group)

    def _create_task(self, name: str, work: Callable[..., Coroutine[object, object, None]], *args: object) -> None:
        task = asyncio.create_task(self._guard(work, *args), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Coroutine[object, object, None]], *args: object) -> None:
        """Runs a task; `next_batch` raises its error."""
        try:
            await work(*args)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._progress.set()

    async def _run(self, group: ScheduledGroup) -> None:
        """Generates and scores a group, again whenever its data are lost, up to `max_attempts` times."""
        for _ in range(self._failures.max_attempts):
            try:
                await self._attempt(group)
                return
            except DataLost as error:
                logger.warning("sampling %s again: %s", group.pick.prompt_uid, error)
                group.attempt = self._ledger.retry(group.pick.prompt_uid)
                group.finished = None
                self.groups.mark_idle(group)
        self._replace(group, f"its data were lost {self._failures.max_attempts} times", failed=True)

    async def _attempt(self, group: ScheduledGroup) -> None:
        """Generates and scores a group once, and keeps, drops or replaces it."""
        try:
            (summary, rollouts), *greedy = await self._generate(group)
        except WorkerError as error:
            self._replace(
                group, f"generation failed {self._failures.max_attempts} times", failed=True, detail=str(error)
            )
            return
        if summary.refused:
            self._replace(group, f"prompt refused: {summary.refused}", failed=False)
            return
        group.finished = Samples(FinishedSamples(summary.prompt_uid, summary.attempt, summary.samples), rollouts)
        scored = await self._scorer.score(summary, rollouts, group.pick.row, group.settings)
        if greedy:
            rewards, _ = await self._scorer.rewards.score(greedy[0][1], group.settings.rewards)
            if rewards.rewards[0] is None:
                self._replace(
                    group, f"reward of the greedy response: {rewards.statuses[0]}", failed=True, scored=scored
                )
                return
            scored = replace(scored, greedy_reward=rewards.rewards[0])
        self._settle(group, scored)

    async def _generate(self, group: ScheduledGroup) -> list[tuple[GroupSummary, TableRef]]:
        """Generates on the least-loaded engine; a failed engine costs an attempt, not the group. Groups that a leaving
        engine could not finish run on another engine without the cost of an attempt. Returns (summary, ROLLOUTS
        reference) of the group, followed by the greedy response's pair, if any."""
        settings, tries = group.settings, 0
        while True:
            done = () if group.finished is None else group.finished.summary.samples
            samples = settings.samples - len(done) + self._greedy_baseline
            engine = await self._pool.acquire(samples)
            self.groups.mark_running(group, engine.version if group.finished is None else group.started_at_version)
            request = group_request(
                self._seed,
                group.pick.prompt_uid,
                group.pick.row,
                settings,
                attempt=group.attempt,
                candidates=True,
                finished=done,
            )
            rows = None if group.finished is None else group.finished.rollouts
            calls = [self._pool.generate(request, self._prompt_pool, engine, rows)]
            if self._greedy_baseline:
                greedy = replace(request, samples=1, greedy=True, candidates=False, finished=())
                calls.append(self._pool.generate(greedy, self._prompt_pool, engine))
            try:
                results = await gather_all(calls)
            except WorkerError as error:
                if isinstance(error, WorkerRaised):
                    group.finished = None  # its rows may be what failed, or are lost with their node
                if group.finished is None:
                    self.groups.mark_idle(group)
                group.attempt = self._ledger.retry(group.pick.prompt_uid)
                tries += engine.state is not EngineState.LEAVING
                await self._pool.report_failure(engine, error)
                if tries >= self._failures.max_attempts:
                    raise
                continue
            finally:
                self._pool.release(engine, samples)
            if self._ledger.is_current(request.prompt_uid, request.attempt):
                return results

    def _settle(self, group: ScheduledGroup, scored: ScoredGroup) -> None:
        """Keeps or replaces a scored group, and drops its samples without reward. A group is replaced if too few of its
        samples have a reward, or if it has no signal and the budget for such replacements lasts (dynamic sampling)."""
        if self.compares:
            scored = scored.paired()
        failures = scored.failures
        if scored.least_rewarded < self.min_group:
            self._replace(group, failures[0][1], failed=True, scored=scored)
            return
        for sample_index, reason in failures:
            self._ledger.mark_dropped(group.pick.prompt_uid, sample_index, reason)
        if failures:
            group.failed += len(failures)
            self.counts.fail(len(failures))
        if self.counts.may_replace and (why := self._signal.problem(scored, group.settings)):
            self.counts.replace_without_signal(scored, group.settings)
            self._drop(group, f"no signal: {why}")
            if self._observe is not None:
                self._observe(group.pick.row, scored.rewards)
            self._dispatch()
            return
        self.groups.mark_scored(group, scored)

    def _replace(
        self, group: ScheduledGroup, reason: str, *, failed: bool, detail: str = "", scored: ScoredGroup | None = None
    ) -> None:
        """Drops a failed or refused group, counts it, and opens its slot for another prompt. `scored`: the group, if
        its rewards failed."""
        logger.warning("%s dropped: %s %s", group.pick.prompt_uid, reason, detail)
        self._drop(group, reason)
        if failed:
            self.counts.replace_failed(scored, group.settings)
        else:
            self.counts.refuse(reason)
        self._dispatch()

    def _drop(self, group: ScheduledGroup, reason: str) -> None:
        """Drops the remaining samples of the group and frees its slot."""
        self.groups.drop(group)
        self._ledger.drop_group(group.pick.prompt_uid, reason)
        self._opened -= 1
