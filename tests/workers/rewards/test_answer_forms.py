"""The answer in the forms in which models give it: a table of responses with the right verdicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from troupe.workers.rewards.functions import last_number, regex
from troupe.workers.rewards.gym import reasoning_gym
from troupe.workers.rewards.numeric import numeric

FORMS = [json.loads(line) for line in Path(__file__).with_name("answer_forms.jsonl").read_text("utf-8").splitlines()]
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "data.md"


def test_the_table_has_every_form_once() -> None:
    assert len(FORMS) >= 150
    assert len({(form["response"], form["answer"]) for form in FORMS}) == len(FORMS)
    assert sum(form["numeric"] for form in FORMS) > len(FORMS) / 2
    assert sum(not form["numeric"] for form in FORMS) >= 30


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["response"][:40])
def test_numeric_gives_the_right_verdict(form: dict[str, str]) -> None:
    assert numeric(form["response"], form["answer"], {}) == form["numeric"]


@pytest.mark.parametrize(
    "form", [form for form in FORMS if "last_number" in form], ids=lambda form: form["response"][:40]
)
def test_last_number_gives_the_right_verdict(form: dict[str, str]) -> None:
    assert last_number(form["response"], form["answer"], {}) == form["last_number"]


@pytest.mark.parametrize(("response", "reward"), [("so 7", 0.0), ("so\n</think>\n7", 1.0), ("3</think>", 0.0)])
def test_a_thought_that_the_template_opened_has_no_answer_until_it_ends(response: str, reward: float) -> None:
    for function in (numeric, last_number):
        assert function(response, "7", {}, opens_thought=True) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>7", 0.0),
        ("<think>3</think>7", 1.0),
        ("<think><answer>7</answer></think>3", 0.0),
        ("so 3</think>7", 1.0),
    ],
)
def test_a_gym_task_is_answered_behind_the_thought(response: str, reward: float) -> None:
    entry = {"question": "3 + 4", "answer": "7", "metadata": {}}
    assert reasoning_gym(response, "7", {"recipe": "chain_sum", "entry": entry}) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n7", 1.0),
        ("a\nb</think>\n7", 1.0),
        ("\n</think>\n\n7\n", 1.0),
        ("7", 0.0),
        ("<think>a\nb", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think>\n", 0.0),
        ("<think>a<think>b</think>7", 0.0),
        ("a</think>7</think>7", 0.0),
        ("<think>a</think>7<think>", 0.0),
    ],
)
def test_the_guides_format_reward_pays_for_a_thought_and_an_answer_on_every_template(
    response: str, reward: float
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "name: regex" in block]
    functions = yaml.safe_load(block)["roles"]["reward"]["functions"]
    (pattern,) = [function["args"]["pattern"] for function in functions if function["name"] == "regex"]
    assert regex(response, "", {}, pattern=pattern) == reward
