"""The tokens of published layouts, compared with TRL's of the same rows.

`READINGS` says by hand what the first row of each layout is, as TRL writes it; its template renders that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import trl
from pydantic import TypeAdapter
from trl.data_utils import apply_chat_template

from tests.orchestrator.starter.test_layouts import COMPARED, LAYOUTS, SAMPLED, SFT
from tests.tokenizers import new_tokenizer
from tests.workers.data.test_conversations import ROOMY, ended, ids, spec
from troupe.orchestrator.data import prompts
from troupe.orchestrator.data.examples import load_pool
from troupe.orchestrator.data.readers import file_format
from troupe.orchestrator.spec.sources import DataSource
from troupe.orchestrator.starter.tables import find_tables
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import tokenize

Row = Mapping[str, Any]
QWEN = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
"""A template that renders calls."""


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


SHAREGPT = {"human": user, "gpt": said}


def parsed(turn: Row) -> Row:
    """A turn whose calls have objects as arguments, which OpenAI writes as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def answered(prompt: str, response: str) -> Callable[[Row, Row], Row]:
    return lambda row, _: {"prompt": user(row[prompt]), "completion": said(row[response])}


def whole(messages: Callable[[Row], Any]) -> Callable[[Row, Row], Row]:
    return lambda row, _: {"messages": messages(row)}


def hh(text: str) -> list[dict[str, Any]]:
    """The turns of HH-RLHF's text."""
    _, *parts = re.split(r"\n\n(Human|Assistant): ", text)
    roles = {"Human": user, "Assistant": said}
    return [turn for role, part in zip(parts[::2], parts[1::2], strict=True) for turn in roles[role](part.strip())]


def hh_pair(row: Row, _: Row) -> Row:
    chosen, rejected = hh(row["chosen"]), hh(row["rejected"])
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def hh_prompt(row: Row, _: Row) -> Row:
    prompt = hh(row["prompt"].removesuffix("\n\nAssistant:").rstrip())
    return {"prompt": prompt, "chosen": said(row["chosen"].strip()), "rejected": said(row["rejected"].strip())}


def shp(row: Row, _: Row) -> Row:
    names = ("human_ref_A", "human_ref_B") if row["labels"] == 1 else ("human_ref_B", "human_ref_A")
    chosen, rejected = (said(row[name]) for name in names)
    return {"prompt": user(row["history"]), "chosen": chosen, "rejected": rejected}


def helpsteer2(first: Row, second: Row) -> Row:
    """Two rows are two answers to one prompt."""
    better, worse = sorted((first, second), key=lambda row: row["helpfulness"], reverse=True)
    return {"prompt": user(first["prompt"]), "chosen": said(better["response"]), "rejected": said(worse["response"])}


READINGS: dict[str, Callable[[Row, Row], Row]] = {
    "sft bool.csv": answered("prompt", "answer"),
    "sft capybara.jsonl": whole(
        lambda row: [turn for one in row["conversation"] for turn in user(one["input"]) + said(one["output"])]
    ),
    "sft crlf.jsonl.zst": answered("prompt", "answer"),
    "sft deepscaler.json": answered("problem", "solution"),
    "sft helpsteer2.jsonl": answered("prompt", "response"),
    "sft kodcode.parquet": answered("question", "solution"),
    "sft limo.parquet": answered("question", "solution"),
    "sft mbpp.jsonl": answered("text", "code"),
    "sft openai_parts.jsonl": whole(
        lambda row: [{"role": one["role"], "content": one["content"][0]["text"]} for one in row["messages"]]
    ),
    "sft openr1_math.parquet": whole(lambda row: row["messages"]),
    "sft semi.csv": answered("prompt", "answer"),
    "sft sharegpt_weight.jsonl": whole(
        lambda row: [turn for one in row["conversations"] for turn in SHAREGPT[one["from"]](one["value"])]
    ),
    "sft code.jsonl": answered("question", "solution"),
    "sft mixed.jsonl": answered("problem", "answer"),
    "sft thought.jsonl": answered("question", "answer"),
    "sft preferences/helpsteer2.jsonl": answered("prompt", "response"),
    **{f"sft preferences/kto{end}": answered("prompt", "completion") for end in (".csv", "_01.jsonl")},
    "sft preferences/kto_mix.jsonl": lambda row, _: {"prompt": row["prompt"], "completion": row["completion"]},
    "sft preferences/tools_sft.jsonl": whole(lambda row: [*map(parsed, row["messages"])]),
    "sft preferences/ultra_bin.jsonl": whole(lambda row: row["messages"]),
    "dpo hh_train.jsonl.gz": hh_pair,
    "dpo preferences/hh.jsonl": hh_pair,
    "dpo preferences/hh_prompt.jsonl": hh_prompt,
    "dpo preferences/shp.jsonl": shp,
    "dpo helpsteer2.jsonl": helpsteer2,
    "dpo preferences/helpsteer2.jsonl": helpsteer2,
    **{f"kto preferences/kto{end}": answered("prompt", "completion") for end in (".csv", "_01s.jsonl", "_str.jsonl")},
}
"""From the first two rows to the first example, by algorithm and layout."""
TOLD = {f"sft {name}": columns for name, (columns, _) in SFT.items()}
TOLD |= {f"{algorithm} {name}": columns for name, (algorithm, columns, _) in COMPARED.items()}


STEPS: dict[str, tuple[str, list[str], list[float]]] = {
    "preferences/prm.jsonl": ("Q 0", ["Step 1 0", "Step 2"], [1, 0]),
    "math_shepherd.jsonl": (
        "Ann has 2 apples and buys 3. She eats 1. How many are left?",
        ["Step 1: Ann has 2 + 3 = 5 apples.", "Step 2: She has 5 - 1 = 4 left. The answer is: 4"],
        [1, 1],
    ),
    "prm800k.jsonl": ("What is 2 + 3 * 4?", ["First I multiply: 3 * 4 = 12.", "Then 2 + 12 = 15."], [1, 0]),
}
"""Prompt, steps and labels of the first example in two steps of each layout with labels for steps."""


def test_every_layout_of_demonstrations_and_comparisons_has_a_reading() -> None:
    assert {*READINGS} | {f"process_reward_model {name}" for name in STEPS} == {*TOLD}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    found = new_tokenizer(tiny_model)
    found.chat_template = QWEN.read_text()
    return found


@pytest.mark.parametrize("case", READINGS)
def test_the_first_row_has_the_tokens_of_trl(case: str, tokenizer: Any) -> None:
    algorithm, name = case.split()
    loaded = spec(LAYOUTS / name, algorithm, kind=file_format(name), **TOLD[case])
    source: Any = loaded.data.train
    made = tokenize(tokenizer, load_pool(loaded, source, "data.train").table.slice(0, 1), ROOMY)[1].to_pylist()
    rows = [*islice(find_tables(str(LAYOUTS / name))[0].rows, 2)]
    theirs = apply_chat_template({**READINGS[case](rows[0], rows[-1])}, tokenizer)
    if "text" in theirs:
        assert made[0]["prompt_ids"] + made[0]["response_ids"] == ids(tokenizer, ended(theirs["text"]))
        return
    completions = [theirs[one] for one in ("completion", "chosen", "rejected") if one in theirs]
    assert len(made) == len(completions)
    for ours, completion in zip(made, completions, strict=True):
        assert ours["prompt_ids"] == ids(tokenizer, theirs["prompt"])
        assert ours["response_ids"] == ids(tokenizer, ended(completion))


@pytest.mark.parametrize("name", STEPS)
def test_the_steps_of_the_first_row_have_the_tokens_of_trl(name: str, tokenizer: Any) -> None:
    """As `PRMTrainer` of earlier versions of TRL tokenizes them: each step and its separator alone, with a label at the
    last token.

    What differs: TRL renders no chat template, and labels a separator behind the last step as well, instead of the
    token that ends the turn. Its separator is a line break. Troupe's, two of them, can have other tokens within a text.
    """
    prompt, steps, labels = STEPS[name]
    case = "process_reward_model"
    loaded = spec(LAYOUTS / name, case, kind=file_format(name), separator="\n", **TOLD[f"{case} {name}"])
    source: Any = loaded.data.train
    config, table = ROOMY.model_copy(update={"steps": True}), load_pool(loaded, source, "data.train").table
    rows = tokenize(tokenizer, table, config)[1].to_pylist()
    made = next(row for row in rows if len(row["step_labels"]) == len(steps))
    assert made["prompt_ids"] == ids(tokenizer, apply_chat_template({"prompt": user(prompt)}, tokenizer)["prompt"])
    parts = [ids(tokenizer, step) + ids(tokenizer, "\n") for step in steps[:-1]]
    parts += [[*ids(tokenizer, steps[-1]), tokenizer.convert_tokens_to_ids("<|im_end|>")]]
    assert made["response_ids"] == [*chain.from_iterable(parts)]
    assert made["loss_mask"] == [place == len(part) - 1 for part in parts for place in range(len(part))]
    assert made["step_labels"] == labels


def listed(question: str, options: list[str]) -> str:
    return question + "\n\n" + "\n".join(f"{letter}. {one}" for letter, one in zip("ABCDEFGHIJ", options, strict=False))


ASKED: dict[str, Callable[[Row], str]] = {
    "mmlu.jsonl": lambda row: listed(row["question"], row["choices"]),
    "mmlu_pro.parquet": lambda row: listed(row["question"], row["options"]),
    "arc.jsonl": lambda row: listed(row["question"], row["choices.text"]),
    "hellaswag.jsonl": lambda row: listed(row["ctx"], row["endings"]),
}
"""Prompts that are more than a column. GPQA's options have an order of ours (`test_options.py`)."""
FIRST = {"cases.jsonl": 1, "eurus.parquet": 1}
"""The row that a run's condition (`where`) keeps first, if there is one."""


@pytest.mark.parametrize("name", [one for one in SAMPLED if one != "gpqa.jsonl"])
def test_the_first_prompt_has_the_tokens_of_trl(name: str, tokenizer: Any) -> None:
    columns, *_ = SAMPLED[name]
    given = {"kind": file_format(name), "path": str(LAYOUTS / name), **columns}
    pool = prompts.load_pool(TypeAdapter[Any](DataSource).validate_python(given))
    raw = next(islice(find_tables(str(LAYOUTS / name))[0].rows, FIRST.get(name, 0), None))
    asked = ASKED[name](raw) if name in ASKED else raw[columns.get("prompt", "prompt")]
    *earlier, last = user(asked) if isinstance(asked, str) else asked
    content = columns.get("template", "{prompt}").replace("{prompt}", last["content"])
    turns = [*earlier, {**last, "content": content}]
    theirs = apply_chat_template({"prompt": turns, "completion": said("x")}, tokenizer)
    ours = encode_prompt(tokenizer, pool.table.column("messages")[0].as_py(), ROOMY.max_length)
    assert ours == ids(tokenizer, theirs["prompt"])
