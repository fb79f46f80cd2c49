"""Pairs of features of a run: the generator of rows, the features beside the fields of the spec, the refused pairs."""

from __future__ import annotations

import random
from fnmatch import fnmatch
from typing import Any

import pytest

from tests.pairs.covering import Row, covering_rows, fewer_rows, pairs_in, pairs_of
from tests.pairs.features import Matrix, switches
from tests.pairs.matrices import LEFT_OUT, MATRICES
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec

SPECS = {"rollouts": RolloutSpec, "offline": OfflineSpec}
BOTH = pytest.mark.parametrize("matrix", MATRICES, ids=lambda matrix: matrix.name)
MOST_ROWS = {"rollouts": 51, "offline": 40}


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_that_is_not_refused_is_in_a_row(seed: int) -> None:
    rng = random.Random(seed)
    factors = {f"f{number}": tuple("abcd"[: rng.randint(2, 4)]) for number in range(8)}
    refused = rng.sample(pairs_of(factors), 5)

    def allowed(row: Row) -> bool:
        return (row["f0"], row["f1"], row["f2"]) != ("a", "a", "a")

    rows, lost = covering_rows(factors, refused, allowed, seed)
    covered = set().union(*map(pairs_in, rows))
    assert covered | set(lost) == set(pairs_of(factors)) - set(refused) and not covered & set(lost)
    assert not lost or seed, "three values that exclude each other exclude no pair of them"
    assert all(map(allowed, rows))
    assert len(rows) < 30 < len(pairs_of(factors))
    assert covering_rows(factors, refused, allowed, seed) == (rows, lost)
    fewer = fewer_rows(rows, refused, allowed, seed)
    assert set().union(*map(pairs_in, fewer)) == covered and all(map(allowed, fewer))
    assert len(fewer) < len(rows) and fewer_rows(rows, refused, allowed, seed) == fewer


def test_a_pair_in_no_possible_row_is_reported() -> None:
    factors = {"f": ("a", "b"), "g": ("a", "b"), "h": ("a",)}
    rows, lost = covering_rows(factors, (), lambda row: (row["f"], row["g"]) != ("b", "b"))
    assert {frozenset({("f", "b"), ("g", "b")})} == set(lost) and len(rows) == 3


@BOTH
def test_each_value_works_alone_and_every_pair_is_refused_or_in_a_valid_row(matrix: Matrix) -> None:
    for factor, values in matrix.values.items():
        for value in values:
            assert not matrix.problems({factor: value}), (factor, value)
    covered = set().union(*map(pairs_in, matrix.rows))
    assert covered == set(pairs_of(matrix.values)) - matrix.refused.keys(), "python -m tests.pairs.record"
    assert not any(matrix.problems(row) for row in matrix.rows), "python -m tests.pairs.record"
    assert len(matrix.rows) <= MOST_ROWS[matrix.name]


def words(matrix: Matrix, factor: str, value: str) -> set[str]:
    """What a message calls a feature by: fields that its factor sets, or what its own value gives them."""
    given = {one for one in matrix.factors[factor][value].values() if isinstance(one, str)}
    return {path.rpartition(".")[2] for path in matrix.fields(factor)} | given


@BOTH
def test_a_refused_pair_names_a_field_of_both_features(matrix: Matrix) -> None:
    for pair, problems in matrix.refused.items():
        reason = " ".join(problems)
        for factor, value in pair:
            assert any(word in reason for word in words(matrix, factor, value)), (sorted(pair), reason)


@BOTH
def test_every_switch_of_the_spec_is_a_feature_or_left_out_for_a_reason(matrix: Matrix) -> None:
    features = set().union(*map(matrix.fields, matrix.factors))
    found = set(switches(SPECS[matrix.name]))
    missing = {path for path in found - features if not any(name.startswith(f"{path}.") for name in features)}
    unexplained = [path for path in sorted(missing) if not any(fnmatch(path, pattern) for pattern in LEFT_OUT)]
    assert not unexplained, "add a value to tests/pairs/matrices.py, or a reason to LEFT_OUT"


def test_each_reason_is_of_a_switch() -> None:
    paths: set[Any] = set().union(*(switches(spec) for spec in SPECS.values()))
    assert [pattern for pattern in LEFT_OUT if not any(fnmatch(path, pattern) for path in paths)] == []
