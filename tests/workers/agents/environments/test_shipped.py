"""The environments that ship, turn by turn, and functions as tools."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from typing import Any

import pytest

from troupe.workers.agents.environments.basic import GuessNumber, Retry
from troupe.workers.agents.environments.functions import ToolCallError, function_schema, function_tool, load_tools
from troupe.workers.agents.environments.tools import MALFORMED, Tools
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.contract.rewards import Feedback

ROW = Row(({"role": "user", "content": "2+3?"},), "5", {}, seed=11)


def say(text: str, *calls: tuple[str, str]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        made = [{"id": f"c{n}", "function": {"name": name, "arguments": args}} for n, (name, args) in enumerate(calls)]
        message["tool_calls"] = made
    return message


def settled(value: Any) -> Any:
    """The value, or what a coroutine returns."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def step(environment: Any, message: Message) -> Observation:
    return settled(environment.step(message))


def test_a_wrong_answer_gets_another_try_at_less() -> None:
    environment = Retry(attempts=2, discount=0.5)
    assert environment.start(ROW).messages == ROW.messages
    again = step(environment, say("4"))
    assert (again.done, again.reward, again.messages[0]["content"]) == (False, None, "That is not right. Try again.")
    last = step(environment, say("5"))
    assert (last.done, last.reward, last.info) == (True, 0.5, {"solved": 1.0})
    other = Retry(attempts=1)
    other.start(ROW)
    assert step(other, say("nothing")).reward == 0.0


def checked(response: str, answer: str, metadata: dict[str, Any]) -> Feedback:
    return Feedback(0.25, f"{response} is not {answer}")


def test_what_the_function_of_an_environment_says_comes_with_its_reward() -> None:
    function = f"{__name__}:checked"
    for environment in (Retry(function, attempts=1), Tools(["calculator"], function=function)):
        settled(environment.start(ROW))
        assert step(environment, say("4")).reward == Feedback(0.25, "4 is not 5")


def test_guesses_are_answered_with_the_direction() -> None:
    environment = GuessNumber(1, 10, guesses=4, cost=0.25)
    environment.start(ROW)
    number = environment._number
    hints = [step(environment, say(str(guess))).messages[0]["content"] for guess in (number - 1, number + 1)]
    assert hints == ["higher", "lower"]
    assert step(environment, say(f"it is {number}")).reward == 0.5
    lost = GuessNumber(guesses=1)
    lost.start(ROW)
    assert (step(lost, say("no idea")).reward, lost._left) == (0.0, 0)


def test_calls_are_answered_together_and_failed_ones_say_why() -> None:
    environment = Tools(tools=["calculator"], function="last_number")
    first: Observation = settled(environment.start(ROW))
    assert first.tools is not None and first.tools[0]["function"]["name"] == "calculator"
    calls = [
        ("calculator", '{"expression": "2+3"}'),
        ("calculator", "{broken"),
        ("calculator", '{"expression": 5}'),
        ("calculator", '{"expression": "1/0"}'),
        ("search", "{}"),
        ("calculator", "[]"),
        ("calculator", "[" * 100_000),
    ]
    results = step(environment, say("", *calls)).messages
    texts = [message["content"] for message in results]
    assert texts[0] == "5" and [message["tool_call_id"] for message in results] == [f"c{n}" for n in range(7)]
    starts = [
        "the arguments are not JSON",
        "expression: ",
        "ZeroDivisionError",
        "there is no tool",
        "the arguments are not a JSON object",
        "the arguments are not JSON",
    ]
    assert all(text.startswith(f"error: {start}") for text, start in zip(texts[1:], starts, strict=True))
    assert step(environment, say('<tool_call>{"name": ')).messages[0]["content"] == MALFORMED
    last = step(environment, say("5"))
    assert (last.done, last.reward) == (True, 1.0)
    assert last.info == {"tool_calls": 8.0, "failed_tool_calls": 7.0}


_MET = [0, 0]
"""Calls of `meet` under way, and the most of them at the same time."""


async def meet(index: int) -> int:
    """Let the other calls run.

    Args:
        index: Number of the call.
    """
    _MET[0] += 1
    _MET[1] = max(_MET)
    for _ in range(10):
        await asyncio.sleep(0)
    _MET[0] -= 1
    return index


@pytest.mark.parametrize("bound", [1, 3])
def test_calls_of_a_turn_run_at_the_same_time_up_to_a_bound(bound: int) -> None:
    environment = Tools(tools=[f"{meet.__module__}:meet"], parallel_calls=bound)
    settled(environment.start(ROW))
    _MET[:] = [0, 0]
    results = step(environment, say("", *(("meet", json.dumps({"index": index})) for index in range(5)))).messages
    assert [message["content"] for message in results] == ["0", "1", "2", "3", "4"], "in the order of the calls"
    assert tuple(_MET) == (0, bound)
    with pytest.raises(ValueError, match="parallel_calls must be at least 1, got 0"):
        Tools(tools=["calculator"], parallel_calls=0)


def test_a_tool_whose_calls_wait_in_threads_does_not_hold_up_the_others() -> None:
    both = threading.Barrier(2, timeout=30)

    def wait() -> int:
        """Return when two calls are there."""
        return both.wait()

    tool = function_tool(wait, in_thread=True)

    async def twice() -> tuple[str, str]:
        return await asyncio.gather(tool.call({}), tool.call({}))

    assert sorted(asyncio.run(twice())) == ["0", "1"]


def test_a_long_result_is_left_to_the_bound_of_observations_and_one_that_no_reply_holds_is_an_error() -> None:
    environment = Tools(tools=[f"{lookup.__module__}:lookup"])
    settled(environment.start(ROW))
    sizes = (50_000, 2**20 - 4, 2**20 - 3)
    calls = [("lookup", json.dumps({"word": "x" * size, "limit": 1})) for size in sizes]
    observation = step(environment, say("", *calls))
    *whole, refused = [message["content"] for message in observation.messages]
    assert [len(text) for text in whole] == [50_004, 2**20]
    assert refused == "error: the result has 1,048,577 characters; at most 1,048,576 can be returned"
    assert observation.info == {"tool_calls": 3.0, "failed_tool_calls": 1.0}


def lookup(word: str, limit: int = 3) -> list[str]:
    """Look a word up.

    Args:
        word: The word,
            in lower case.
        limit: Most entries.
    """
    return [word] * limit


def untyped(word) -> str:
    return word


def test_a_schema_has_types_and_descriptions() -> None:
    schema = function_schema(lookup)["function"]
    assert schema["description"] == "Look a word up."
    assert schema["parameters"]["properties"]["word"] == {"type": "string", "description": "The word, in lower case."}
    assert schema["parameters"]["required"] == ["word"]
    assert settled(function_tool(lookup).call({"word": "a", "limit": 2})) == '["a", "a"]'
    with pytest.raises(ToolCallError, match="limit: "):
        settled(function_tool(lookup).call({"word": "a", "limit": "many"}))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["calcul"], "no tool 'calcul'"),
        (["calculator", "calculator"], "two tools have the name calculator"),
        ([f"{__name__}:nothing"], "has no 'nothing'"),
        ([f"{__name__}:untyped"], "needs a type for its argument word"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tools(names)
