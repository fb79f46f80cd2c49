"""Lets workers call other workers, each side by its protocol; keeps Ray out of worker code.

A link is pickled to the worker that calls. The transfer of weights, episodes and judging need no controller so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from troupe.orchestrator.cluster.event_loop import within
from troupe.workers.contract.environments import EnvironmentGone, EpisodeReply, Message, Row, failed
from troupe.workers.contract.judges import JudgeAnswer, JudgeGone, Question
from troupe.workers.contract.messages import GroupRequest, ReferenceGone, ReferenceResponse, WeightAck, WorkerGone
from troupe.workers.contract.roles import EnvironmentServer, JudgeEngine, ReferenceSampler, RolloutEngine
from troupe.workers.contract.text import one_line


def submit(actor: Any, method: Callable[..., object], *args: object, **kwargs: object) -> Any:
    return getattr(actor, method.__name__).remote(*args, **kwargs)


class ActorEngines:
    """The `EngineLink` of a run, pickled to the trainer; the transfer group has all engines' processes in order."""

    def __init__(self, actors: Sequence[Any], ranks_per_engine: int, timeout_s: float) -> None:
        self._actors = tuple(actors)
        self._ranks = ranks_per_engine
        self._timeout_s = timeout_s

    @property
    def processes(self) -> int:
        """Number of engine processes in the transfer group."""
        return len(self._actors) * self._ranks

    def join(self, info: dict[str, Any]) -> None:
        first = info.get("first_rank", 0)
        infos = ({**info, "first_rank": first + number * self._ranks} for number in range(len(self._actors)))
        self._wait(
            submit(actor, RolloutEngine.transfer_init, own) for actor, own in zip(self._actors, infos, strict=True)
        )

    def start(self) -> None:
        self._wait(submit(actor, RolloutEngine.transfer_start) for actor in self._actors)

    def receive(self, info: dict[str, Any]) -> None:
        self._wait(submit(actor, RolloutEngine.transfer_receive, info) for actor in self._actors)

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        return self._wait(submit(actor, RolloutEngine.transfer_finish, version, digest) for actor in self._actors)

    def _wait(self, calls: Iterable[Any]) -> list[Any]:
        return ray.get(list(calls), timeout=self._timeout_s)


class ActorEnvironments:
    """The `EnvironmentLink` of a run. Pickled to every rollout worker, which counts its own episodes."""

    def __init__(self, actors: Mapping[str, Any], lost: str = "") -> None:
        """`lost`: why no worker will serve again, or empty if one can still start."""
        self._actors = dict(actors)
        self._open = dict.fromkeys(self._actors, 0)
        self._lost = lost

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        if not self._open:
            if self._lost:
                return "", failed(self._lost)
            raise EnvironmentGone("no environment worker is running")
        worker = min(self._open, key=self._open.__getitem__)
        self._open[worker] += 1
        try:
            return worker, await self._call(worker, EnvironmentServer.begin, timeout_s, episode, row)
        except BaseException:
            self.end(worker, episode)  # an abandoned call would still take an episode process
            raise

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        return await self._call(worker, EnvironmentServer.step, timeout_s, episode, message)

    def end(self, worker: str, episode: str) -> None:
        self._closed(worker)
        if worker in self._actors:
            submit(self._actors[worker], EnvironmentServer.end, episode)

    async def _call(self, worker: str, method: Callable[..., object], timeout_s: float, *args: Any) -> EpisodeReply:
        """The reply of a worker; one that has died gets no further episodes."""
        if worker not in self._actors:
            raise EnvironmentGone(f"{worker} is gone")
        try:
            reply = await within(timeout_s, submit(self._actors[worker], method, *args))
        except TimeoutError:
            reply = failed(f"{method.__name__}: {worker} did not answer in {timeout_s:g} s")
        except RayTaskError as error:
            if isinstance(error.cause, EnvironmentGone):
                raise EnvironmentGone(str(error.cause)) from None
            reply = failed(one_line(f"{method.__name__}: {worker}: {type(error.cause).__name__}: {error.cause}"))
        except RayActorError as error:
            self._actors.pop(worker, None)
            self._open.pop(worker, None)
            raise EnvironmentGone(f"{worker} is gone") from error
        if reply.observation.done:
            self._closed(worker)
        return reply

    def _closed(self, worker: str) -> None:
        if worker in self._open:
            self._open[worker] = max(0, self._open[worker] - 1)


class _ActorReplicas:
    """Workers with the same frozen model. Pickled to every worker that calls them."""

    def __init__(self, actors: Mapping[str, Any], lost: str = "") -> None:
        """`lost`: why no worker will serve again, or empty."""
        self._actors = dict(actors)
        self._open = Counter[str]()
        self._lost = lost

    async def _call(self, method: Callable[..., object], timeout_s: float, *args: Any) -> Any:
        """The answer of the least-loaded worker, of another one if it is lost, or None if none is left. Raises
        TimeoutError."""
        while self._actors:
            worker = min(self._actors, key=self._open.__getitem__)
            call = submit(self._actors[worker], method, *args)
            self._open[worker] += 1
            try:
                return await within(timeout_s, call)
            except TimeoutError:
                ray.cancel(call)
                raise TimeoutError(_silent(worker, timeout_s)) from None
            except (RayActorError, RayTaskError) as error:
                self._drop(worker, error)
            finally:
                self._open[worker] -= 1
        return None

    def _drop(self, worker: str, error: Exception) -> None:
        """Asks a worker no more whose process or engine has ended. Raises any other error."""
        if isinstance(error, RayTaskError) and not isinstance(error.cause, WorkerGone):
            raise error
        self._actors.pop(worker, None)


class ActorReferences(_ActorReplicas):
    """The `ReferenceLink` of a run with the role `reference_engine`."""

    def __init__(self, actors: Mapping[str, Any], timeout_s: float, lost: str = "") -> None:
        super().__init__(actors, lost)
        self._timeout_s = timeout_s

    async def complete(
        self, request: GroupRequest, prompt_ids: list[int], indices: Sequence[int]
    ) -> list[ReferenceResponse]:
        found = await self._call(ReferenceSampler.complete, self._timeout_s, request, prompt_ids, indices)
        if found is None:
            raise RuntimeError(self._lost) if self._lost else ReferenceGone("no engine of the reference is running")
        return found


class ActorJudges(_ActorReplicas):
    """The `JudgeLink` of a run with the role `judge`."""

    def __init__(self, name: str, actors: Mapping[str, Any], lost: str = "") -> None:
        """`name`: the model and its settings."""
        super().__init__(actors, lost)
        self.name = name

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question; a lost worker's go to others. Raises JudgeGone if a worker can still start."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, JudgeAnswer] = {}
        while len(answers) < len(questions):
            left = [place for place in range(len(questions)) if place not in answers]
            if not self._actors:
                if not self._lost:
                    raise JudgeGone("no judge worker is running")
                return [answers.get(place, JudgeAnswer(failure=self._lost)) for place in range(len(questions))]
            answers |= self._ask_all(questions, left, deadline, timeout_s)
        return [answers[place] for place in range(len(questions))]

    async def turn(self, question: Question, timeout_s: float) -> JudgeAnswer:
        try:
            answers = await self._call(JudgeEngine.answer, timeout_s, [question])
        except TimeoutError as error:
            return JudgeAnswer(failure=str(error))
        if answers is not None:
            return answers[0]
        if not self._lost:
            raise JudgeGone("no judge worker is running")
        return JudgeAnswer(failure=self._lost)

    def _ask_all(
        self, questions: Sequence[Question], places: Sequence[int], deadline: float, timeout_s: float
    ) -> dict[int, JudgeAnswer]:
        """Answers by place, without a lost worker's, which gets no further questions."""
        workers = list(self._actors)
        shares = {worker: places[number :: len(workers)] for number, worker in enumerate(workers)}
        calls = {
            worker: submit(self._actors[worker], JudgeEngine.answer, [questions[p] for p in share])
            for worker, share in shares.items()
            if share
        }
        answers: dict[int, JudgeAnswer] = {}
        for worker, call in calls.items():
            try:
                given = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                ray.cancel(call)
                given = [JudgeAnswer(failure=_silent(worker, timeout_s))] * len(shares[worker])
            except (RayActorError, RayTaskError) as error:
                self._drop(worker, error)
                continue
            answers |= dict(zip(shares[worker], given, strict=True))
        return answers


def _silent(worker: str, timeout_s: float) -> str:
    return f"{worker} did not answer in {timeout_s:g} s"
