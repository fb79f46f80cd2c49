"""The experts that an engine chose for the tokens of a sequence, as one value of a table's column."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_HEAD = struct.Struct("<HBB")
"""Layers, experts for each token, bytes of a number."""


def write_routes(routes: NDArray[np.unsignedinteger]) -> bytes:
    """`routes` [tokens, layers, k], of uint8 or uint16, as bytes."""
    _, layers, chosen = routes.shape
    little = routes.astype(routes.dtype.newbyteorder("<"), copy=False)
    return _HEAD.pack(layers, chosen, routes.itemsize) + little.tobytes()


def read_routes(written: bytes) -> NDArray[np.unsignedinteger]:
    """The numbers of the experts, [tokens, layers, k]. Raises ValueError if they are damaged."""
    try:
        layers, chosen, size = _HEAD.unpack_from(written)
        return np.frombuffer(written, np.dtype(f"<u{size}"), offset=_HEAD.size).reshape(-1, layers, chosen)
    except (struct.error, TypeError, ValueError) as error:
        raise ValueError(f"routes of experts cannot be read: {error}") from error
