"""Throughput of the time in which engines have groups."""

from __future__ import annotations

from troupe.orchestrator.pools.engine import GenerationMeter


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_the_time_with_groups_counts_and_once() -> None:
    clock = Clock()
    meter = GenerationMeter(clock)
    clock.now = 5.0
    with meter:
        clock.now = 6.0
        with meter:
            clock.now = 8.0
        meter.add(100)
        clock.now = 9.0
    meter.add(100)
    clock.now = 50.0  # training
    assert meter.read() == (200 / 4.0, 4.0 / 50.0)
    assert meter.read() == (0.0, 0.0)


def test_a_reading_splits_a_stretch_that_goes_on() -> None:
    clock = Clock()
    meter = GenerationMeter(clock)
    with meter:
        clock.now = 2.0
        meter.add(10)
        assert meter.read() == (5.0, 1.0)
        clock.now = 6.0
    meter.add(40)
    clock.now = 10.0
    assert meter.read() == (10.0, 0.5)


def test_a_group_that_fails_takes_time_and_gives_no_tokens() -> None:
    clock = Clock()
    meter = GenerationMeter(clock)
    try:
        with meter:
            clock.now = 1.0
            raise RuntimeError("lost")
    except RuntimeError:
        clock.now = 3.0
    assert meter.read().tokens_per_s == 0.0
    with meter:
        clock.now = 4.0
    meter.add(7)
    assert meter.read().tokens_per_s == 7.0
