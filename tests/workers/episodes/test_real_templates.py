"""Episodes on chat templates as published: every prompt is the template's own rendering, or begins a new row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.workers.episodes.real_templates import REAL, tokenizer_of
from troupe.workers.data.turn_ends import turn_ends, without_end
from troupe.workers.episodes.conversation import Conversation

SMOLLM2 = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
CONVERSATIONS = 30
END = "\u23f9"
"""Stands for every end of a turn."""


@cache
def tokenizer_named(name: str) -> Any:
    if not Path(SMOLLM2).is_dir():
        pytest.skip("needs SmolLM2: make models")
    return tokenizer_of(REAL[name], SMOLLM2, Path(mkdtemp()))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def sampled(tokenizer: Any, text: str, end: int | None) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a turn, and its message."""
    ids = [*ids_of(tokenizer, text), *([] if end is None else [end])]
    content = tokenizer.decode(without_end(tokenizer, ids), skip_special_tokens=False)
    return ids, {"role": "assistant", "content": content}


@pytest.mark.parametrize("name", REAL)
def test_a_turn_has_one_end_whichever_of_the_folders_was_sampled(name: str) -> None:
    real, tokenizer = REAL[name], tokenizer_named(name)
    ends = turn_ends(tokenizer)
    assert set(tokenizer.convert_tokens_to_ids([real.eos, *real.ends])) == ends.ids
    either = re.compile("|".join(map(re.escape, {*ends.texts, *ends.written})))
    for end in sorted(ends.ids):
        start = [{"role": "user", "content": "hi"}]
        conversation = Conversation(tokenizer, start)
        opened = tokenizer.decode(conversation.prompt_ids)
        ids, message = sampled(tokenizer, f"{real.opening}yes", end)
        conversation.add_response(ids, message)
        added = conversation.add_messages([{"role": "user", "content": "more"}])
        text = tokenizer.decode(conversation.prompt_ids)
        said = text.removeprefix(opened).removeprefix(message["content"])
        wanted = rendered(tokenizer, [*start, message, {"role": "user", "content": "more"}])
        if added.forked:
            assert text == wanted
        elif real.spaced:
            assert either.sub(END, said).replace(" ", "").startswith(f"{END}"), said
            assert either.sub(END, said).count(END) == either.sub(END, wanted.removeprefix(opened)).count(END)
        else:
            assert either.sub(END, text) == either.sub(END, wanted)


def test_an_end_that_only_the_generation_configuration_names_is_one() -> None:
    """Gemma's: `<end_of_turn>` is a special token that the tokenizer has no name for."""
    tokenizer = tokenizer_named("gemma")
    conversation = Conversation(tokenizer, [{"role": "user", "content": "hi"}])
    ids = ids_of(tokenizer, "yes<end_of_turn>")
    conversation.add_response(ids, {"role": "assistant", "content": "yes"})
    conversation.add_messages([{"role": "user", "content": "more"}])
    assert tokenizer.decode(conversation.prompt_ids) == (
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
        "<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n"
    )
