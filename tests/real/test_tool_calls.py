"""vLLM's parsers of tool calls on what policies sample: cut turns, malformed calls, and parsers that read no text."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from tests.real.call_forms import FORMS, OTHERS, READ_NO_TEXT, TOKENS, two_arguments
from troupe.workers.agents.environments.tools import CUT, MALFORMED, Tools, unread_call
from troupe.workers.agents.episodes.conversation import MalformedCall, TurnReader
from troupe.workers.engine import tool_calls
from troupe.workers.engine.tool_calls import tool_parser

pytestmark = pytest.mark.real

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["code"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with the tokens that parsers require."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS])
    return tokenizer


def read(tokenizer: PreTrainedTokenizerBase, parser: str, *texts: str, cut: bool) -> list[dict[str, Any]]:
    """Turns as an environment gets them."""
    reader, messages = TurnReader(tokenizer, tool_parser(parser, tokenizer)), []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        message, history = reader.read(ids, [PYTHON], cut=cut)
        assert ("tool_calls" in history) == ("tool_calls" in message)
        messages.append(message | {"finish_reason": "length" if cut else "stop"})
    return messages


@pytest.mark.parametrize("parser", FORMS)
def test_no_turn_that_was_cut_calls_a_tool_or_is_the_answer(tokenizer: PreTrainedTokenizerBase, parser: str) -> None:
    """Wherever a call is cut, and also behind its end: some parsers complete the arguments, others see no call."""
    whole = FORMS[parser]
    (message,) = read(tokenizer, parser, whole, cut=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["python"]
    assert "print(1)" in message["tool_calls"][0]["function"]["arguments"]
    ends = (whole.index("print(1)") + 6, len(whole) - 1, len(whole))
    for message in read(tokenizer, parser, *(whole[:end] for end in ends), cut=True):
        assert "tool_calls" not in message and unread_call(message) == CUT


def arguments(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What the calls of a turn are called with."""
    return [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("parser", FORMS)
def test_no_turn_that_a_stop_string_ends_inside_a_call_calls_a_tool_with_half_of_its_arguments(
    tokenizer: PreTrainedTokenizerBase, parser: str
) -> None:
    """Wherever the string stands: the parser completes the call, or the turn ends with no token that ends one."""
    whole = two_arguments(FORMS[parser])
    expected, again = (arguments(one) for one in read(tokenizer, parser, whole, f"{whole}\n", cut=False))
    assert expected == again and [call.keys() for call in expected] == [{"code", "n"}]
    ends = range(whole.index("print(1)"), len(whole), 4)
    for message in read(tokenizer, parser, *(whole[:end] for end in ends), cut=False):
        assert arguments(message) in ([], expected)


def test_a_cut_turn_is_never_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    (message,) = read(tokenizer, "hermes", "The answer is 4.", cut=True)
    environment: Any = Tools(tools=["calculator"], function="last_number")
    observation = asyncio.run(environment.step(message))
    assert (observation.done, observation.reward, observation.messages[0]["content"]) == (False, None, CUT)


def test_a_whole_answer_is_no_call(tokenizer: PreTrainedTokenizerBase) -> None:
    (message,) = read(tokenizer, "hermes", "The answer is 4.", cut=False)
    assert unread_call(message) is None
    assert unread_call({"content": "<tool_call>{", "finish_reason": "stop"}) == MALFORMED
    assert unread_call({"content": "", "unread_call": "malformed", "finish_reason": "stop"}) == MALFORMED


@pytest.mark.parametrize("parser", ["hermes", "jamba", "lfm2", "deepseek_v3"])
def test_a_call_that_is_not_whole_is_told_where_its_tag_is_a_special_token(
    tokenizer: PreTrainedTokenizerBase, parser: str
) -> None:
    """The text that the environment gets has no special tokens."""
    whole = FORMS[parser]
    (message,) = read(tokenizer, parser, whole[: whole.index("print(1)")], cut=False)
    assert unread_call(message) == MALFORMED


@pytest.mark.parametrize("parser", sorted(READ_NO_TEXT))
def test_a_parser_that_reads_no_text_is_refused(tokenizer: PreTrainedTokenizerBase, parser: str) -> None:
    with pytest.raises(ValueError, match=f"tool parser {parser} does not read the text of a turn"):
        tool_parser(parser, tokenizer)


def test_a_turn_is_read_without_the_whole_vocabulary(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the rest, and a parser is created for every turn."""
    parse, read = tool_parser("qwen3_coder", tokenizer), []
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: read.append(self) or {})
    assert parse is not None and len(parse(FORMS["qwen3_coder"], [PYTHON])[1]) == 1
    assert read == []


def test_a_turn_that_repeats_itself_is_read_within_a_bound(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one takes 20 s without it, and twice as long a turn eight times that."""
    monkeypatch.setattr(tool_calls, "_MOST_CPU_S", 0.2, raising=False)
    parse = tool_parser("glm45", tokenizer)
    assert parse is not None
    with pytest.raises(MalformedCall, match=r"not done after 0\.2 s of processor time"):
        parse("<tool_call>python\n" + "<arg_key>code</arg_key>\n<arg_value>" * 160, [PYTHON])


def test_a_malformed_call_writes_no_traceback_of_the_parser(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    parse, written = tool_parser("hermes", tokenizer), logging.getLogger("vllm")
    assert parse is not None
    written.addHandler(caplog.handler)

    def tracebacks() -> int:
        parse('<tool_call>{"name": </tool_call>', [PYTHON])
        return sum(record.exc_info is not None for record in caplog.records)

    try:
        assert tracebacks() == 0
        with caplog.at_level(logging.ERROR, "vllm.tool_parsers"):
            assert tracebacks() > 0, "this call has one unless it is silenced"
    finally:
        written.removeHandler(caplog.handler)


def test_every_parser_reads_whatever_a_policy_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    """What a parser raises is a malformed call; nothing else leaves it. Each sees its own form, and others'."""
    from vllm.tool_parsers import ToolParserManager

    chance, tried, malformed = random.Random(7), 0, 0
    names = set(ToolParserManager.list_registered()) - READ_NO_TEXT
    assert names == FORMS.keys() | OTHERS
    for name in sorted(names):
        parse = tool_parser(name, tokenizer)
        assert parse is not None
        for text in (*[FORMS.get(name, FORMS["hermes"])] * 3, *chance.sample(list(FORMS.values()), 3)):
            for _ in range(6):
                start, end = sorted(chance.sample(range(len(text) + 1), 2))
                mutated = text[:start] + chance.choice(["", "{", "null", "\ud83d", text]) + text[end:]
                tried += 1
                try:
                    _, calls = parse(mutated, [PYTHON])
                except MalformedCall:
                    malformed += 1
                    continue
                assert all(isinstance(call["function"]["name"], str) for call in calls), (name, mutated)
    assert tried > 1500 and malformed > 0
