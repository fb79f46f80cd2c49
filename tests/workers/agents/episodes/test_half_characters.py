"""A policy that writes half a character in a tool call: the tool answers it, and the sample has its rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tests.workers.agents.episodes.test_conversation import tokenizer_of
from troupe.workers.agents.episodes.check import Rehearsal, rehearse
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import Row
from troupe.workers.contract.messages import ROLLOUTS, GroupRequest
from troupe.workers.engine.rows import RowBuilder
from troupe.workers.environment import EnvironmentWorker

ROW = Row(({"role": "user", "content": "hello"},), "5", {}, seed=11)
CALL = '<tool_call>{"name": "repeat", "arguments": {"text": "\\ud83d"}}</tool_call>'


def repeat(text: str) -> str:
    """Repeats a text."""
    return f"again: {text}"


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """As vLLM's parsers do: arguments are written again, without escapes."""
    if "<tool_call>" not in text:
        return text, []
    call = json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return "", [{"id": "c", "type": "function", "function": {"name": call["name"], "arguments": arguments}}]


def test_a_call_with_half_a_character_is_answered_and_recorded() -> None:
    tokenizer = tokenizer_of("qwen3")
    config = EnvironmentConfig(name="tools", args={"tools": [f"{__name__}:repeat"]}, turn_timeout_s=20.0)
    rehearsal = Rehearsal(config, TurnReader(tokenizer, parse), 64, 1024)
    (played,) = asyncio.run(rehearse(rehearsal, EnvironmentWorker(config, "check"), [ROW], [CALL, "Done."]))
    assert played.status == "ok"
    assert [message["content"] for message in played.messages if message["role"] == "tool"] == [r"again: \ud83d"]
    prompt = {"messages": "[]", "answer": "5", "metadata": "{}", "source": None}
    builder = RowBuilder("rollout-0", tokenizer, GroupRequest("p0", 0, 0, 1, seed=1), prompt, [])
    table = pa.Table.from_pylist(builder.episode(0, played), schema=ROLLOUTS)
    assert json.loads(table["conversation"][0].as_py()) == played.messages
