"""Search: the policy asks a local index of passages before it answers, as in Search-R1 (arXiv 2503.09516).

    python -m troupe.deploy.examples.search passages.db wiki-18.jsonl.gz

writes the index, a file of SQLite, from JSON lines with `contents` (gzip-compressed if their name ends in `.gz`).
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from troupe.environments import Environment, Message, Observation, Row

COMMON_SHARE, FEW = 0.01, 1000
"""A word that is in more than this share of the passages, and in more than so many, ranks none, because its query would
take seconds among millions of passages."""
NOTHING = "These words are in no passage, or in too many."
_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)


class Search(Environment):
    """A turn with `<search>QUERY</search>` is answered with the best passages, between `<information>` tags; any other
    turn ends the episode, and the reward functions of `roles.reward` score it."""

    def __init__(self, index: str, passages: int = 3) -> None:
        """Open an index. Each query is answered with at most `passages`. Raises ValueError if there is no index."""
        if not Path(index).is_file():
            command = f"python -m troupe.deploy.examples.search {index} FILE.jsonl"
            raise ValueError(f"{index}: no such file; write it from passages by: {command}")
        self._index, self._passages, self._searches = index, passages, 0

    def start(self, row: Row) -> Observation:
        """The prompt."""
        return self._observation(row.messages)

    def step(self, message: Message) -> Observation:
        """The passages that the turn asks for, or the end."""
        if not (queries := _QUERY.findall(message["content"])):
            return Observation(done=True, info={"searches": self._searches})
        self._searches += 1
        found = "\n\n".join(search(self._index, queries[-1], self._passages)) or NOTHING
        return self._observation([{"role": "user", "content": f"<information>\n{found}\n</information>"}])

    def _observation(self, messages: Sequence[Message]) -> Observation:
        return Observation(messages, stop=["</search>", "</answer>"], info={"searches": self._searches})


def search(index: str, query: str, limit: int) -> list[str]:
    """The passages that have words of the query, the best by BM25 first, at most `limit`."""
    with closing(sqlite3.connect(f"{Path(index).absolute().as_uri()}?mode=ro", uri=True)) as database:
        words = {*re.findall(r"\w+", query.casefold())}
        common = database.execute(
            "SELECT term FROM common WHERE term IN (SELECT value FROM json_each(?))", (json.dumps([*words]),)
        )
        rare = sorted(words - {term for (term,) in common})
        statement = "SELECT contents FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
        matches = " OR ".join(f'"{word}"' for word in rare)
        return [text for (text,) in database.execute(statement, (matches, limit))] if rare else []


def write_index(index: Path, files: Sequence[Path]) -> int:
    """Write the index of the passages in files; returns how many there are. Raises FileExistsError if it exists."""
    if index.exists():
        raise FileExistsError(f"{index} exists")
    unfinished = index.with_name(f"{index.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with closing(sqlite3.connect(unfinished)) as database:
        database.execute("CREATE VIRTUAL TABLE passages USING fts5(contents)")
        database.executemany("INSERT INTO passages VALUES (?)", _contents(files))
        (number,) = database.execute("SELECT count(*) FROM passages").fetchone()
        database.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, passages, row)")
        most = max(number * COMMON_SHARE, FEW)
        database.execute("CREATE TABLE common (term TEXT PRIMARY KEY) WITHOUT ROWID")
        database.execute("INSERT INTO common SELECT term FROM words WHERE doc > ?", (most,))
        database.commit()
    unfinished.rename(index)
    return number


def _contents(files: Sequence[Path]) -> Iterator[tuple[str]]:
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for line in lines:
                yield (json.loads(line)["contents"],)


if __name__ == "__main__":
    written, *given = map(Path, sys.argv[1:])
    sys.stdout.write(f"{write_index(written, given):,} passages in {written}\n")
