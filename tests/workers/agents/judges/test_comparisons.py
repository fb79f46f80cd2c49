"""Judges that compare: groups in one question, pairs in both orders, and a baseline's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from troupe.workers.agents.judges.arguments import read_args
from troupe.workers.agents.judges.reward import JudgeReward
from troupe.workers.agents.judges.scores import FORMS, JudgeError, read_better, read_scores
from troupe.workers.contract.judges import JudgeAnswer, Question
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import CONSISTENCY
from troupe.workers.rewards.runner import RewardResult, Sample

RUBRIC = "Longer is better."
SHOWN = re.compile(r"<response_(\w+)>\n(.*)\n</response_\1>")
PROMPT = json.dumps([{"role": "user", "content": "Count."}])


def sample(response: str, answer: str = "", **columns: Any) -> Sample:
    return Sample(response, answer, json.dumps(columns), 3, "stop", PROMPT)


class Comparer:
    """A judge that answers by what it is shown: the texts by their names."""

    name = "comparer"

    def __init__(self, answer: Callable[[dict[str, str]], str]) -> None:
        self._answer = answer
        self.asked: list[Question] = []

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        self.asked += questions
        found = (SHOWN.findall(one.messages[-1]["content"]) for one in questions)
        return [JudgeAnswer(self._answer(dict(texts))) for texts in found]


def longest(texts: dict[str, str]) -> str:
    a, b = len(texts["A"]), len(texts["B"])
    return f"Better: {'tie' if a == b else 'A' if a > b else 'B'}"


def lengths(texts: dict[str, str]) -> str:
    return "\n".join(f"Score {name}: {len(text)}" for name, text in texts.items())


def judged(
    answer: Callable[[dict[str, str]], str], samples: Sequence[Sample], **args: Any
) -> tuple[list[RewardResult], Comparer]:
    reward = JudgeReward(RewardFunctionConfig(name="judge", args={"rubric": RUBRIC, **args}))
    reward.start()
    asked = Comparer(answer)
    reward.connect(asked)
    try:
        return reward.score(samples), asked
    finally:
        reward.close()


def values(outcomes: Sequence[RewardResult]) -> list[float | None]:
    return [outcome.value for outcome in outcomes]


def test_a_group_is_scored_in_one_question() -> None:
    outcomes, asked = judged(lengths, [sample("a" * size) for size in (1, 4, 10)], compare="group")
    assert values(outcomes) == [0.1, 0.4, 1.0] and len(asked.asked) == 1
    system, user = asked.asked[0].messages
    assert "`Score K: N` for each response K, where N is a number from 0 to 10" in system["content"]
    assert user["content"].startswith(
        "<task>\nCount.\n</task>\n\n<response_1>\na\n</response_1>\n\n<response_2>\naaaa\n"
    )


def test_several_answers_about_a_group_show_it_in_turns() -> None:
    """Each sample stands in each place, so that a judge which scores by place makes no difference."""
    by_place = lambda texts: "\n".join(f"Score {name}: {name}" for name in texts)  # noqa: E731
    outcomes, asked = judged(by_place, [sample(text) for text in "abcd"], compare="group", answers=4)
    assert values(outcomes) == [pytest.approx(0.25)] * 4 and len(asked.asked) == 4
    once, _ = judged(by_place, [sample(text) for text in "abcd"], compare="group")
    assert values(once) == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize("biased", ["A", "B"])
@pytest.mark.parametrize("compare", ["pairs", "baseline"])
def test_a_judge_that_prefers_a_place_comes_out_at_a_half(compare: str, biased: str) -> None:
    group = [sample(text, answer="abc") for text in ("a", "bb", "ccc", "dddd")]
    outcomes, _ = judged(lambda texts: f"Better: {biased}", group, compare=compare)
    assert values(outcomes) == [0.5] * 4
    assert [outcome.also for outcome in outcomes] == [{CONSISTENCY: 0.0}] * 4


def test_pairs_are_asked_in_both_orders_and_wins_count() -> None:
    outcomes, asked = judged(longest, [sample("a" * size) for size in (1, 2, 2, 4)], compare="pairs")
    assert values(outcomes) == [0.0, pytest.approx(1.5 / 3), pytest.approx(1.5 / 3), 1.0]
    assert [outcome.also for outcome in outcomes] == [{CONSISTENCY: 1.0}] * 4
    assert len(asked.asked) == 7, "equal responses share their questions"


def test_a_pair_is_judged_as_it_stands() -> None:
    """Half of the bias, half of the truth: a judge that prefers A unless B is much longer."""

    def leaning(texts: dict[str, str]) -> str:
        return f"Better: {'B' if len(texts['B']) > len(texts['A']) + 2 else 'A'}"

    outcomes, _ = judged(leaning, [sample("a"), sample("aa"), sample("aaaaaa")], compare="pairs")
    assert values(outcomes) == [0.25, 0.25, 1.0]
    assert [outcome.also[CONSISTENCY] for outcome in outcomes] == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(("opponents", "questions"), [(1, 12), (2, 12), (3, 24), (5, 30), (0, 30), (99, 30)])
def test_opponents_bound_the_pairs(opponents: int, questions: int) -> None:
    outcomes, asked = judged(longest, [sample("a" * size) for size in range(6)], compare="pairs", opponents=opponents)
    assert len(asked.asked) == questions and None not in values(outcomes)
    assert fmean(value for value in values(outcomes) if value is not None) == pytest.approx(0.5)


def test_a_sample_without_another_one_has_no_pair() -> None:
    (outcome,), _ = judged(longest, [sample("a")], compare="pairs")
    assert outcome.status == "judge: there is no other sample of its prompt to compare it with"


def test_an_answer_that_names_no_better_one_fails_both_of_a_pair() -> None:
    def unsure(texts: dict[str, str]) -> str:
        return "Hm." if {"x", "y"} == {*texts.values()} else longest(texts)

    outcomes, _ = judged(unsure, [sample("x"), sample("y"), sample("zz")], compare="pairs", opponents=0)
    assert [outcome.value is None for outcome in outcomes] == [True, True, False]
    assert outcomes[0].status == "judge: it does not say which response is better: 'Hm.'"


def test_the_datas_answer_is_a_baseline_and_no_reference() -> None:
    group = [sample("a", answer="bb"), sample("cc", answer="bb"), sample("ddd", answer="bb")]
    outcomes, asked = judged(longest, group, compare="baseline")
    assert values(outcomes) == [0.0, 0.5, 1.0] and len(asked.asked) == 6
    assert all("reference_answer" not in one.messages[1]["content"] for one in asked.asked)
    column, asked = judged(longest, [sample("a", answer="b", other="ccc")], compare="baseline", baseline="other")
    assert values(column) == [0.0]
    assert "<reference_answer>\nb\n</reference_answer>" in asked.asked[0].messages[1]["content"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_stored_answers_of_a_model_are_a_baseline_by_prompt(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"stored.{kind}"
    rows = [
        {"messages": PROMPT, "response": "bb"},
        {"messages": PROMPT, "response": "a second one"},
        {"messages": json.dumps([{"role": "user", "content": "Sing."}]), "response": "la"},
    ]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        rows = [{"prompt": "Count.", "response": "bb"}, {"messages": json.loads(PROMPT), "response": "c"}]
        file.write_text("\n".join(map(json.dumps, rows)))
    group = [sample("a"), sample("ccc")]
    other = Sample("a", "", "{}", 1, "stop", json.dumps([{"role": "user", "content": "Dance."}]))
    outcomes, _ = judged(longest, [*group, other], compare="baseline", baseline=str(file))
    assert values(outcomes) == [0.0, 1.0, None]
    assert outcomes[2].status == f"judge: the baseline ({file}) has no answer to the prompt"


@pytest.mark.parametrize("content", ["", "no json\n", '{"text": 1}\n', "[]\n"])
def test_a_file_without_answers_is_found_at_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "stored.jsonl").write_text(content)
    with pytest.raises(OSError, match=r"the baseline's answers .* (cannot be read|are empty)"):
        judged(longest, [sample("a")], compare="baseline", baseline=str(tmp_path / "stored.jsonl"))


def test_criteria_are_compared_one_by_one() -> None:
    criteria = [{"criterion": "long", "weight": 2}, {"criterion": "rude", "weight": -1}]
    outcomes, asked = judged(longest, [sample("a"), sample("bb")], compare="pairs", criteria=criteria)
    assert values(outcomes) == [0.0, 0.5] and len(asked.asked) == 4
    assert "Criterion: rude" in asked.asked[1].messages[0]["content"]


def test_a_template_places_the_responses() -> None:
    template = "Q: {prompt}\n{response}"
    _, asked = judged(longest, [sample("a"), sample("b")], compare="pairs", template=template)
    assert asked.asked[0].messages[1]["content"] == (
        "Q: Count.\n<response_A>\na\n</response_A>\n\n<response_B>\nb\n</response_B>"
    )


@pytest.mark.parametrize(
    ("answer", "points"),
    [
        ("Better: A", (1.0, 0.0)),
        ("**Better:** B.", (0.0, 1.0)),
        ("Better: Response A", (1.0, 0.0)),
        ("Better: response_B", (0.0, 1.0)),
        ("better = tie", (0.5, 0.5)),
        ("[[A]]", (1.0, 0.0)),
        ("[[C]]", (0.5, 0.5)),
        ('{"better": "B"}', (0.0, 1.0)),
        ("Better: A at first.\nBetter: B", (0.0, 1.0)),
        ("<think>Better: A</think>Better: both", (0.5, 0.5)),
    ],
)
def test_the_last_comparison_counts(answer: str, points: tuple[float, float]) -> None:
    assert read_better(answer) == points


@pytest.mark.parametrize("answer", ["A", "A is better", "Better: Apples", "Better: C", "[[D]]", "<think>Better: A"])
def test_what_compares_nothing_is_a_failure(answer: str) -> None:
    with pytest.raises(JudgeError, match="does not say which response is better"):
        read_better(answer)


def test_scores_of_a_group_are_read_by_number() -> None:
    assert read_scores("Score 2: 7\nScore 1: 3/10", 2, 0, 10) == [3, 7]
    assert read_scores("Score 1: 9?\n**Score 1:** 4, good\nScore 2 = 5.5", 2, 0, 10) == [4, 5.5]
    assert read_scores('{"score_1": 2, "score_2": 10}', 2, 0, 10) == [2, 10]
    assert read_scores("\n".join(f"Score {n}: {n}" for n in range(1, 13)), 12, 0, 20) == list(range(1, 13))
    for answer, problem in (
        ("Score 1: 7", "no score of response 2"),
        ("Score: 7\nScore: 8", "no score of response 1"),
        ("Score 1: 7\nScore 2: 11", "a score of 11 is not on the scale"),
        ("Score 1: 7-8\nScore 2: 1", "a score of 7-8 is not on the scale"),
        ("Score 1: 7\nScore 2: 1\nScore 3: 1", "a score of response 3, of 2"),
    ):
        with pytest.raises(JudgeError, match=problem):
            read_scores(answer, 2, 0, 10)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"compare": "pair"}, "compare: Input should be '', 'group', 'pairs' or 'baseline'"),
        ({"opponents": 2}, "opponents: has no effect with compare: none"),
        ({"compare": "pairs", "scale": [1, 5]}, "scale: has no effect with compare: pairs"),
        ({"compare": "pairs", "baseline": "column"}, "baseline: has no effect with compare: pairs"),
        ({"compare": "group", "expected": True}, "expected: has no effect with compare: group"),
        ({"expected": True}, "expected: needs a scale between two digits"),
        ({"answers": 0}, "answers: Input should be greater than or equal to 1"),
        ({"max_requests": 9}, "cache: name a file, in which all workers count"),
        (
            {"answers": 3, "endpoint": {"url": "http://x", "model": "m"}},
            "answers: are all the same at endpoint.temperature 0",
        ),
        (
            {"endpoint": {"url": "http://x", "model": "m", "tokens_per_minute": 5}},
            "cache: name a file, in which all workers count",
        ),
    ],
)
def test_arguments_without_effect_are_refused(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(JudgeError, match=re.escape(problem)):
        read_args({"rubric": RUBRIC, **args})


def test_every_form_reads_what_it_asks_for() -> None:
    for form in FORMS.values():
        example = form.how.split("`")[1].replace("K", "1").replace("N", "1")
        assert form.points(example, 1, 0.0, 1.0)[0] == 1.0
