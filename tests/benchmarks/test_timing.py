"""Timers of wrapped functions."""

from __future__ import annotations

import pytest

from benchmarks.support.timing import Parts


class Worker:
    """Something to watch."""

    def work(self, result: int) -> int:
        """Give it back."""
        return result

    def fail(self) -> None:
        """Raise."""
        raise ValueError("no")


def test_parts_are_noted_until_they_are_read() -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    parts, worker = Parts(lambda: next(clock)), Worker()
    parts.watch(worker, "work", "work")
    parts.watch(worker, "fail", "failure")
    assert (worker.work(1), worker.work(2)) == (1, 2)
    with pytest.raises(ValueError, match="no"):
        worker.fail()
    assert parts.read() == {"work": 3.0, "failure": 4.0}
    assert parts.read() == {}
