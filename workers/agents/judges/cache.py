"""Answers of judges by question, in a file that several workers and runs can share."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping

from troupe.workers.contract.judges import Question

_BUSY_S = 30.0
_MINUTE_S = 60.0
_LEAST_WAIT_S = 0.05


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
                columns = "id INTEGER PRIMARY KEY AUTOINCREMENT, budget TEXT, at REAL, tokens INTEGER"
                self._database.execute(f"CREATE TABLE IF NOT EXISTS minute ({columns})")
        except (sqlite3.Error, OSError) as error:
            raise OSError(f"the cache of judges' answers {path} cannot be opened: {error}") from error

    def find(self, questions: Iterable[str]) -> dict[str, str]:
        found = {}
        for question in questions:
            row = self._database.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
            if row is not None:
                found[question] = row[0]
        return found

    def add(self, answers: Mapping[str, str]) -> None:
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

    def begin(self, budget: str, tokens: int, most: tuple[int | None, int | None]) -> tuple[int, float]:
        """Count a request if the last minute has room for it, for `most` requests and tokens; returns its number and 0,
        or 0 and the seconds after which to try again."""
        with self._database:
            now = time.time()
            old = "DELETE FROM minute WHERE at NOT BETWEEN ? AND ?"  # the clock may have been set back
            self._database.execute(old, (now - _MINUTE_S, now + _MINUTE_S))  # locks the file
            counts = "SELECT count(*), coalesce(sum(tokens), 0), min(at) FROM minute WHERE budget = ?"
            requests, used, first = self._database.execute(counts, (budget,)).fetchone()
            room = (most[0] is None or requests < most[0]) and (most[1] is None or used + tokens <= most[1])
            if not requests or room:
                row = "INSERT INTO minute (budget, at, tokens) VALUES (?, ?, ?)"
                return self._database.execute(row, (budget, now, tokens)).lastrowid or 0, 0.0
        return 0, max(_LEAST_WAIT_S, first + _MINUTE_S - now)

    def end(self, request: int, tokens: int) -> None:
        """Notes how many tokens a request has used."""
        with self._database:
            self._database.execute("UPDATE minute SET tokens = ? WHERE id = ?", (tokens, request))

    def close(self) -> None:
        self._database.close()


def question_key(judge: str, question: Question) -> str:
    """Name of a question to a judge: equal for equal questions with the same number."""
    number = [question.number] if question.number else []
    return hashlib.sha256(json.dumps([judge, *question.messages, *number], sort_keys=True).encode()).hexdigest()
