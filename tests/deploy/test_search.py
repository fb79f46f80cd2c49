"""The environment of the recipe `search-r1`: its index, its answers, and what ends an episode."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from troupe.deploy.examples import search as module
from troupe.deploy.examples.search import NOTHING, Search, search, write_index
from troupe.environments import Observation, Row

PASSAGES = (
    '"Night Harbour"\nNight Harbour is a play by Omar Reed after the book of Ann Teller.',
    '"Ann Teller"\nAnn Teller is born in Selby and wrote the book about a harbour.',
    '"Selby"\nSelby is a town at the Ouse.',
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "FEW", 2)
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    lines = [json.dumps({"id": str(place), "contents": text}) for place, text in enumerate(PASSAGES)]
    plain.write_text("\n".join(lines[:2]))
    packed.write_bytes(gzip.compress(lines[2].encode()))
    assert write_index(tmp_path / "a db?.sqlite", [plain, packed]) == 3
    return str(tmp_path / "a db?.sqlite")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("Which play was by Omar Reed?", [0]),
        ("ANN TELLER", [1, 0]),
        ('the "Ouse" OR (NEAR', [2]),
        ("is the", []),
        ("zither", []),
        ("", []),
    ],
)
def test_the_best_passages_stand_first(query: str, found: list[int], index: str) -> None:
    """Operators of the query language are words: a policy writes anything."""
    assert search(index, query, 2) == [PASSAGES[place] for place in found]
    assert search(index, query, 1) == [PASSAGES[place] for place in found[:1]]


def test_a_query_is_answered_and_any_other_turn_ends_the_episode(index: str) -> None:
    environment = Search(index, passages=1)
    begun = environment.start(Row(({"role": "user", "content": "Where?"},)))
    assert begun.messages == ({"role": "user", "content": "Where?"},) and "</search>" in begun.stop
    answer = environment.step(
        {"role": "assistant", "content": "Hm. <search>first</search> <search>Selby\n town</search>"}
    )
    content = f"<information>\n{PASSAGES[2]}\n</information>"
    assert answer.messages == [{"role": "user", "content": content}]
    assert not answer.done and answer.stop == begun.stop and answer.info == {"searches": 1}
    nothing = environment.step({"role": "assistant", "content": "<search>zither</search>"})
    assert NOTHING in nothing.messages[0]["content"]
    ended = environment.step({"role": "assistant", "content": "<answer>Selby</answer>"})
    assert ended == Observation(done=True, info={"searches": 2})


def test_a_missing_index_names_the_command_and_none_is_overwritten(index: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none\.db: no such file; write it .*python -m troupe\.deploy\.examples\.search"
    ):
        Search(str(tmp_path / "none.db"))
    with pytest.raises(FileExistsError):
        write_index(Path(index), [])
