"""Offline data has the tokens of the chat template's own rendering of the whole conversation, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.tokenizers import new_tokenizer
from tests.workers.agents.episodes.real_templates import REAL, real_tokenizer
from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.contract.offline_messages import EXAMPLE_TEXTS
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import ExampleRefused, encode_turns, tokenize
from troupe.workers.data.turn_ends import turn_ends

OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
KEEPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set c = m.content %}{% set r = '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<think>\n' + r + '\n</think>\n\n' + c }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
) + OPENS
STRIPS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>assistant\n' + c + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endif %}{% endfor %}"
) + OPENS
RESPONSES = ["<think>\nIt is 4.\n</think>\n\n4", "It is 4.\n</think>\n\n4", "4"]
ASK = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return new_tokenizer(tiny_model)


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False)


def said(response: str) -> dict[str, str]:
    return {"role": "assistant", "content": response}


def encoded(tokenizer: Any, turns: list[dict[str, str]]) -> tuple[str, str]:
    """The text of prompt and turns, and that of the tokens with a loss."""
    messages = json.dumps(ASK)
    prompt = encode_prompt(tokenizer, messages, 4096)
    ids, mask = encode_turns(tokenizer, messages, prompt, turns)
    trained = [token for token, on in zip(ids, mask, strict=True) if on]
    return tokenizer.decode([*prompt, *ids]), tokenizer.decode(trained)


@pytest.mark.parametrize("response", RESPONSES)
def test_a_thought_that_the_template_opens_is_opened_once_and_closed(tokenizer: Any, response: str) -> None:
    tokenizer.chat_template = KEEPS
    text, trained = encoded(tokenizer, [said(response)])
    assert text == rendered(tokenizer, [*ASK, said(response)]).removesuffix("\n")
    assert text.count("<think>") == text.count("</think>") == 1
    assert trained == text.partition("<think>\n")[2]


@pytest.mark.parametrize("response", RESPONSES)
def test_a_thought_that_the_template_opens_and_does_not_show_is_refused(tokenizer: Any, response: str) -> None:
    tokenizer.chat_template = STRIPS
    why = r"opens the response with '.*assistant\\n<think>\\n', and does not have that in the whole conversation"
    with pytest.raises(ExampleRefused, match=why):
        encoded(tokenizer, [said(response)])


@pytest.mark.parametrize("count", [1, 2])
def test_every_offline_algorithm_refuses_what_the_template_does_not_show(tokenizer: Any, count: int) -> None:
    """Demonstrations and answers that are compared are encoded alike."""
    tokenizer.chat_template = STRIPS
    responses = [json.dumps([said(response)]) for response in ("4", "five")[:count]]
    row = {"origin": "d:1", "messages": json.dumps(ASK), "responses": responses, "scores": []}
    fields = row | {"margin": 0.0, "desirable": True}
    table = pa.Table.from_pylist([fields], schema=EXAMPLE_TEXTS)
    summary, rows = tokenize(tokenizer, table, ExampleConfig(max_length=256, micro_batch_tokens=1024))
    assert (summary.refused, rows.num_rows) == (1, 0)
    assert summary.problems[0].startswith("d:1: the chat template opens the response with ")


def test_a_template_that_changes_the_response_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content | upper }} {% endfor %}"
    with pytest.raises(ExampleRefused, match="the chat template changes the text of the response"):
        encoded(tokenizer, [said("yes")])


TALKS = {
    "one turn": [said("It is 4.")],
    "white space": [said("\n It is 4. \n")],
    "a thought": [said("<think>\nhm\n</think>\n\nIt is 4.")],
    "the end's name": [said("im_end")],
    "two turns": [said("It is 4."), {"role": "user", "content": "It is 4."}, said("Yes.")],
    "two thoughts": [
        said("<think>\nhm\n</think>\n\nIt is 4."),
        {"role": "user", "content": "Sure?"},
        said("<think>\noh\n</think>\n\nYes."),
    ],
}
ENDS_ELSEWHERE = {
    "behind the last turn": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "behind the user's turns": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'user' %}<|im_end|>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "spelled": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|stop|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
}
"""Templates that write no token of the vocabulary between a turn and the next message."""


@pytest.mark.parametrize("name", ENDS_ELSEWHERE)
def test_the_text_of_the_next_message_is_not_trained(name: str, tiny_model: Path) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.chat_template = ENDS_ELSEWHERE[name]
    turns = [said("It is 4."), {"role": "user", "content": " And seven? "}, said("Yes.")]
    text, trained = encoded(tokenizer, turns)
    assert "seven" in text and "seven" not in trained
    assert text.count("Yes.") == trained.count("Yes.") == trained.count("It is 4.") == 1


REFUSED = {
    "qwen3": {"two thoughts"},
    "qwen3_5_think": {"two turns", "two thoughts"},
    "deepseek_v3": set(TALKS),
    "deepseek_r1": set(TALKS),
    "glm4_moe": {"two thoughts"},
    "nemotron3": set(TALKS) - {"a thought"},
}
"""Templates that open a thought, or strip it from earlier turns."""


@pytest.mark.parametrize("name", REAL)
def test_published_templates_give_their_own_rendering_or_a_refusal(name: str, tiny_model: Path) -> None:
    tokenizer = real_tokenizer(name, tiny_model)
    ends, refused = turn_ends(tokenizer), set[str]()
    for talk, turns in TALKS.items():
        try:
            text, trained = encoded(tokenizer, turns)
        except ExampleRefused:
            refused.add(talk)
            continue
        whole = rendered(tokenizer, [*ASK, *turns])
        assert whole.startswith((text, text.removesuffix(REAL[name].eos)))
        assert text.endswith((*ends.written, REAL[name].eos)) and trained.endswith((*ends.texts, *ends.written))
        assert all("".join(turn["content"].split()) in "".join(text.split()) for turn in turns)
    assert refused == REFUSED.get(name, set())
