"""Which group runs where and when, and which groups make the next batch.

Staleness is a matter of slots. With P groups a step and a bound of k, (version + k + 1) * P groups may ever have
been opened when the policy is at `version`; training a batch is what opens the next P. A batch must take every
group that was started at version - k or before: at most P such groups can be open, so they always fit, no group is
ever dropped for its age, and a step waits for a straggler only when that straggler would otherwise pass the bound.
With k = 0 this is strictly on-policy training, by the same code.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from orchestrator.engine_pool import EnginePool, EngineState
from orchestrator.errors import BatchFailed, DataLost, WorkerError
from orchestrator.handles import TableRef, together
from orchestrator.ledger import Ledger, OpenGroup
from orchestrator.prompts import PromptPick
from orchestrator.scoring import ScoredGroup, Scorer
from workers.messages import GroupRequest, GroupSummary

log = logging.getLogger(__name__)

_REFUSALS_PER_GROUP = 8
"""A step that refuses this many prompts for each group it wants has the wrong data, not a few bad rows."""
_OPENED_AT_ONCE = 16
"""Groups; opening a whole step's at once would hold up thousands of engines."""


def sampling_seed(seed: int, prompt_uid: str) -> int:
    """Seed of one group's samples: the same in every run of this spec, whatever engine and order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{prompt_uid}".encode(), digest_size=4).digest()) >> 1


NextPrompt = Callable[[], PromptPick]
Progress = Callable[[int, int], None]
"""Told (groups finished, groups wanted) while a batch gathers."""


@dataclass(frozen=True)
class SchedulePlan:
    """What the scheduler is held to."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    steps: int
    max_attempts: int
    max_failed_fraction: float
    min_group: int
    """Fewest scored samples a group needs to be trained (two where samples are compared within the group)."""
    seed: int
    replaceable: int = 0
    """Groups without signal that may be replaced, for each group of a step (dynamic sampling, arXiv 2503.14476)."""
    greedy_baseline: bool = False
    """Ask for the greedy response to every prompt as well; it is scored and never trained on."""


@dataclass(eq=False)
class _Open:
    """A group on its way."""

    order: int
    pick: PromptPick
    attempt: int
    running: bool = False
    """An engine has it, or it is being scored."""
    started_at_version: int = 0
    """Of the engine that has it or had it last."""
    scored: ScoredGroup | None = None


class RolloutScheduler:
    """Keeps the engines busy within the staleness bound and hands out batches of scored groups."""

    def __init__(
        self,
        plan: SchedulePlan,
        pool: EnginePool,
        scorer: Scorer,
        ledger: Ledger,
        next_prompt: NextPrompt,
        prompt_pool: TableRef,
        version: int = 0,
    ) -> None:
        self.plan = plan
        self.version = version
        self._pool = pool
        self._scorer = scorer
        self._ledger = ledger
        self._next_prompt = next_prompt
        self._prompt_pool = prompt_pool
        self._opened = version * plan.groups_per_step
        self._order = 0
        self._opening = False
        """Slots that are free are being opened."""
        self._finished: list[_Open] = []
        """Groups that are scored and in no batch yet."""
        self._running: Counter[int] = Counter()
        """Groups that are running, by the version they were started at; no version has 0 of them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self._failed_samples = 0
        self._refused = 0
        self._silent = 0
        self._lost_groups: list[OpenGroup] = ledger.open_groups()

    def start(self) -> None:
        """Dispatch what the bound allows; groups that were in flight when a checkpoint was taken go first."""
        for lost in self._lost_groups:
            self._opened += 1
            self._launch(PromptPick(lost.prompt_uid, lost.row), self._ledger.retry(lost.prompt_uid))
        self._lost_groups = []
        self._dispatch()

    async def next_batch(self, progress: Progress | None = None) -> list[ScoredGroup]:
        """Wait for the groups of the next step, in order of dispatch.

        Raises BatchFailed, EnginesLost or a WorkerError when the batch cannot be had.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            ready = self._ready()
            if progress is not None:
                progress(min(len(self._finished), self.plan.groups_per_step), self.plan.groups_per_step)
            if ready is not None:
                batch = [group.scored for group in ready if group.scored is not None]
                taken = set(ready)
                self._finished = [group for group in self._finished if group not in taken]
                self._failed_samples = 0
                self._refused = 0
                self._silent = 0
                return batch
            self._progress.clear()
            await self._progress.wait()

    def again(self, groups: Sequence[ScoredGroup]) -> None:
        """Sample these groups of the last batch anew; their data were lost before they could be trained on."""
        for group in groups:
            uid = group.summary.prompt_uid
            self._launch(PromptPick(uid, group.row), self._ledger.retry(uid))

    def advance(self, version: int) -> None:
        """The engines serve `version`: open the slots this frees."""
        self.version = version
        self._dispatch()

    async def close(self) -> None:
        """Abandon what is in flight; the ledger still lists it as open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ready(self) -> list[_Open] | None:
        """The next batch if it can be formed now: the groups at the bound first, then the oldest finished ones."""
        oldest_allowed = self.version - self.plan.max_staleness
        # Asked whenever a group finishes: what is not ready is found out without a look at every group.
        if len(self._finished) < self.plan.groups_per_step or any(v <= oldest_allowed for v in self._running):
            return None
        finished = sorted(self._finished, key=lambda group: (group.started_at_version > oldest_allowed, group.order))
        return sorted(finished[: self.plan.groups_per_step], key=lambda group: group.order)

    @property
    def _free(self) -> int:
        """Slots that may be opened now."""
        allowed = min(self.version + self.plan.max_staleness + 1, self.plan.steps) * self.plan.groups_per_step
        return allowed - self._opened

    def _dispatch(self) -> None:
        """Open the free slots, in order: a few now, the others little by little."""
        if self._opening:
            return
        self._open_some()
        if self._free > 0:
            self._opening = True
            self._begin("open", self._open_the_rest)

    def _open_some(self) -> None:
        for _ in range(min(self._free, _OPENED_AT_ONCE)):
            self._opened += 1
            pick = self._next_prompt()
            self._launch(pick, self._ledger.dispatch(pick.prompt_uid, pick.row, self.plan.group_size))

    async def _open_the_rest(self) -> None:
        """Between any two portions whatever is ready has its turn."""
        try:
            while self._free > 0:
                await asyncio.sleep(0)
                self._open_some()
        finally:
            self._opening = False

    def _launch(self, pick: PromptPick, attempt: int) -> None:
        group = _Open(self._order, pick, attempt)
        self._order += 1
        self._begin(pick.prompt_uid, self._run, group)

    def _begin(self, name: str, work: Callable[..., Coroutine[object, object, None]], *args: object) -> None:
        task = asyncio.create_task(self._guard(work, *args), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Coroutine[object, object, None]], *args: object) -> None:
        """Do it; an error is the next batch's."""
        try:
            await work(*args)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._progress.set()

    async def _run(self, group: _Open) -> None:
        for _ in range(self.plan.max_attempts):
            try:
                await self._attempt(group)
                return
            except DataLost as error:
                log.warning("%s is sampled anew: %s", group.pick.prompt_uid, error)
                group.attempt = self._ledger.retry(group.pick.prompt_uid)
                self._stop(group)
        self._replace(group, f"its data were lost {self.plan.max_attempts} times", failed=True)

    async def _attempt(self, group: _Open) -> None:
        """Generate, score, settle. Raises DataLost where a node took the samples with it."""
        try:
            (summary, rollouts), *greedy = await self._generate(group)
        except WorkerError as error:
            self._replace(group, f"generation failed {self.plan.max_attempts} times", failed=True, detail=str(error))
            return
        if summary.refused:
            self._replace(group, f"prompt refused: {summary.refused}", failed=False)
            return
        scored = await self._scorer.score(summary, rollouts, group.pick.row)
        if greedy:
            rewards, _ = await self._scorer.rewards.score(greedy[0][1])
            if rewards.rewards[0] is None:
                self._replace(group, f"reward of the greedy response: {rewards.statuses[0]}", failed=True)
                return
            scored = replace(scored, greedy_reward=rewards.rewards[0])
        self._settle_failures(group, scored)

    async def _generate(self, group: _Open) -> list[tuple[GroupSummary, TableRef]]:
        """Generate on the engine with least to do; an engine's failure costs an attempt, not the group. An engine that
        leaves and hands its groups back has not failed.

        Returns the group, and after it the greedy response where there is to be one. Raises the last WorkerError when
        the attempts are used up.
        """
        samples = self.plan.group_size + self.plan.greedy_baseline
        tries = 0
        while True:
            engine = await self._pool.acquire(samples)
            self._start(group, engine.version)
            request = GroupRequest(
                prompt_uid=group.pick.prompt_uid,
                row=group.pick.row,
                attempt=group.attempt,
                samples=self.plan.group_size,
                seed=sampling_seed(self.plan.seed, group.pick.prompt_uid),
            )
            requests = [request, *([replace(request, samples=1, greedy=True)] if self.plan.greedy_baseline else [])]
            try:
                results = await together(self._pool.generate(asked, self._prompt_pool, engine) for asked in requests)
            except WorkerError as error:
                self._stop(group)
                group.attempt = self._ledger.retry(group.pick.prompt_uid)
                tries += engine.state is not EngineState.LEAVING
                await self._pool.report_failure(engine, error)
                if tries >= self.plan.max_attempts:
                    raise
                continue
            finally:
                await self._pool.release(engine, samples)
            if self._ledger.is_current(request.prompt_uid, request.attempt):
                return results

    def _settle_failures(self, group: _Open, scored: ScoredGroup) -> None:
        """Drop samples without a reward; a group left with too few of them is dropped whole and replaced."""
        failures = [(i, s) for i, s in enumerate(scored.rewards.statuses) if s != "ok"]
        if self.plan.group_size - len(failures) < self.plan.min_group:
            self._replace(group, f"reward: {failures[0][1]}", failed=True)
            return
        for sample_index, status in failures:
            self._ledger.dropped(group.pick.prompt_uid, sample_index, f"reward: {status}")
        self._count_failures(len(failures))
        if not scored.has_signal and self._silent < self.plan.replaceable * self.plan.groups_per_step:
            self._silent += 1
            self._drop(group, "no signal: all rewards of the group are equal")
            self._dispatch()
            return
        self._stop(group)
        group.scored = scored
        self._finished.append(group)

    def _start(self, group: _Open, version: int) -> None:
        """The group runs on an engine of this version."""
        self._stop(group)
        group.running, group.started_at_version = True, version
        self._running[version] += 1

    def _stop(self, group: _Open) -> None:
        """The group no longer runs: it is scored, dropped, or to be started anew."""
        if group.running:
            group.running = False
            self._running[group.started_at_version] -= 1
            if not self._running[group.started_at_version]:
                del self._running[group.started_at_version]

    def _replace(self, group: _Open, reason: str, *, failed: bool, detail: str = "") -> None:
        log.warning("%s dropped: %s %s", group.pick.prompt_uid, reason, detail)
        self._drop(group, reason)
        if failed:
            self._count_failures(self.plan.group_size)
        else:
            self._count_refusal(reason)
        self._dispatch()

    def _drop(self, group: _Open, reason: str) -> None:
        """Drop what is left of the group; its slot is free again."""
        self._stop(group)
        self._ledger.drop_group(group.pick.prompt_uid, reason)
        self._opened -= 1

    def _count_refusal(self, reason: str) -> None:
        self._refused += 1
        if self._refused > _REFUSALS_PER_GROUP * self.plan.groups_per_step:
            raise BatchFailed(f"{self._refused} prompts in a row were refused; last: {reason}")

    def _count_failures(self, samples: int) -> None:
        self._failed_samples += samples
        budget = self.plan.max_failed_fraction * self.plan.groups_per_step * self.plan.group_size
        if self._failed_samples > budget:
            raise BatchFailed(
                f"{self._failed_samples} samples of this step failed, more than failures.max_failed_fraction allows "
                f"({budget:.0f}); reasons so far: {self._ledger.drop_reasons()}"
            )
