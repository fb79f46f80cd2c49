"""Micro-batches dealt out to the processes of one reference worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from troupe.workers.contract.messages import RankPlan
from troupe.workers.reference import shares


@given(st.lists(st.integers(1, 3), max_size=12), st.integers(1, 5))
def test_every_micro_batch_is_dealt_out_once_and_all_ranks_run_equally_often(sizes: list[int], ranks: int) -> None:
    micro_batches = tuple(tuple(range(10 * number, 10 * number + size)) for number, size in enumerate(sizes))
    dealt = shares(RankPlan(micro_batches, 7, 3, packed=True), ranks)
    assert len(dealt) == ranks
    assert len({len(plan.micro_batches) for plan in dealt}) == 1
    assert sorted(part for plan in dealt for part in plan.micro_batches if part) == sorted(micro_batches)
    assert all((plan.total_loss_tokens, plan.total_sequences, plan.packed) == (7, 3, True) for plan in dealt)
