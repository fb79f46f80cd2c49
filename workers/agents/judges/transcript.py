"""What a judge reads: what was said in a prompt and in an episode, and the answers that responses are compared with.

An answer is in the data, in another column, or in a file that another model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import is_file
from troupe.workers.rewards.runner import Sample


def said(messages: str) -> str:
    """The prompt as text; a single message stands alone."""
    turns = json.loads(messages)
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(map(_turn, turns))


def played(messages: str, conversation: str) -> str:
    """All that was said in an episode, without the messages of the prompt at its beginning. An environment can show the
    prompt, a part of it, other messages before it, or something else."""
    prompt, turns = json.loads(messages), json.loads(conversation)
    words, read = list[str](), 0
    for place, turn in enumerate(turns):
        found = next((at for at in range(read, len(prompt)) if _behind(turn, prompt[at]) is not None), None)
        if turn["role"] == "assistant" and (found is None or not _is_example(prompt, found, turns, place)):
            words += map(_turn, turns[place:])  # from the first turn of the policy
            break
        if found is None:
            words.append(_turn(turn))
            continue
        rest = _behind(turn, prompt[found])
        words += [_turn(turn | {"content": rest})] if rest else []
        read = found + 1
    return "\n\n".join(words)


def _behind(turn: Message, asked: Message) -> str | None:
    """The text of a message behind one of the prompt, in separate paragraphs, or None if it does not begin with it."""
    content, known = str(turn["content"]).strip(), str(asked["content"]).strip()
    if turn["role"] != asked["role"] or not content.startswith(known):
        return None
    rest = content[len(known) :]
    return rest.strip() if not rest or rest.startswith("\n\n") else None


def _is_example(prompt: Sequence[Message], at: int, turns: Sequence[Message], place: int) -> bool:
    """Whether the turn at `place` is the prompt's answer `at`, between the same messages, not the policy's own."""
    for step in (-1, 1):
        if not 0 <= at + step < len(prompt):
            continue
        beside, asked = turns[place + step : place + step + 1] if place + step >= 0 else [], prompt[at + step]
        if not any(turn["role"] == asked["role"] and asked["content"].strip() in turn["content"] for turn in beside):
            return False
    return True


def _turn(turn: Message) -> str:
    """A message as text, with its calls of tools."""
    calls = [call.get("function") or {} for call in turn.get("tool_calls") or ()]
    called = [f"[calls {call.get('name')} with {call.get('arguments')}]" for call in calls]
    content = str(turn["content"])
    return f"{turn['role']}: " + "\n".join([content, *called] if content else called)


class Baseline:
    """One answer to each prompt."""

    def __init__(self, name: str) -> None:
        """Read the stored answers if `name` is a file; otherwise it is a column of `metadata`, or empty for the data's
        answer. Raises OSError if the file cannot be read, or has no answers."""
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
