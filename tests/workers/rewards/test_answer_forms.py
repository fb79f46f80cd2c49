"""The answer in the forms in which models give it: a table of responses with the right verdicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import AddedToken

from tests.tokenizers import new_tokenizer
from troupe.workers.data.plain_text import response_text
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


@pytest.mark.parametrize("response", ["The answer is...42", "Ans.42", "No.42", "page p.42", "(a).42"])
def test_the_end_of_a_sentence_is_no_decimal_point(response: str) -> None:
    assert last_number(response, "42", {}) == 1


@pytest.mark.parametrize(("response", "reward"), [("so 7", 0.0), ("so\n</think>\n7", 1.0), ("3</think>", 0.0)])
def test_a_thought_that_the_template_opened_has_no_answer_until_it_ends(response: str, reward: float) -> None:
    task = {"recipe": "chain_sum", "entry": {"question": "3 + 4", "answer": "7", "metadata": {}}}
    for function in (numeric, last_number, reasoning_gym):
        assert function(response, "7", task, opens_thought=True) == reward


SPECIAL_TAGS = [
    *("[THINK]", "[/THINK]", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>"),
    *("<think:opensource>", "</think:opensource>", "<|channel>", "<channel|>"),
]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final"
COMMENTARY = "<|start|>assistant<|channel|>commentary to=functions.add"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("[THINK]2 or 3[/THINK]7", 1.0),
        ("[THINK]3[/THINK] \\boxed{7}", 1.0),
        ("[THINK]so it is 7", 0.0),
        ("<|START_THINKING|>3<|END_THINKING|><|START_RESPONSE|>7<|END_RESPONSE|>", 1.0),
        ("<|START_THINKING|>so it is 7", 0.0),
        (f"{ANALYSIS}3<|end|>{FINAL}<|message|>7<|return|>", 1.0),
        (f"{ANALYSIS}3<|end|>{FINAL} <|constrain|>json<|message|>7<|return|>", 1.0),
        (f"{ANALYSIS}so it is 7", 0.0),
        (f"{ANALYSIS}so it is 7<|end|>{FINAL}", 0.0),
        (f"{ANALYSIS}3<|end|>{COMMENTARY} <|constrain|>json<|message|>3<|end|>{ANALYSIS}now it is 7", 0.0),
        ("<|channel|>final<|message|>7<|return|>", 1.0),
        ("\u25c1think\u25b73\u25c1/think\u25b77", 1.0),
        ("\u25c1think\u25b7so it is 7", 0.0),
        ("<seed:think>3</seed:think>7", 1.0),
        ("<seed:think>so it is 7", 0.0),
        ("<mm:think>so it is 7", 0.0),
        ("<think:opensource>3</think:opensource>7", 1.0),
        ("<think:opensource>so it is 7", 0.0),
        ("<|channel>thought\n3<channel|>7", 1.0),
        ("<|channel>thought\nso it is 7", 0.0),
    ],
)
def test_the_thoughts_of_every_family_are_known_also_where_their_tags_are_special_tokens(
    response: str, reward: float, tiny_model: Path
) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in SPECIAL_TAGS])
    scored = response_text(tokenizer, tokenizer(response, add_special_tokens=False)["input_ids"])
    for function in (numeric, last_number):
        assert function(scored, "7", {}) == reward, scored
    entry = {"question": "3 + 4", "answer": "7", "metadata": {}}
    assert reasoning_gym(scored, "7", {"recipe": "chain_sum", "entry": entry}) == reward, scored


def test_special_tokens_other_than_the_tags_of_thoughts_are_not_scored(tiny_model: Path) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in SPECIAL_TAGS])
    for text in ("<|im_start|>a<|start|>b<|im_end|>", "[THINK]a[/THINK]b<|im_end|>"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert response_text(tokenizer, ids) == re.sub(r"<\|.*?\|>", "", text)


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
