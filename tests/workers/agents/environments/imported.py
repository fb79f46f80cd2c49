"""An environment whose module does at its import what a fork does not keep."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from queue import Queue

import numpy as np

from troupe.workers.agents.environments import Environment, Message, Observation, Row

FAILED = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode
np.random.random()


class Draws(Environment):
    """Reports random numbers, and what a process returned during the import."""

    def start(self, row: Row) -> Observation:
        numbers = {"random": random.random(), "numpy": float(np.random.random()), "failed": float(FAILED)}
        return Observation(row.messages, info=numbers)

    def step(self, message: Message) -> Observation:
        return Observation(done=True)


class Helped(Draws):
    """Waits for a thread that the import started, where it is told so."""

    questions: Queue[Queue[str]] = Queue()
    helper: threading.Thread | None = None

    def __init__(self) -> None:
        if Helped.helper is None:  # the first instance is made to check the arguments
            Helped.helper = threading.Thread(target=self.help, name="helper", daemon=True)
            Helped.helper.start()

    def help(self) -> None:
        """Answer for ever."""
        while True:
            self.questions.get().put("yes")

    def start(self, row: Row) -> Observation:
        answers: Queue[str] = Queue()
        self.questions.put(answers)
        return Observation([{"role": "user", "content": answers.get()}])
