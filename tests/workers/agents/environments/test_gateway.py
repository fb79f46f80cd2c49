"""Every protocol of the gateway gives the tokens that chat completions give for the same conversation."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.workers.agents.environments import protocol_agents
from tests.workers.agents.environments.started import started
from tests.workers.agents.episodes.test_conversation import tokenizer_of
from troupe.workers.agents.environments.gateway.chat import Chat
from troupe.workers.agents.environments.gateway.completions import Completions
from troupe.workers.agents.environments.gateway.endpoint import PROTOCOLS
from troupe.workers.agents.environments.gateway.messages import CountTokens, Messages
from troupe.workers.agents.environments.gateway.protocol import Protocol
from troupe.workers.agents.environments.gateway.responses import Responses
from troupe.workers.agents.environments.gateway.thoughts import read_thought, seal, unseal
from troupe.workers.agents.episodes.check import Rehearsal, rehearse
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.agents.episodes.turns import Played
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import Row
from troupe.workers.environment import EnvironmentWorker

HERE = protocol_agents.__name__
ROW = Row(({"role": "user", "content": "hello"},), "5", {}, seed=11)
ANSWER = ["It is 4.", "Bye."]
CALL = ['<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', "It is 5."]
THOUGHT = ["<think>\ntwo and two\n</think>\n\nIt is 4.", "Bye."]

Play = Callable[..., Played]


class _StayingWorker:
    """The worker of all tests, which stays when an episode has been played."""

    def __init__(self, worker: EnvironmentWorker) -> None:
        self.begin, self.step, self.end = worker.begin, worker.step, worker.end

    async def start(self) -> None:
        """It runs."""

    async def close(self) -> None:
        """It stays."""


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Plays an episode of an agent, whose policy says the given texts."""
    module = "tests.workers.agents.environments.agents"
    config = EnvironmentConfig(name=f"{module}:AgentOfRow", episodes=1, memory_limit_mib=1024, max_turns=4)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        kept = _StayingWorker(runner.run(stack.enter_async_context(started(config))))

        def played(
            function: str, said: Sequence[str], family: str = "chatml", longest: int = 1024, **args: Any
        ) -> Played:
            row = replace(ROW, metadata={"agent": {"function": f"{HERE}:{function}", "args": args}})
            reader = TurnReader(tokenizer_of(family), parse)
            (one,) = runner.run(rehearse(Rehearsal(config, reader, 64, longest), kept, [row], said))
            return one

        yield played
        runner.run(stack.aclose())


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    found = re.findall(r"<tool_call>(.*?)</tool_call>", text)
    calls = [json.loads(one) for one in found]
    return re.sub(r"<tool_call>.*?</tool_call>", "", text), [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for number, call in enumerate(calls)
    ]


def tokens(played: Played) -> list[tuple[list[int], list[int], list[bool]]]:
    assert played.status == "ok"
    return [(row.prompt_ids, row.response_ids, row.loss_mask) for row in played.segments]


@pytest.fixture(scope="module")
def reference(play: Play) -> dict[bool, Any]:
    """The tokens of chat completions, without and with a call; a single row each."""
    plain, called = play("chat", ANSWER), play("chat", CALL, "qwen3", tools=True)
    assert len(plain.segments) == len(called.segments) == 1 and len(called.turns) == 2
    return {False: tokens(plain), True: tokens(called)}


@pytest.mark.parametrize("function", ["chat", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [False, True])
def test_protocols_give_the_tokens_of_chat_completions(
    play: Play, reference: dict[bool, Any], function: str, stream: bool, tools: bool
) -> None:
    played = play(function, *((CALL, "qwen3") if tools else (ANSWER,)), tools=tools, stream=stream)
    assert tokens(played) == reference[tools]
    assert played.rewards[-1][1] == float(tools)


def test_a_response_is_continued_by_its_id(play: Play, reference: dict[bool, Any]) -> None:
    assert tokens(play("responses", ANSWER, stored=True)) == reference[False]
    assert tokens(play("responses", CALL, "qwen3", stored=True, tools=True)) == reference[True]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_the_rendered_conversation_have_its_tokens(
    play: Play, reference: dict[bool, Any], stream: bool
) -> None:
    assert tokens(play("completions", ANSWER, stream=stream)) == reference[False]


def test_token_ids_in_and_out_are_the_tokens_that_are_recorded(play: Play, reference: dict[bool, Any]) -> None:
    ((prompt, response, loss),) = reference[False]
    more = [token for token, sampled in zip(response, loss, strict=True) if not sampled]
    assert tokens(play("generate", ANSWER, prompt=prompt, more=more)) == reference[False]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("messages", {"thinking": "adaptive"}),
        ("messages", {"thinking": "enabled", "stream": True}),
        ("messages", {"thinking": "adaptive", "display": "omitted"}),
        ("responses", {}),
        ("responses", {"stream": True}),
    ],
)
def test_thoughts_in_blocks_stay_the_tokens_that_were_sampled(
    play: Play, function: str, args: dict[str, Any], keeps: bool
) -> None:
    """Also if the agent leaves them out of the history, as the services allow."""
    assert tokens(play(function, THOUGHT, keeps=keeps, **args)) == tokens(play("chat", THOUGHT))


def test_the_seal_of_a_thought_brings_its_text_back_where_a_history_forks() -> None:
    for text in ("<think>\na\n</think>\n\nb", "a</think> b", "<think>a", "[THINK]a[/THINK]b", "b", ""):
        thought = read_thought(text)
        assert unseal(seal(thought.before), "") + thought.answer == text
    assert read_thought("a</think> b") == ("a", "a</think> ", "b") and read_thought("<think>a").answer == ""
    assert unseal("of another service", "a") == "<think>\na\n</think>\n\n" and unseal(None, "") == ""


def test_counts_are_the_tokens_of_the_prompt_and_no_turns(play: Play) -> None:
    played = play("counts", ANSWER)
    assert (played.status, len(played.turns), len(played.segments), played.rewards[-1][1]) == ("ok", 1, 1, 1.0)
    assert played.info == {"requests": 1.0, "restarted": 0.0, "rewritten": 0.0}


def test_models_are_listed_in_the_form_of_both_services(play: Play) -> None:
    assert play("lists_models", ANSWER).rewards[-1][1] == 1.0


def test_a_text_that_ends_a_turn_is_named_and_left_out(play: Play) -> None:
    """A raw prompt that has it continues the turn."""
    said = ["It is 4.", "It is 4.", "It is 4.", "Bye."]
    played = play("stops", said)
    assert (played.status, played.rewards[-1][1]) == ("ok", 3.0)
    assert len(played.segments) == 4, "what the scripted turn has behind the text is no end of a turn"


def test_custom_tools_and_namespaces_are_functions(play: Play) -> None:
    calls = [
        '<tool_call>{"name": "patch", "arguments": {"input": "+ a"}}</tool_call>',
        '<tool_call>{"name": "sums__add", "arguments": {"a": 1}}</tool_call>',
    ]
    played = play("custom_tools", calls, "qwen3")
    assert (played.status, len(played.segments), played.rewards[-1][1]) == ("ok", 1, 1.0)


def test_requests_that_mean_something_else_are_refused_in_the_form_of_their_service(play: Play) -> None:
    played = play("refused", ANSWER)
    assert (played.status, played.rewards[-1][1]) == ("ok", float(len(protocol_agents.REFUSED)))


def test_an_agent_without_a_turn_ends_with_its_last_refusal(play: Play) -> None:
    status = play("long_claude", ANSWER).status
    assert "the agent ended without a request; its last one was refused: This model's maximum context length" in status


RUN = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
COMMAND = "echo 4 > four.txt; cat four.txt"


@pytest.mark.parametrize(
    ("program", "call"),
    [
        ("claude", RUN.format("Bash", json.dumps({"command": COMMAND, "description": "x"}))),
        ("codex", RUN.format("exec_command", json.dumps({"cmd": COMMAND}))),
    ],
)
def test_what_command_line_agents_send_is_one_row(play: Play, program: str, call: str) -> None:
    """Requests of Claude Code 2.1.332 and Codex 0.171.0 from npm, their texts cut."""
    said = [f"<think>\nI write it.\n</think>\n\n{call}", "Done: the file has 4."]
    played = play("replays", said, "qwen3", longest=8192, program=program)
    assert (played.status, len(played.turns), len(played.segments), played.rewards[-1][1]) == ("ok", 2, 1, 1.0)
    (note,) = played.notes.values()
    assert ("context_management" if program == "claude" else "web_search") in note


SDK: tuple[tuple[type[Protocol], type], ...] = (
    (Chat, chat_create_params.CompletionCreateParamsBase),
    (Responses, response_create_params.ResponseCreateParamsBase),
    (Messages, message_create_params.MessageCreateParamsBase),
    (CountTokens, message_count_tokens_params.MessageCountTokensParams),
    (Completions, completion_create_params.CompletionCreateParamsBase),
)


@pytest.mark.parametrize(("protocol", "parameters"), SDK)
def test_every_field_of_the_official_client_is_honoured_refused_or_ignored(
    protocol: type[Protocol], parameters: type
) -> None:
    fields = protocol.fields
    known = fields.done | fields.refused.keys() | fields.ignored | fields.hints
    assert parameters.__annotations__.keys() - known == set()


def test_a_field_has_one_fate() -> None:
    for protocol in PROTOCOLS:
        fields = protocol.fields
        assert not fields.refused.keys() & (fields.ignored | fields.hints | fields.done), protocol.path


def test_unknown_fields_are_ignored_and_named() -> None:
    assert Chat.fields.check({"messages": [], "user": "a", "reasoning_effort": "low", "brand_new": 1, "seed": 3}) == [
        "reasoning_effort",
        "brand_new",
    ]
