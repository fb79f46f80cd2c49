"""vLLM's parsers of tool calls on what policies sample: cut turns, malformed calls, and parsers that read no text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from troupe.workers.engine.tool_calls import tool_parser
from troupe.workers.environments.tools import CUT, MALFORMED, unread_call
from troupe.workers.episodes.reader import MalformedCall, TurnReader

pytestmark = pytest.mark.real

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
_XML = "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n</tool_call>"
WHOLE = {
    "hermes": '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "glm45": "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>print(1)</arg_value>\n</tool_call>",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="python">\n<parameter name="code">print(1)</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "granite": '<|tool_call|>[{"name": "python", "arguments": {"code": "print(1)"}}]',
}
"""A call in the form of each parser."""


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with a chat template."""
    return AutoTokenizer.from_pretrained(demo_model)


def read(tokenizer: PreTrainedTokenizerBase, parser: str, text: str, *, cut: bool) -> dict[str, Any]:
    """The turn as an environment gets it."""
    reader = TurnReader(tokenizer, tool_parser(parser, tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    message, history = reader.read(ids, [PYTHON], cut=cut)
    assert ("tool_calls" in history) == ("tool_calls" in message)
    return message | {"finish_reason": "length" if cut else "stop"}


@pytest.mark.parametrize("parser", WHOLE)
def test_no_tool_runs_from_a_turn_that_was_cut(tokenizer: PreTrainedTokenizerBase, parser: str) -> None:
    """Wherever a call is cut, and also behind its end: some parsers complete the arguments on their own."""
    whole = WHOLE[parser]
    message = read(tokenizer, parser, whole, cut=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["python"]
    assert "print(1)" in message["tool_calls"][0]["function"]["arguments"]
    for end in range(len(whole) // 2, len(whole) + 1, 3):
        message = read(tokenizer, parser, whole[:end], cut=True)
        assert "tool_calls" not in message


@pytest.mark.parametrize("parser", ["qwen3_coder", "qwen3_xml", "glm45", "minimax_m2"])
def test_a_policy_is_told_that_its_call_was_cut(tokenizer: PreTrainedTokenizerBase, parser: str) -> None:
    whole = WHOLE[parser]
    message = read(tokenizer, parser, whole[: whole.index("print(1)") + 6], cut=True)
    assert unread_call(message) == CUT


def test_a_whole_answer_is_no_call(tokenizer: PreTrainedTokenizerBase) -> None:
    for cut in (True, False):
        assert unread_call(read(tokenizer, "hermes", "The answer is 4.", cut=cut)) is None
    assert unread_call({"content": "<tool_call>{", "finish_reason": "stop"}) == MALFORMED
    assert unread_call({"content": "", "unread_call": "malformed", "finish_reason": "stop"}) == MALFORMED


@pytest.mark.parametrize("parser", ["cohere_command3", "cohere_command4", "openai"])
def test_a_parser_that_reads_no_text_is_refused(tokenizer: PreTrainedTokenizerBase, parser: str) -> None:
    with pytest.raises(ValueError, match=f"tool parser {parser} does not read the text of a turn"):
        tool_parser(parser, tokenizer)


def test_a_turn_is_read_without_the_whole_vocabulary(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the rest, and a parser is created for every turn."""
    parse, read = tool_parser("qwen3_coder", tokenizer), []
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: read.append(self) or {})
    assert parse is not None and len(parse(_XML, [PYTHON])[1]) == 1
    assert read == []


def test_every_parser_reads_whatever_a_policy_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    """What a parser raises is a malformed call; nothing else leaves it."""
    from vllm.tool_parsers import ToolParserManager

    chance, tried, malformed = random.Random(7), 0, 0
    texts = [*WHOLE.values(), '<|action_start|><|plugin|>{"name": "python", "parameters": {"code": "1"}}<|action_end|>']
    texts += [
        "<|python_tag|>[python(code='1')]",
        '[TOOL_CALLS][{"name": "python", "arguments": {}}]',
        "[python(code=1)]",
    ]
    for name in sorted(ToolParserManager.list_registered()):
        try:
            parse = tool_parser(name, tokenizer)
        except ValueError:
            continue
        assert parse is not None
        for text in texts:
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
    assert tried > 1000 and malformed > 0
