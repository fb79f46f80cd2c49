"""Endpoints: limits by the minute that all workers share, several answers, and scores expected by log-probs."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tests.workers.agents.judges.judge_endpoint import endpoint, error
from tests.workers.agents.judges.test_judges import judge, sample, statuses
from troupe.workers.agents.judges.cache import AnswerCache
from troupe.workers.agents.judges.scores import JudgeError, expected_score
from troupe.workers.contract.judges import AnswerToken, JudgeAnswer
from troupe.workers.engine.rows import answer_tokens


def answered(text: str, tokens: int = 0, logprobs: list[dict[str, Any]] | None = None) -> web.Response:
    choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": logprobs or []}}
    return web.json_response({"choices": [choice], "usage": {"total_tokens": tokens}})


def test_requests_of_a_minute_are_those_of_all_workers_and_of_runs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than four requests in a minute (of half a second), of two workers at once and of one that is later."""
    monkeypatch.setattr("troupe.workers.agents.judges.cache._MINUTE_S", 0.5)
    begin, before, after = AnswerCache.begin, list[float](), list[float]()

    def noted(cache: AnswerCache, *args: Any) -> tuple[int, float]:
        started = time.time()
        number, wait_s = begin(cache, *args)
        if number:
            before.append(started)
            after.append(time.time())
        return number, wait_s

    monkeypatch.setattr(AnswerCache, "begin", noted)
    with endpoint(lambda number, body: "Score: 5") as served:
        asked = {"url": served.url, "model": "m", "requests_per_minute": 4}
        workers = [judge(60.0, endpoint=asked, cache=str(tmp_path / "answers")) for _ in range(2)]
        groups = [[sample(f"{name}{number}") for number in range(4)] for name in "ab"]
        jobs = [threading.Thread(target=one.score, args=(group,)) for one, group in zip(workers, groups, strict=True)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        later = judge(60.0, endpoint=asked, cache=str(tmp_path / "answers"))
        assert statuses(later.score([sample(text) for text in "xy"])) == ["ok"] * 2
    before, after = sorted(before), sorted(after)
    assert len(before) == 10 and all(after[place + 4] - before[place] >= 0.5 for place in range(6))


def test_a_question_that_waits_too_long_says_for_what(tmp_path: Path) -> None:
    with endpoint(lambda number, body: "Score: 5") as served:
        asked = {"url": served.url, "model": "m", "requests_per_minute": 1}
        limited = judge(0.5, endpoint=asked, cache=str(tmp_path / "answers"))
        first, second = limited.score([sample("a"), sample("b")])
    assert first.status == "ok"
    assert second.status == "judge: timeout after 0.5 s, waiting for requests_per_minute or tokens_per_minute"


def test_a_request_that_is_repeated_counts_each_time(tmp_path: Path) -> None:
    with endpoint(lambda number, body: error(500) if number < 3 else "Score: 5") as served:
        asked = {"url": served.url, "model": "m", "requests_per_minute": 2, "retries": 4}
        limited = judge(4.0, endpoint=asked, cache=str(tmp_path / "answers"))
        (outcome,) = limited.score([sample("a")])
    assert "waiting for requests_per_minute" in outcome.status and len(served.bodies) == 2


def test_tokens_of_a_minute_are_those_that_answers_say(tmp_path: Path) -> None:
    with endpoint(lambda number, body: answered("Score: 5", tokens=900)) as served:
        asked = {"url": served.url, "model": "m", "tokens_per_minute": 1800, "concurrency": 1, "max_tokens": 9}
        limited = judge(1.5, endpoint=asked, cache=str(tmp_path / "answers"))
        outcomes = limited.score([sample(text) for text in "abc"])
    assert [outcome.status.partition(" s, ")[2] for outcome in outcomes] == [
        *["", ""],
        "waiting for requests_per_minute or tokens_per_minute",
    ]


def test_a_request_larger_than_the_limit_goes_alone() -> None:
    cache = AnswerCache()
    number, wait_s = cache.begin("m", 500, (None, 100))
    assert number and not wait_s
    assert cache.begin("m", 1, (None, 100))[1] > 59, "the minute is full"
    assert cache.begin("other", 1, (None, 100))[0], "another model has its own"
    cache.end(number, 20)
    assert cache.begin("m", 80, (None, 100))[0] and cache.begin("m", 1, (None, 100))[1] > 59


def test_several_answers_count_by_their_mean() -> None:
    with endpoint(lambda number, body: f"Score: {number}") as served:
        asked = {"url": served.url, "model": "m", "temperature": 1.0, "concurrency": 1}
        (outcome,) = judge(endpoint=asked, answers=4).score([sample("a")])
    assert outcome.value == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4) and len(served.bodies) == 4


def token(text: str, **shares: float) -> dict[str, Any]:
    """A token with others in its place; names begin with an underscore for a digit."""
    others = [{"token": name.lstrip("_"), "logprob": math.log(share)} for name, share in shares.items()]
    return {"token": text, "logprob": others[0]["logprob"] if others else 0.0, "top_logprobs": others}


def test_the_score_is_expected_by_the_log_probs_of_its_token(tmp_path: Path) -> None:
    told = [token("Out of 5"), token("Score"), token(": "), token("4", _4=0.5, _5=0.25, _2=0.05, four=0.1, _9=0.1)]
    with endpoint(lambda number, body: answered("Out of 5\nScore: 4", logprobs=told)) as served:
        asked = {"url": served.url, "model": "m"}
        args: dict[str, Any] = {"scale": [1, 5], "expected": True, "cache": str(tmp_path / "answers")}
        mean = (0.5 * 4 + 0.25 * 5 + 0.05 * 2) / 0.8
        for _ in range(2):
            (outcome,) = judge(endpoint=asked, **args).score([sample("a")])
            assert outcome.value == pytest.approx((mean - 1) / 4, abs=1e-6)
    assert len(served.bodies) == 1, "the second one is from the cache"
    assert served.bodies[0]["logprobs"] is True and served.bodies[0]["top_logprobs"] == 20


def test_an_answer_without_log_probs_has_no_expected_score() -> None:
    with endpoint(lambda number, body: "Score: 4") as served:
        asked = {"url": served.url, "model": "m"}
        (outcome,) = judge(endpoint=asked, scale=[1, 5], expected=True).score([sample("a")])
    assert outcome.status == "judge: no log-probs of a score in its answer: 'Score: 4'"


def test_tokens_of_the_roles_engine_with_the_same_text_count_together() -> None:
    """Two ids are a 4, with and without the space that their tokenizer drops; the sampled one is also in its place."""
    texts = {1: "Score:", 2: "4", 3: "4", 4: "5"}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: texts[ids[0]])
    shares = [1.0, 0.25, 0.25, 0.25, 0.5]
    flat: Any = SimpleNamespace(
        start_indices=[0, 1],
        end_indices=[1, 5],
        token_ids=[1, 2, 2, 3, 4],
        logprobs=[math.log(share) for share in shares],
    )
    tokens = answer_tokens(flat, tokenizer)
    assert [token.text for token in tokens] == ["Score:", "4"]
    assert {text: math.exp(value) for text, value in tokens[1].logprobs.items()} == pytest.approx({"4": 0.5, "5": 0.5})
    assert expected_score(JudgeAnswer("Score:4", tokens=tokens), 1, 5) == pytest.approx(4.5)


def test_the_token_that_decides_the_score_is_found() -> None:
    def answer(*texts: str) -> JudgeAnswer:
        tokens = tuple(AnswerToken(text, {"1": math.log(0.5), "3": math.log(0.5)}) for text in texts)
        return JudgeAnswer("".join(texts), tokens=tokens)

    for texts in (("Score: ", "3"), ("Score: 9 of 9? Score: ", "3", "\n", "2", " typos"), ("[[", "3", "]] ", "7", "!")):
        assert expected_score(answer(*texts), 1, 3) == 2.0
    with pytest.raises(JudgeError, match="no log-probs of a score"):
        expected_score(answer("3", " typos"), 1, 3)
