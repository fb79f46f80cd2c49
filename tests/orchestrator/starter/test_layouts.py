"""The table of published layouts: what `troupe init` writes, the rows that a run uses, and the rewards of right and
wrong responses. `layouts/` has rows in the exact layouts, with values made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.starter.choices import Choices
from troupe.orchestrator.starter.command import text_of
from troupe.orchestrator.starter.tables import find_tables
from troupe.workers.rewards.loading import load

LAYOUTS = Path(__file__).parent / "layouts"
PREFERENCES = LAYOUTS / "preferences"
PROGRAM = {"answer": None, "template": "{prompt}\n\nAnswer with a Python program in a ```python block."}
APPS = {"prompt": "question", "metadata": ["input_output"], **PROGRAM}
KODCODE = {"prompt": "question", "metadata": ["test"], **PROGRAM}
MBPP = {"prompt": "text", "metadata": ["test_list", "test_setup_code"], **PROGRAM}
EURUS = {"metadata": ["reward_model.ground_truth"], "where": 'data_source == "taco"', **PROGRAM}
CASES = {"metadata": ["reward_model.ground_truth"], "where": 'data_source == "code"', **PROGRAM}
LIVE_CODE = {"prompt": "question_content", "metadata": ["public_test_cases", "metadata"], **PROGRAM}
HH = {"prompt": None}
SHP = {"answers": ["human_ref_A", "human_ref_B"], "preferred": {"column": "labels", "first": 1, "second": 0}}
LETTER = {"template": "{prompt}\n\nPut the letter of the right option in \\boxed{}."}
GPQA = {"prompt": "Question", "answer": "Correct Answer", **LETTER}
GPQA |= {"options": ["Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))]}
_SUM = "import sys\n*_, last = sys.stdin\nprint(sum(map(int, last.split())))"
TESTS, NUMBER, WORDS = "python_tests", "last_number", "choice"

SAMPLED: dict[str, tuple[dict[str, Any], str, int]] = {
    "apps.jsonl": (APPS, TESTS, 6),
    "bool.csv": ({}, WORDS, 2),
    "crlf.jsonl.zst": ({}, NUMBER, 6),
    "deepscaler.json": ({"prompt": "problem"}, NUMBER, 6),
    "gpqa.jsonl": (GPQA, WORDS, 6),
    "mmlu.jsonl": ({"prompt": "question", "options": "choices", **LETTER}, WORDS, 6),
    "mmlu_pro.parquet": ({"prompt": "question", "options": "options", **LETTER}, WORDS, 2),
    "arc.jsonl": ({"prompt": "question", "answer": "answerKey", "options": "choices.text", **LETTER}, WORDS, 2),
    "hellaswag.jsonl": ({"prompt": "ctx", "answer": "label", "options": "endings", **LETTER}, WORDS, 2),
    "humaneval.jsonl": ({"metadata": ["test", "entry_point"], **PROGRAM}, TESTS, 6),
    "kodcode.parquet": (KODCODE, TESTS, 6),
    "limo.parquet": ({"prompt": "question"}, NUMBER, 6),
    "livecodebench.jsonl": (LIVE_CODE, TESTS, 6),
    "mbpp.jsonl": (MBPP, TESTS, 6),
    "openr1_math.parquet": ({"prompt": "problem"}, NUMBER, 6),
    "semi.csv": ({}, NUMBER, 1),
    "taco.parquet": (APPS, TESTS, 6),
    "code.jsonl": (KODCODE, TESTS, 6),
    "cases.jsonl": (CASES, TESTS, 4),
    "eurus.parquet": (EURUS, TESTS, 3),
    "tests_in_answer.jsonl": ({"prompt": "question", "metadata": [], "template": PROGRAM["template"]}, TESTS, 6),
    "thought.jsonl": ({"prompt": "question"}, WORDS, 8),
    "wrapped.json": ({}, NUMBER, 6),
}
"""Layouts that GRPO trains on: columns, the reward function, and rows."""

SFT: dict[str, tuple[dict[str, Any], int]] = {
    "bool.csv": ({"response": "answer"}, 2),
    "capybara.jsonl": ({"messages": "conversation"}, 6),
    "crlf.jsonl.zst": ({"response": "answer"}, 6),
    "deepscaler.json": ({"prompt": "problem", "response": "solution"}, 6),
    "helpsteer2.jsonl": ({}, 6),
    "kodcode.parquet": ({"prompt": "question", "response": "solution"}, 6),
    "limo.parquet": ({"prompt": "question", "response": "solution"}, 6),
    "mbpp.jsonl": ({"prompt": "text", "response": "code"}, 6),
    "openai_parts.jsonl": ({"messages": "messages"}, 6),
    "openr1_math.parquet": ({"messages": "messages"}, 6),
    "semi.csv": ({"response": "answer"}, 1),
    "sharegpt_weight.jsonl": ({"messages": "conversations"}, 6),
    "code.jsonl": ({"prompt": "question", "response": "solution"}, 6),
    "mixed.jsonl": ({"prompt": "problem", "response": "answer"}, 9),
    "thought.jsonl": ({"prompt": "question", "response": "answer"}, 8),
    **{f"preferences/{one}": ({}, 6) for one in ("helpsteer2.jsonl",)},
    **{f"preferences/kto{one}": ({"response": "completion"}, 6) for one in (".csv", "_01.jsonl", "_mix.jsonl")},
    "preferences/tools_sft.jsonl": ({"messages": "messages"}, 4),
    "preferences/ultra_bin.jsonl": ({"messages": "messages"}, 6),
}
"""Layouts that SFT trains on: columns and rows."""

COMPARED: dict[str, tuple[str, dict[str, Any], int]] = {
    "hh_train.jsonl.gz": ("dpo", HH, 6),
    "preferences/hh.jsonl": ("dpo", HH, 6),
    "preferences/hh_prompt.jsonl": ("dpo", {}, 6),
    "preferences/shp.jsonl": ("dpo", {"prompt": "history", **SHP}, 6),
    **{
        name: ("dpo", {"answers": "response", "scores": "helpfulness", "one_in_a_row": True}, 3)
        for name in ("helpsteer2.jsonl", "preferences/helpsteer2.jsonl")
    },
    "preferences/prm.jsonl": ("process_reward_model", {}, 6),
    "math_shepherd.jsonl": (
        "process_reward_model",
        {"prompt": None, "steps": "input", "step_labels": "label"},
        2,
    ),
    "prm800k.jsonl": (
        "process_reward_model",
        {"prompt": "question.problem", "steps": "label.steps", "step_labels": None},
        5,
    ),
    "preferences/kto.csv": ("kto", {"response": "completion"}, 6),
    "preferences/kto_01s.jsonl": ("kto", {"response": "completion"}, 6),
    "preferences/kto_str.jsonl": ("kto", {"response": "completion"}, 6),
}
"""Layouts of comparisons: algorithm, columns and rows. `test_published_preferences.py` has the others."""

REFUSED: dict[tuple[str, str], str] = {
    ("grpo", "capybara.jsonl"): "no column prompt",
    ("grpo", "countdown.parquet"): "no column prompt",
    ("grpo", "latin.csv"): "not UTF-8",
    ("grpo", "mixed.jsonl"): "answer has no answer in 3 of 9 rows",
    ("grpo", "openai_parts.jsonl"): "no column with the answer",
    ("grpo", "preferences/kto.csv"): "no column with the answer",
    ("grpo", "preferences/kto_pm.jsonl"): "no column with the answer",
    ("kto", "preferences/kto_pm.jsonl"): "the label is neither true nor false",
    ("dpo", "preferences/prm.jsonl"): "a label for each step",
    ("sft", "apps.jsonl"): "no column response",
    ("sft", "eurus.parquet"): "no column response",
    ("sft", "humaneval.jsonl"): "no column response",
    ("sft", "mmlu.jsonl"): "no row can be used",
    ("sft", "taco.parquet"): "no column response",
}
"""Layouts that hold no answer, or more than one kind of task, and what the refusal says."""


def started(model: Path, name: str, algorithm: str, folder: Path) -> tuple[dict[str, Any], Any, list[str]]:
    """The written spec, the data that a run of it reads, and what `init` has said."""
    said: list[str] = []
    choices = Choices(model=str(model), data=str(LAYOUTS / name), algorithm=algorithm, cpus=2)
    (folder / "run.yaml").write_text(text_of(choices, folder / "run.yaml", said.append))
    spec = plan_runs(read_document(folder / "run.yaml"))[0].spec
    return yaml.safe_load((folder / "run.yaml").read_text()), load_data(spec).pools["train"], said


def columns(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document["data"]["train"].items() if name not in {"kind", "path"}}


def references(row: Mapping[str, Any]) -> Iterator[str]:
    """Right programs of a row; without any, one that adds the numbers of the last line."""
    programs = ("solutions", "solution", "canonical_solution", "code")
    given = next((row[name] for name in programs if name in row), _SUM)
    programs = json.loads(given) if given.startswith("[") else [given]
    yield from chain(programs, (f"{row['prompt']}{one}" for one in programs if "canonical_solution" in row))


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLED)
def test_the_reward_of_a_published_layout_pays_for_right_responses_alone(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    expected, function, rows = SAMPLED[name]
    document, pool, _ = started(tiny_model, name, "grpo", tmp_path)
    assert columns(document) == expected
    assert pool.rows == rows
    (reward,) = document["roles"]["reward"]["functions"]
    assert reward["name"] == function
    score = partial(load(function, {}), **reward.get("args", {}))
    table = find_tables(str(LAYOUTS / name))[0].rows
    given = zip(pool.table.to_pylist(), table, strict="where" not in expected)
    for number, (row, raw) in enumerate(islice(given, 1 if function == TESTS else None)):  # sandboxes take a second
        metadata, prompt = json.loads(row["metadata"]), json.loads(row["messages"])[-1]["content"]
        right = list(references(raw)) if function == TESTS else [row["answer"], f"So it is \\boxed{{{row['answer']}}}."]
        other = {*pool.table.column("answer").to_pylist()} - {row["answer"]} if function != TESTS else set[str]()
        wrong = {"", "I do not know.", "```python\npass\n```", *other}
        wrong |= {prompt} if number else set()  # the first prompt of one layout has its answer, 1, as its last number
        assert max(score(text, row["answer"], metadata) for text in right) == 1.0
        assert max(score(text, row["answer"], metadata) for text in wrong) == 0.0


@pytest.mark.parametrize("name", SFT)
def test_sft_trains_the_most_complete_column_of_a_published_layout(name: str, tiny_model: Path, tmp_path: Path) -> None:
    expected, rows = SFT[name]
    document, pool, said = started(tiny_model, name, "sft", tmp_path)
    assert columns(document) == expected
    assert pool.rows == rows
    read = {expected["messages"]} if "messages" in expected else {"prompt", "response"} | set(expected.values())
    (row, *_) = find_tables(str(LAYOUTS / name))[0].rows
    unread = [one for one in row if one and one not in read - ({"prompt"} if "prompt" in expected else set())]
    assert said == ([f"Columns that the spec does not read: {', '.join(unread)}."] if unread else [])


@pytest.mark.parametrize("name", COMPARED)
def test_a_published_comparison_gets_a_spec_that_uses_its_rows(name: str, tiny_model: Path, tmp_path: Path) -> None:
    algorithm, expected, rows = COMPARED[name]
    document, pool, _ = started(tiny_model, name, algorithm, tmp_path)
    assert (columns(document), pool.rows) == (expected, rows)


@pytest.mark.parametrize(("algorithm", "name"), REFUSED)
def test_a_layout_without_what_the_algorithm_needs_is_refused(
    algorithm: str, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        started(tiny_model, name, algorithm, tmp_path)
    assert REFUSED[algorithm, name] in str(refused.value)


def test_prompts_that_do_not_name_the_function_that_is_tested_are_counted(tiny_model: Path, tmp_path: Path) -> None:
    _, _, said = started(tiny_model, "livecodebench.jsonl", "grpo", tmp_path)
    assert any("3 prompts do not name the function that is tested (minusTwo): add it" in note for note in said), said


def test_every_layout_is_in_a_table() -> None:
    held = {*SAMPLED, *SFT, *COMPARED, *(name for _, name in REFUSED)}
    assert {path.name for path in LAYOUTS.iterdir() if path.is_file()} <= held
