"""Agents with the unmodified `openai` client, against a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pytest

from tests.workers.agents.environments.agents import ADD
from tests.workers.agents.environments.started import bound, started
from troupe.workers.agents.environments.gateway.chat import Chat
from troupe.workers.agents.environments.gateway.request import (
    Choice,
    forced_calls,
    forced_schema,
    plain,
    read_options,
    read_request,
)
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Observation, Row
from troupe.workers.environment import EnvironmentWorker

HERE = "tests.workers.agents.environments.agents"
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}
COST: Message = {"usage": {"prompt_tokens": 5, "completion_tokens": 3}}
ROW = Row(({"role": "user", "content": "hello"},), "5", {"level": 2}, seed=11)


@dataclass
class Played:
    last: EpisodeReply
    asked: list[Observation] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    """Responses sampled at the same time, for each step."""


Play = Callable[..., Played]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Plays episodes of agents, one after another by the same worker."""
    config = EnvironmentConfig(name=f"{HERE}:AgentOfRow", episodes=1, memory_limit_mib=1024)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        worker = runner.run(stack.enter_async_context(started(config)))
        yield lambda *args, **keywords: runner.run(_play(worker, *args, **keywords))
        runner.run(stack.aclose())


async def _play(
    worker: EnvironmentWorker,
    call: Message | None = None,
    extra: Message | None = None,
    pause_s: float = 0.0,
    said: Iterator[str] | None = None,
    longest: int = 100,
    step_s: float = 60.0,
    **agent: Any,
) -> Played:
    """Answers `answer 0`, `answer 1`, ... to every request, the first time with a tool call if one is given.

    Requests of more than `longest` characters are refused.
    """
    bound(worker, turn_timeout_s=60.0)
    played = Played(await worker.begin("a", replace(ROW, metadata={**ROW.metadata, "agent": agent})))
    bound(worker, turn_timeout_s=step_s)
    while not played.last.observation.done:
        number = len(played.asked)
        asked = [played.last.observation, *played.last.observation.also]
        played.asked += asked
        played.together.append(len(asked))
        message, *also = (
            {"role": "assistant", "content": f"answer {number + place}"} | (extra or {}) for place in range(len(asked))
        )
        if said is not None:
            message["content"] = next(said)
        if not asked[0].logprobs:
            message.pop("logprobs", None)
        if also:
            message["also"] = also
        if call is not None and number == 0:
            message |= {"content": "", "tool_calls": [call]}
        if len(json.dumps(contents(asked[0]))) > longest:
            message["refused"] = {"code": "context_length_exceeded", "message": "too long"}
        await asyncio.sleep(pause_s)
        played.last = await worker.step("a", message)
    return played


def contents(observation: Observation) -> list[str]:
    return [message["content"] for message in observation.messages]


def test_a_conversation_is_continued_by_its_new_messages_alone(play: Play) -> None:
    played = play(function=f"{HERE}:chat", args={"turns": 3})
    assert (played.last.status, played.last.observation.reward) == ("ok", 7.0)
    assert [contents(asked) for asked in played.asked] == [["hello"], ["you said answer 0"], ["you said answer 1"]]
    assert [asked.restart for asked in played.asked] == [True, False, False]
    assert played.last.observation.info == {"requests": 3.0, "restarted": 0.0, "rewritten": 0.0}


def test_an_asynchronous_agent_may_leave_the_reward_to_others(play: Play) -> None:
    played = play(function=f"{HERE}:chat_async")
    assert (played.last.status, played.last.observation.reward, len(played.asked)) == ("ok", None, 1)


def test_streaming_gives_the_whole_message(play: Play) -> None:
    assert play(function=f"{HERE}:streams").last.observation.reward == 1.0


def test_tool_calls_and_limits_of_a_request(play: Play) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    played = play(call, function=f"{HERE}:tools")
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    first, second = played.asked
    assert first.tools is not None and first.tools[0]["function"]["name"] == "add"
    assert not second.restart, "the call in the history is the one that was answered"
    assert [message["role"] for message in second.messages] == ["tool"]
    assert (second.stop, second.max_tokens) == (("END",), 7)


def test_several_choices_and_branches_are_rows_of_their_own(play: Play) -> None:
    played = play(function=f"{HERE}:choices")
    assert played.last.observation.reward == 1.0
    assert [asked.restart for asked in played.asked] == [True, True, True]
    assert played.together == [3], "the choices of a request are sampled at the same time"
    assert played.last.observation.info == {"requests": 3.0, "restarted": 2.0, "rewritten": 0.0}
    played = play(function=f"{HERE}:branches")
    assert played.last.observation.reward == 1.0
    assert sorted(contents(asked) for asked in played.asked) == [["left"], ["right"]]
    assert [asked.restart for asked in played.asked] == [True, True]


@pytest.mark.parametrize(
    ("function", "rows", "turns", "steps"),
    [
        ("subagents", 2, 8, [8]),
        ("parallel_subagents", 2, 8, range(4, 9)),
        ("planner", 4, 6, [6]),
        ("picks_a_choice", 4, 6, [3]),
    ],
)
def test_conversations_that_alternate_keep_their_rows(
    play: Play, function: str, rows: int, turns: int, steps: Sequence[int]
) -> None:
    played = play(function=f"{HERE}:{function}")
    assert (played.last.status, len(played.asked)) == ("ok", turns) and len(played.together) in steps
    assert len({asked.conversation for asked in played.asked}) == rows == sum(asked.restart for asked in played.asked)
    assert all(len(asked.messages) == 1 for asked in played.asked if not asked.restart)
    assert [asked.note for asked in played.asked if asked.note] == []
    assert played.last.observation.info == {"requests": turns, "restarted": rows - 1.0, "rewritten": 0.0}


def test_a_response_says_how_it_ended_and_what_it_cost(play: Play) -> None:
    limits = {"finish_reason": "length", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    assert play(extra=limits, function=f"{HERE}:counted").last.observation.reward == 1.0


def test_a_response_has_the_log_probs_of_its_tokens_where_they_are_asked_for(play: Play) -> None:
    logprobs = {"logprobs": [["an", -0.5], ["swer", -1.5]]}
    played = play(extra=logprobs, function=f"{HERE}:scored")
    assert (played.last.status, played.last.observation.reward) == ("ok", -2.0)
    assert [asked.logprobs for asked in played.asked] == [True, True, False]


def test_requests_can_force_calls_and_the_form_of_a_response(play: Play) -> None:
    said = iter(['{"a": 5}', '[{"name": "add", "parameters": {"a": 5}}]', '{"a": 1}', "{}"])
    played = play(said=said, function=f"{HERE}:forced")
    assert (played.last.status, played.last.observation.reward) == ("ok", 4.0)
    arguments = {"type": "object", "properties": {"a": {"type": "integer"}}}
    properties = {"name": {"type": "string", "enum": ["add"]}, "parameters": arguments}
    call = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
    assert [asked.structured for asked in played.asked] == [
        {"json_schema": arguments},
        {"json_schema": {"type": "array", "minItems": 1, "items": {"anyOf": [call]}}},
        {"json_schema": arguments},
        {"json_schema": {"type": "object"}},
    ]
    assert [asked.restart for asked in played.asked[:3]] == [True, False, False], "forced calls are in the history"


def test_an_agent_that_asks_for_one_call_gets_one(play: Play) -> None:
    """What follows has a separate prompt: the tokens of the turn have a call that the history does not."""
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {number}}}'}}
        for number in (5, 6)
    ]
    played = play(extra={"tool_calls": calls}, function=f"{HERE}:one_call_at_a_time")
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    assert [asked.restart for asked in played.asked] == [True, True]
    history = played.asked[1].messages
    assert [message["role"] for message in history] == ["user", "assistant", "tool"]
    assert history[1]["tool_calls"] == calls[:1]


def test_one_call_of_any_tool_is_a_list_of_one() -> None:
    (choice,) = asyncio.run(read({"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}))
    assert choice.schema is not None and (choice.schema["minItems"], choice.schema["maxItems"]) == (1, 1)
    (choice,) = asyncio.run(read({"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": True}))
    assert choice.schema is not None and "maxItems" not in choice.schema


async def read(options: dict[str, Any]) -> list[Choice]:
    body = {"model": "any", "messages": list(ROW.messages), **options}
    Chat.fields.check(body)
    return read_request(read_options(Chat().request(body, [])))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"functions": [ADD["function"]]}, "functions: use tools and tool_choice"),
        ({"function_call": {"name": "add"}}, "function_call: use tools"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}, "messages: function_call"),
        ({"guided_json": {"type": "object"}}, "guided_json: use response_format"),
        ({"guided_regex": "[0-9]"}, "guided_regex: use response_format"),
        ({"structured_outputs": {"regex": "[0-9]"}}, "structured_outputs: use response_format"),
        ({"best_of": 4}, "best_of: every sampled response is trained"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: it would change the distribution"),
        ({"logit_bias": {"5": 1}}, "logit_bias: it would change the distribution"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs: the template is"),
        ({"min_tokens": 5}, "min_tokens: it would change the distribution that is trained; leave it out"),
        ({"return_token_ids": True}, "return_token_ids: the tokens are recorded"),
        ({"modalities": ["text", "audio"]}, "modalities: the policy writes text"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: Input should be a valid boolean"),
        ({"logprobs": 5}, "logprobs: Input should be a valid boolean"),
        ({"stream": 1}, "stream: Input should be a valid boolean"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage: Input should be a valid boolean"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"n": 2.7}, "n: Input should be a valid integer"),
        ({"n": True}, "n: Input should be a valid integer"),
        ({"n": "2"}, "n: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_completion_tokens": False}, "max_completion_tokens: Input should be a valid integer"),
        ({"max_tokens": 5.0}, "max_tokens: Input should be a valid integer"),
        ({"stop": 0}, "stop.str: Input should be a valid string"),
    ],
)
def test_an_option_is_never_ignored_where_a_response_depends_on_it(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        asyncio.run(read(options))


def test_options_without_effect_and_neutral_values_are_accepted() -> None:
    neutral = {"functions": None, "best_of": 1, "repetition_penalty": 1.0, "function_call": "none", "logit_bias": {}}
    ignored = {"temperature": 0.0, "top_p": 0.9, "seed": 5, "user": "me", "store": False, "metadata": {"a": "b"}}
    assert len(asyncio.run(read({**neutral, **ignored, "modalities": ["text"], "n": 2}))) == 2
    absent: Any = dict.fromkeys(
        ("n", "max_tokens", "stop", "tools", "tool_choice", "logprobs", "stream", "stream_options")
    )
    (choice,) = asyncio.run(read(dict(absent)))
    asked = choice.observation
    assert (asked.max_tokens, asked.stop, asked.tools, asked.logprobs) == (None, (), None, False)


def test_hints_that_agents_always_send_are_ignored_and_named_once(play: Play) -> None:
    played = play(function=f"{HERE}:hints", args={"turns": 3})
    assert (played.last.status, len(played.asked)) == ("ok", 3)
    named = "options of requests are ignored, because the policy does not read them: reasoning_effort, verbosity"
    assert [asked.note for asked in played.asked] == [named, "", ""]


def test_what_the_endpoint_does_not_serve_is_an_error_of_the_protocol(play: Play) -> None:
    played = play(function=f"{HERE}:other_protocols")
    assert (played.last.status, played.last.observation.reward) == ("ok", 4.0)
    status = play(function=f"{HERE}:other_protocols", args={"served": False}).last.status
    assert (
        "its last one was refused: POST /v1/audio/speech: Not Found. The endpoint serves POST /v1/chat/completions"
        in status
    )


def test_definitions_of_forced_tools_are_where_references_begin() -> None:
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}, {"function": {"name": "g"}}]
    schema = forced_schema(tools, True)
    assert schema["$defs"] == {"P": {"type": "integer"}} and "$defs" in parameters
    assert forced_schema(tools, "f") == parameters
    assert forced_schema(tools, "g") == {"type": "object", "properties": {}}
    for text in ("", "[", "5", "{}", "[5]", '[{"name": 5, "parameters": {}}]', '[{"name": "f", "parameters": []}]'):
        assert forced_calls(text, True, "call") == []
    assert forced_calls("[]", "f", "call") == []


def test_an_agent_shortens_a_request_that_is_too_long(play: Play) -> None:
    played = play(function=f"{HERE}:shortens")
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    assert [asked.restart for asked in played.asked] == [True, False, True], "what was refused is not continued"
    assert all(asked.refusable for asked in played.asked)


def test_the_retry_of_a_request_that_the_client_gave_up_is_that_request(play: Play) -> None:
    played = play(pause_s=1.5, function=f"{HERE}:impatient")
    assert (played.last.status, played.last.observation.reward) == ("ok", 2.0)
    assert len(played.asked) == 2
    assert played.last.observation.info == {"requests": 2.0, "restarted": 0.0, "rewritten": 0.0}


def test_wrong_keys_and_what_cannot_be_trained_are_refused(play: Play) -> None:
    assert play(function=f"{HERE}:refused").last.observation.reward == 3.0


@pytest.mark.parametrize(
    ("function", "status"),
    [
        ("silent", "start: error: ValueError: the agent ended without a request"),
        (
            "catches",
            "start: error: ValueError: the agent ended without a request; its last one was refused: logit_bias",
        ),
        ("broken", "step: error: RuntimeError: lost the plot (agents.py:"),
        ("word", "step: error: TypeError: the agent returned no number, but str"),
        ("endless", "step: timeout after 2 s"),
    ],
)
def test_a_fault_of_the_agent_is_a_status(play: Play, function: str, status: str) -> None:
    step_s = 2.0 if function == "endless" else 60.0
    assert play(step_s=step_s, function=f"{HERE}:{function}").last.status.startswith(status)


def test_an_episode_that_is_cut_short_leaves_nothing_in_its_process() -> None:
    """The agent waits for a response that never comes; it gets an error, and its endpoint and thread end."""
    config = EnvironmentConfig(name="agent", args={"function": f"{HERE}:chat"}, episodes=1, turn_timeout_s=60.0)

    async def run() -> list[tuple[int, int, int]]:
        worker = EnvironmentWorker(config, "environment-0")
        await worker.start()
        used = []
        try:
            for number in range(4):
                assert (await worker.begin(str(number), ROW)).status == "ok"
                await worker.end(str(number))
                while not worker._free:  # the episode is being closed
                    await asyncio.sleep(0.01)
                process = psutil.Process(worker._free[0].pid)
                used.append((process.pid, process.num_fds(), process.num_threads()))
            return used
        finally:
            await worker.close()

    pids, descriptors, threads = zip(*asyncio.run(run()), strict=True)
    assert len(set(pids)) == 1, "the process serves all episodes"
    assert len(set(descriptors[1:])) == 1 and len(set(threads[1:])) == 1, (descriptors, threads)


def test_a_program_in_any_language_is_an_agent(play: Play) -> None:
    played = play(command=[sys.executable, "-m", HERE])
    assert (played.last.status, played.last.observation.reward) == ("ok", 0.5)
    played = play(command=["false"])
    assert played.last.status.startswith("start: error: ProgramFailed: the command ended with exit code 1")
    for held in ("", ", stdout=-3", ", stderr=-3"):
        script = f"import subprocess, sys; subprocess.Popen(['sleep', '100']{held}); sys.exit('no such table')"
        played = play(command=[sys.executable, "-c", script])
        assert "the command ended with exit code 1: no such table" in played.last.status
    for size in (200_000, 20_000_000):
        script = f"import sys; print('x' * {size}); print('first', file=sys.stderr); sys.exit('no such table: orders')"
        played = play(command=[sys.executable, "-c", script])
        assert "the command ended with exit code 1: first | no such table: orders" in played.last.status


def test_the_cause_of_a_failed_program_is_in_the_status_behind_many_lines(play: Play) -> None:
    """Node writes it some lines before its last one."""
    frames = [f"    at Module.load (loader:{number})" for number in range(30)]
    lines = "\n".join(["Error: no table", *frames, *"012345678", "Node.js v20"])
    script = f"import os, sys; print({lines!r}, file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    status = play(command=[sys.executable, "-c", script]).last.status
    assert "the command ended with signal 9 (Killed): Error: no table | 0 | 1" in status and "| Node.js v20" in status


def test_a_long_line_of_output_loses_no_episode(play: Play) -> None:
    code = f"import runpy; print('x' * 20_000_000); runpy.run_module({HERE!r}, run_name='__main__')"
    played = play(command=[sys.executable, "-c", code])
    assert (played.last.status, played.last.observation.reward) == ("ok", 0.5)


def test_what_a_command_leaves_behind_ends_with_its_episode(play: Play) -> None:
    """In its group or in a session of its own; the worker's processes go on."""
    for session in (False, True):
        length = f"{314159 + session}.{os.getpid()}"
        left = f"subprocess.Popen(['sleep', '{length}'], start_new_session={session}, stdout=-3, stderr=-3)"
        script = f"import runpy, subprocess; {left}; runpy.run_module({HERE!r}, run_name='__main__')"
        played = play(command=[sys.executable, "-c", script])
        assert (played.last.status, played.last.observation.reward) == ("ok", 0.5)
        left_behind = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", length]]
        assert not psutil.wait_procs(left_behind, timeout=10)[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "set function or command"),
        ({"function": "agents"}, "use package.module:function"),
        ({"function": f"{HERE}:nobody"}, "has no 'nobody'"),
        ({"function": f"{HERE}:chat", "command": ["true"]}, "not both"),
    ],
)
def test_wrong_settings_are_refused_at_start(args: dict[str, Any], message: str) -> None:
    worker = EnvironmentWorker(EnvironmentConfig(name="agent", args=args), "environment-0")
    with pytest.raises(ValueError, match=message):
        asyncio.run(worker.start())


@pytest.mark.parametrize("form", ["dumped again", "index", "no type", "own id", "object", "stripped", "name"])
def test_an_equal_turn_in_another_form_continues_the_conversation(play: Play, form: str) -> None:
    played = play(call=CALL, function=f"{HERE}:retells", args={"form": form})
    assert [len(asked.messages) for asked in played.asked] == [1, 1, 1, 1]
    assert [asked.restart for asked in played.asked] == [True, False, False, False]
    assert played.last.observation.info == {"requests": 4.0, "restarted": 0.0, "rewritten": 0.0}


def test_a_turn_that_is_told_otherwise_begins_a_row_and_names_the_difference(play: Play) -> None:
    played = play(call=CALL, function=f"{HERE}:retells", args={"form": "another value"})
    assert [asked.restart for asked in played.asked] == [True, True, False, False]
    assert played.last.observation.info == {"requests": 4.0, "restarted": 1.0, "rewritten": 1.0}
    (note,) = [asked.note for asked in played.asked if asked.note]
    assert "messages.1 (assistant): tool_calls [('add', '{\"a\": 2}')] became [('add', '{\"a\": 3}')]" in note


def test_the_usage_of_a_stream_comes_once_and_if_it_is_asked_for(play: Play) -> None:
    assert play(extra=COST, function=f"{HERE}:counts_usage").last.observation.reward == 1.0


def test_messages_of_the_sdk_and_of_the_history_compare_equal() -> None:
    full = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [{"id": "c"}]}
    assert plain(full) == {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert plain(parts) == {"role": "user", "content": "ab"}
    with pytest.raises(ValueError, match="parts of type image_url are not supported"):
        plain({"role": "user", "content": [{"type": "image_url"}]})
