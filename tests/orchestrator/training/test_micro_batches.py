"""Plans: every row once, budgets kept, ranks in step."""

from __future__ import annotations

from itertools import chain, groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.batching import (
    cut_micro_batches,
    minibatches,
    pick_states,
    plan_ranks,
    plan_texts,
    plan_update,
    split_balanced,
)
from workers.messages import TrainRow

lengths_lists = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(lengths_lists, st.integers(1, 5), st.integers(200, 900))
def test_every_row_is_planned_once_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    """Padded size of a micro-batch stays within the budget; ranks have equally many micro-batches."""
    plans = plan_ranks(lengths, range(len(lengths)), ranks, budget)
    assert len(plans) == ranks
    assert sorted(r for plan in plans for mb in plan.micro_batches for r in mb) == list(range(len(lengths)))
    for plan in plans:
        assert len(plan.micro_batches) == len(plans[0].micro_batches)
        for micro_batch in plan.micro_batches:
            if micro_batch:
                assert max(lengths[r] for r in micro_batch) * len(micro_batch) <= budget


@given(lengths_lists, st.integers(1, 6))
def test_loads_differ_by_at_most_the_longest_row(lengths: list[int], parts: int) -> None:
    """The classic bound of longest-first assignment."""
    loads = [sum(lengths[r] for r in part) for part in split_balanced(lengths, range(len(lengths)), parts)]
    assert max(loads) - min(loads) <= max(lengths)


def test_rows_longer_than_the_budget_go_alone() -> None:
    """Sorted by length; 50 and 40 pad to 100 together, 120 cannot share."""
    assert cut_micro_batches([40, 120, 50], [0, 1, 2], 100) == [(1,), (2, 0)]


def test_silent_rows_are_skipped_but_counted() -> None:
    """Two of three rows have signal; the totals are of all three, so the gradient is the same."""
    rows = [TrainRow(10, 4, True), TrainRow(10, 5, False), TrainRow(10, 6, True)]
    (skipping,) = plan_update(rows, [0, 1, 2], 1, 100, skip_silent=True)
    (whole,) = plan_update(rows, [0, 1, 2], 1, 100, skip_silent=False)
    assert set(chain(*skipping.micro_batches)) == {0, 2}
    assert set(chain(*whole.micro_batches)) == {0, 1, 2}
    assert skipping.total_loss_tokens == whole.total_loss_tokens == 15
    assert skipping.total_sequences == whole.total_sequences == 3


def test_fewer_rows_than_ranks_leaves_empty_micro_batches() -> None:
    """Collectives stay in step."""
    plans = plan_ranks([5], [0], 3, 100)
    assert [plan.micro_batches for plan in plans] == [((0,),), ((),), ((),)]


@given(st.integers(1, 50), st.integers(1, 8), st.integers(0, 99))
def test_minibatches_partition_the_rows_and_depend_on_the_seed_alone(rows: int, parts: int, seed: int) -> None:
    """Every row once a pass; the same seed cuts the same way; sizes differ by one at most."""
    cut = minibatches(rows, parts, (seed, 1, 0))
    assert sorted(chain(*cut)) == list(range(rows))
    assert cut == minibatches(rows, parts, (seed, 1, 0))
    sizes = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1


@given(lengths_lists, st.integers(1, 4), st.data())
def test_texts_count_every_token_that_is_predicted(tokens: list[int], ranks: int, data: st.DataObject) -> None:
    """A piece may be picked twice in a step; nothing predicts a piece's first token."""
    rows = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=20))
    plans = plan_texts(tokens, rows, ranks, 300)
    assert sorted(r for plan in plans for mb in plan.micro_batches for r in mb) == sorted(rows)
    assert {plan.total_loss_tokens for plan in plans} == {sum(tokens[row] - 1 for row in rows)}


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 400), st.integers(0, 9))
def test_states_are_as_many_as_wanted_where_there_are(loss_tokens: list[int], wanted: int, seed: int) -> None:
    """Thinned by the stride they are at least as many as wanted, and fewer than twice that and one row more."""
    rows = [TrainRow(10 + count, count, True) for count in loss_tokens]
    picked, stride = pick_states(rows, wanted, (seed, 1))
    assert (picked, stride) == pick_states(rows, wanted, (seed, 1))
    found = sum(loss_tokens[row] for row in picked)
    assert len(set(picked)) == len(picked) and (found >= min(wanted, sum(loss_tokens)))
    assert wanted <= found // stride < 2 * wanted or found <= wanted
    if not wanted:
        assert picked == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 200), st.integers(0, 9))
def test_states_are_taken_group_after_group(groups: list[int], wanted: int, seed: int) -> None:
    """So that at most one group is there in part."""
    rows = [TrainRow(20, 10, True, 10, group) for group in groups]
    picked, _ = pick_states(rows, wanted, (seed, 1))
    taken = [groups[row] for row in picked]
    assert len([group for group, other in pairwise(taken) if group != other]) == len(set(taken)) - 1
    assert all(taken.count(group) == groups.count(group) for group in taken if group != taken[-1])


grouped_rows = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=8)


@given(grouped_rows, st.integers(1, 3), st.integers(100, 400), st.booleans())
def test_shared_prompts_change_the_layout_and_nothing_else(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int, skip_silent: bool
) -> None:
    """Rows, totals and ranks in step as without; what stands together fits the budget, and no group stands twice."""
    rows = [
        TrainRow(prompt + response, response, response % 2 == 0, prompt, group)
        for group, (prompt, responses) in enumerate(groups)
        for response in responses
    ]
    chosen = range(len(rows))
    plain = plan_update(rows, chosen, ranks, budget, skip_silent=skip_silent)
    shared = plan_update(rows, chosen, ranks, budget, skip_silent=skip_silent, share_prompts=True)
    worked = [sorted(r for plan in plans for mb in plan.micro_batches for r in mb) for plans in (plain, shared)]
    assert worked[0] == worked[1]
    assert {(p.total_loss_tokens, p.total_sequences) for p in plain} == {
        (p.total_loss_tokens, p.total_sequences) for p in shared
    }
    assert len({len(plan.micro_batches) for plan in shared}) <= 1
    for plan in shared:
        for micro_batch in plan.micro_batches if plan.shared else ():
            order = [rows[r].group for r in micro_batch]
            together = [group for group, _ in groupby(order)]
            assert len(together) == len(set(together))
            widths = [
                rows[unit[0]].prompt_tokens + sum(rows[r].loss_tokens for r in unit)
                for unit in (list(part) for _, part in groupby(micro_batch, key=lambda r: rows[r].group))
            ]
            assert max(widths, default=0) * len(widths) <= budget or len(widths) == 1


def test_prompts_are_shared_where_it_pays() -> None:
    """Eight responses of 5 behind a prompt of 20: 60 tokens and not 200. Long responses behind a short prompt: no."""
    short = [TrainRow(25, 5, True, 20, 0) for _ in range(8)]
    (plan,) = plan_update(short, range(8), 1, 256, skip_silent=True, share_prompts=True)
    assert plan.shared and plan.micro_batches == (tuple(range(8)),)
    long = [TrainRow(105, 100, True, 5, 0) for _ in range(8)]
    (plan,) = plan_update(long, range(8), 1, 256, skip_silent=True, share_prompts=True)
    assert not plan.shared
    # One group cannot keep two ranks busy.
    assert not any(plan.shared for plan in plan_update(short, range(8), 2, 256, skip_silent=True, share_prompts=True))
