"""A reward function and an environment of a user, with bugs that a file switches on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import Message, Observation, Row

_first, _second = threading.Lock(), threading.Lock()


def letter_share(response: str, answer: str, metadata: dict[str, Any], control: str) -> float:
    """Share of vowels; `control` names the file that switches a bug on."""
    bug = _bug(control)
    if bug == "loop":
        endless_loop(control)
    elif bug == "sleep":
        oversleep(control)
    elif bug == "deadlock":
        deadlock()
    return sum(char in "aeiou" for char in response) / max(1, len(response))


def endless_loop(control: str) -> None:
    """Never ends while the file is there."""
    count = 0
    while count >= 0:
        count += 1
        if count % 2**20 == 0 and not Path(control).exists():
            return


def oversleep(control: str) -> None:
    """Waits for something that does not come."""
    while Path(control).exists():
        time.sleep(0.5)


def deadlock() -> None:
    """Two threads take two locks in opposite order."""
    barrier = threading.Barrier(2)
    other = threading.Thread(target=_take, args=(_second, _first, barrier), daemon=True)
    other.start()
    _take(_first, _second, barrier)


def _take(one: threading.Lock, another: threading.Lock, barrier: threading.Barrier) -> None:
    with one:
        barrier.wait()
        with another:
            return


class Stalling(Environment):
    """Ends after one turn, unless the file exists."""

    def __init__(self, control: str) -> None:
        self._control = control

    def start(self, row: Row) -> Observation:
        """A question."""
        return Observation([{"role": "user", "content": "Say a number."}])

    def step(self, message: Message) -> Observation:
        """Waits for a service that does not answer while the file is there."""
        while Path(self._control).exists():
            time.sleep(0.5)
        return Observation(reward=len(message["content"]) / 100.0, done=True)


def _bug(control: str) -> str:
    path = Path(control)
    return path.read_text() if path.is_file() else ""
