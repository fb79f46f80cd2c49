"""What a user chooses for a first spec, and what the data say about themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS, DataFormat
from troupe.orchestrator.algorithms.section import unknown_algorithm
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.errors import UsageError

GYM = "reasoning_gym:"
_ROWS = 1000
"""Rows of a file that are looked at."""
_LINE_CHARS = 1 << 20
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "problem", "query", "input", "messages"),
    "answer": ("answer", "solution", "target", "label", "final_answer"),
    "response": ("response", "completion", "output", "answer"),
    "chosen": ("chosen", "preferred"),
    "rejected": ("rejected", "dispreferred"),
    "label": ("label", "desirable"),
    "answers": ("answers", "responses", "candidates"),
    "scores": ("scores", "rewards"),
}
"""Names under which a column of the spec is looked for, the spec's own first."""
_OFFLINE_COLUMNS: Mapping[DataFormat, tuple[str, ...]] = {
    "demonstrations": ("prompt", "response"),
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "response", "label"),
    "ranked": ("prompt", "answers", "scores"),
}
_NUMBER = re.compile(r"\s*[-+$]?[\d,]+(\.\d+)?\s*")


@dataclass(frozen=True)
class Choices:
    """A user's choices."""

    model: str
    data: str
    """Path of a JSON Lines file, or `reasoning_gym:TASK`."""
    algorithm: str = "grpo"
    gpus: int = 0
    gpu_type: str = ""
    """A name of `GPU_GIB`; empty: not known, and memory of GPUs is not checked."""
    cpus: int = 1
    name: str = "my-run"
    steps: int = 100
    max_tokens: int = 0
    """Longest response; 0: 64 on the CPU, 1024 on GPUs."""

    @property
    def offline(self) -> bool:
        """Whether the algorithm learns from examples instead of rollouts."""
        return self.algorithm in OFFLINE_ALGORITHMS


@dataclass(frozen=True)
class Data:
    """The data section of the spec, and what it says about lengths and rewards."""

    section: dict[str, Any]
    prompt_tokens: int
    """Room for a prompt."""
    response_tokens: int
    """Room for a response of the data; 0 if there are no responses."""
    reward: str
    """Reward function that fits the answers."""


def check_algorithm(name: str) -> None:
    """Raise UsageError unless a first spec can be written for this algorithm."""
    if name == "distill":
        raise UsageError("--algorithm: distill needs a second model as teacher; see `troupe algorithms distill`")
    if name not in ALGORITHMS and name not in OFFLINE_ALGORITHMS:
        raise UsageError(f"--algorithm: {unknown_algorithm(name)}")


def read_data(choices: Choices) -> Data:
    """The data that were chosen. Raises UsageError where they do not fit the algorithm."""
    if choices.data.startswith(GYM):
        if choices.offline:
            raise UsageError(f"--data: {choices.algorithm} learns from examples: give a JSON Lines file")
        recipe = choices.data.removeprefix(GYM)
        train = {"kind": "reasoning_gym", "recipes": [{"name": recipe}], "size": 2000, "seed": 1}
        return Data({"train": train, "eval": train | {"size": 200, "seed": 2}}, 512, 0, "reasoning_gym")
    rows = _rows(Path(choices.data))
    if choices.offline:
        return _examples(choices, rows)
    columns = _named(("prompt",), rows, choices.data)
    answers = _found("answer", rows)
    section = {"kind": "jsonl", "path": choices.data, **columns}
    if answers is None:
        raise UsageError(
            f"--data: {choices.data} has no column with the answer (it has: {', '.join(rows[0])}): name it "
            f"{' or '.join(_COLUMNS['answer'][:3])}"
        )
    section |= {"answer": answers} if answers != "answer" else {}
    numbers = all(_NUMBER.fullmatch(str(row.get(answers, ""))) for row in rows)
    prompt = columns.get("prompt", "prompt")
    return Data({"train": section}, _tokens(rows, prompt), 0, "last_number" if numbers else "exact_match")


def _examples(choices: Choices, rows: list[dict[str, Any]]) -> Data:
    needed = _OFFLINE_COLUMNS[OFFLINE_ALGORITHMS[choices.algorithm].formats[0]]
    columns = _named(needed, rows, choices.data)
    if choices.algorithm == "rrhf":  # has no columns by default
        columns = {name: columns.get(name, name) for name in ("answers", "scores")} | columns
    longest = max(_tokens(rows, columns.get(name, name)) for name in needed[1:])
    train = {"kind": "jsonl", "path": choices.data, **columns}
    return Data({"train": train}, _tokens(rows, columns.get("prompt", "prompt")), longest, "")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The first rows of a JSON Lines file. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"--data: no such file: {path} (a task of reasoning-gym is written {GYM}chain_sum)")
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in islice(iter(lambda: file.readline(_LINE_CHARS), ""), _ROWS):
                row = json.loads(line) if line.strip() else {}
                rows += [row] if isinstance(row, dict) and row else []
    except (OSError, ValueError, RecursionError):
        raise UsageError(f"--data: {path}: line {len(rows) + 1} is not a JSON object in UTF-8") from None
    if not rows:
        raise UsageError(f"--data: {path} has no JSON object")
    return rows


def _found(column: str, rows: list[dict[str, Any]]) -> str | None:
    return next((name for name in _COLUMNS[column] if name in rows[0]), None)


def _named(columns: tuple[str, ...], rows: list[dict[str, Any]], path: str) -> dict[str, str]:
    """The columns whose name in the file is not the spec's default. Raises UsageError if one is missing."""
    named: dict[str, str] = {}
    for column in columns:
        name = _found(column, rows)
        if name is None:
            raise UsageError(f"--data: {path} has no column {column} (it has: {', '.join(map(str, rows[0]))})")
        if name != column:
            named[column] = name
    return named


def _tokens(rows: list[dict[str, Any]], column: str) -> int:
    """Room for the longest value, with the chat template: two characters a token, and at least 128."""
    longest = max(len(str(row.get(column, ""))) for row in rows)
    return min(4096, max(128, 64 * -(-(longest // 2 + 64) // 64)))
