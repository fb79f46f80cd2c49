"""Micro-batch planning: assigns rows to ranks and splits them into micro-batches.

Rows are distributed over the ranks with balanced token counts, sorted by length within a rank, and split if the
micro-batch would exceed the token budget: its tokens if the group packs them into one row of the model, otherwise
its padded size. Every rank gets the same number of micro-batches, because each one involves collective operations.
Ranks that share their micro-batches (`sequence_parallel_size`) count as one here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from troupe.workers.contract.messages import RankPlan, TrainRow

_SHARING_THRESHOLD = 0.95
"""Prompts are shared only if at most this fraction of the tokens remains on the rank that has the most."""


def longest_first(lengths: Sequence[int], rows: Sequence[int]) -> list[int]:
    """`rows` by descending length; rows of equal length in ascending order."""
    return sorted(sorted(rows), key=lengths.__getitem__, reverse=True)


def split_balanced(lengths: Sequence[int], rows: Sequence[int], parts: int) -> list[list[int]]:
    """Splits `rows` into `parts` with nearly equal sums of `lengths[row]`: longest rows first, to the lightest part."""
    if parts == 1:
        return [longest_first(lengths, rows)]
    heap = [(0, 0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for row in longest_first(lengths, rows):
        load, count, part = heapq.heappop(heap)
        out[part].append(row)
        heapq.heappush(heap, (load + lengths[row], count + 1, part))
    return out


def cut_micro_batches(
    lengths: Sequence[int], rows: Sequence[int], budget: int, *, packed: bool = False
) -> list[tuple[int, ...]]:
    """Sorts `rows` by length and splits them into micro-batches of at most `budget` tokens: the rows' if `packed`,
    else (number of rows) x (longest row). A longer row forms a separate micro-batch."""
    cuts = _fill(longest_first(lengths, rows), lengths, lengths, [1] * len(lengths), budget, packed)
    return [tuple(cut) for cut in cuts]


def _fill(
    order: Sequence[int],
    tokens: Sequence[int],
    longest: Sequence[int],
    members: Sequence[int],
    budget: int,
    packed: bool,
) -> list[list[int]]:
    """Splits items in the order given, by descending longest row, into micro-batches of at most `budget` tokens.
    `packed`: whether a micro-batch has the tokens of its items; otherwise all its rows are as long as the longest."""
    cuts: list[list[int]] = []
    total = count = width = 0
    for item in order:
        size = total + tokens[item] if packed else width * (count + members[item])
        if not cuts or size > budget:
            cuts.append([])
            total, count, width = 0, 0, longest[item]
        cuts[-1].append(item)
        total, count = total + tokens[item], count + members[item]
    return cuts


def plan_ranks(
    lengths: Sequence[int], rows: Sequence[int], ranks: int, budget: int, *, packed: bool = False
) -> list[RankPlan]:
    """Plans a forward pass without loss (scoring) over `ranks`; `budget` is in tokens per micro-batch."""
    parts = split_balanced(lengths, rows, ranks)
    return _pad([cut_micro_batches(lengths, part, budget, packed=packed) for part in parts], 0, 0, packed)


def plan_update(
    rows: Sequence[TrainRow],
    chosen: Sequence[int],
    ranks: int,
    budget: int,
    *,
    skip_zero_advantage: bool,
    packed: bool = False,
    share_prompts: bool = False,
    whole_samples: bool = False,
) -> list[RankPlan]:
    """Plans one optimizer update. The totals are the loss tokens of the chosen rows, the number of their samples, and
    their tokens without loss.
    Args:
        budget: Tokens per micro-batch; without `packed` padding included.
        skip_zero_advantage: Rows without an advantage get no forward pass, but count in the totals: same gradient.
        share_prompts: Packed rows of a group may share one copy of their prompt, if that saves enough tokens on the
            rank with the most: a group is not divided among ranks.
        whole_samples: Rows of a sample share a micro-batch, even beyond the budget, and prompts are not shared."""
    lengths = [row.tokens for row in rows]
    samples = sample_rows(rows, chosen)
    added = sum([rows[r].tokens - rows[r].prompt_tokens - rows[r].loss_tokens for r in chosen])
    totals = sum([rows[r].loss_tokens for r in chosen]), len(samples), packed, added
    if whole_samples and len(samples) < len(chosen):
        signals = [unit for unit in samples if not skip_zero_advantage or any(rows[r].has_signal for r in unit)]
        with_loss = [[r for r in unit if rows[r].loss_tokens > 0] for unit in signals]
        return _pad(_cut_whole(rows, [unit for unit in with_loss if unit], ranks, budget, packed), *totals)
    worked = [r for r in chosen if rows[r].loss_tokens > 0 and (rows[r].has_signal or not skip_zero_advantage)]
    parts = split_balanced(lengths, worked, ranks)
    if packed and share_prompts:
        units = _shared_units(rows, worked, budget)
        widths = [_shared_width(rows, unit) for unit in units]
        shares = split_balanced(widths, range(len(units)), ranks)
        if _heaviest(widths, shares) <= _SHARING_THRESHOLD * _heaviest(lengths, parts):
            plans = _pad([_cut_units(units, widths, share, budget) for share in shares], *totals)
            return [replace(plan, shared=True) for plan in plans]
    return _pad([cut_micro_batches(lengths, part, budget, packed=packed) for part in parts], *totals)


def sample_rows(rows: Sequence[TrainRow], chosen: Sequence[int]) -> list[list[int]]:
    """The chosen rows by sample, in the order of each sample's first row."""
    samples: dict[tuple[str, int], list[int]] = {}
    for r in chosen:
        sample = rows[r].sample
        samples.setdefault(("row", r) if sample is None else ("sample", sample), []).append(r)
    return list(samples.values())


def _heaviest(tokens: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    return max(sum(tokens[item] for item in part) for part in parts)


def _shared_units(rows: Sequence[TrainRow], worked: Sequence[int], most: int) -> list[list[int]]:
    """The rows by group, split if a prompt and its responses would exceed `most` tokens."""
    units: list[list[int]] = []
    width = 0
    for row in sorted(worked, key=lambda r: (rows[r].group, r)):
        response = rows[row].tokens - rows[row].prompt_tokens
        if units and rows[units[-1][0]].group == rows[row].group and width + response <= most:
            units[-1].append(row)
            width += response
        else:
            units.append([row])
            width = rows[row].tokens
    return units


def _shared_width(rows: Sequence[TrainRow], unit: Sequence[int]) -> int:
    """Tokens of one copy of the prompt and the responses of the unit."""
    prompt = rows[unit[0]].prompt_tokens
    return prompt + sum(rows[r].tokens - prompt for r in unit)


def _cut_units(
    units: Sequence[Sequence[int]], widths: Sequence[int], part: Sequence[int], budget: int
) -> list[tuple[int, ...]]:
    """Micro-batches of whole units, widest first."""
    cuts = cut_micro_batches(widths, part, budget, packed=True)
    return [tuple(row for unit in cut for row in units[unit]) for cut in cuts]


def plan_units(
    rows: Sequence[TrainRow], units: Sequence[Sequence[int]], ranks: int, budget: int, *, packed: bool = False
) -> list[RankPlan]:
    """Plans one optimizer update over `units`: rows that the loss compares and that share a micro-batch. The totals
    are the loss tokens of the units and their number."""
    cuts = _cut_whole(rows, units, ranks, budget, packed)
    return _pad(cuts, sum(rows[r].loss_tokens for unit in units for r in unit), len(units), packed)


def _cut_whole(
    rows: Sequence[TrainRow], units: Sequence[Sequence[int]], ranks: int, budget: int, packed: bool
) -> list[list[tuple[int, ...]]]:
    tokens = [sum(rows[r].tokens for r in unit) for unit in units]
    longest = [max(rows[r].tokens for r in unit) for unit in units]
    members = [len(unit) for unit in units]
    parts = [
        _fill(longest_first(longest, part), tokens, longest, members, budget, packed)
        for part in split_balanced(tokens, range(len(units)), ranks)
    ]
    return [[tuple(row for unit in cut for row in units[unit]) for cut in part] for part in parts]


def plan_texts(
    tokens: Sequence[int], rows: Sequence[int], ranks: int, budget: int, *, packed: bool = False
) -> list[RankPlan]:
    """Plans one optimizer update on the pieces of text `rows`. The first token of a piece has no loss."""
    parts = split_balanced(tokens, rows, ranks)
    total = sum(tokens[row] - 1 for row in rows)
    return _pad([cut_micro_batches(tokens, part, budget, packed=packed) for part in parts], total, len(rows), packed)


def minibatches(row_count: int, parts: int, seed: Sequence[int]) -> list[list[int]]:
    """Shuffles rows 0..row_count-1 by `seed` into `parts` of nearly equal size; a single part keeps the order."""
    if parts == 1:
        return [list(range(row_count))]
    order = np.random.default_rng(list(seed)).permutation(row_count)
    return [sorted(int(r) for r in part) for part in np.array_split(order, parts)]


def pick_states(rows: Sequence[TrainRow], wanted: int, seed: Sequence[int]) -> tuple[list[int], int]:
    """Draws groups of rows by `seed`, as they can share prompts, until they have `wanted` loss tokens. Returns the
    rows, and the stride that reduces their loss tokens to about `wanted`."""
    rng = np.random.default_rng(list(seed))
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    drawn = (groups[group] for group in rng.permutation(list(groups)).tolist())
    picked: list[int] = []
    tokens = 0
    for number in chain.from_iterable(rng.permutation(group).tolist() for group in drawn):
        if tokens >= wanted:
            break
        picked.append(number)
        tokens += rows[number].loss_tokens
    return picked, max(1, tokens // wanted) if wanted else 1


def _pad(
    parts: list[list[tuple[int, ...]]], loss_tokens: int, sequences: int, packed: bool, observation_tokens: int = 0
) -> list[RankPlan]:
    """Plans with the same number of micro-batches for every rank; the added ones are empty."""
    most = max(len(part) for part in parts)
    plan = RankPlan((), loss_tokens, sequences, packed, total_observation_tokens=observation_tokens)
    return [replace(plan, micro_batches=(*part, *(((),) * (most - len(part))))) for part in parts]
