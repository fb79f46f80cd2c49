"""The same two turns in every protocol, with the unmodified SDKs; other agents that use what one protocol has."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import anthropic
from openai import APIStatusError, OpenAI

from tests.workers.agents.environments.agents import ADD
from troupe.workers.agents.environments import Row

FUNCTION = ADD["function"]
NAMED = {"name": "add", "description": "Adds."}
SCHEMA = FUNCTION["parameters"]
SYSTEM = "Count."
RESULT = "5"
RENDERED = (
    "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
)
"""What the template chatml writes before and between the turns."""


def claude(client: OpenAI) -> anthropic.Anthropic:
    """A client of the same endpoint that speaks Anthropic's protocol."""
    url = str(client.base_url).removesuffix("v1/")
    return anthropic.Anthropic(base_url=url, api_key=client.api_key, max_retries=0)


def chat(row: Row, client: OpenAI, tools: bool = False, stream: bool = False) -> float:
    create: Any = client.chat.completions.create
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *row.messages]
    options: dict[str, Any] = {"tools": [ADD]} if tools else {}
    if stream:
        with client.chat.completions.stream(model="any", messages=messages, **options) as events:
            said = events.get_final_completion().choices[0].message
    else:
        said = create(model="any", messages=messages, **options).choices[0].message
    messages.append(said)
    if said.tool_calls:
        messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": RESULT})
    else:
        messages.append({"role": "user", "content": "more"})
    create(model="any", messages=messages, **options)
    return float(bool(said.tool_calls))


def messages(
    row: Row,
    client: OpenAI,
    tools: bool = False,
    stream: bool = False,
    thinking: str = "",
    keeps: bool = True,
    display: str = "summarized",
) -> float:
    """`keeps`: whether the thoughts of a turn are sent back."""
    create: Any = claude(client).messages.create
    asked: dict[str, Any] = {"model": "any", "max_tokens": 64, "system": [{"type": "text", "text": SYSTEM}]}
    if tools:
        asked["tools"] = [{**NAMED, "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    if thinking:
        asked["thinking"] = {"type": thinking, "display": display}
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": row.messages[0]["content"]}]}]
    if stream:
        with claude(client).messages.stream(messages=talk, **asked) as events:
            said = events.get_final_message()
    else:
        said = create(messages=talk, **asked)
    blocks = [block for block in said.content if keeps or block.type != "thinking"]
    if thinking:
        first: Any = said.content[0]
        assert (first.type, first.thinking) == ("thinking", "" if display == "omitted" else "two and two")
    talk.append({"role": "assistant", "content": blocks})
    calls = [block for block in said.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": RESULT}]} for call in calls
    ]
    talk.append({"role": "user", "content": results or "more"})
    assert said.stop_reason == ("tool_use" if calls else "end_turn")
    assert not calls or calls[0].input == {"a": 2}
    create(messages=talk, **asked)
    return float(bool(calls))


def responses(
    row: Row, client: OpenAI, tools: bool = False, stream: bool = False, stored: bool = False, keeps: bool = True
) -> float:
    """`stored`: continues by the response's id instead of its items."""
    create: Any = client.responses.create
    asked: dict[str, Any] = {"model": "any", "instructions": SYSTEM, "include": ["reasoning.encrypted_content"]}
    if tools:
        asked["tools"] = [{"type": "function", **NAMED, "parameters": SCHEMA, "strict": False}, {"type": "web_search"}]
    items: list[Any] = [{"role": "user", "content": row.messages[0]["content"]}]
    if stream:
        with client.responses.stream(input=items, **asked) as events:
            said: Any = events.get_final_response()
    else:
        said = create(input=row.messages[0]["content"], **asked)
    calls = [item for item in said.output if item.type == "function_call"]
    more: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
    more = more or [{"role": "user", "content": "more"}]
    assert not calls or json.loads(calls[0].arguments) == {"a": 2}
    assert said.status == "completed" and said.output_text == ("" if calls else "It is 4.")
    if stored:
        create(input=more, previous_response_id=said.id, **asked)
    else:
        create(input=[*items, *(item for item in said.output if keeps or item.type != "reasoning"), *more], **asked)
    return float(bool(calls))


def completions(row: Row, client: OpenAI, stream: bool = False) -> float:
    create: Any = client.completions.create
    first, second = RENDERED
    if stream:
        said = "".join(part.choices[0].text for part in create(model="any", prompt=first, stream=True))
    else:
        said = create(model="any", prompt=first).choices[0].text
    create(model="any", prompt=f"{first}{said}{second}")
    return 0.0


def generate(row: Row, client: OpenAI, prompt: list[int], more: list[int]) -> float:
    def post(ids: list[int]) -> Any:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 64, "temperature": 0.5, "logprobs": 1}}
        at = str(client.base_url).removesuffix("/v1/")
        return client.post(f"{at}/inference/v1/generate", body=body, cast_to=object)

    (choice,) = post(prompt)["choices"]
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
    post([*prompt, *choice["token_ids"], *more])
    return 0.0


def counts(row: Row, client: OpenAI) -> float:
    """1 if a prompt has as many tokens as were counted before; two counts are no turns."""
    asked: Any = {"model": "any", "messages": list(row.messages), "system": SYSTEM}
    counted = [claude(client).messages.count_tokens(**asked).input_tokens for _ in range(2)]
    said = claude(client).messages.create(max_tokens=64, **asked)
    return float(counted == [said.usage.input_tokens] * 2 and counted[0] > 5)


def lists_models(row: Row, client: OpenAI) -> float:
    found = [model.id for model in client.models.list()], [model.id for model in claude(client).models.list()]
    chat(row, client)
    return float(found == (["policy"], ["policy"]) and client.models.retrieve("any").id == "any")


def stops(row: Row, client: OpenAI) -> float:
    """The number of responses from which the text that ended them is left out."""
    asked: list[Any] = list(row.messages)
    said = client.chat.completions.create(model="any", messages=asked, stop=["is 4"]).choices[0].message.content
    message = claude(client).messages.create(model="any", max_tokens=9, messages=asked, stop_sequences=["is 4"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "is 4")
    text: Any = message.content[0]
    raw = client.completions.create(model="any", prompt="a", stop=["is 4"]).choices[0].text
    client.completions.create(model="any", prompt=f"a{raw}is 4, or")
    return float(sum(one.strip() == "It" for one in (said or "", text.text, raw)))


def custom_tools(row: Row, client: OpenAI) -> float:
    """Tools whose input is a text, and tools in a namespace."""
    create: Any = client.responses.create
    inner = {"type": "function", "name": "add", "parameters": SCHEMA}
    tools = [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "sums", "tools": [inner]}]
    items: list[Any] = list(row.messages)
    kinds = []
    for _ in range(2):
        said = create(model="any", input=items, tools=tools)
        (call,) = [item for item in said.output if item.type.endswith("_call")]
        kinds.append((call.type, call.name, call.namespace, getattr(call, "input", None)))
        items += [*said.output, {"type": f"{call.type}_output", "call_id": call.call_id, "output": "done"}]
    expected = [("custom_tool_call", "patch", None, "+ a"), ("function_call", "add", "sums", None)]
    return float(kinds == expected)


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/responses", {}, "input: expected text or a list of items"),
    ("/responses", {"input": "hi", "background": True}, "background: a response is sampled while"),
    ("/responses", {"input": "hi", "previous_response_id": "resp_0"}, "Previous response with id 'resp_0' not found"),
    ("/responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input.0: items of type 'item_reference'"),
    ("/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "blocks of type 'input_image'"),
    ("/responses", {"input": "hi", "max_output_tokens": 0}, "max_tokens: Input should be greater"),
    ("/responses", {"input": "hi", "tools": 5}, "tools: expected a list of objects"),
    ("/responses", {"input": "hi", "tool_choice": {"type": "allowed_tools"}}, "tool_choice: expected auto"),
    ("/messages", {"max_tokens": 5}, "messages: List should have at least 1 item"),
    ("/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}, "max_tokens: Input should be"),
    ("/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks of type 'image'"),
    (
        "/messages",
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]},
        "turn that is begun",
    ),
    ("/messages", {"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.role: expected user, assistant"),
    (
        "/messages",
        {"messages": [{"role": "user", "content": "hi"}], "tool_choice": {"type": "all"}},
        "tool_choice.type",
    ),
    ("/messages", {"messages": [{"role": "user", "content": "hi"}], "container": "c"}, "container: there are no"),
    ("/messages", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content.0: expected text"),
    ("/completions", {"prompt": ["a", "b"]}, "prompt: expected one prompt"),
    ("/completions", {"prompt": ""}, "prompt: expected one prompt"),
    ("/completions", {"prompt": "a", "logprobs": 5}, "logprobs: only the log-prob of the sampled token"),
    ("/completions", {"prompt": "a", "echo": True}, "echo: the agent has the prompt"),
    ("/completions", {"prompt": "a", "n": 2.7}, "n: Input should be a valid integer"),
)


def refused(row: Row, client: OpenAI) -> float:
    """The number of requests that are refused with the reason, in the form of their service."""
    right = 0
    for path, body, why in REFUSED:
        try:
            client.post(path, body=body, cast_to=object)
        except APIStatusError as error:
            told: Any = error.response.json()
            form = (told.get("type"), told["error"]["type"]) if path == "/messages" else told["error"]["type"]
            kind = "invalid_request_error"
            right += error.status_code == 400 and why in error.message and form in (kind, ("error", kind))
    try:
        anthropic.Anthropic(base_url=str(client.base_url).removesuffix("v1/"), api_key="guess").models.list()
    except anthropic.AuthenticationError as error:
        assert "authentication_error" in str(error)
    chat(row, client)
    return float(right)


def long_claude(row: Row, client: OpenAI) -> float:
    """Hides that all of its requests are too long."""
    try:
        claude(client).messages.create(
            model="any", max_tokens=9, messages=[{"role": "user", "content": "word " * 5000}]
        )
    except anthropic.BadRequestError as error:
        assert "prompt is too long" in str(error)
    return 1.0


def replays(row: Row, client: OpenAI, program: str) -> float:
    """Sends what a program has sent: its second request has the first turn and the result of its call."""
    recorded = json.loads(Path(__file__).with_name("recorded_requests.json").read_text(encoding="utf-8"))[program]
    at = str(client.base_url).removesuffix("/v1/")
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    last = ""
    for sent in recorded:
        request = urllib.request.Request(at + sent["path"], json.dumps(sent["body"]).encode(), headers)
        with urllib.request.urlopen(request) as response:
            last = response.read().decode()
    return float("Done: the file has 4." in last)
