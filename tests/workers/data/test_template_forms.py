"""What chat templates make of tools is tried, not guessed: what they drop, and the form of the arguments of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.agents.episodes.test_conversation import tokenizer_of
from troupe.workers.agents.episodes.conversation import Conversation, TurnReader
from troupe.workers.contract.environments import CALLS, RESULTS, TOOLS, dropped_note
from troupe.workers.data.template_forms import template_forms

CALL = "{% if m.tool_calls %}{% for c in m.tool_calls %}<call {{ c.function.name }} ARGUMENTS>{% endfor %}{% endif %}"
BODY = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    f"<|im_start|>{{{{ m.role }}}}\n{CALL}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ITEMS = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
FULL = BODY.replace("ARGUMENTS", ITEMS)
HISTORY = [
    {"role": "user", "content": "2 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "name": "add", "content": "5"},
]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Templated = Callable[[str], Any]


@pytest.fixture
def templated() -> Any:
    """A tokenizer with a template, and its own one again after the test."""
    tokenizer = tokenizer_of("chatml")
    before = tokenizer.chat_template

    def given(template: str) -> Any:
        tokenizer.chat_template = template
        return tokenizer

    yield given
    tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("arguments", "as_object", "written"),
    [
        (ITEMS, True, "a=2;b=x;"),
        ("{{ c.function.arguments | tojson }}", True, '{"a": 2, "b": "x"}'),
        ("{{ c.function.arguments }}", False, '{"a": 2, "b": "x"}'),
        ("{{ c.function.arguments + '' }}", False, '{"a": 2, "b": "x"}'),
        ("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}", True, "{"),
    ],
)
def test_the_arguments_of_calls_have_the_form_that_the_template_reads(
    templated: Templated, arguments: str, as_object: bool, written: str
) -> None:
    tokenizer = templated(BODY.replace("ARGUMENTS", arguments))
    assert template_forms(tokenizer).object_arguments == as_object
    prompt = tokenizer.decode(Conversation(tokenizer, HISTORY).prompt_ids)
    assert f"<call add {written}" in prompt and "\\" not in prompt


def test_a_turn_with_a_call_continues_under_a_template_that_needs_objects(templated: Templated) -> None:
    tokenizer = templated(BODY.replace("ARGUMENTS", ITEMS))
    conversation = Conversation(tokenizer, HISTORY[:1], [ADD])
    ids = [*tokenizer("call", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    conversation.add_response(ids, HISTORY[1] | {"content": "call"})
    added = conversation.add_messages(HISTORY[2:])
    assert not added.forked
    assert tokenizer.decode(added.ids) == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_that_are_no_object_stay_as_they_are(templated: Templated) -> None:
    tokenizer = templated(BODY.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"))
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{2"}}
    prompt = tokenizer.decode(Conversation(tokenizer, [HISTORY[0], HISTORY[1] | {"tool_calls": [call]}]).prompt_ids)
    assert '<call add "{2">' in prompt


@pytest.mark.parametrize(
    ("template", "dropped"),
    [
        (FULL, ()),
        (FULL.replace("{% if tools %}", "{% if no_such_thing %}"), (TOOLS,)),
        (FULL.replace("{{ c.function.name }} " + ITEMS, ""), (CALLS,)),
        (FULL.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"), (RESULTS,)),
        (FULL.replace("messages[loop.index0 - 1].tool_calls", "no_such_thing"), (RESULTS,)),
    ],
)
def test_what_a_template_drops_is_named_once(
    templated: Templated, template: str, dropped: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = templated(template)
    assert template_forms(tokenizer).dropped == dropped
    reader = TurnReader(tokenizer)
    reader.start(HISTORY[:1], None)
    assert not reader.dropped, "a conversation without tools loses nothing"
    for _ in range(2):
        reader.start(HISTORY[:2], [ADD])
    assert tuple(reader.dropped) == dropped
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([dropped_note(dropped)] if dropped else [])
