"""Exact tokens over turns: what was sampled stays, what is added is the template's, and rewritten histories fork."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.tokenizers import new_tokenizer
from tests.workers.agents.episodes.templates import FAMILIES, Family
from troupe.workers.agents.episodes.conversation import Conversation, ConversationError, end_of
from troupe.workers.data.tokenizer import PLAIN_TEMPLATE
from troupe.workers.data.turn_ends import without_end

SMOLLM2 = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
TURNS = 1200
"""Fuzzed turns of each template: with nine templates, more than 10 000."""
PIECES = (
    *(
        "Hello",
        " world",
        "42",
        "é",
        "漢字",
        "🙂",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "a" * 40,
        "{",
        "}",
        "'",
        '"',
        "\\n",
        "<",
        ">",
    ),
    *("user", "assistant", "system", "<|eot", "im_end", "```python\nprint(1)\n```", "٣", "\u200b", "e\u0301"),
)


@cache
def tokenizer_of(family: str) -> Any:
    """SmolLM2's tokenizer with the family's template and special tokens."""
    if not Path(SMOLLM2).is_dir():
        pytest.skip("needs SmolLM2: make models")
    tokenizer = new_tokenizer(SMOLLM2)
    tokenizer.name_or_path = ""  # the families' tokens are in no model's embedding
    if family == "plain":
        tokenizer.chat_template = PLAIN_TEMPLATE
        return tokenizer
    found = FAMILIES[family]
    tokenizer.add_special_tokens({"eos_token": found.eos, "additional_special_tokens": list(found.special)})
    tokenizer.chat_template = found.template
    return tokenizer


def text_of(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 8)))


def spoken(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    return {"role": "assistant", "content": tokenizer.decode(without_end(tokenizer, ids), skip_special_tokens=False)}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sampled(rng: random.Random, tokenizer: Any, family: Family) -> list[int]:
    """A turn as an engine may sample it: any tokens, not those that the tokenizer would have chosen."""
    ids = ids_of(tokenizer, text_of(rng))
    if rng.random() < 0.5:
        ids += [rng.randrange(3, 49_000) for _ in range(rng.randint(0, 6))]
    if rng.random() < 0.3:  # letter by letter
        ids += [ids_of(tokenizer, letter)[0] for letter in "letters"]
    if family.strips and rng.random() < 0.3:
        ids = ids_of(tokenizer, f"<think>{rng.random()}</think>") + ids
    # Where a turn was cut, it has a word: some templates write a space before a turn without one.
    return [*ids, tokenizer.eos_token_id] if rng.random() < 0.8 else [*ids, *ids_of(tokenizer, "cut")]


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_tokens_stay_and_added_ones_are_the_templates(name: str) -> None:
    tokenizer, family, rng = tokenizer_of(name), FAMILIES[name], random.Random(name)
    turns = forks = 0
    while turns < TURNS:
        start = [{"role": "user", "content": f"start {text_of(rng)}."}]
        conversation = Conversation(tokenizer, start)
        assert tokenizer.decode(conversation.prompt_ids) == render(tokenizer, start)
        for _ in range(rng.randint(1, 12)):
            turns += 1
            before, said = conversation.prompt_ids, list(conversation.messages)
            ids = sampled(rng, tokenizer, family)
            message = spoken(tokenizer, ids)
            conversation.add_response(ids, message)
            new = [
                {"role": rng.choice(family.roles), "content": f"new {text_of(rng)}."} for _ in range(rng.randint(1, 3))
            ]
            added = conversation.add_messages(new)
            assert conversation.messages == [*said, message, *new]
            assert added.forked == rewritten(family, said, message, new)
            if added.forked:
                forks += 1
                assert conversation.prompt_ids == ids_of(tokenizer, render(tokenizer, conversation.messages))
                continue
            assert conversation.prompt_ids == [*before, *ids, *added.ids], "nothing that was there is touched"
            assert family.behind is not None
            ended = ids[-1:] == [tokenizer.eos_token_id]
            expected = ("" if ended else family.eos) + family.behind(new)
            assert tokenizer.decode(added.ids, skip_special_tokens=False) == expected
            assert added.ids == ids_of(tokenizer, expected), "tokenized as the template's own text is"
    assert (forks > 0) == bool(family.strips or family.fills or family.behind is None)


def render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def rewritten(family: Family, said: list[Any], response: dict[str, Any], new: list[Any]) -> bool:
    """Whether the template shows earlier turns in another way than they were."""
    if family.behind is None:
        return True
    if family.fills and not response["content"].strip():
        return True
    if not family.strips:
        return False
    if family.any_role_strips:
        return family.strips in response["content"]
    asks = [message["role"] == "user" for message in [*said, response, *new]]
    last = max(place for place, asked in enumerate(asks) if asked)
    was = max(place for place, asked in enumerate(asks[: len(said)]) if asked)
    turns = [*said, response]
    return any(m["role"] == "assistant" and family.strips in m["content"] for m in turns[was:last])


def test_a_response_is_never_tokenized_again() -> None:
    tokenizer = tokenizer_of("chatml")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "spell"}])
    letters = [ids_of(tokenizer, letter)[0] for letter in "hello"]
    assert letters != ids_of(tokenizer, "hello")
    conversation.add_response(letters, spoken(tokenizer, letters))
    conversation.add_messages([{"role": "user", "content": "again"}])
    text = tokenizer.decode(conversation.prompt_ids)
    assert letters == conversation.prompt_ids[-len(ids_of(tokenizer, "<|im_end|>" + tail("again"))) - 5 :][:5]
    assert conversation.prompt_ids != ids_of(tokenizer, text)


def tail(content: str) -> str:
    return f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_the_separator_behind_a_turn_is_kept_once(end: str) -> None:
    tokenizer = tokenizer_of("chatml")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "hi"}])
    ids = ids_of(tokenizer, f"  hello \n{end}")
    conversation.add_response(ids, spoken(tokenizer, ids))
    conversation.add_messages([{"role": "user", "content": "more"}])
    wanted = render(tokenizer, [{"role": "user", "content": "hi"}]) + "  hello \n<|im_end|>" + tail("more")
    assert tokenizer.decode(conversation.prompt_ids) == wanted


@pytest.mark.parametrize("content", [" padded ", "\n\nlines\n", "", "   "])
def test_trimmed_contents_are_no_rewritten_history(content: str) -> None:
    tokenizer = tokenizer_of("llama3")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "hi"}])
    ids = [*ids_of(tokenizer, content), tokenizer.eos_token_id]
    conversation.add_response(ids, spoken(tokenizer, ids))
    assert not conversation.add_messages([{"role": "user", "content": "more"}]).forked
    assert content in tokenizer.decode(conversation.prompt_ids)


CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_a_template_that_needs_the_structure_of_a_call_gets_it_and_the_sampled_tokens_stay() -> None:
    tokenizer = tokenizer_of("mistral")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "1+1"}])
    ids = ids_of(tokenizer, '[TOOL_CALLS][{"name":"add",  "arguments":{"a":1}}]</s>')
    conversation.add_response(ids, {**spoken(tokenizer, ids), "tool_calls": [CALL]})
    added = conversation.add_messages([{"role": "tool", "content": "2", "tool_call_id": "123456789"}])
    assert tokenizer.decode(added.ids) == "[TOOL_RESULTS] 2[/TOOL_RESULTS]" and not added.forked
    last = ids_of(tokenizer, " 2</s>")
    conversation.add_response(last, spoken(tokenizer, last))
    added = conversation.add_messages([{"role": "user", "content": "and 3?"}])
    assert (tokenizer.decode(added.ids), added.forked) == ("[INST] and 3?[/INST]", False)


@pytest.mark.parametrize("name", ["calls", "mistral"])
def test_the_calls_of_earlier_turns_stay_in_the_prompt_once(name: str) -> None:
    """With a template that writes the calls of a message behind its text, and with one that needs them."""
    tokenizer = tokenizer_of("chatml" if name == "calls" else name)
    marker, text = "[TOOL_CALLS]", '[TOOL_CALLS][{"name":"add",  "arguments":{"a":1}}]</s>'
    template = tokenizer.chat_template
    if name == "calls":
        marker, text = "<tool_call>", '<tool_call>{"name":  "add"}</tool_call><|im_end|>'
        written = "{{ message['content'] }}{% for call in message.tool_calls or [] %}<tool_call>{{ call }}{% endfor %}"
        tokenizer.chat_template = template.replace("{{ message['content'] }}", written)
    try:
        conversation = Conversation(tokenizer, [{"role": "user", "content": "1+1"}])
        for turn in range(1, 4):
            ids = ids_of(tokenizer, text)
            conversation.add_response(ids, {**spoken(tokenizer, ids), "tool_calls": [CALL]})
            added = conversation.add_messages([{"role": "tool", "content": "2", "tool_call_id": "123456789"}])
            assert (added.forked, tokenizer.decode(conversation.prompt_ids).count(marker)) == (False, turn)
        ids = ids_of(tokenizer, text)
        conversation.add_response(ids, {**spoken(tokenizer, ids), "tool_calls": [CALL]})
        short = conversation.compacted(2, "left out", [{"role": "tool", "content": "2", "tool_call_id": "123456789"}])
        assert tokenizer.decode(short.prompt_ids).count(marker) == 2
    finally:
        tokenizer.chat_template = template


def test_tools_are_offered_once_and_change_no_later_turn() -> None:
    tokenizer = tokenizer_of("qwen3")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    conversation = Conversation(tokenizer, [{"role": "user", "content": "1+1"}], tools)
    assert '"name": "add"' in tokenizer.decode(conversation.prompt_ids)
    ids = ids_of(tokenizer, '<tool_call>{"name": "add"}</tool_call><|im_end|>')
    conversation.add_response(ids, {**spoken(tokenizer, ids), "tool_calls": [CALL]})
    added = conversation.add_messages([{"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}])
    assert not added.forked and tokenizer.decode(added.ids).count("<tool_response>") == 2


def test_thoughts_are_kept_until_the_user_speaks() -> None:
    """Qwen3 keeps the thoughts of a chain of tool calls, and strips them when the user asks something new."""
    tokenizer = tokenizer_of("qwen3")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "1+1"}])
    ids = ids_of(tokenizer, "<think>\nhm\n</think>\n\ncall<|im_end|>")
    conversation.add_response(ids, spoken(tokenizer, ids))
    assert not conversation.add_messages([{"role": "tool", "content": "2"}]).forked
    conversation.add_response(ids, spoken(tokenizer, ids))
    assert conversation.add_messages([{"role": "user", "content": "and 3?"}]).forked
    assert "hm" not in tokenizer.decode(conversation.prompt_ids)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_what_the_template_cannot_render_says_why(role: str) -> None:
    tokenizer = tokenizer_of("gemma")
    with pytest.raises(ConversationError, match="System role not supported"):
        Conversation(tokenizer, [{"role": role, "content": "x"}])
    conversation = Conversation(tokenizer, [{"role": "user", "content": "x"}])
    conversation.add_response([5], spoken(tokenizer, [5]))
    with pytest.raises(ConversationError, match="System role not supported"):
        conversation.add_messages([{"role": role, "content": "x"}])


def test_without_a_template_texts_follow_each_other() -> None:
    tokenizer = tokenizer_of("plain")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "1 + 1 ="}])
    ids = ids_of(tokenizer, " 2")
    conversation.add_response(ids, spoken(tokenizer, ids))
    conversation.add_messages([{"role": "user", "content": "\n2 + 2 ="}])
    assert tokenizer.decode(conversation.prompt_ids) == "1 + 1 = 2\n2 + 2 ="


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("ab", "ab<", 2),
        (" a b ", "a b<", 3),
        ("", "<", 0),
        ("ab", "a<b", None),
        ("ab", "a", None),
        ("a\n\nb", "a b<", 3),
    ],
)
def test_the_end_of_a_content_is_found_whatever_its_white_space(content: str, text: str, expected: int | None) -> None:
    assert end_of(content, f"head{text}", 4) == (None if expected is None else 4 + expected)


def test_a_rendering_that_tokenizes_responses_again_would_fail_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzz above finds the two faults that users of other systems met."""
    find: Callable[[str], None] = test_sampled_tokens_stay_and_added_ones_are_the_templates

    def again(self: Conversation, messages: Any) -> Any:
        self._shown += messages
        self.prompt_ids = ids_of(self._tokenizer, render(self._tokenizer, self.messages))
        return type("Added", (), {"forked": False, "ids": []})()

    def no_separator(self: Conversation, text: str) -> list[int]:
        return ids_of(self._tokenizer, text.removeprefix(str(self._tokenizer.eos_token)).lstrip())

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "add_messages", again)
        with pytest.raises(AssertionError):
            find("chatml")
    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "_tokenize_behind", no_separator)
        with pytest.raises(AssertionError):
            find("chatml")
