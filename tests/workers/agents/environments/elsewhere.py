"""An environment in a virtual environment that has a package which Troupe's has not, and faults of every kind."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import only_there  # pyright: ignore[reportMissingImports]

from troupe.environments import Environment, Message, Observation, Row


class Elsewhere(Environment):
    """Answers with where it is, or fails as it is told."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def rows(self) -> Any:
        return ({"prompt": f"number {number}", "index": number} for number in range(only_there.TASKS))

    def start(self, row: Row) -> Observation:
        return Observation(row.messages)

    def step(self, message: Message) -> Any:
        if self._fault:
            FAULTS[self._fault]()
        if self._fault == "10 MB":
            return Observation([{"role": "user", "content": "x" * 10_000_000}])
        if self._fault == "20 MB":
            return Observation([{"role": "user", "content": "x" * 20_000_000}])
        content = only_there.ANSWER + ("\ud83d" if self._fault == "surrogates" else "")
        return Observation([{"role": "user", "content": content}], reward=1.0, done=True, info={"here": 1.0})


class Further(Elsewhere):
    """Inherits its tasks."""


def dies() -> None:
    print("the arena is on fire", file=sys.stderr)
    os._exit(3)


def garbage() -> None:
    os.write(1, b"\xff\x00}{\n" * 100_000)
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff\x00}{\n")
        except OSError:
            continue


FAULTS = {
    "dies": dies,
    "hangs": lambda: time.sleep(3600),
    "slow": lambda: time.sleep(0.2),
    "garbage": garbage,
    "raises": lambda: only_there.boom("\udc00"),
    "10 MB": lambda: None,
    "20 MB": lambda: None,
    "surrogates": lambda: None,
}
