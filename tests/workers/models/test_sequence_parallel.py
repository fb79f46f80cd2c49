"""How rows are divided among workers; what the workers compute of them is in tests/real/test_sequence_parallel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.models.test_modeling import SAMPLES
from tests.workers.models.test_token_batch import train_table
from troupe.workers.models.packed_attention import parse
from troupe.workers.models.sequence_parallel import SequenceGroup, divide
from troupe.workers.models.token_batch import TokenTable

TABLE = TokenTable(train_table(SAMPLES))
NO_GROUP: Any = None


@pytest.mark.parametrize("size", [2, 3, 5, 16, 64])
def test_the_parts_of_a_row_are_the_row_and_a_segment_of_padding(size: int) -> None:
    batch = TABLE.packed_batch(range(len(SAMPLES)))
    parts = [divide(SequenceGroup(NO_GROUP, size, rank), batch) for rank in range(size)]
    tokens = batch.input_ids.shape[1]
    widths = {part.input_ids.shape[1] for part in parts}
    assert widths == {-(-tokens // size)}
    for name in ("input_ids", "position_ids"):
        whole = torch.cat([vars(part)[name] for part in parts], 1)
        assert torch.equal(whole[:, :tokens], vars(batch)[name]) and not whole[:, tokens:].any()
    segments = parse(batch.attention_mask).items
    for part in parts:
        assert part.attention_mask is not None
        found = parse(part.attention_mask).items
        assert found[: len(segments)] == segments
        assert sum(segment.length for segment in found) == size * widths.copy().pop()
    places = [part.find(batch.positions) for part in parts]
    chosen = torch.cat([torch.arange(len(batch.positions))[at.chosen] for at in places])
    assert torch.equal(chosen.sort().values, torch.arange(len(batch.positions)))
    for part, at in zip(parts, places, strict=True):
        assert torch.equal(part.input_ids[0, at.local], batch.input_ids[0, batch.positions[at.chosen]])


def test_a_row_of_one_token_is_divided_and_the_filler_is_not() -> None:
    """Each worker runs the filler, which has no loss; a token with a score must count once."""
    group = SequenceGroup(NO_GROUP, 2, 1)
    filler = TABLE.batch([])
    own = divide(group, filler)
    assert own.sequence is None and own.input_ids.numel() == 1
    alone = TokenTable(train_table([([7], [])])).packed_batch([0])
    own = divide(group, alone)
    assert own.sequence is group and len(own.find(alone.last).local) == 0


def test_padded_rows_are_not_divided() -> None:
    batch = TABLE.batch(range(2))
    with pytest.raises(ValueError, match="packed rows only"):
        divide(SequenceGroup(NO_GROUP, 2, 0), batch)
    whole = divide(None, batch)
    at = whole.find(batch.positions)
    assert whole.input_ids is batch.input_ids and at.gather(batch.targets) is batch.targets
