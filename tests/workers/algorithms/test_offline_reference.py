"""Every offline objective is its loop in float64, in value and gradient, also on the float32 numbers of a model."""

from __future__ import annotations

import pytest
import torch

from tests.workers.algorithms.offline_reference import ROWS, Row, by_product, compare, make_data, table
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_objective_is_its_loop(row: Row, seed: int) -> None:
    found = compare(row, seed)
    assert max(found.value, found.gradient, found.value_float32) < 1e-12
    assert found.gradient_float32 < 2.0**-22, "beyond the rounding of the gradient itself"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_split_into_micro_batches_does_not_matter(row: Row) -> None:
    data = make_data(row, 3)
    value, gradient = by_product(row, data, torch.double, parts=1)
    for parts in (2, 4, len(data.examples)):
        found, slope = by_product(row, data, torch.double, parts)
        assert found == pytest.approx(value, rel=1e-13)
        assert torch.allclose(slope, gradient, rtol=1e-12, atol=1e-14)


def test_every_algorithm_has_a_row() -> None:
    assert {row.name.split(",")[0] for row in ROWS} == OFFLINE_ALGORITHMS.keys()
    assert table([0]).count("\n") == len(ROWS) + 1
