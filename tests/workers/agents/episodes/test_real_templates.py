"""Episodes on chat templates as published: every prompt is the template's own rendering, or begins a new row."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.workers.agents.episodes.real_templates import REAL, real_tokenizer
from troupe.workers.agents.episodes.conversation import Conversation, ConversationError
from troupe.workers.data.turn_ends import turn_ends, without_end

SMOLLM2 = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
CONVERSATIONS = 30
END = "\u23f9"
"""Stands for every end of a turn."""


def tokenizer_named(name: str) -> Any:
    if not Path(SMOLLM2).is_dir():
        pytest.skip("needs SmolLM2: make models")
    return real_tokenizer(name, SMOLLM2)


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


ANSWERS = (
    "yes",
    "",
    "",
    "a\nb",
    "<tool_call>{}</tool_call>",
    "漢字 🙂",
    "<think>\nhm\n</think>\n\nyes",
    "\n",
    " ",
    " padded \n",
)
ASKED = ("more", "<tool_response>\n7\n</tool_response>", "[7]", "line\n")
CONVERSATIONS = 40


@pytest.mark.parametrize("name", REAL)
def test_every_prompt_is_the_templates_rendering_or_begins_a_new_row(name: str) -> None:
    """Empty turns, turns that were cut, any end, several messages of one role, results of tools in turns of the user.

    White space that was sampled around an answer stays, whatever the template does with it.
    """
    real, tokenizer, rng = REAL[name], tokenizer_named(name), random.Random(name)
    ends = turn_ends(tokenizer)
    either = re.compile("|".join(map(re.escape, sorted({*ends.texts, *ends.written}, key=len, reverse=True))))
    kept = forked = 0
    for _ in range(CONVERSATIONS):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        conversation, exact = Conversation(tokenizer, messages), not real.spaced
        for _ in range(rng.randint(1, 3)):
            before = conversation.prompt_ids
            answer = rng.choice(ANSWERS)
            text = rng.choice((real.opening, "")) + answer
            ids, message = sampled(tokenizer, text, rng.choice([None, *sorted(ends.ids)]))
            new = [
                {"role": rng.choice(real.roles), "content": rng.choice(ASKED)} for _ in range(rng.choice((1, 1, 2, 3)))
            ]
            conversation.add_response(ids, message)
            try:
                added = conversation.add_messages(new)
            except ConversationError:
                break  # the template takes turns only
            messages += [message, *new]
            exact = exact and answer == answer.strip() and text == text.rstrip()
            wanted, found = rendered(tokenizer, messages), tokenizer.decode(conversation.prompt_ids)
            if added.forked:
                forked += 1
                exact = not real.spaced
                assert found == wanted
                continue
            kept += 1
            assert conversation.prompt_ids == [*before, *ids, *added.ids]
            found, wanted = either.sub(END, found), either.sub(END, wanted)
            if not exact:
                found, wanted = ("".join(one.split()) for one in (found, wanted))
            assert found == wanted, (text, new)
    assert kept + forked >= CONVERSATIONS / 2 and (kept > 0 or real.opening.startswith("hm"))
