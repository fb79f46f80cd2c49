"""Every algorithm on rollouts is its loop in float64, from rewards to the gradient of a later update on the batch."""

from __future__ import annotations

import pytest

from tests.workers.algorithms.rollout_loops import LOOPS
from tests.workers.algorithms.rollout_reference import compare, make_batch
from troupe.orchestrator.algorithms.table import ALGORITHMS


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_its_loop(name: str, seed: int) -> None:
    found = compare(name, seed)
    assert max(found.value, found.gradient) < 1e-12


def test_every_algorithm_has_a_loop_and_the_batch_reaches_its_bounds() -> None:
    assert LOOPS.keys() == ALGORITHMS.keys()
    moved = [abs(float(x.detach()) - old) for s in make_batch(1).samples for x, old in zip(s.new, s.old, strict=True)]
    assert sum(gap > 0.25 for gap in moved) > 3
