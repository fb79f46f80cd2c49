"""How the experts of a sequence's tokens are written in a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from troupe.workers.contract.routes import read_routes, write_routes


@given(
    arrays.arrays(
        st.sampled_from([np.uint8, np.uint16]), st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 3))
    )
)
def test_what_is_written_is_read(routes: np.ndarray) -> None:
    read = read_routes(write_routes(routes))
    assert read.dtype == routes.dtype and np.array_equal(read, routes)


@pytest.mark.parametrize(
    "wrong", [b"", b"ab", write_routes(np.zeros((2, 2, 2), np.uint8))[:-1], b"\2\0\2\3" + b"0" * 12]
)
def test_damaged_routes_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="routes of experts cannot be read"):
        read_routes(wrong)
