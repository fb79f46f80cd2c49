"""The link of the benchmark weight_sync_delta."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.weight_sync_delta import Link


def test_bytes_arrive_as_they_were_sent_and_no_sooner_than_the_link_allows() -> None:
    payload = np.random.default_rng(1).integers(0, 256, 3_000_001, dtype=np.uint8)
    link = Link(gbit=0.1)
    began = time.monotonic()
    assert np.array_equal(link.send(payload), payload)
    assert time.monotonic() - began >= 8 * payload.nbytes / 1e8
    assert not link.send(np.empty(0, np.uint8)).nbytes
    link.close()
