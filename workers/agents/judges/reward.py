"""The reward component `judge`: asks the questions, and reads the scores in the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from troupe.workers.agents.judges.arguments import Asked, read_args
from troupe.workers.agents.judges.cache import AnswerCache, question_key
from troupe.workers.agents.judges.endpoint import PACE, HttpJudge
from troupe.workers.agents.judges.scores import BASELINE, JudgeError
from troupe.workers.agents.judges.transcript import Baseline
from troupe.workers.contract.judges import Judge, JudgeAnswer, Question
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import CONSISTENCY
from troupe.workers.rewards.runner import RewardResult, Sample

_SHOWN = 200
"""Characters of an answer in a status."""
Points = Sequence[float] | RewardResult
"""Points of the responses of a question, in their order, or why there are none."""


class JudgeReward:
    """Scores of a judge, from 0 to 1. An outage, a spent budget and an answer without a score are statuses."""

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.config = config
        self._args = read_args(config.args)
        self._judge: Judge | None = None
        self._cache: AnswerCache | None = None
        self._baseline = Baseline("")
        self._budget = self._args.model_dump_json(
            exclude={"cache": True, "max_requests": True, "endpoint": PACE}, exclude_defaults=True
        )

    def start(self) -> None:
        """Open the cache and the endpoint, and read the baseline's answers. Raises JudgeError if the key of the
        endpoint is not set, and OSError if the cache or the baseline cannot be opened."""
        self._cache = AnswerCache(self._args.cache)
        self._baseline = Baseline(self._args.baseline)
        if self._args.endpoint is not None:
            self._judge = HttpJudge(self._args.endpoint, self._cache, logprobs=self._args.expected)

    def connect(self, judge: Judge) -> None:
        """Ask the role `judge` from now on, unless the arguments name an endpoint."""
        if self._args.endpoint is None:
            self._judge = judge

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One outcome for each sample of a group. Equal questions are asked once. Raises JudgeGone."""
        if self._judge is None or self._cache is None:
            return [_failed("no judge is connected")] * len(samples)
        asked, named = list(self._args.questions(samples, self._baseline)), self._judge.name
        keys = ["" if one.question is None else question_key(named, one.question) for one in asked]
        responses = {key: len(one.order) for key, one in zip(keys, asked, strict=True)}
        questions = {key: one.question for key, one in zip(keys, asked, strict=True) if one.question is not None}
        stored = self._cache.find(questions)
        known = {key: self._read(JudgeAnswer(text), responses[key]) for key, text in stored.items()}
        points = {key: one for key, one in known.items() if not isinstance(one, RewardResult)}
        answers = self._ask(self._judge, self._cache, {key: questions[key] for key in questions if key not in points})
        new = {key: self._read(answer, responses[key]) for key, answer in answers.items()}
        self._cache.add({key: answers[key].text for key, one in new.items() if not isinstance(one, RewardResult)})
        found = points | new
        read = [found[key] if key else _failed(one.problem) for key, one in zip(keys, asked, strict=True)]
        texts = stored | {key: answer.text for key, answer in answers.items()}
        reasons: list[list[str]] = [[] for _ in samples]
        for key, one in zip(keys, asked, strict=True):
            reasons[one.order[0]].append(self._args.reasons(texts[key]) if key else "")
        outcomes = zip(_outcomes(len(samples), asked, read), reasons, strict=True)
        return [replace(outcome, feedback="\n".join(filter(None, own))) for outcome, own in outcomes]

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _read(self, answer: JudgeAnswer, responses: int) -> Points:
        """The points of the responses of a question in its answer, or the failure if it has none."""
        if answer.failure:
            return _failed(answer.failure, answer.said[:_SHOWN])
        try:
            return self._args.points(answer.text, responses)
        except JudgeError as error:
            return _failed(str(error), answer.text[-_SHOWN:])

    def _ask(self, judge: Judge, cache: AnswerCache, questions: dict[str, Question]) -> dict[str, JudgeAnswer]:
        """Answers by key, as far as the budget reaches."""
        budget = self._args.max_requests
        left = len(questions) if budget is None else cache.take(self._budget, len(questions), budget)
        asked = dict(list(questions.items())[:left])
        answers = judge.ask(list(asked.values()), self.config.timeout_s) if asked else []
        spent = JudgeAnswer(failure=f"the budget of {budget} questions (max_requests) is used up")
        return dict.fromkeys(questions, spent) | dict(zip(asked, map(self._args.settled, answers), strict=True))


def _outcomes(samples: int, asked: Sequence[Asked], read: Sequence[Points]) -> list[RewardResult]:
    """The weighted mean of each sample's points, or the first failure if there is one. Of comparisons in both orders,
    also the share in which both say the same."""
    parts: list[list[tuple[float, float | RewardResult]]] = [[] for _ in range(samples)]
    agreed: list[list[bool]] = [[] for _ in range(samples)]
    by_order = {(one.order, one.part): points for one, points in zip(asked, read, strict=True)}
    for one, points in zip(asked, read, strict=True):
        other = by_order.get((one.order[::-1], one.part)) if len(one.order) == 2 else None
        for place, sample in enumerate(one.order):
            if sample == BASELINE:
                continue
            failed = isinstance(points, RewardResult)
            parts[sample].append((one.weight, points if failed else points[place]))
            if other is not None and not failed and not isinstance(other, RewardResult):
                agreed[sample].append(points[place] == other[1 - place])
    return [_outcome(*both) for both in zip(parts, agreed, strict=True)]


def _outcome(parts: Sequence[tuple[float, float | RewardResult]], agreed: Sequence[bool]) -> RewardResult:
    if not parts:
        return _failed("there is no other sample of its prompt to compare it with")
    total = 0.0
    for weight, points in parts:
        if isinstance(points, RewardResult):
            return points
        total += weight * points
    value = min(1.0, max(0.0, total / sum(max(0.0, weight) for weight, _ in parts)))
    return RewardResult(value, also={CONSISTENCY: fmean(agreed)} if agreed else {})


def _failed(reason: str, said: str = "") -> RewardResult:
    """A failure for a reason; what the judge `said` differs between failures of the same cause."""
    return RewardResult(None, f"judge: {reason}" + (f": {said!r}" if said else ""), cause=f"judge: {reason}")
