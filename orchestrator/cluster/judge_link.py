"""Lets reward workers call judge workers; keeps Ray out of worker code."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import JudgeAnswer, JudgeGone
from troupe.workers.contract.messages import WorkerGone
from troupe.workers.contract.roles import JudgeEngine


class ActorJudges:
    """The `Judge` of a run with the role `judge`. Pickled to every reward worker."""

    def __init__(self, name: str, actors: Mapping[str, Any], lost: str = "") -> None:
        """`name`: the model and its settings; `lost`: why no worker will serve again, or empty."""
        self.name = name
        self._actors = dict(actors)
        self._lost = lost

    def ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question. The workers share the questions; a lost worker's go to the others.

        Raises:
            JudgeGone: There is no worker, and one can still start.
        """
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

    def _ask_all(
        self, questions: Sequence[list[Message]], places: Sequence[int], deadline: float, timeout_s: float
    ) -> dict[int, JudgeAnswer]:
        """Answers by place, without a lost worker's, which gets no further questions."""
        workers = list(self._actors)
        shares = {worker: places[number :: len(workers)] for number, worker in enumerate(workers)}
        calls = {
            worker: getattr(self._actors[worker], JudgeEngine.answer.__name__).remote([questions[p] for p in share])
            for worker, share in shares.items()
            if share
        }
        answers: dict[int, JudgeAnswer] = {}
        for worker, call in calls.items():
            try:
                given = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                ray.cancel(call)
                given = [JudgeAnswer(failure=f"{worker} did not answer in {timeout_s:g} s")] * len(shares[worker])
            except (RayActorError, RayTaskError) as error:
                if isinstance(error, RayTaskError) and not isinstance(error.cause, WorkerGone):
                    raise
                self._actors.pop(worker)  # its process or its engine has ended
                continue
            answers |= dict(zip(shares[worker], given, strict=True))
        return answers
