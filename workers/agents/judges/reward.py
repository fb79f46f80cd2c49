"""The reward component `judge`: asks the questions, and reads the scores in the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from troupe.workers.agents.judges.arguments import read_args
from troupe.workers.agents.judges.cache import AnswerCache, question_key
from troupe.workers.agents.judges.endpoint import HttpJudge
from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.contract.config import RewardFunctionConfig
from troupe.workers.contract.environments import Message
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
        self._budget = self._args.model_dump_json(exclude={"cache", "max_requests"})

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
        questions = dict[str, list[Message]]()
        parts = list[list[tuple[float, str]] | RewardResult]()
        for sample in samples:
            try:
                asked = self._args.questions(sample)
            except JudgeError as error:
                parts.append(_failed(str(error)))
                continue
            keys = [question_key(self._judge.name, question) for _, question in asked]
            questions |= {key: question for key, (_, question) in zip(keys, asked, strict=True)}
            parts.append([(weight, key) for key, (weight, _) in zip(keys, asked, strict=True)])
        known = {key: self._read(JudgeAnswer(text)) for key, text in self._cache.find(questions).items()}
        scores = {key: score for key, score in known.items() if isinstance(score, float)}
        answers = self._ask(self._judge, self._cache, {key: questions[key] for key in questions if key not in scores})
        new = {key: self._read(answer) for key, answer in answers.items()}
        self._cache.add({key: answers[key].text for key, score in new.items() if isinstance(score, float)})
        return [part if isinstance(part, RewardResult) else _outcome(part, scores | new) for part in parts]

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _read(self, answer: JudgeAnswer) -> float | RewardResult:
        """The score in an answer, from 0 to 1, or the failure if it has none."""
        if answer.failure:
            return _failed(answer.failure, answer.said[:_SHOWN])
        try:
            return self._args.reward(answer.text)
        except JudgeError as error:
            return _failed(str(error), answer.text[-_SHOWN:])

    def _ask(self, judge: Judge, cache: AnswerCache, questions: dict[str, list[Message]]) -> dict[str, JudgeAnswer]:
        """Answers by key, as far as the budget reaches."""
        budget = self._args.max_requests
        left = len(questions) if budget is None else cache.take(self._budget, len(questions), budget)
        asked = dict(list(questions.items())[:left])
        answers = judge.ask(list(asked.values()), self.config.timeout_s) if asked else []
        spent = JudgeAnswer(failure=f"the budget of {budget} questions (max_requests) is used up")
        return dict.fromkeys(questions, spent) | dict(zip(asked, answers, strict=True))


def _outcome(parts: Sequence[tuple[float, str]], scores: Mapping[str, float | RewardResult]) -> RewardResult:
    """The weighted mean of the scores with these keys, or the first failure if there is one."""
    total = 0.0
    for weight, key in parts:
        score = scores[key]
        if isinstance(score, RewardResult):
            return score
        total += weight * score
    return RewardResult(min(1.0, max(0.0, total / sum(max(0.0, weight) for weight, _ in parts))))


def _failed(reason: str, said: str = "") -> RewardResult:
    """A failure for a reason; what the judge `said` differs between failures of the same cause."""
    return RewardResult(None, f"judge: {reason}" + (f": {said!r}" if said else ""), cause=f"judge: {reason}")
