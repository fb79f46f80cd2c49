"""Answers of judges by question, in a file that several workers and runs can share."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence

from troupe.workers.contract.environments import Message

_BUSY_S = 30.0


class AnswerCache:
    """Answers by question, in an SQLite file that several workers and runs can share."""

    def __init__(self, path: str = "") -> None:
        """`path`: the file, which is created for its owner only; in memory if empty. Raises OSError."""
        try:
            if path:  # SQLite gives its journals the mode of the file
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # Groups are scored on a separate thread, one after another.
            self._database = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, check_same_thread=False)
            with self._database:
                self._database.execute("CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT)")
                self._database.execute("CREATE TABLE IF NOT EXISTS asked (budget TEXT PRIMARY KEY, number INTEGER)")
        except (sqlite3.Error, OSError) as error:
            raise OSError(f"the cache of judges' answers {path} cannot be opened: {error}") from error

    def find(self, questions: Iterable[str]) -> dict[str, str]:
        """The answers that are known, by question."""
        found = {}
        for question in questions:
            row = self._database.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
            if row is not None:
                found[question] = row[0]
        return found

    def add(self, answers: Mapping[str, str]) -> None:
        """Keeps answers."""
        with self._database:
            self._database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", answers.items())

    def take(self, budget: str, wanted: int, most: int) -> int:
        """Takes questions from a budget of `most`; returns how many of the wanted ones it has left."""
        with self._database:
            self._database.execute("INSERT OR IGNORE INTO asked VALUES (?, 0)", (budget,))  # locks the file
            (asked,) = self._database.execute("SELECT number FROM asked WHERE budget = ?", (budget,)).fetchone()
            taken = max(0, min(wanted, most - asked))
            self._database.execute("UPDATE asked SET number = number + ? WHERE budget = ?", (taken, budget))
        return taken

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def question_key(judge: str, question: Sequence[Message]) -> str:
    """Name of a question to a judge: equal for equal questions."""
    return hashlib.sha256(json.dumps([judge, *question], sort_keys=True).encode()).hexdigest()
