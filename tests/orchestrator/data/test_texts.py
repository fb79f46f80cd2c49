"""The texts of PPO-ptx: read, cut into pieces, and assigned to steps in an order that resumes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer

from tests.tokenizers import new_tokenizer
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.texts import Pieces, SourcePieces, TextOrder, load_texts
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.runs.rollouts import RolloutRun
from troupe.orchestrator.spec.sections import DataConfig
from troupe.orchestrator.spec.sources import SourceShare
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import TEXTS, RankPlan, TextCut, TextSummary
from troupe.workers.data.texts import cut_sources, cut_texts, text_batches
from troupe.workers.policy import PolicyWorker


def jsonl(path: Path, *rows: dict[str, Any]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "jsonl", "path": str(path)}


def read(ptx: Any, on_bad_row: Literal["skip", "stop"]) -> Pool:
    """The texts of a spec's section `data`."""
    data = DataConfig.model_validate({"train": {"kind": "jsonl", "path": "train.jsonl"}, "ptx": ptx})
    found = load_texts(data, on_bad_row)
    assert found is not None
    return found


def texts(*found: str) -> pa.Table:
    return pa.table({"text": list(found), "origin": [f"t:{number}" for number in range(1, len(found) + 1)]})


def test_bad_rows_are_skipped_and_named_or_stop_the_run(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "texts.jsonl", {"text": "One."}, {"text": " "}, {"text": 3}, {"text": "a\ud800"})
    pool = read(source, "skip")
    assert pool.table.to_pylist() == [{"text": "One.", "origin": "texts.jsonl:1"}]
    assert pool.bad_rows == 3
    assert [problem.partition(": ")[0] for problem in pool.problems] == [f"texts.jsonl:{row}" for row in (2, 3, 4)]
    with pytest.raises(DataError, match=r"^texts.jsonl:2: the text is empty or not text$"):
        read(source, "stop")


def test_a_source_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data.ptx: no row can be used \(1 bad; the first: empty.jsonl:1"):
        read(jsonl(tmp_path / "empty.jsonl", {"text": ""}), "skip")
    with pytest.raises(DataError, match=r"no column 'text' \(data.ptx.text\).*did you mean 'texts'"):
        read(jsonl(tmp_path / "other.jsonl", {"texts": "a"}), "skip")
    with pytest.raises(DataError, match=r"data\.ptx\.path"):
        read({"kind": "parquet", "path": str(tmp_path / "none.parquet")}, "skip")


def test_texts_become_pieces_that_hold_every_token_once(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    found = ["Numbers add up in any order, and that is all there is to say of them.", "Short.", "Ünïcödé 🙂"]
    summary, table = cut_texts(tokenizer, texts(*found), max_tokens=5)
    assert table.schema.equals(TEXTS)
    rows = table.to_pylist()
    assert summary.tokens == tuple(1 + len(row["response_ids"]) for row in rows)
    for number, text in enumerate(found, start=1):
        own = [row for row in rows if row["prompt_uid"] == f"t:{number}"]
        ids = [token for row in own for token in row["prompt_ids"] + row["response_ids"]]
        expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        # A last token alone in its piece predicts nothing.
        assert ids == (expected[:-1] if len(expected) % 5 == 1 else expected)
        assert [row["sample_index"] for row in own] == list(range(len(own)))
        assert all(len(row["prompt_ids"]) == 1 and len(row["response_ids"]) <= 4 for row in own)


def test_a_text_with_a_token_outside_the_embedding_is_refused_and_counted(tiny_model: Path) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.add_tokens(["<tool_call>"])
    summary, table = cut_texts(tokenizer, texts("One two.", "call <tool_call> now", "Three."), max_tokens=64)
    assert table["prompt_uid"].to_pylist() == ["t:1", "t:3"]
    assert (len(summary.tokens), summary.refused) == (2, 1)
    (problem,) = summary.problems
    assert problem.startswith("t:2: the token 4096 ('<tool_call>') is outside the model's embedding")


@pytest.mark.parametrize(("on_bad_row", "tokens"), [("skip", (3,)), ("stop", (3,)), ("skip", ())])
def test_refused_texts_are_said_or_stop_the_run(on_bad_row: str, tokens: tuple[int, ...]) -> None:
    class Policy:
        async def cut_texts(self, *arguments: Any, **named: Any) -> tuple[tuple[TextSummary], str]:
            return (TextSummary(tokens, 1, ("t:2: the token 9 is outside",)),), "table"

    said: list[str] = []
    run: Any = SimpleNamespace(
        _spec=SimpleNamespace(
            data=SimpleNamespace(
                ptx=None, text_sources=lambda: {"ptx": SimpleNamespace(max_tokens=9, texts_per_step=1)}
            ),
            schedule=SimpleNamespace(train_timeout_s=9.0),
            failures=SimpleNamespace(on_bad_row=on_bad_row),
            seed=0,
        ),
        _session=SimpleNamespace(
            cluster=SimpleNamespace(put=lambda table: table),
            console=SimpleNamespace(message=said.append),
            data=SimpleNamespace(texts=Pool(texts("a", "b"), digest="d")),
        ),
    )
    policy: Any = Policy()
    found = "data.ptx: 1 of 2 texts cannot be used: t:2: the token 9 is outside"
    if on_bad_row == "skip" and tokens:
        assert asyncio.run(RolloutRun._texts(run, policy)) is not None
        assert said == [found]
    else:
        with pytest.raises(DataError, match=found):
            asyncio.run(RolloutRun._texts(run, policy))


@pytest.mark.parametrize("allowed", [True, False])
def test_special_tokens_of_the_mix_are_what_the_spec_says(allowed: bool, tiny_model: Path) -> None:
    model = ModelConfig(path=str(tiny_model), allow_special=allowed)
    worker: Any = SimpleNamespace(_config=SimpleNamespace(model=model))
    _, table = PolicyWorker.cut_texts(worker, texts("a<|im_end|>b"), [TextCut(1, 64)])
    ids = [token for row in table.to_pylist() for token in row["prompt_ids"] + row["response_ids"]]
    end = new_tokenizer(tiny_model).convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == (2 if allowed else 1)  # the text's own end is one


def test_batches_are_the_plans_pieces(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    _, table = cut_texts(tokenizer, texts("One two three four.", "Five six.", "Seven."), max_tokens=64)
    batches = text_batches(table, RankPlan(((2, 0), (), (1, 1)), 0, 0))
    rows = table.to_pylist()
    for batch, expected in zip(batches, ([2, 0], [], [1, 1]), strict=True):
        assert batch.targets.tolist() == [token for row in expected for token in rows[row]["response_ids"]]
        firsts = [rows[row]["prompt_ids"][0] for row in expected]
        assert batch.input_ids[: len(expected), 0].tolist() == firsts
        assert bool(batch.loss_mask.all())
    assert torch.equal(batches[1].input_ids, torch.zeros(1, 1, dtype=torch.int64))


def test_the_order_resumes_after_the_last_trained_step() -> None:
    pieces = Pieces(None, tokens=(3, 4, 5, 6, 7), digest="d")
    whole = TextOrder(pieces, per_step=2, seed=1)
    picks = []
    for _ in range(5):
        picks.append(whole.pick())
        whole.mark_trained()
    assert sorted(row for pick in picks for row in pick.rows) == sorted([*range(5)] * 2)  # two epochs
    first = TextOrder(pieces, per_step=2, seed=1)
    assert first.pick() == picks[0]
    first.mark_trained()
    first.pick()  # of a step that is not trained
    second = TextOrder(pieces, per_step=2, seed=1)
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.pick(), second.pick()] == picks[1:3]
    with pytest.raises(DataError, match="cannot resume"):
        TextOrder(Pieces(None, (3, 4), "other"), per_step=2, seed=1).restore(first.state())


def test_several_sources_are_one_pool_with_parts(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "One."}, {"text": ""})
    jsonl(tmp_path / "b.jsonl", {"text": "Two."}, {"text": "Three."})
    named = tuple(
        {"kind": "jsonl", "path": str(tmp_path / file), "name": name}
        for name, file in (("news", "a.jsonl"), ("books", "b.jsonl"))
    )
    pool = read(named, "skip")
    assert pool.table["text"].to_pylist() == ["One.", "Two.", "Three."]
    assert {name: (part.rows, part.bad_rows) for name, part in pool.parts.items()} == {"news": (1, 1), "books": (2, 0)}
    with pytest.raises(DataError, match=r"^a.jsonl:2: the text is empty"):
        read(named, "stop")
    lost = named[1] | {"path": str(tmp_path / "none.jsonl")}
    with pytest.raises(DataError, match=r"data\.ptx\.1\.path"):
        read((named[0], lost), "skip")


def test_each_source_is_cut_at_its_own_length(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    found = ["Numbers add up in any order.", "Short.", "Numbers add up in any order."]
    (first, second), table = cut_sources(tokenizer, texts(*found), [TextCut(2, 5), TextCut(1, 3)])
    assert table.schema.equals(TEXTS) and table.num_rows == len(first.tokens) + len(second.tokens)
    assert (max(first.tokens), max(second.tokens)) == (5, 3)
    origins = table["prompt_uid"].to_pylist()
    assert set(origins[: len(first.tokens)]) == {"t:1", "t:2"} and set(origins[len(first.tokens) :]) == {"t:3"}


def test_every_step_has_the_pieces_of_each_source_that_it_asks_for() -> None:
    """Each source runs through its own passes; a resumed order continues in all of them."""
    sizes = {"news": (1, 4), "books": (3, 7)}
    parts = tuple(
        SourcePieces(SourceShare(name=name, weight=weight), rows, name) for name, (weight, rows) in sizes.items()
    )
    pieces = Pieces(None, tokens=(9,) * 11, digest="d", parts=parts)
    whole, picks = TextOrder(pieces, per_step=4, seed=3), []
    for _ in range(28):
        picks.append(whole.pick().rows)
        whole.mark_trained()
    for rows in picks:
        assert (sum(row < 4 for row in rows), sum(row >= 4 for row in rows)) == (1, 3)
    drawn = [row for rows in picks for row in rows]
    assert {drawn.count(row) for row in range(4)} == {7}  # 28 draws over 4 pieces
    assert {drawn.count(row) for row in range(4, 11)} == {12}  # 84 draws over 7 pieces
    first = TextOrder(pieces, per_step=4, seed=3)
    for _ in range(3):
        first.pick()
        first.mark_trained()
    first.pick()  # of a step that is not trained
    second = TextOrder(pieces, per_step=4, seed=3)
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.pick().rows for _ in range(5)] == picks[3:8]
    with pytest.raises(DataError, match=r"the sources of data\.ptx are not the checkpoint's \(news, books\)"):
        TextOrder(Pieces(None, (9,) * 4, "d", parts[:1]), per_step=1, seed=3).restore(first.state())
