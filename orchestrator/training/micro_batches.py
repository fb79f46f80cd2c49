"""Which rank computes which rows, in which micro-batches.

Rows are spread over ranks so that token counts balance, sorted by length inside a rank so that a micro-batch pads
little, and cut where the padded size would pass the token budget. Every rank gets the same number of
micro-batches (collectives must stay in step).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from workers.messages import RankPlan, TrainRow

SHARED_TOKENS = 1024
"""Widest row of a prompt with its responses: attention over it is computed whole, so its cost grows with the square."""
_WORTH = 0.8
"""Prompts are shared where at most this share of the tokens is left."""


def longest_first(lengths: Sequence[int], rows: Sequence[int]) -> list[int]:
    """`rows` by descending length; rows of one length in ascending order."""
    return sorted(sorted(rows), key=lengths.__getitem__, reverse=True)


def split_balanced(lengths: Sequence[int], rows: Sequence[int], parts: int) -> list[list[int]]:
    """Assign `rows` to `parts` so that sums of `lengths[row]` are near equal (longest first, to the lightest)."""
    if parts == 1:
        return [longest_first(lengths, rows)]
    heap = [(0, 0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for row in longest_first(lengths, rows):
        load, count, part = heapq.heappop(heap)
        out[part].append(row)
        heapq.heappush(heap, (load + lengths[row], count + 1, part))
    return out


def cut_micro_batches(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Sort `rows` by length and cut them so that rows times longest row stays within `budget` tokens.

    A single row longer than the budget forms a micro-batch of its own.
    """
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    longest = 0
    for row in longest_first(lengths, rows):
        longest = longest if current else lengths[row]
        if current and longest * (len(current) + 1) > budget:
            batches.append(tuple(current))
            current, longest = [], lengths[row]
        current.append(row)
    if current:
        batches.append(tuple(current))
    return batches


def plan_ranks(lengths: Sequence[int], rows: Sequence[int], ranks: int, budget: int) -> list[RankPlan]:
    """Forward-only plan over `ranks` (scoring): no loss totals."""
    return _pad([cut_micro_batches(lengths, part, budget) for part in split_balanced(lengths, rows, ranks)], 0, 0)


def plan_update(
    rows: Sequence[TrainRow],
    chosen: Sequence[int],
    ranks: int,
    budget: int,
    *,
    skip_silent: bool,
    share_prompts: bool = False,
) -> list[RankPlan]:
    """One optimizer update over the rows `chosen`.

    With `skip_silent`, rows whose advantages are all zero get no forward pass; they still count in the totals, so
    that leaving them out changes the work and not the gradient. With `share_prompts`, rows of one group stand behind
    one copy of their prompt, where that saves enough and there are enough groups for all ranks.
    """
    lengths = [row.tokens for row in rows]
    worked = [r for r in chosen if rows[r].loss_tokens > 0 and (rows[r].has_signal or not skip_silent)]
    totals = sum(rows[r].loss_tokens for r in chosen), len(chosen)
    if share_prompts:
        units = _shared_units(rows, worked, min(budget, SHARED_TOKENS))
        widths = [_shared_width(rows, unit) for unit in units]
        if len(units) >= ranks and sum(widths) <= _WORTH * sum(lengths[r] for r in worked):
            parts = split_balanced(widths, range(len(units)), ranks)
            plans = _pad([_cut_units(rows, units, widths, part, budget) for part in parts], *totals)
            return [replace(plan, shared=True) for plan in plans]
    parts = split_balanced(lengths, worked, ranks)
    return _pad([cut_micro_batches(lengths, part, budget) for part in parts], *totals)


def _shared_units(rows: Sequence[TrainRow], worked: Sequence[int], most: int) -> list[list[int]]:
    """The rows group by group, cut where a prompt and its responses would pass `most` tokens."""
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
    prompt = rows[unit[0]].prompt_tokens
    return prompt + sum(rows[r].tokens - prompt for r in unit)


def _cut_units(
    rows: Sequence[TrainRow], units: Sequence[Sequence[int]], widths: Sequence[int], part: Sequence[int], budget: int
) -> list[tuple[int, ...]]:
    """Micro-batches of whole units, the widest first; never two units of one group, which would be laid out as one."""
    cuts: list[list[int]] = []
    width, groups = 0, set[int]()
    for unit in sorted(part, key=lambda u: (-widths[u], u)):
        group = rows[units[unit][0]].group
        if not cuts or width * (len(groups) + 1) > budget or group in groups:
            cuts.append([])
            width, groups = widths[unit], set()
        cuts[-1] += units[unit]
        groups.add(group)
    return [tuple(cut) for cut in cuts]


def plan_units(rows: Sequence[TrainRow], units: Sequence[Sequence[int]], ranks: int, budget: int) -> list[RankPlan]:
    """One optimizer update over `units`: rows that are compared with one another and stay in one micro-batch.

    As :func:`plan_update`, with units in place of rows; the totals count the units' loss tokens and the units.
    """
    tokens = [sum(rows[r].tokens for r in unit) for unit in units]
    longest = [max(rows[r].tokens for r in unit) for unit in units]
    parts: list[list[tuple[int, ...]]] = []
    for part in split_balanced(tokens, range(len(units)), ranks):
        cuts: list[list[int]] = []
        width = 0
        for unit in sorted(part, key=lambda u: (-longest[u], u)):
            if not cuts or width * (len(cuts[-1]) + len(units[unit])) > budget:
                cuts.append([])
                width = longest[unit]
            cuts[-1] += units[unit]
        parts.append([tuple(cut) for cut in cuts])
    return _pad(parts, sum(rows[r].loss_tokens for unit in units for r in unit), len(units))


def plan_texts(tokens: Sequence[int], rows: Sequence[int], ranks: int, budget: int) -> list[RankPlan]:
    """One optimizer update on the pieces of text `rows`; nothing predicts a piece's first token."""
    parts = split_balanced(tokens, rows, ranks)
    total = sum(tokens[row] - 1 for row in rows)
    return _pad([cut_micro_batches(tokens, part, budget) for part in parts], total, len(rows))


def minibatches(row_count: int, parts: int, seed: Sequence[int]) -> list[list[int]]:
    """Shuffle rows 0..row_count-1 by `seed` and deal them into `parts` of near-equal size; one part keeps the order."""
    if parts == 1:
        return [list(range(row_count))]
    order = np.random.default_rng(list(seed)).permutation(row_count)
    return [sorted(int(r) for r in part) for part in np.array_split(order, parts)]


def pick_states(rows: Sequence[TrainRow], wanted: int, seed: Sequence[int]) -> tuple[list[int], int]:
    """(rows, stride): rows drawn by `seed` until they have `wanted` loss tokens, and the stride that thins those out to
    about as many. No rows where none are wanted.

    They are drawn group after group, for rows of one group may share their prompt: often most of what they cost.
    """
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


def _pad(parts: list[list[tuple[int, ...]]], loss_tokens: int, sequences: int) -> list[RankPlan]:
    most = max(len(part) for part in parts)
    return [RankPlan((*part, *(((),) * (most - len(part)))), loss_tokens, sequences) for part in parts]
