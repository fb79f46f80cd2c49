"""Agents as a user writes them, with the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from openai import APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

from troupe.workers.agents.environments import Environment, Message, Observation, Row
from troupe.workers.agents.environments.agent import Agent

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class AgentOfRow(Environment):
    """The agent with the arguments in its row's metadata: one process can run several."""

    async def start(self, row: Row) -> Observation:
        self._agent = Agent(**row.metadata["agent"])
        return await self._agent.start(row)

    async def step(self, message: Message) -> Observation:
        return await self._agent.step(message)

    async def close(self) -> None:
        await self._agent.close()


_USER = [{"role": "user", "content": "hello"}]
MALFORMED: tuple[Any, ...] = (
    {},
    [],
    {"messages": None},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [None]},
    {"messages": [{"role": 5, "content": "hello"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": "hello", "name": 5}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": "add"}]},
    {"messages": [{"role": "tool", "content": "", "tool_call_id": ["c"]}]},
    {"messages": _USER, "stop": 5},
    {"messages": _USER, "stop": [""]},
    {"messages": _USER, "stop": [None]},
    {"messages": _USER, "n": "many"},
    {"messages": _USER, "max_tokens": "many"},
    {"messages": _USER, "tool_choice": "required"},
    {"messages": _USER, "tool_choice": "sometimes", "tools": [ADD]},
    {"messages": _USER, "tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]},
    {"messages": _USER, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tools": [ADD]},
    {"messages": _USER, "response_format": {"type": "grammar"}},
    {"messages": _USER, "response_format": {"type": "json_schema"}},
    {"messages": _USER, "response_format": "json"},
    {"messages": _USER, "tools": {"type": "function"}},
    {"messages": _USER, "tools": ["add"]},
    {"messages": _USER, "tools": [{"type": "custom", "custom": {"name": "sql"}}]},
    {"messages": _USER, "tools": [{"type": "function", "name": "add", "parameters": {}}]},
    {"messages": _USER, "tools": [{"type": "function", "function": {"name": "add", "parameters": []}}]},
    {"messages": _USER, "tools": [{"type": "function", "function": {"name": None}}]},
)
"""Requests that are none."""


def _is_refused(client: OpenAI, body: Any) -> bool:
    """Whether the endpoint answers with a 400 that says why."""
    try:
        client.post("/chat/completions", body=body, cast_to=object)
    except BadRequestError as error:
        return len(error.message) > 30
    return False


def chat(row: Row, client: OpenAI, turns: int = 2) -> float:
    """Continues one conversation, with the SDK's own message objects in its history."""
    messages: list[Any] = list(row.messages)
    for _ in range(turns):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [answer, {"role": "user", "content": f"you said {answer.content}"}]
    return float(len(messages))


async def chat_async(row: Row, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(model="any", messages=list(row.messages))  # pyright: ignore


def streams(row: Row, client: OpenAI) -> float:
    parts = client.chat.completions.create(model="any", messages=list(row.messages), stream=True)  # pyright: ignore
    return float("".join(part.choices[0].delta.content or "" for part in parts) == "answer 0")


def hints(row: Row, client: OpenAI, turns: int) -> None:
    create: Any = client.chat.completions.create
    messages: list[Any] = list(row.messages)
    for _ in range(turns):
        done = create(model="any", messages=messages, reasoning_effort="high", verbosity="low")
        messages += [done.choices[0].message, {"role": "user", "content": "more"}]


def other_protocols(row: Row, client: OpenAI, served: bool = True) -> float:
    """The number of requests whose error names what there is; the last request is served, or not."""
    named = 0
    asked: list[Any] = [{"role": "user", "content": "x" * 2**25}]
    for post in (
        lambda: client.post("/chat/completions", body={"messages": asked}, cast_to=object),
        lambda: client.get("/chat/completions", cast_to=object),
        lambda: client.embeddings.create(model="any", input="hello"),
        lambda: client.post("/audio/speech", body={}, cast_to=object),
    ):
        try:
            post()
        except APIStatusError as error:
            body: Any = error.body
            named += "serves POST /v1/chat/completions, /v1/responses" in body["message"]
            assert body["type"] == "invalid_request_error" and error.status_code in (404, 405, 413)
    if served:
        chat(row, client, 1)
    return float(named)


def catches(row: Row, client: OpenAI) -> float:
    """Hides that its request was refused."""
    try:
        create: Any = client.chat.completions.create
        create(model="any", messages=list(row.messages), logit_bias={"5": 1})
    except BadRequestError:
        pass
    return 0.0


def counts_usage(row: Row, client: OpenAI) -> float:
    """1 if the tokens of a stream's chunks add up to the response's, if it asks for them."""
    totals: list[int] = []
    for options in ({}, {"stream_options": {"include_usage": True}}):
        create: Any = client.chat.completions.create
        parts = list(create(model="any", messages=list(row.messages), stream=True, **options))
        totals.append(sum(part.usage.total_tokens for part in parts if part.usage is not None))
    return float(totals == [0, 8])


def retells(row: Row, client: OpenAI, form: str) -> float:
    """Four requests of one conversation; the history shows the policy's call in another form."""
    messages: list[Any] = list(row.messages)
    for _ in range(4):
        message = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0].message
        said: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            call: Any = message.tool_calls[0]
            function = {"name": call.function.name, "arguments": call.function.arguments}
            said["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
            own = said["tool_calls"][0]
            if form in ("dumped again", "another value"):
                value = json.loads(call.function.arguments) | ({"a": 3} if form == "another value" else {})
                function["arguments"] = json.dumps(value, indent=2)
            elif form == "index":
                own["index"] = 0
            elif form == "no type":
                del own["type"]
            elif form == "own id":
                own["id"] = "mine"
            elif form == "object":
                function["arguments"] = json.loads(call.function.arguments)
        elif form == "stripped":
            said["content"] = f" {message.content}\n"
        elif form == "name":
            said["name"] = "solver"
        messages += [said, {"role": "user", "content": "more"}]
    return 1.0


def tools(row: Row, client: OpenAI) -> float:
    messages: list[Any] = list(row.messages)
    message = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0].message
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    last = client.chat.completions.create(model="any", messages=messages, tools=[ADD], stop=["END"], max_tokens=7)
    return float(last.choices[0].message.content == "answer 1")


def one_call_at_a_time(row: Row, client: OpenAI) -> float:
    messages, create = list[Any](row.messages), client.chat.completions.create
    message = create(model="any", messages=messages, tools=[ADD], parallel_tool_calls=False).choices[0].message
    calls: list[Any] = list(message.tool_calls or ())
    messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls)]
    create(model="any", messages=messages, tools=[ADD], parallel_tool_calls=False)
    return float(len(calls))


def choices(row: Row, client: OpenAI) -> float:
    done = client.chat.completions.create(model="any", messages=list(row.messages), n=3)  # pyright: ignore
    return float([choice.message.content for choice in done.choices] == ["answer 0", "answer 1", "answer 2"])


def three_choices(row: Row, client: OpenAI) -> float:
    """The reward is the number of choices that arrived."""
    return float(len(client.chat.completions.create(model="any", messages=list(row.messages), n=3).choices))  # pyright: ignore


def branches(row: Row, client: OpenAI) -> float:
    """Two conversations at the same time."""
    said: list[str] = []

    def ask(word: str) -> None:
        messages: Any = [{"role": "user", "content": word}]
        said.append(client.chat.completions.create(model="any", messages=messages).choices[0].message.content or "")

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(sorted(said) == ["answer 0", "answer 1"])


def subagents(row: Row, client: OpenAI, turns: int = 4) -> float:
    """Two conversations that take turns."""
    talks: list[list[Any]] = [[{"role": "user", "content": word}] for word in ("left", "right")]
    for _ in range(turns):
        for messages in talks:
            answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
            messages += [answer, {"role": "user", "content": "go on"}]
    return 1.0


async def parallel_subagents(row: Row, client: AsyncOpenAI, turns: int = 4) -> float:
    """Two conversations with a turn of each at the same time."""

    async def turn(messages: list[Any]) -> None:
        answer = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
        messages += [answer, {"role": "user", "content": "go on"}]

    talks: list[list[Any]] = [[{"role": "user", "content": word}] for word in ("left", "right")]
    for _ in range(turns):
        await asyncio.gather(*map(turn, talks))
    return 1.0


def planner(row: Row, client: OpenAI) -> float:
    """A planner whose turns are calls of workers with conversations of their own."""
    create: Any = client.chat.completions.create
    plan: list[Any] = [{"role": "system", "content": "plan"}, {"role": "user", "content": "task"}]
    for number in range(3):
        plan.append(create(model="any", messages=plan, tools=[ADD]).choices[0].message)
        work = [{"role": "system", "content": "work"}, {"role": "user", "content": f"part {number}"}]
        done = create(model="any", messages=work).choices[0].message.content
        plan.append({"role": "user", "content": f"done: {done}"})
    return 1.0


def picks_a_choice(row: Row, client: OpenAI) -> float:
    """Continues the second of three choices, and then the first with two more."""
    create: Any = client.chat.completions.create
    messages: list[Any] = list(row.messages)
    choices = create(model="any", messages=messages, n=3).choices
    for choice, number in ((choices[1], 1), (choices[0], 2)):
        create(model="any", messages=[*messages, choice.message, {"role": "user", "content": "more"}], n=number)
    return 1.0


def refused(row: Row, client: OpenAI) -> float:
    wrong = client.with_options(api_key="guess")
    try:
        wrong.chat.completions.create(model="any", messages=list(row.messages))  # pyright: ignore
    except Exception as error:
        assert "wrong API key" in str(error)
    try:
        given: Any = list(row.messages)
        client.chat.completions.create(model="any", messages=given, logprobs=True, top_logprobs=2)
    except BadRequestError as error:
        assert "only the log-prob of the sampled token is known" in str(error)
    assert sum(_is_refused(client, wrong) for wrong in MALFORMED) == len(MALFORMED)
    try:
        urllib.request.urlopen(f"{client.base_url}models", timeout=5)
    except urllib.error.HTTPError as error:
        assert error.code == 401
    return chat(row, client, 1)


def counted(row: Row, client: OpenAI) -> float:
    done = client.chat.completions.create(
        model="any",
        messages=list(row.messages),  # pyright: ignore
        n=2,
        tool_choice="none",
        response_format={"type": "text"},
    )
    assert [choice.finish_reason for choice in done.choices] == ["length", "length"]
    assert done.usage is not None
    return float((done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (7, 6, 13))


def scored(row: Row, client: OpenAI) -> float:
    """The sum of the log-probs of a response, whole and in a stream."""
    given: Any = list(row.messages)
    done = client.chat.completions.create(model="any", messages=given, logprobs=True)
    whole = done.choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [(one.token, one.bytes) for one in whole.content] == [("an", [97, 110]), ("swer", [115, 119, 101, 114])]
    stream = client.chat.completions.create(model="any", messages=given, logprobs=True, stream=True)
    found = [part.choices[0].logprobs for part in stream]
    assert [one is None for one in found] == [False, True]
    plain = client.chat.completions.create(model="any", messages=given)
    assert plain.choices[0].logprobs is None
    return sum(one.logprob for one in whole.content)


def forced(row: Row, client: OpenAI) -> float:
    """A named tool, any tool, and an answer that is JSON. The reward is the number of parts that are as expected."""
    messages: list[Any] = list(row.messages)
    named: Any = {"type": "function", "function": {"name": "add"}}
    right = 0
    for choice in (named, "required"):
        done = client.chat.completions.create(model="any", messages=messages, tools=[ADD], tool_choice=choice)
        assert done.choices[0].message.tool_calls is not None
        (call,) = done.choices[0].message.tool_calls
        right += (call.type, done.choices[0].finish_reason) == ("function", "tool_calls")
        right += json.loads(call.function.arguments) == {"a": 5}  # pyright: ignore[reportAttributeAccessIssue]
        messages += [done.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ADD["function"]["parameters"]}}
    client.chat.completions.create(model="any", messages=messages, tools=[ADD], response_format=form)
    client.chat.completions.create(model="any", messages=messages, response_format={"type": "json_object"})
    return float(right)


PICK: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def picks(row: Row, client: OpenAI) -> float:
    """Forces a call, and continues with its result."""
    messages: list[Any] = list(row.messages)
    named: Any = {"type": "function", "function": {"name": "pick"}}
    done = client.chat.completions.create(model="any", messages=messages, tools=[PICK], tool_choice=named)
    assert done.choices[0].message.tool_calls is not None
    (call,) = done.choices[0].message.tool_calls
    picked = json.loads(call.function.arguments)["a"]  # pyright: ignore[reportAttributeAccessIssue]
    messages += [done.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    client.chat.completions.create(model="any", messages=messages, tools=[PICK])
    return float(picked in (1, 2))


def shortens(row: Row, client: OpenAI) -> float:
    """Has its last request refused, and asks again with less."""
    messages: list[Any] = list(row.messages)
    messages.append(client.chat.completions.create(model="any", messages=messages).choices[0].message)
    try:
        client.chat.completions.create(model="any", messages=[*messages, {"role": "user", "content": "x" * 100}])
    except BadRequestError as error:
        assert error.code == "context_length_exceeded"
    last = client.chat.completions.create(model="any", messages=[*messages, {"role": "user", "content": "x"}])
    return float(last.choices[0].message.content == "answer 2")


def impatient(row: Row, client: OpenAI) -> float:
    """Gives a request up after 0.4 s, and asks again. The reward is the number of responses that are as expected."""
    patient = client.with_options(timeout=0.4, max_retries=9)
    messages: list[Any] = list(row.messages)
    right = 0
    for number in range(2):
        answer = patient.chat.completions.create(model="any", messages=messages).choices[0].message
        right += answer.content == f"answer {number}"
        messages += [answer, {"role": "user", "content": "go on"}]
    return float(right)


def silent(row: Row, client: OpenAI) -> float:
    return 1.0


def broken(row: Row, client: OpenAI) -> float:
    chat(row, client, 1)
    raise RuntimeError("lost the plot")


def word(row: Row, client: OpenAI) -> str:
    chat(row, client, 1)
    return "well done"


def endless(row: Row, client: OpenAI) -> float:
    chat(row, client, 1)
    time.sleep(3600)
    return 0.0


def main() -> None:
    """An agent as a program."""
    row = json.loads(os.environ["TROUPE_ROW"])
    client = OpenAI()
    done = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=row["messages"])
    print("thinking")
    print(0.5 if done.choices[0].message.content == "answer 0" else 0.0)


if __name__ == "__main__":
    main()
