"""Batches of given lengths."""

from __future__ import annotations

from benchmarks.support.train_rows import GroupLengths, train_batch
from troupe.workers.contract.messages import TRAIN


def test_a_batch_trains_every_token_of_its_rows() -> None:
    summary, table = train_batch([GroupLengths(5, (3, 1)), GroupLengths(2, (7,))], 11, seed=1)
    assert [(row.tokens, row.loss_tokens, row.prompt_tokens, row.group) for row in summary.rows] == [
        (8, 3, 5, 0), (6, 1, 5, 0), (9, 7, 2, 1)
    ]  # fmt: skip
    assert table.schema == TRAIN and [len(ids) for ids in table["response_ids"].to_pylist()] == [3, 1, 7]
    first, second, _ = table["prompt_ids"].to_pylist()
    assert first == second, "the samples of a group share their prompt"
    assert max(max(ids) for ids in table["response_ids"].to_pylist()) < 11
    assert all(advantage != 0 for row in table["advantages"].to_pylist() for advantage in row)
