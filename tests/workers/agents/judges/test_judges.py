"""Judges: what they are asked, how their scores are read, and what happens when they do not answer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.agents.judges.judge_endpoint import endpoint, error
from troupe.workers.agents.judges.arguments import JudgeArgs, read_args
from troupe.workers.agents.judges.cache import AnswerCache
from troupe.workers.agents.judges.endpoint import HttpJudge, HttpJudgeConfig, read_completion
from troupe.workers.agents.judges.reward import JudgeReward
from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.agents.judges.transcript import Baseline
from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import JudgeAnswer, Question
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.judge import _read
from troupe.workers.rewards.loading import find_problems
from troupe.workers.rewards.runner import RewardResult, Sample

RUBRIC = "Is it polite?"


def sample(response: str, answer: str = "") -> Sample:
    messages = json.dumps([{"role": "user", "content": "Greet me."}])
    return Sample(response, answer, "{}", 3, "stop", messages)


def asked(args: JudgeArgs, sample: Sample) -> list[Message]:
    (one,) = args.questions([sample], Baseline(""))
    assert one.weight == 1.0 and one.question is not None
    return one.question.messages


def judge(timeout_s: float = 10.0, **args: Any) -> JudgeReward:
    reward = JudgeReward(RewardFunctionConfig(name="judge", args={"rubric": RUBRIC, **args}, timeout_s=timeout_s))
    reward.start()
    return reward


def statuses(outcomes: Sequence[RewardResult]) -> list[str]:
    return [outcome.status for outcome in outcomes]


class Scripted:
    """A judge that gives the answers of a table, and counts the questions."""

    name = "scripted"

    def __init__(self, **answers: str) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        texts = [
            re.split(r"<response(?:_1)?>\n", question.messages[-1]["content"])[1].split("\n")[0]
            for question in questions
        ]
        self.asked += texts
        return [JudgeAnswer(self._answers[t]) if t in self._answers else JudgeAnswer(failure="lost") for t in texts]


SAID = {
    "It is rude.\nScore: 3": "It is rude.",
    "<think>Hm, score: 9</think>\n**Score: 4/10**\n\nIt is short, and kind.": "It is short, and kind.",
    "A rating is due: [[7]]\n- polite\n- too long": "A rating is due:\n- polite\n- too long",
    "Score: 5": "",
}
"""Answers of a judge, and the reasons in them."""


@pytest.mark.parametrize("answer", SAID)
def test_the_reasons_of_a_judge_are_its_answer_without_the_score(answer: str) -> None:
    reward = judge()
    reward.connect(Scripted(Hi=answer))
    (first,), (again,) = reward.score([sample("Hi")]), reward.score([sample("Hi")])
    assert first.feedback == again.feedback == SAID[answer] and first.value == again.value is not None


def test_reasons_are_bounded_and_those_of_several_answers_follow_each_other() -> None:
    reward = judge(criteria=[{"criterion": "kind"}, {"criterion": "short"}])
    reward.connect(Scripted(Hi="no " * 1500 + "\nScore: 0"))
    (outcome,) = reward.score([sample("Hi")])
    one = "no " * 666 + "no\n[... 2,499 characters cut]"
    assert outcome.feedback == f"{one}\n{one}"


def test_comparisons_give_no_reasons_and_failures_neither() -> None:
    group = judge(compare="group")
    group.connect(Scripted(Hi="Response 1 is better than 2.\nScore 1: 9\nScore 2: 3"))
    outcomes = group.score([sample("Hi"), sample("Ho")])
    assert [(outcome.value, outcome.feedback) for outcome in outcomes] == [(0.9, ""), (0.3, "")]
    lost = judge()
    lost.connect(Scripted(Hi="no score here"))
    assert [outcome.value for outcome in lost.score([sample("Hi"), sample("Ho")])] == [None, None]


def test_the_question_has_the_rubric_the_task_and_the_response() -> None:
    system, user = asked(read_args({"rubric": f" {RUBRIC} ", "scale": [1, 5]}), sample("Hello {you}."))
    assert (
        system["content"] == "Is it polite?\n\nEnd your answer with a line `Score: N`, where N is a number from 1 to 5."
    )
    assert user["content"] == "<task>\nGreet me.\n</task>\n\n<response>\nHello {you}.\n</response>"
    _, user = asked(read_args({"rubric": RUBRIC}), sample("Hello.", answer="Hi!"))
    assert user["content"].endswith("<reference_answer>\nHi!\n</reference_answer>")
    _, user = asked(read_args({"rubric": RUBRIC, "template": "{{{response}}} to {prompt}"}), sample("Hi"))
    assert user["content"] == "{Hi} to Greet me."


def test_an_episode_is_shown_turn_by_turn() -> None:
    said = [("user", "Greet me."), ("assistant", "Hm."), ("user", "Again."), ("assistant", "Hello.")]
    conversation = json.dumps([{"role": role, "content": text} for role, text in said])
    messages = json.dumps([{"role": "user", "content": "Greet me."}])
    played = Sample("Hello.", "", "{}", 3, "stop", messages, conversation)
    _, user = asked(read_args({"rubric": RUBRIC, "template": "{response}"}), played)
    assert user["content"] == "assistant: Hm.\n\nuser: Again.\n\nassistant: Hello."


_EXAMPLES = [("user", "Greet Bo."), ("assistant", "Hm."), ("user", "Greet me.")]
_PLAYED = [("assistant", "Hm."), ("user", "Greet me."), ("assistant", "Hello.")]
SHOWN: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]] = {
    "a system message before the prompt": (
        [("user", "Greet me.")],
        [("system", "You have tools."), ("user", "Greet me.")],
        [("system", "You have tools.")],
    ),
    "other messages than the row": (
        [("system", "Be kind."), ("user", "Greet me.")],
        [("user", "Guess a number.")],
        [("user", "Guess a number.")],
    ),
    "no message at all": ([("user", "Greet me.")], [], []),
    "a part of the row": ([("system", "Be kind."), ("user", "Greet me.")], [("user", "Greet me.")], []),
    "examples in the row": (
        [("user", "Greet Bo."), ("assistant", "Hi Bo."), ("user", "Greet me.")],
        [("user", "Greet Bo."), ("assistant", "Hi Bo."), ("user", "Greet me.")],
        [],
    ),
    "examples in the row, with the policy's answer": (_EXAMPLES, _EXAMPLES, []),
    "examples in the row that the environment does not show": (_EXAMPLES, [("user", "Greet me.")], []),
    "examples in the row, and a question in other words": (
        _EXAMPLES,
        [("user", "Please: Greet me.")],
        [("user", "Please: Greet me.")],
    ),
    "examples in the row, and another question": (_EXAMPLES, [("user", "Greet Bo!")], [("user", "Greet Bo!")]),
    "examples in the row, of which it shows the first question": (_EXAMPLES[:2] * 2, [("user", "Greet Bo.")], []),
    "a question that is trimmed": ([("user", "Greet me.\n")], [("user", "Greet me.")], []),
    "an observation behind the prompt": (
        [("user", "Greet me.")],
        [("user", "Greet me.\n\nThe door is shut.")],
        [("user", "The door is shut.")],
    ),
}
"""Prompt of the row, what the environment shows at first, and what of it the judge reads as turns."""


@pytest.mark.parametrize("case", SHOWN)
def test_every_turn_of_an_episode_is_shown_once(case: str) -> None:
    def messages(said: Sequence[tuple[str, str]]) -> str:
        return json.dumps([{"role": role, "content": text} for role, text in said])

    prompt, shown, read = SHOWN[case]
    played = Sample("Hello.", "", "{}", 3, "stop", messages(prompt), messages([*shown, *_PLAYED]))
    _, user = asked(read_args({"rubric": RUBRIC, "template": "{response}"}), played)
    assert user["content"] == "\n\n".join(f"{role}: {text}" for role, text in [*read, *_PLAYED])


def test_calls_of_tools_are_shown() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    played = Sample("", "", "{}", 3, "stop", "[]", json.dumps(turns))
    _, user = asked(read_args({"rubric": RUBRIC, "template": "{response}"}), played)
    assert user["content"] == 'assistant: [calls add with {"a": 5}]\n\ntool: 5'


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Score: 10", 1.0),
        ("Quite polite.\nScore: 7.5", 0.75),
        ("Score: 2 at first.\n**Score:** 4", 0.4),
        ("final score = 0", 0.0),
        ("SCORE: `3`/10", 0.3),
        ("Score: 7 out of 10", 0.7),
        ("Score：８", 0.8),
        ("Score: 7,5", 0.75),
        ("Score: 7\n- 2 mistakes\n100% polite", 0.7),
        ("<think>Score: 2?</think>\nScore: 9", 0.9),
        ("Score: **8**/**10**.", 0.8),
        ("Score: 8 (out of 10)", 0.8),
        ("Score: 8 of 10, with care", 0.8),
        ("Score: 8 points out of 10. 2 are missing.", 0.8),
        ("Score: 8 (7 for style, 9 for content)", 0.8),
        ("Score: 8 — good, 2 typos", 0.8),
        ("Score: 8th or so, 10 is best", 0.8),
        ("Score: 10" + "." * 10_000, 1.0),
        ("Score: 6 or better\n7 was possible", 0.6),
        ("Rating: 7", 0.7),
        ("**Rating:** 7/10", 0.7),
        ("<rating> 7 </rating>", 0.7),
        ("Good, 2 typos.\n[[7]]", 0.7),
        ("[[7/10]] 3 typos", 0.7),
        (r"So \boxed{7}", 0.7),
        ("<score>7</score>\n9 words", 0.7),
        ("<score>7.5/10</score>", 0.75),
        ("The score is 7.", 0.7),
        ("The score is **7**", 0.7),
        ('{"reason": "2 typos", "score": 7}', 0.7),
        ("Score: 3\nIts answer is [[7]]", 0.3),
        (r"Rating: 3, for its answer \boxed{7}", 0.3),
        ("The score is 2 if it is rude.\n<score>7</score>", 0.7),
    ],
)
def test_the_last_score_counts(answer: str, reward: float) -> None:
    assert JudgeArgs(rubric=RUBRIC).points(answer)[0] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("It is fine.", "no score"),
        ("Score: 11", "a score of 11 is not on the scale from 0 to 10"),
        ("Score: -1", "-1"),
        ("Score: 3/5", "a score of 3/5 is not on the scale from 0 to 10"),
        ("Score: **3** / 100", "is not on the scale"),
        ("Score: 7%", "a score of 7% is not on the scale"),
        ("Score: 5-7", "a score of 5-7 is not on the scale"),
        ("Score: 5 to 7", "a score of 5 to 7 is not on the scale"),
        ("Score: 1,000", "a score of 1,000 is not on the scale"),
        ("<think>Perhaps Score: 2", "no score"),
        ("[[7-8]]", "no score"),
        ("<score>7 or 8</score>", "no score"),
        (r"\boxed{\frac{7}{2}}", "no score"),
        ("The score is 7 or 8.", "a score of 7 or 8 is not on the scale"),
        ("Rating: 7-8", "a score of 7-8 is not on the scale"),
        ("[[11]]", "a score of 11 is not on the scale"),
        ("[[7/100]]", "a score of 7/100 is not on the scale"),
        ("The score is high: 7 of 10 words", "no score"),
        ("It is overrating: 7", "no score"),
        ("[7]", "no score"),
    ],
)
def test_an_answer_without_a_score_on_the_scale_is_none(answer: str, problem: str) -> None:
    with pytest.raises(JudgeError, match=problem):
        JudgeArgs(rubric=RUBRIC).points(answer)


RANGES = ("7–8", "7 – 8", "7 — 8", "7 - 8", "7~8", "7 ~ 8", "7...8", "7 … 8", "7->8", "7, 8", "7; 8", "7/10 - 8/10")
IN_WORDS = (
    "7 or 8",
    "7 to 8",
    "7 and 8",
    "7 or maybe 8",
    "7** or **8**",
    "7/10 or 8",
    "4 (out of 5)",
    "8 of 12 points",
)
CALCULATIONS = ("0.5*4 + 0.5*6 = 5", "3 + 4 = 7", "9½", "8 ½", "8 1/2", "2²", "3e0", "1e+1", "7.5.2")


@pytest.mark.parametrize("written", [*RANGES, *IN_WORDS, *CALCULATIONS])
def test_a_number_that_is_not_the_whole_score_is_none(written: str) -> None:
    """Its first number would be a wrong score that nobody sees."""
    with pytest.raises(JudgeError, match=rf"a score of {re.escape(written[0])}.+ is not on the scale from 0 to 10"):
        JudgeArgs(rubric=RUBRIC).points(f"Score: {written}")


@pytest.mark.parametrize(
    ("text", "left"), [("It is.\nScore: 1", "It is.\nScore: "), ("Score: 10 ", "Score: 10 "), ("1", "")]
)
def test_the_last_word_of_an_answer_that_was_cut_is_left_out(text: str, left: str) -> None:
    """Of `Score: 10` the cut may have left `Score: 1`."""
    choice = {"message": {"content": text}, "finish_reason": "length"}
    assert read_completion(json.dumps({"choices": [choice]}).encode())[0].text == left
    assert read_completion(json.dumps({"choices": [choice | {"finish_reason": "stop"}]}).encode())[0].text == text
    assert _read(text, "length", opens_thought=False).text == left
    assert _read(text, "stop", opens_thought=False).text == text


def test_a_thought_of_a_judge_is_no_answer() -> None:
    assert _read("Score: 1?</think>Score: 7", "stop", opens_thought=True).text == "Score: 7"
    cut = _read("Score: 1? Score: 2?", "length", opens_thought=True)
    assert (cut.text, cut.failure) == ("", "an answer that is a thought only")


@given(low=st.integers(-20, 20), width=st.integers(1, 40), place=st.floats(0, 1))
def test_a_reward_is_the_position_on_the_scale(low: int, width: int, place: float) -> None:
    score = round(low + place * width, 6)
    args = JudgeArgs(rubric=RUBRIC, scale=(low, low + width))
    assert args.points(f"Score: {score:.6f}")[0] == pytest.approx((score - low) / width)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "judge: rubric: Field required"),
        ({"rubric": "  "}, "judge: rubric: is empty"),
        ({"rubric": RUBRIC, "scale": [5, 5]}, "judge: scale: the lowest score must come first, got (5.0, 5.0)"),
        ({"rubric": RUBRIC, "template": "{answer}"}, "judge: template: needs {response}"),
        (
            {"rubric": RUBRIC, "template": "{a.b}"},
            "judge: template: has no field {a.b}; it can have prompt, response, ",
        ),
        ({"rubric": RUBRIC, "template": "{}"}, "judge: template: has no field {}; it can have prompt, response, "),
        ({"rubric": RUBRIC, "template": "{response:d}"}, "judge: template: cannot be filled in: Unknown format code"),
        ({"rubric": RUBRIC, "template": "{response} {0}"}, "judge: template: cannot be filled in: Format string"),
        ({"rubric": RUBRIC, "template": "{response:{n}}"}, "judge: template: cannot be filled in: 'n'"),
        (
            {"rubric": RUBRIC, "criteria": [{"weight": 1}]},
            "judge: criteria.tuple[Criterion, ...].0.criterion: Field",
        ),
        ({"rubric": RUBRIC, "criteria": [{"text": "a", "weight": -1}]}, "judge: criteria: no weight is above 0"),
        (
            {"rubric": RUBRIC, "endpoint": {"url": "http://x", "model": "m", "headers": {"X-Api-Key": "abc"}}},
            "judge: endpoint.headers: holds credentials",
        ),
        (
            {"rubric": RUBRIC, "endpoint": {"url": "http://x", "model": "m", "body": {"temperature": 1}}},
            "judge: endpoint.body: temperature is decided elsewhere",
        ),
        ({"rubric": RUBRIC, "endpoint": {"url": "http://x"}}, "judge: endpoint.model: Field required"),
        (
            {"rubric": RUBRIC, "endpoint": {"url": "https://me:pass@host/v1", "model": "m"}},
            "judge: endpoint.url: holds credentials",
        ),
        (
            {"rubric": RUBRIC, "endpoint": {"url": "https://host/v1?api-key=x", "model": "m"}},
            "judge: endpoint.url: holds credentials",
        ),
        ({"rubrik": RUBRIC}, "judge: rubric: Field required"),
    ],
)
def test_wrong_arguments_are_found_before_the_run(args: dict[str, Any], problem: str) -> None:
    ((field, found),) = find_problems([{"name": "judge", "args": args}])
    assert field == "args" and found.startswith(problem), found


def test_equal_questions_are_asked_once_and_answers_are_kept(tmp_path: Path) -> None:
    file = str(tmp_path / "answers.sqlite")
    first, asked = judge(cache=file), Scripted(a="Score: 5", b="Score: 10")
    first.connect(asked)
    assert first.score([sample(text) for text in "abba"]) == [
        RewardResult(0.5),
        RewardResult(1.0),
        RewardResult(1.0),
        RewardResult(0.5),
    ]
    assert asked.asked == ["a", "b"]
    first.close()
    again, silent = judge(cache=file), Scripted()
    again.connect(silent)
    assert [outcome.value for outcome in again.score([sample("b"), sample("c")])] == [1.0, None]
    assert silent.asked == ["c"], "a failure is not kept, and an answer is not asked for again"
    other = judge(cache=file, rubric="Is it short?")
    other.connect(silent)
    assert statuses(other.score([sample("b")])) == ["judge: lost"], "another rubric is another question"


def test_a_spent_budget_is_a_status(tmp_path: Path) -> None:
    reward = judge(max_requests=3, cache=str(tmp_path / "answers"))
    asked = Scripted(a="Score: 1", b="Score: 2", c="no", d="Score: 4")
    reward.connect(asked)
    assert statuses(reward.score([sample("a"), sample("b")])) == ["ok", "ok"]
    third, fourth = statuses(reward.score([sample("c"), sample("d")]))
    assert third == "judge: no score in its answer: 'no'"
    assert fourth == "judge: the budget of 3 questions (max_requests) is used up"
    assert statuses(reward.score([sample("a")])) == ["ok"], "a known answer costs nothing"


def test_a_budget_is_that_of_all_workers_and_runs_with_one_cache(tmp_path: Path) -> None:
    args: dict[str, Any] = {"cache": str(tmp_path / "answers.sqlite")}
    asked = Scripted(**dict.fromkeys("abcdef", "Score: 1"))
    spent = "judge: the budget of 3 questions (max_requests) is used up"
    for texts, expected in ("ab", ["ok", "ok"]), ("cd", ["ok", spent]):
        worker = judge(**args, max_requests=3)
        worker.connect(asked)
        assert statuses(worker.score([sample(text) for text in texts])) == expected
    other = judge(**args, max_requests=3, rubric="Is it short?")
    other.connect(asked)
    assert statuses(other.score([sample("d")])) == ["ok"], "another judge has its own budget"
    more = judge(**args, max_requests=4)
    more.connect(asked)
    assert statuses(more.score([sample("e")])) == ["ok"], "it continues with a larger budget"


def test_an_answer_without_a_score_is_asked_for_again(tmp_path: Path) -> None:
    file = str(tmp_path / "answers.sqlite")
    first, second = judge(cache=file), judge(cache=file)
    first.connect(Scripted(a="no"))
    second.connect(again := Scripted(a="Score: 5"))
    assert statuses(first.score([sample("a")])) == ["judge: no score in its answer: 'no'"]
    assert AnswerCache(file)._database.execute("SELECT answer FROM answers").fetchall() == []
    assert second.score([sample("a")]) == [RewardResult(0.5)] and again.asked == ["a"]
    assert first.score([sample("a")]) == [RewardResult(0.5)], "from the file"


def rubric(response: str, **columns: Any) -> Sample:
    return Sample(response, "", json.dumps(columns), 3, "stop", json.dumps([{"role": "user", "content": "Greet me."}]))


def test_a_template_has_the_columns_of_the_row() -> None:
    args = read_args({"rubric": RUBRIC, "template": "{response} by {criteria} of {level}"})
    _, user = asked(args, rubric("Hi", criteria=["short", "kind"], level="2"))
    assert user["content"] == 'Hi by ["short", "kind"] of 2'
    reward = judge(template="{response} by {criteria}")
    reward.connect(Scripted())
    assert statuses(reward.score([rubric("Hi", level=2)])) == ["judge: the row has no column criteria for the template"]


class Criteria(Scripted):
    """Scores each criterion by its text."""

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        texts = [question.messages[0]["content"].split("Criterion: ")[1].split("\n")[0] for question in questions]
        self.asked += texts
        return [JudgeAnswer(self._answers[text]) for text in texts]


SCORES = {"kind": "Score: 10", "short": "Score: 5", "rude": "Score: 2", "vague": "hm"}


@pytest.mark.parametrize(
    ("criteria", "reward"),
    [
        ([{"criterion": "kind"}, {"criterion": "short"}], 0.75),
        ([{"criterion": "kind", "weight": 3}, {"criterion": "short"}], 0.875),
        ([{"description": "kind", "weight": 1}, {"description": "rude", "weight": -1}], 0.8),
        ([{"text": "short", "points": 5}, {"text": "rude", "points": -20, "tags": ["x"]}], 0.0),
        ('[{"criterion": "short"}]', 0.5),
    ],
)
def test_criteria_of_a_row_are_asked_one_by_one_and_weighted(criteria: Any, reward: float) -> None:
    judged, asked = judge(criteria="rubrics"), Criteria(**SCORES)
    judged.connect(asked)
    (result,) = judged.score([rubric("Hi", rubrics=criteria)])
    assert result.value == pytest.approx(reward)
    assert len(asked.asked) == str(criteria).count("{")


def test_criteria_of_the_arguments_hold_for_all_rows_and_one_failure_is_the_samples() -> None:
    judged, asked = judge(criteria=[{"criterion": "kind"}, {"criterion": "vague", "weight": 0.1}]), Criteria(**SCORES)
    judged.connect(asked)
    assert statuses(judged.score([rubric("Hi")])) == ["judge: no score in its answer: 'hm'"]
    lacking = judge(criteria="rubrics")
    lacking.connect(asked)
    rows = [
        rubric("Hi"),
        rubric("Hi", rubrics=[]),
        rubric("Hi", rubrics="x"),
        rubric("Hi", rubrics=[{"criterion": "kind"}]),
    ]
    none, empty, text, sound = lacking.score(rows)
    assert none.status.startswith("judge: the row's column rubrics has no criteria: ")
    assert empty.status == "judge: the row's column rubrics has no criterion with a weight above 0"
    assert text.status.startswith("judge: the row's column rubrics has no criteria: ")
    assert sound == RewardResult(1.0), "the others lose nothing"


def test_an_endpoint_gets_further_fields_and_headers_and_lacks_what_is_null() -> None:
    with endpoint(lambda number, body: "Score: 8") as served:
        asked: dict[str, Any] = {"url": served.url, "model": "m", "temperature": None, "max_tokens": None}
        asked |= {
            "body": {"max_completion_tokens": 9, "response_format": {"type": "json_object"}},
            "headers": {"X-A": "b"},
        }
        assert judge(endpoint=asked).score([sample("a")]) == [RewardResult(0.8)]
    (body,) = served.bodies
    assert body.keys() == {"model", "messages", "max_completion_tokens", "response_format"}
    assert served.headers[0]["X-A"] == "b"
    one, other = (HttpJudge(HttpJudgeConfig.model_validate(asked | {"body": body})) for body in ({}, {"top_p": 0.5}))
    elsewhere = HttpJudge(HttpJudgeConfig.model_validate(asked | {"body": {}, "headers": {"X-A": "c"}}))
    assert len({one.name, other.name, elsewhere.name}) == 3, "the cache tells their answers apart"


def test_a_wait_that_is_longer_than_the_bound_is_said() -> None:
    def script(number: int, body: dict[str, Any]) -> Any:
        return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": waits})

    refused, late = "judge: RateLimitError: Error code: 429", "judge: timeout after 5 s"
    for waits, timeout_s, status in ("3600", 60.0, refused), ("30", 5.0, late):
        with endpoint(script) as served:
            asked = {"url": served.url, "model": "m", "retries": 4}
            (outcome,) = judge(timeout_s, endpoint=asked).score([sample("a")])
        assert outcome.status.startswith(status) and outcome.status.endswith(f": 'Retry-After: {waits}'")
        assert outcome.cause.startswith(status) and waits not in outcome.cause and len(served.bodies) == 1


class Lost(web.Response):
    """An answer whose connection ends within its body."""

    async def prepare(self, request: web.BaseRequest) -> Any:
        prepared = await super().prepare(request)
        await super().write(b'{"choices": [')
        assert request.transport is not None
        request.transport.close()
        return prepared


def test_an_answer_that_is_lost_on_its_way_is_asked_for_again() -> None:
    with endpoint(lambda number, body: Lost(headers={"Content-Length": "500"}) if number < 3 else "Score: 5") as served:
        asked = {"url": served.url, "model": "m"}
        patient, impatient = (judge(endpoint=asked | {"retries": retries}) for retries in (2, 0))
        assert patient.score([sample("a")]) == [RewardResult(0.5)] and len(served.bodies) == 3
        served.bodies.clear()
        (status,) = statuses(impatient.score([sample("a")]))
    assert status.startswith("judge: RemoteProtocolError: ") and len(served.bodies) == 1


def test_the_body_of_an_answer_is_bounded() -> None:
    large = completion({"content": "Score: 5" + " " * 2**21})
    with endpoint(lambda number, body: web.Response(body=large, content_type="application/json")) as served:
        (outcome,) = judge(endpoint={"url": served.url, "model": "m"}).score([sample("a")])
    assert outcome.status == "judge: an answer of more than 1048576 bytes" and len(served.bodies) == 1


@pytest.mark.parametrize("status", [302, 400, 503])
def test_the_body_of_a_refusal_is_bounded(status: int) -> None:
    """One that never ends would be read to its end, or until the memory is."""
    sent = 0

    class Endless(web.StreamResponse):
        async def prepare(self, request: web.BaseRequest) -> Any:
            nonlocal sent
            prepared = await super().prepare(request)
            with contextlib.suppress(ConnectionError):
                while sent < 2**26:
                    await super().write(b"x" * 2**16)
                    sent += 2**16
            return prepared

    with endpoint(lambda number, body: Endless(status=status, headers={"Location": "/v1/other"})) as served:
        asked = {"url": served.url, "model": "m", "retries": 0}
        (outcome,) = judge(endpoint=asked).score([sample("a")])
    assert outcome.value is None and len(outcome.status) < 1000 and sent < 2**24


def test_an_answer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def read_score(answer: str, low: float, high: float) -> float:
        read.append(answer)
        return 5.0

    monkeypatch.setattr("troupe.workers.agents.judges.scores.read_score", read_score)
    with endpoint(lambda number, body: "Score: 5") as served:
        asked = judge(endpoint={"url": served.url, "model": "m"})
        assert asked.score([sample("a")]) == [RewardResult(0.5)] and read == ["Score: 5"]
        assert asked.score([sample("a")]) == [RewardResult(0.5)] and read == ["Score: 5"] * 2


def test_without_a_judge_every_sample_says_so() -> None:
    assert statuses(judge().score([sample("a")])) == ["judge: no judge is connected"]


def test_an_endpoint_is_asked_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "open sesame")
    with endpoint(lambda number, body: "Score: 8", pause_s=0.05) as served:
        asked = {"url": served.url, "model": "big", "api_key_variable": "JUDGE_KEY", "max_tokens": 9, "concurrency": 2}
        outcomes = judge(endpoint=asked).score([sample(text) for text in "abcdef"])
    assert outcomes == [RewardResult(0.8)] * 6
    assert served.busiest == 2 and set(served.keys) == {"Bearer open sesame"}
    body = served.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("big", 9, 0.0)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_requests_are_repeated_and_what_stays_refused_is_a_status() -> None:
    def script(number: int, body: dict[str, Any]) -> Any:
        if "bad" in body["messages"][1]["content"]:
            return error(500)
        return error(429) if number <= 2 else "Score: 5"

    with endpoint(script) as served:
        asked = {"url": served.url, "model": "m", "retries": 3, "concurrency": 1}
        outcomes = judge(endpoint=asked, timeout_s=30.0).score([sample("good"), sample("bad")])
    assert outcomes[0] == RewardResult(0.5)
    assert outcomes[1].status.startswith("judge: InternalServerError: Error code: 500")
    assert len(served.bodies) == 7, "three for the one, and four for the other"


def test_an_outage_and_a_silent_endpoint_are_statuses() -> None:
    with endpoint(lambda number, body: None) as served:
        asked = {"url": served.url, "model": "m", "retries": 0}
        assert statuses(judge(0.5, endpoint=asked).score([sample("a")])) == ["judge: timeout after 0.5 s"]
    gone = judge(endpoint=asked).score([sample("a"), sample("b")])
    assert statuses(gone) == ["judge: APIConnectionError: Connection error."] * 2


def completion(message: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}).encode()


NO_COMPLETION = "judge: the endpoint's answer is not a chat completion: "
NO_JSON = "judge: the endpoint's answer is not JSON"
EMPTY = "judge: an empty answer"
NONSENSE = {
    "html": (b"<html><body>Bad gateway</body></html>", NO_JSON + ": '<html>"),
    "cut JSON": (b'{"choices": [', NO_JSON + ": '{"),
    "nothing": (b"", NO_JSON),
    "not UTF-8": (b"\xff\xfe{", NO_JSON),
    "deep JSON": (b"[" * 100_000, NO_JSON + ": '[["),
    "null": (b"null", NO_COMPLETION + "'null'"),
    "a list": (b"[1]", NO_COMPLETION),
    "a text": (b'"Score: 5"', NO_COMPLETION),
    "no choices": (b"{}", NO_COMPLETION),
    "choices are null": (b'{"choices": null}', NO_COMPLETION),
    "choices are a text": (b'{"choices": "Score: 5"}', NO_COMPLETION),
    "an empty list": (b'{"choices": []}', EMPTY),
    "a choice is null": (b'{"choices": [null]}', NO_COMPLETION),
    "a message is null": (completion(None), NO_COMPLETION),
    "a message is a text": (completion("Score: 5"), NO_COMPLETION),
    "no content": (completion({"role": "assistant"}), NO_COMPLETION),
    "content is null": (completion({"content": None, "refusal": "no"}), EMPTY),
    "content is a number": (completion({"content": 5}), NO_COMPLETION),
    "no text parts": (completion({"content": [None, 5, {"type": "image_url"}, {"type": "text", "text": 5}]}), EMPTY),
    "half a character": (completion({"content": "Score: 5 \ud83d"}), "judge: an answer that is not valid text: "),
}


@pytest.mark.parametrize("media_type", ["application/json", "text/html"])
def test_whatever_an_endpoint_answers_is_a_status(media_type: str) -> None:
    def script(number: int, body: dict[str, Any]) -> Any:
        name = body["messages"][1]["content"].split("<response>\n")[1].split("\n")[0]
        answer, _ = NONSENSE.get(name, (completion({"content": "Score: 5"}), ""))
        return web.Response(body=answer, content_type=media_type)

    with endpoint(script) as served:
        asked = judge(endpoint={"url": served.url, "model": "m", "retries": 0, "concurrency": 1})
        *failed, sound = asked.score([sample(name) for name in (*NONSENSE, "sound")])
    assert sound == RewardResult(0.5), "the others lose nothing"
    for outcome, (name, (_, status)) in zip(failed, NONSENSE.items(), strict=True):
        assert outcome.value is None and outcome.status.startswith(status), (name, outcome)
        outcome.status.encode()  # a column of the table holds it
        assert "<html>" not in outcome.cause and len(outcome.status) < 400


def test_a_question_that_cannot_be_sent_is_a_status() -> None:
    with endpoint(lambda number, body: web.Response(body=completion({"content": "Score: 5"}))) as served:
        client = HttpJudge(HttpJudgeConfig(url=served.url, model="m", retries=0))
        half, whole = client.ask([Question([{"role": "user", "content": text}]) for text in ("\ud83d", "a")], 10.0)
    assert half.failure.startswith("UnicodeEncodeError") and whole == JudgeAnswer("Score: 5")


def test_parts_of_a_content_are_read() -> None:
    parts = [{"type": "thinking", "thinking": "Hm."}, *({"type": "text", "text": text} for text in ("Sco", "re: 5"))]
    assert read_completion(completion({"content": parts}))[0] == JudgeAnswer("Score: 5")


def test_the_error_of_an_endpoint_is_one_line_of_a_status() -> None:
    body = {"error": {"message": "bad\n" + "\ud83d gateway\n" * 1000}}
    with endpoint(lambda number, asked: web.json_response(body, status=502)) as served:
        (status,) = statuses(judge(endpoint={"url": served.url, "model": "m", "retries": 0}).score([sample("a")]))
    assert status.startswith("judge: InternalServerError: Error code: 502 - ") and len(status) < 320
    status.encode()


def test_a_missing_key_and_a_cache_that_cannot_be_opened_are_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="the environment variable NO_SUCH_KEY is not set"):
        judge(endpoint={"url": "http://localhost", "model": "m", "api_key_variable": "NO_SUCH_KEY"})
    with pytest.raises(OSError, match="the cache of judges' answers"):
        judge(cache=str(tmp_path / "missing" / "file"))
