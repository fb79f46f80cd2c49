"""The reward component that a judge gives."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.workers.agents.judges.answer_cache import AnswerCache, question_key
from troupe.workers.agents.judges.http_judge import HttpJudge
from troupe.workers.agents.judges.rubric import JudgeError, read_args
from troupe.workers.contract.config import RewardFunctionConfig
from troupe.workers.contract.judges import Judge, JudgeAnswer
from troupe.workers.rewards.runner import RewardResult, Sample

_SHOWN = 200
"""Characters of an answer in a status."""


class JudgeReward:
    """Scores of a judge, from 0 to 1. An outage, a spent budget and an answer without a score are statuses."""

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.config = config
        self._args = read_args(config.args)
        self._judge: Judge | None = None
        self._cache: AnswerCache | None = None
        self._asked = 0

    def start(self) -> None:
        """Open the cache and the endpoint.

        Raises:
            JudgeError: the key of the endpoint is not set.
            OSError: the cache cannot be opened.
        """
        self._cache = AnswerCache(self._args.cache)
        if self._args.endpoint is not None:
            self._judge = HttpJudge(self._args.endpoint)

    def connect(self, judge: Judge) -> None:
        """Ask the role `judge` from now on, unless the arguments name an endpoint."""
        if self._args.endpoint is None:
            self._judge = judge

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One outcome per sample. Equal questions are asked once. Raises JudgeGone."""
        if self._judge is None or self._cache is None:
            return [_failed("no judge is connected")] * len(samples)
        conversations = [self._args.question(s.messages, s.response, s.answer, s.conversation) for s in samples]
        keys = [question_key(self._judge.name, conversation) for conversation in conversations]
        known = self._cache.find(keys)
        new = {key: question for key, question in zip(keys, conversations, strict=True) if key not in known}
        answers = {key: JudgeAnswer(text) for key, text in known.items()} | self._ask(self._judge, new)
        self._cache.add({key: answers[key].text for key in new if not answers[key].failure})
        return [self._outcome(answers[key]) for key in keys]

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _ask(self, judge: Judge, questions: dict[str, list[dict[str, object]]]) -> dict[str, JudgeAnswer]:
        """Answers by key, as far as the budget reaches."""
        budget = self._args.max_requests
        left = len(questions) if budget is None else max(0, budget - self._asked)
        asked = dict(list(questions.items())[:left])
        self._asked += len(asked)
        answers = judge.ask(list(asked.values()), self.config.timeout_s) if asked else []
        spent = JudgeAnswer(failure=f"the budget of {budget} questions of this worker is used up")
        return dict.fromkeys(questions, spent) | dict(zip(asked, answers, strict=True))

    def _outcome(self, answer: JudgeAnswer) -> RewardResult:
        if answer.failure:
            return _failed(answer.failure, answer.said[:_SHOWN])
        try:
            return RewardResult(self._args.reward(answer.text))
        except JudgeError as error:
            return _failed(str(error), answer.text[-_SHOWN:])


def _failed(reason: str, said: str = "") -> RewardResult:
    """A failure for a reason; what the judge `said` differs between failures of the same cause."""
    return RewardResult(None, f"judge: {reason}" + (f": {said!r}" if said else ""), cause=f"judge: {reason}")
