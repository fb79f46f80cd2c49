"""Covering arrays: few rows in which every pair of values of different factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

Value = tuple[str, str]
"""A factor and its value."""
Pair = frozenset[Value]
Row = dict[str, str]
"""The value of each factor."""

_CANDIDATES = 20
"""Possible rows that are compared for each row that is taken."""
_TRIES = 200
"""Rows that are made until as many of them are possible as a whole."""
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
