"""Micro-batch plans: every row once, within the token budget, and equally many micro-batches on every rank."""

from __future__ import annotations

from itertools import chain, groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from troupe.orchestrator.training.micro_batches import (
    cut_micro_batches,
    minibatches,
    pick_states,
    plan_ranks,
    plan_texts,
    plan_units,
    plan_update,
    split_balanced,
)
from troupe.workers.contract.messages import TrainRow

lengths_lists = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(lengths_lists, st.integers(1, 5), st.integers(200, 900), st.booleans())
def test_every_row_is_planned_once_within_the_budget(lengths: list[int], ranks: int, budget: int, packed: bool) -> None:
    """Micro-batches stay within the budget, padding included, and ranks have equally many micro-batches."""
    plans = plan_ranks(lengths, range(len(lengths)), ranks, budget, packed=packed)
    assert len(plans) == ranks
    assert sorted(r for plan in plans for mb in plan.micro_batches for r in mb) == list(range(len(lengths)))
    for plan in plans:
        assert len(plan.micro_batches) == len(plans[0].micro_batches)
        for micro_batch in plan.micro_batches:
            if micro_batch:
                longest, tokens = max(lengths[r] for r in micro_batch), sum(lengths[r] for r in micro_batch)
                assert (tokens if packed else longest * len(micro_batch)) <= budget


def test_minibatches_depend_on_the_seed_and_a_single_one_keeps_the_order() -> None:
    parts = minibatches(40, 2, (17, 3))
    assert sorted(chain(*parts)) == list(range(40)) and parts == minibatches(40, 2, (17, 3))
    assert len({str(minibatches(40, 2, seed)) for seed in ((17, 3), (17, 4), (18, 3), (17, 3, 1))}) == 4
    assert minibatches(4, 1, (17, 3)) == [[0, 1, 2, 3]]


@given(lengths_lists, st.integers(200, 900))
def test_packed_micro_batches_are_not_more_than_padded_ones(lengths: list[int], budget: int) -> None:
    packed, padded = (cut_micro_batches(lengths, range(len(lengths)), budget, packed=kind) for kind in (True, False))
    assert len(packed) <= len(padded)


@given(lengths_lists, st.integers(1, 6))
def test_loads_differ_by_at_most_the_longest_row(lengths: list[int], parts: int) -> None:
    """The known bound of longest-first assignment."""
    loads = [sum(lengths[r] for r in part) for part in split_balanced(lengths, range(len(lengths)), parts)]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_row_longer_than_the_budget_is_alone_in_its_micro_batch() -> None:
    """50 and 40 pad to 100 together; 120 exceeds the budget. Packed, 20 fit behind 70."""
    assert cut_micro_batches([40, 120, 50], [0, 1, 2], 100) == [(1,), (2, 0)]
    assert cut_micro_batches([20, 120, 70], [0, 1, 2], 100) == [(1,), (2,), (0,)]
    assert cut_micro_batches([20, 120, 70], [0, 1, 2], 100, packed=True) == [(1,), (2, 0)]


def test_zero_advantage_rows_are_skipped_but_counted() -> None:
    """Two of three rows have an advantage. The totals count all three, so the gradient is the same."""
    rows = [TrainRow(10, 4, True), TrainRow(10, 5, False, 3), TrainRow(10, 6, True)]
    (skipping,) = plan_update(rows, [0, 1, 2], 1, 100, skip_zero_advantage=True)
    (whole,) = plan_update(rows, [0, 1, 2], 1, 100, skip_zero_advantage=False)
    assert set(chain(*skipping.micro_batches)) == {0, 2}
    assert set(chain(*whole.micro_batches)) == {0, 1, 2}
    assert skipping.total_loss_tokens == whole.total_loss_tokens == 15
    assert skipping.total_sequences == whole.total_sequences == 3
    assert skipping.total_observation_tokens == whole.total_observation_tokens == 30 - 3 - 15


def test_fewer_rows_than_ranks_leaves_empty_micro_batches() -> None:
    """Every rank has as many micro-batches as the others, so that collectives match."""
    plans = plan_ranks([5], [0], 3, 100)
    assert [plan.micro_batches for plan in plans] == [((0,),), ((),), ((),)]


@given(st.integers(1, 50), st.integers(1, 8), st.integers(0, 99))
def test_minibatches_partition_the_rows_and_depend_on_the_seed_alone(rows: int, parts: int, seed: int) -> None:
    """A pass has every row once, the same seed gives the same mini-batches, and sizes differ by at most one."""
    cut = minibatches(rows, parts, (seed, 1, 0))
    assert sorted(chain(*cut)) == list(range(rows))
    assert cut == minibatches(rows, parts, (seed, 1, 0))
    sizes = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1


@given(lengths_lists, st.integers(1, 4), st.data())
def test_text_plans_count_every_predicted_token(tokens: list[int], ranks: int, data: st.DataObject) -> None:
    """A step may pick a piece twice. The first token of a piece is not predicted."""
    rows = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=20))
    plans = plan_texts(tokens, rows, ranks, 300)
    assert sorted(r for plan in plans for mb in plan.micro_batches for r in mb) == sorted(rows)
    assert {plan.total_loss_tokens for plan in plans} == {sum(tokens[row] - 1 for row in rows)}


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 400), st.integers(0, 9))
def test_as_many_states_are_picked_as_wanted_or_all(loss_tokens: list[int], wanted: int, seed: int) -> None:
    """After the stride, at least as many as wanted and fewer than twice as many."""
    rows = [TrainRow(10 + count, count, True) for count in loss_tokens]
    picked, stride = pick_states(rows, wanted, (seed, 1))
    assert (picked, stride) == pick_states(rows, wanted, (seed, 1))
    found = sum(loss_tokens[row] for row in picked)
    assert len(set(picked)) == len(picked) and (found >= min(wanted, sum(loss_tokens)))
    assert wanted <= found // stride < 2 * wanted or found <= wanted
    if not wanted:
        assert picked == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 200), st.integers(0, 9))
def test_states_are_picked_one_group_at_a_time(groups: list[int], wanted: int, seed: int) -> None:
    """At most one group is picked in part."""
    rows = [TrainRow(20, 10, True, 10, group) for group in groups]
    picked, _ = pick_states(rows, wanted, (seed, 1))
    taken = [groups[row] for row in picked]
    assert len([group for group, other in pairwise(taken) if group != other]) == len(set(taken)) - 1
    assert all(taken.count(group) == groups.count(group) for group in taken if group != taken[-1])


grouped_rows = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=8)


@given(grouped_rows, st.integers(1, 3), st.integers(100, 400), st.booleans())
def test_shared_prompts_change_the_layout_and_nothing_else(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int, skip_zero_advantage: bool
) -> None:
    """Rows, totals and equal numbers of micro-batches stay; every micro-batch fits the budget and has a group once."""
    rows = [
        TrainRow(prompt + response, response, response % 2 == 0, prompt, group)
        for group, (prompt, responses) in enumerate(groups)
        for response in responses
    ]
    chosen = range(len(rows))
    plain, shared = (
        plan_update(
            rows,
            chosen,
            ranks,
            budget,
            skip_zero_advantage=skip_zero_advantage,
            packed=True,
            share_prompts=share_prompts,
        )
        for share_prompts in (False, True)
    )
    worked = [sorted(r for plan in plans for mb in plan.micro_batches for r in mb) for plans in (plain, shared)]
    assert worked[0] == worked[1]
    assert {(p.total_loss_tokens, p.total_sequences) for p in plain} == {
        (p.total_loss_tokens, p.total_sequences) for p in shared
    }
    assert len({len(plan.micro_batches) for plan in shared}) <= 1
    for plan in shared:
        for micro_batch in plan.micro_batches if plan.shared else ():
            # The prompt is in the row once for each run of its responses.
            prompts = [rows[next(run)].prompt_tokens for _, run in groupby(micro_batch, key=lambda r: rows[r].group)]
            tokens = sum(prompts) + sum(rows[r].tokens - rows[r].prompt_tokens for r in micro_batch)
            assert tokens <= budget or len(micro_batch) == 1


def test_prompts_are_shared_if_that_saves_tokens() -> None:
    """Eight responses of 5 tokens to a prompt of 20 take 60 tokens instead of 200. Long responses save too little."""
    sharing = {"skip_zero_advantage": True, "packed": True, "share_prompts": True}
    short = [TrainRow(25, 5, True, 20, 0) for _ in range(8)]
    (plan,) = plan_update(short, range(8), 1, 256, **sharing)
    assert plan.packed and plan.shared and plan.micro_batches == (tuple(range(8)),)
    long = [TrainRow(105, 100, True, 5, 0) for _ in range(8)]
    (plan,) = plan_update(long, range(8), 1, 256, **sharing)
    assert plan.packed and not plan.shared
    # Only packed rows have an attention that isolates the responses.
    (plan,) = plan_update(short, range(8), 1, 256, skip_zero_advantage=True, share_prompts=True)
    assert not plan.packed and not plan.shared


def test_prompts_are_not_shared_where_a_rank_would_get_more_work() -> None:
    """A group is not divided: one rank would have 60 tokens, instead of two with 100 each; of long responses more."""
    sharing = {"skip_zero_advantage": True, "packed": True, "share_prompts": True}
    short = [TrainRow(25, 5, True, 20, 0) for _ in range(8)]
    assert all(plan.shared for plan in plan_update(short, range(8), 2, 256, **sharing))
    even = [TrainRow(40, 20, True, 20, 0) for _ in range(8)]  # 180 on one rank, or 160 on each of two
    assert not any(plan.shared for plan in plan_update(even, range(8), 2, 256, **sharing))


def test_long_responses_share_their_prompt() -> None:
    """A prompt of 1,500 tokens and eight responses of 3,000."""
    rows = [TrainRow(4500, 3000, True, 1500, 0) for _ in range(8)]
    (plan,) = plan_update(rows, range(8), 1, 32768, skip_zero_advantage=True, packed=True, share_prompts=True)
    assert plan.shared and plan.micro_batches == (tuple(range(8)),)


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(240, 600),
    st.booleans(),
)
def test_every_unit_is_planned_once_undivided_and_within_the_budget(
    lengths: list[list[int]], ranks: int, budget: int, packed: bool
) -> None:
    rows = [TrainRow(length, length, True) for unit in lengths for length in unit]
    starts = [sum(len(unit) for unit in lengths[:n]) for n in range(len(lengths))]
    units = [tuple(range(start, start + len(unit))) for start, unit in zip(starts, lengths, strict=True)]
    plans = plan_units(rows, units, ranks, budget, packed=packed)
    assert sorted(r for plan in plans for batch in plan.micro_batches for r in batch) == list(range(len(rows)))
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    assert {plan.total_sequences for plan in plans} == {len(units)}
    for batch in (batch for plan in plans for batch in plan.micro_batches if batch):
        longest, tokens = max(rows[r].tokens for r in batch), sum(rows[r].tokens for r in batch)
        assert (tokens if packed else longest * len(batch)) <= budget
        assert all(set(unit) <= set(batch) or not set(unit) & set(batch) for unit in units)
