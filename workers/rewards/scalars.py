"""Numbers as people return them."""

from __future__ import annotations

from numbers import Real
from typing import Any


def as_number(value: Any) -> float | None:
    """The value as a float: a real number, a bool, or a numpy or torch value without dimensions. None: it is neither.

    Raises:
        OverflowError: an integer that no float can hold.
    """
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, Real) else None
