"""The answers that responses are compared with: the data's, a column's, or those of another model in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.contract.judges import is_file
from troupe.workers.rewards.runner import Sample


class Baseline:
    """One answer to each prompt."""

    def __init__(self, name: str) -> None:
        """Reads the answers if they are stored.

        Args:
            name: A column of `metadata`, a file, or empty for the data's answer.

        Raises:
            OSError: the file cannot be read, or has no answers.
        """
        self._name = name
        self._stored = _stored(Path(name)) if is_file(name) else None

    def answer(self, sample: Sample) -> str:
        """The answer to the prompt of a sample. Raises JudgeError if there is none."""
        if self._stored is not None:
            found = self._stored.get(_key(sample.messages), "")
        elif self._name:
            found = json.loads(sample.metadata).get(self._name, "")
        else:
            found = sample.answer
        if not found or not isinstance(found, str):
            raise JudgeError(f"the baseline ({self._name or 'the answer of the data'}) has no answer to the prompt")
        return found


def _stored(file: Path) -> dict[str, str]:
    """Answers by prompt: of several to one prompt, the first. Raises OSError."""
    try:
        answers = {_key(row.get("messages") or row["prompt"]): row["response"] for row in reversed(list(_rows(file)))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise OSError(f"the baseline's answers {file} cannot be read: {type(error).__name__}: {error}") from error
    if not answers:
        raise OSError(f"the baseline's answers {file} are empty")
    return answers


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".jsonl":
        yield from (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    else:
        yield from pq.read_table(file, columns=["messages", "response"]).to_pylist()


def _key(prompt: str | list[Any]) -> str:
    """The roles and texts of a prompt; one that is not JSON is a single message."""
    messages = prompt
    if isinstance(prompt, str):
        try:
            messages = json.loads(prompt)
        except ValueError:
            messages = prompt
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": prompt}]
    return json.dumps([[one["role"], one["content"]] for one in messages])
