"""Covering arrays: few rows in which every pair of values of different factors occurs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

Value = tuple[str, str]
"""A factor and its value."""
Pair = frozenset[Value]
Row = dict[str, str]
"""The value of each factor."""

_CANDIDATES = 20
"""Possible rows that are compared for each row that is taken."""
_TRIES = 200
"""Rows that are made until as many of them are possible as a whole."""
_MOVES, _TRIED = 500, 6
"""Moves until rows count as few enough, and places of a move that are tried."""
_RANDOM = 0.1
"""Chance that a factor takes any value, without which the same three values might meet in every row."""


def pairs_of(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every pair of values of two factors, in a fixed order."""
    return [
        frozenset({(one, left), (other, right)})
        for one, other in itertools.combinations(factors, 2)
        for left in factors[one]
        for right in factors[other]
    ]


def pairs_in(row: Mapping[str, str]) -> set[Pair]:
    """Every pair of values of a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covering_rows(
    factors: Mapping[str, Sequence[str]], refused: Iterable[Pair], allowed: Callable[[Row], bool], seed: int = 0
) -> tuple[list[Row], list[Pair]]:
    """Rows with every pair that is not refused; rows with most new pairs come first.

    Each row is the best of several, which begin with a pair that is still missing and take for one factor after the
    other, in random order, the value with most missing pairs. Of equal values the first is taken, the plainest.

    Args:
        factors: The values of each factor.
        refused: Pairs that no row may have.
        allowed: Whether a row is possible as a whole.
        seed: Of the order of the factors.

    Returns:
        The rows, and the pairs that occur in no possible row although they are not refused.
    """
    rng, never = random.Random(seed), frozenset(refused)
    missing = dict.fromkeys(pair for pair in pairs_of(factors) if pair not in never)
    rows: list[Row] = []
    lost: list[Pair] = []
    while missing:
        first = next(iter(missing))
        made = (_row(factors, first, missing, never, rng) for _ in range(_TRIES))
        possible = (row for row in made if row is not None and allowed(row))
        candidates = list(itertools.islice(possible, _CANDIDATES))
        if not candidates:
            lost.append(first)
            del missing[first]
            continue
        best = max(candidates, key=lambda row: len(pairs_in(row) & missing.keys()))
        rows.append(best)
        for pair in pairs_in(best):
            missing.pop(pair, None)
    return sorted_by_new(rows), lost


def fewer_rows(
    rows: Sequence[Row], refused: Iterable[Pair], allowed: Callable[[Row], bool], seed: int = 0
) -> list[Row]:
    """As few rows with all pairs of these rows as a tabu search finds.

    It takes away the row with fewest pairs of its own, until the others cannot have these.

    Args:
        rows: Possible rows.
        refused: Pairs that no row may have.
        allowed: Whether a row is possible as a whole.
        seed: Of the search.
    """
    rng, never, found = random.Random(seed), frozenset(refused), list(rows)
    while True:
        counts = Counter(pair for row in found for pair in pairs_in(row))
        spare = min(found, key=lambda row: sum(counts[pair] == 1 for pair in pairs_in(row)))
        fewer = _without(spare, found, never, allowed, rng)
        if fewer is None:
            return sorted_by_new(found)
        found = fewer


def _without(
    spare: Row, rows: Sequence[Row], refused: frozenset[Pair], allowed: Callable[[Row], bool], rng: random.Random
) -> list[Row] | None:
    """The other rows with all pairs of `rows`, or None if the search has not found them. A move gives a missing pair to
    the row that loses fewest pairs by it, even if more are missing then; what it changes stays for some moves."""
    kept = [row for row in rows if row is not spare]
    needed = list(dict.fromkeys(pair for row in rows for pair in sorted(pairs_in(row), key=sorted)))
    counts = Counter(pair for row in kept for pair in pairs_in(row))
    until: dict[tuple[int, str], int] = {}
    for move in range(_MOVES):
        missing = [pair for pair in needed if not counts[pair]]
        if not missing:
            return kept
        wanted = dict(sorted(rng.choice(missing)))
        moves: list[tuple[int, float, int, Row]] = []
        for place, row in enumerate(kept):
            if any(until.get((place, name), 0) > move for name in wanted):
                continue
            old, new = pairs_in(row), pairs_in(row | wanted)
            if not refused & new:
                loss = sum(counts[pair] == 1 for pair in old - new) - sum(not counts[pair] for pair in new - old)
                moves.append((loss, rng.random(), place, row | wanted))
        best = sorted(moves, key=itemgetter(0, 1))[:_TRIED]
        for _, _, place, row in itertools.islice((one for one in best if allowed(one[3])), 1):
            counts.subtract(pairs_in(kept[place]))
            counts.update(pairs_in(row))
            kept[place] = row
            until |= {(place, name): move + rng.randint(3, 10) for name in wanted}
    return None


def sorted_by_new(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order in which each adds most pairs to the ones before it."""
    left, seen, ordered = list(rows), set[Pair](), list[Row]()
    while left:
        best = max(left, key=lambda row: len(pairs_in(row) - seen))
        left.remove(best)
        ordered.append(best)
        seen |= pairs_in(best)
    return ordered


def _row(
    factors: Mapping[str, Sequence[str]],
    first: Pair,
    missing: Mapping[Pair, None],
    refused: frozenset[Pair],
    rng: random.Random,
) -> Row | None:
    """A row with the pair `first`, or None if a factor has no value that its other values allow."""
    row = dict(sorted(first))
    others = [name for name in factors if name not in row]
    rng.shuffle(others)
    for name in others:
        possible = {}
        for value in factors[name]:
            new = [frozenset({(name, value), one}) for one in row.items()]
            if not refused.intersection(new):
                possible[value] = sum(pair in missing for pair in new)
        if not possible:
            return None
        chosen = rng.choice(list(possible)) if rng.random() < _RANDOM else None
        row[name] = chosen or max(possible, key=possible.__getitem__)
    return {name: row[name] for name in factors}
