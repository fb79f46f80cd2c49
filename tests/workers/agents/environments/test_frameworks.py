"""Frameworks for agents, where they are installed, against a scripted policy: their requests are understood.

pip install openai-agents langgraph langchain-openai smolagents
"""

from __future__ import annotations

import json

import pytest

from tests.workers.agents.environments.test_agent import play
from troupe.workers.contract.environments import Message

HERE = "tests.workers.agents.environments.framework_agents"
CALL: Message = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
}


@pytest.mark.parametrize(
    ("function", "packages"),
    [("langgraph", ("langgraph", "langchain_openai")), ("openai_agents", ("agents",))],
)
def test_a_framework_calls_a_tool_and_answers(function: str, packages: tuple[str, ...]) -> None:
    for package in packages:
        pytest.importorskip(package)
    played = play(CALL, said=iter(["", "5"]), longest=10_000, function=f"{HERE}:{function}")
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    first, second = played.asked
    assert first.tools is not None and [tool["function"]["name"] for tool in first.tools] == ["add"]
    assert not second.restart, "the second request continues the tokens of the first"
    assert [(message["role"], message["content"]) for message in second.messages] == [("tool", "5")]


def test_smolagents_runs_the_code_of_the_policy() -> None:
    pytest.importorskip("smolagents")
    said = iter(["Thought: add them.\n<code>\nfinal_answer(add(2, 3))\n</code>"])
    played = play(said=said, longest=100_000, function=f"{HERE}:smolagents_code")
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    assert len(played.asked) == 1


def test_smolagents_forces_calls() -> None:
    pytest.importorskip("smolagents")
    calls = [("add", {"a": 2, "b": 3}), ("final_answer", {"answer": "5"})]
    said = iter([json.dumps([{"name": name, "parameters": arguments}]) for name, arguments in calls])
    played = play(said=said, longest=100_000, function=f"{HERE}:smolagents_tools")
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    assert all(asked.structured is not None for asked in played.asked)
