"""Data as people have them and a base model without a chat template, in a chain of runs.

The first stage fine-tunes on conversations of a JSON array, with a chat template from a file. The second samples on
prompts in verl's layout with the same template. Prompts that are plain text are in test_algorithms.py.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from tests.conftest import ROOT
from tests.real.commands import Run, running, trajectories

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
LONG = " ".join(["word"] * 200)


def turns(*texts: str) -> list[dict[str, str]]:
    """A conversation of the user and the assistant."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def conversations(path: Path, *rows: Any) -> dict[str, Any]:
    """Rows of ShareGPT's kind in a compressed JSON array."""
    path.write_bytes(gzip.compress(json.dumps([{"conversations": row} for row in rows]).encode()))
    return {"kind": "json", "path": str(path), "messages": "conversations"}


def verl(path: Path, prompts: list[str]) -> dict[str, Any]:
    """Rows in verl's layout, with the length of each prompt as its ground truth."""
    rows = [
        {"prompt": turns(text), "reward_model": {"style": "rule", "ground_truth": str(len(text))}} for text in prompts
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return {"kind": "parquet", "path": str(path), "answer": "reward_model.ground_truth"}


def spec(folder: Path, model: Path) -> Path:
    """A file with both stages."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    shared = yaml.safe_load(GRPO.read_text())
    roles = shared["roles"]
    rollouts = {"roles": roles, "algorithm": {"name": "grpo", "group_size": 4}, "model": {"path": "stage:sft"}}
    rollouts |= {"schedule": {"steps": 1, "prompts_per_step": 4}, "sampling": {"max_tokens": 6}}
    talks = [turns("Hi", "Hello", f"Count to {n}", "1 2 3") for n in range(16)]
    broken = turns("Hi", "Hello", "Nobody answers")
    train, held_out = (folder / f"{name}.json.gz" for name in ("train", "eval"))
    sft = {
        "train": conversations(train, *talks, broken, turns("Hi", LONG)),
        "eval": conversations(held_out, turns("Hi", "Hello"), turns("Bye", "See you"), turns("Long", LONG)),
        "max_length": 96,
    }
    chats = {
        "train": verl(folder / "train.parquet", [f"Say {n}" for n in range(8)] + [LONG]),
        "eval": verl(folder / "eval.parquet", ["Say 1", "Say 99", LONG + " or not"]),
    }
    document = {
        "name": "forms",
        "seed": 7,
        "model": {"path": str(model), "dtype": "float32", "chat_template": str(folder / "chat.jinja")},
        "checkpoint": {"every_steps": 0},
        "stages": {
            "sft": {
                "roles": {"policy": roles["policy"] | {"learning_rate": 0.01}},
                "schedule": {"steps": 2, "examples_per_step": 16},
                "data": sft,
                "evaluation": {"every_steps": 0},
            },
            "chats": rollouts | {"data": chats, "evaluation": {"every_steps": 0, "at_start": False}},
        },
    }
    path = folder / "spec.yaml"
    path.write_text(json.dumps(document, indent=1))  # JSON is YAML, and has no anchors
    return path


@pytest.mark.long
def test_a_base_model_trains_on_conversations_and_verls_prompts(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base, ignore=shutil.ignore_patterns("*.jinja"))
    with running(Run(tmp_path, spec(tmp_path, base), name="chain")) as run:
        assert run.wait() == 0, run.output
    lines = {stage: last_line(run.out / stage) for stage in ("sft", "chats")}
    counts = {
        "data/train_rows": 16.0,
        "data/train_bad_rows": 2.0,  # a conversation that ends with the user, and one that is too long
        "data/eval_rows": 1.0,
        "data/eval_bad_rows": 1.0,
        "data/eval_removed_rows": 1.0,
    }
    assert {name: lines["sft"][name] for name in counts} == counts
    assert lines["sft"]["policy/loss"] > 0
    counts = {"data/train_rows": 9.0, "data/train_refused_rows": 1.0, "data/eval_removed_rows": 1.0}
    counts |= {"data/eval_refused_rows": 1.0, "eval/refused": 1.0, "eval/prompts": 1.0}
    assert {name: lines["chats"][name] for name in counts} == counts
    assert "1 of the first 9 prompts of data.train have more than the " in run.stdout + run.stderr
    for stage in ("sft", "chats"):
        (model,) = (run.out / stage / "checkpoints").glob("step-*/model")
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        assert tokenizer.chat_template == TEMPLATE
    for row in trajectories(run.out / "chats", 1).to_pylist():
        said = json.loads(row["messages"])[-1]["content"]
        assert tokenizer.decode(row["prompt_ids"]) == f"<|im_start|>user: {said}<|im_end|><|im_start|>assistant: "
        assert row["answer"] == str(len(said))


def last_line(out: Path) -> dict[str, Any]:
    """Metrics of the last step."""
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
