"""Examples with tools and calls have the tokens and the loss mask that transformers finds in the same conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl

from tests.workers.agents.episodes import templates
from tests.workers.agents.episodes.real_templates import REAL, real_tokenizer
from tests.workers.data.test_conversations import pool, said, spec
from troupe.orchestrator.data.examples import load_pool
from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.data.examples import tokenize

ROOMY = ExampleConfig(max_length=4096, micro_batch_tokens=16384)
PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "A number."},
        "note": {"type": "string", "description": "x"},
    },
    "required": ["a"],
}
ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": ADD}]
ARGUMENTS = {"a": 2, "note": 'é "q" {x}\n'}
ASK, RESULT = {"role": "user", "content": "2 + 3?"}, {"role": "tool", "tool_call_id": "call00000", "content": "5"}
SAYS = {"role": "assistant", "content": "It is 5."}


def calls(arguments: Any = ARGUMENTS, content: str | None = "", count: int = 1) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    found = [{"id": f"call0000{number}", "type": "function", "function": function} for number in range(count)]
    return {"role": "assistant", "content": content, "tool_calls": found}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a call": [ASK, calls(), RESULT, SAYS],
    "nothing beside": [ASK, calls(content=None), RESULT, SAYS],
    "text beside it": [ASK, calls(content="Let me add."), RESULT, SAYS],
    "two calls": [ASK, calls(count=2), RESULT, RESULT | {"tool_call_id": "call00001"}, SAYS],
    "calls again": [ASK, calls(), RESULT, calls(), RESULT, SAYS],
    "a call last": [ASK, calls()],
}


def conversation(form: str, *, text: bool = False) -> list[dict[str, Any]]:
    """The conversation, with arguments as JSON text or as objects."""
    found = json.loads(json.dumps(CONVERSATIONS[form]))
    for message in found if text else []:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(ARGUMENTS, ensure_ascii=False)
    return found


def made(tokenizer: Any, folder: Path, row: dict[str, Any], **fields: Any) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of an example, as the run reads it."""
    loaded = pool(folder, [row], "sft", **({"messages": "messages", "tools": "tools"} | fields))
    summary, table = tokenize(tokenizer, loaded.table, ROOMY)
    assert (loaded.problems, summary.problems) == ((), ())
    (example,) = table.to_pylist()
    mask = [False] * len(example["prompt_ids"]) + example["loss_mask"]
    return example["prompt_ids"] + example["response_ids"], list(map(int, mask))


def spoken(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Token ids by transformers, and a mask of what each turn of the assistant adds to the prompt before it."""

    def text(count: int, *, opened: bool) -> str:
        shown: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": opened, "tokenize": False}
        return tokenizer.apply_chat_template(messages[:count], **shown)

    spans = [
        (len(text(place, opened=True)), len(text(place + 1, opened=False).rstrip("\n")))
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    whole = tokenizer(text(len(messages), opened=False), add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start < b for a, b in spans)) for start, _ in whole["offset_mapping"]]
    return whole["input_ids"], mask


def said_in(tokenizer: Any, ids: list[int], mask: list[int]) -> tuple[str, str]:
    """The whole text, without the line break at its end, and that of the tokens with a loss."""
    trained = [token for token, on in zip(ids, mask, strict=True) if on]
    return tokenizer.decode(ids).rstrip("\n"), tokenizer.decode(trained)


KEEPS_ALL = {"llama3_1": ("a call", "nothing beside", "calls again", "a call last")}
"""Conversations that a template does not refuse or cut, of templates that do."""


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (template, form)
        for template in ("qwen2_5", "qwen3_instruct", "llama3_1")
        for form in KEEPS_ALL.get(template, tuple(CONVERSATIONS))
    ],
)
def test_tokens_and_mask_are_those_of_transformers(demo_model: Path, tmp_path: Path, template: str, form: str) -> None:
    tokenizer = real_tokenizer(template, demo_model)
    ids, mask = spoken(tokenizer, [one | {"content": one["content"] or ""} for one in conversation(form)])
    for text, tools in ((False, TOOLS), (True, json.dumps(TOOLS)), (False, [ADD])):
        row = {"messages": conversation(form, text=text), "tools": tools}
        ours, trained = made(tokenizer, tmp_path, row)
        assert said_in(tokenizer, ours, trained) == said_in(tokenizer, ids, mask) and sum(trained) > 20
        if template != "llama3_1":  # SmolLM2's vocabulary merges the line breaks before a turn with its brace
            assert ours == ids[: len(ours)] and trained == mask[: len(trained)]


def test_the_mask_is_that_which_transformers_returns(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer("qwen3_instruct", demo_model)
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507_training.jinja").read_text()
    messages = conversation("calls again")
    theirs = tokenizer.apply_chat_template(
        messages, tools=TOOLS, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = made(tokenizer, tmp_path, {"messages": messages, "tools": TOOLS})
    assert ids == theirs["input_ids"][: len(ids)]
    other = [number for number, on in enumerate(mask) if on != theirs["assistant_masks"][number]]
    # The template marks the line break behind the end of a turn as well, which no policy samples.
    assert {tokenizer.decode(ids[number - 1 : number + 1]) for number in other} == {"<|im_end|>\n"}


def trained(tokenizer: Any, folder: Path, row: dict[str, Any], **fields: Any) -> str:
    """The text of the tokens with a loss."""
    return said_in(tokenizer, *made(tokenizer, folder, row, **fields))[1]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
XLAM = [{"name": "add", "arguments": {"a": 2}}]
GIVEN = {"role": "user", "content": "2?"}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "xLAM": (
        {
            "query": "2?",
            "answers": json.dumps(XLAM),
            "tools": json.dumps([ADD | {"parameters": PARAMETERS["properties"]}]),
        },
        {"prompt": "query", "response": "answers", "messages": None},
    ),
    "APIGen-MT": (
        {
            "conversations": [
                {"from": "human", "value": "2?"},
                {"from": "function_call", "value": json.dumps(XLAM[0])},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "It is 2."},
            ],
            "tools": json.dumps([ADD]),
        },
        {"messages": "conversations"},
    ),
    "OpenAI": (
        {"messages": [GIVEN, calls('{"a": 2}', None)], "tools": TOOLS, "parallel_tool_calls": False},
        {},
    ),
    "OpenAI, before tools": (
        {"messages": [GIVEN, {"role": "assistant", "content": None, "function_call": XLAM[0]}], "functions": [ADD]},
        {"tools": "functions"},
    ),
    "bare calls": ({"messages": [GIVEN, {"role": "assistant", "tool_calls": XLAM}], "tools": [ADD]}, {}),
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_published_layouts_are_read_as_calls(demo_model: Path, tmp_path: Path, layout: str) -> None:
    tokenizer = real_tokenizer("qwen2_5", demo_model)
    row, fields = PUBLISHED[layout]
    assert trained(tokenizer, tmp_path, row, **fields).startswith(CALL)
    ids, _ = made(tokenizer, tmp_path, row, **fields)
    shown = json.dumps(TOOLS[0]).replace(', "required": ["a"]', "" if layout == "xLAM" else ', "required": ["a"]')
    assert shown in tokenizer.decode(ids)


def test_keys_that_arrow_adds_to_arguments_and_schemas_are_left_out(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer("qwen2_5", demo_model)
    other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
    function = {"name": "sub", "arguments": {"b": 1}}
    both = [GIVEN, calls({"a": 2}), RESULT, {"role": "assistant", "tool_calls": [{"function": function}]}]
    row = {"messages": both, "tools": [*TOOLS, other]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    columns = {"messages": "messages", "tools": "tools"}
    loaded = spec(tmp_path / "rows.parquet", "sft", kind="parquet", **columns)
    source: Any = loaded.data.train
    read = load_pool(loaded, source, "data.train")
    assert said(read) == said(pool(tmp_path, [row], "sft", **columns)) and "null" not in str(read.table.to_pylist())
    assert tokenize(tokenizer, read.table, ROOMY)[0].problems == ()


def test_preferences_of_calls_are_compared(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer("qwen2_5", demo_model)
    row = {"prompt": "2?", "chosen": [calls({"a": 2})], "rejected": [calls({"a": 3})], "tools": TOOLS}
    loaded = pool(tmp_path, [row], "dpo", tools="tools")
    better, worse = tokenize(tokenizer, loaded.table, ROOMY)[1].to_pylist()
    assert better["prompt_ids"] == worse["prompt_ids"]
    assert tokenizer.decode(better["response_ids"]) == CALL
    assert tokenizer.decode(worse["response_ids"]) == CALL.replace("2", "3")


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        ("llama3", {"messages": conversation("a call"), "tools": TOOLS}, "does not render tools, which"),
        (templates.CHATML, {"messages": conversation("a call")}, "does not render tool calls in the history, which"),
        ("gemma3", {"messages": [ASK, SAYS, RESULT, SAYS]}, "does not render tool messages"),
        (templates.CHATML, {"messages": [ASK, SAYS], "tools": TOOLS}, "does not render tools, which the row has"),
        ("llama3_1", {"messages": conversation("text beside it")}, "renders a turn with calls without its text"),
        ("gpt_oss", {"messages": conversation("two calls")}, "some of its calls or an end"),
        ("gemma4", {"messages": conversation("a call")}, "some of its calls or an end"),
        ("qwen2_5", {"messages": [ASK, SAYS | {"reasoning_content": "hm"}]}, "leaves out reasoning_content"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(
    demo_model: Path, tmp_path: Path, template: str, row: dict[str, Any], reason: str
) -> None:
    tokenizer = real_tokenizer(template if template in REAL else "qwen2_5", demo_model)
    before = tokenizer.chat_template
    tokenizer.chat_template = before if template in REAL else template
    tools = "tools" if "tools" in row else None
    summary, _ = tokenize(tokenizer, pool(tmp_path, [row], "sft", messages="messages", tools=tools).table, ROOMY)
    tokenizer.chat_template = before
    assert len(summary.problems) == 1 and reason in summary.problems[0]


def test_thoughts_are_trained_where_the_template_renders_them(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer("qwen3", demo_model)
    messages = [ASK, calls() | {"reasoning_content": "I add."}, RESULT, SAYS | {"reasoning_content": "Now I know."}]
    text = trained(tokenizer, tmp_path, {"messages": messages, "tools": TOOLS})
    assert text.startswith("<think>\nI add.\n</think>\n\n<tool_call>")
    assert text.endswith("<think>\nNow I know.\n</think>\n\nIt is 5.<|im_end|>")


def test_turns_with_weight_0_have_no_loss(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = real_tokenizer("qwen2_5", demo_model)
    off = {"weight": 0}
    again = [ASK, {"role": "assistant", "content": "Yes.", "weight": 1}, ASK]
    messages = [ASK, SAYS | off, *again, calls() | off, RESULT, SAYS, ASK, SAYS | off]
    assert trained(tokenizer, tmp_path, {"messages": messages}, tools=None) == "Yes.<|im_end|>It is 5.<|im_end|>"
    ids, _ = made(tokenizer, tmp_path, {"messages": messages}, tools=None)
    plain = tokenizer.apply_chat_template([{**one, "weight": None} for one in messages[:-2]], tokenize=False)
    assert tokenizer.decode(ids) == plain.rstrip("\n")
    none = pool(tmp_path, [{"messages": messages}, {"messages": [ASK, SAYS | off]}], "sft", messages="messages")
    assert none.problems == ("rows.jsonl:2: all messages of the assistant have weight 0",)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [ASK, calls("{a: 2")], "tools": TOOLS}, "the arguments of call 0 are neither an object"),
        ({"messages": [ASK, calls([2])], "tools": TOOLS}, "the arguments of call 0 are neither an object"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "tools": TOOLS}, "call 0 is not one"),
        ({"messages": [ASK, calls()], "tools": "add"}, "tools: expected a list of JSON schemas"),
        ({"messages": [ASK, calls()], "tools": [{"description": "x"}]}, "tools.0.function: expected an object with"),
        ({"messages": [ASK, SAYS | {"weight": 0.5}], "tools": None}, "message 1 has weight 0.5"),
        ({"messages": [ASK, SAYS | {"reasoning_content": 1}], "tools": None}, "has a reasoning_content that is not"),
        ({"messages": [ASK | {"tool_calls": [1]}, SAYS], "tools": None}, "message 0 has tool_calls, which is not read"),
    ],
)
def test_calls_and_tools_in_another_form_are_bad_rows(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"messages": [ASK, SAYS], "tools": None}
    loaded = pool(tmp_path, [good, row], "sft", messages="messages", tools="tools")
    assert len(said(loaded)) == 1 and reason in loaded.problems[0]
