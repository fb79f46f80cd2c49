"""Calls with a bound on their processor time."""

from __future__ import annotations

import re
import threading
import time

import pytest

from troupe.workers.engine.tool_calls import limit_cpu


def repeat(started: list[threading.Thread]) -> None:
    """What a parser does with a turn that repeats itself: many short steps, and it expects exceptions."""
    started.append(threading.current_thread())
    while True:
        try:
            re.findall("a+b", "a" * 100)
        except Exception:
            continue


def test_a_call_that_takes_too_long_ends() -> None:
    started: list[threading.Thread] = []
    with pytest.raises(TimeoutError, match=r"not done after 0\.1 s"):
        limit_cpu(0.1, repeat, started)
    started[0].join(30)
    assert not started[0].is_alive()


def test_other_calls_return_or_raise_what_they_do() -> None:
    assert limit_cpu(1, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        limit_cpu(1, divmod, 7, 0)


def test_time_in_which_others_run_does_not_count() -> None:
    limit_cpu(0.05, time.sleep, 0.3)
