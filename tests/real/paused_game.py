"""An environment whose episodes wait on request."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from troupe.workers.agents.environments import Message, Observation
from troupe.workers.agents.environments.basic import GuessNumber

PAUSE = "pause"
"""Turns wait as long as the folder has this file, and create the file that it names."""


class PausedGame(GuessNumber):
    """`GuessNumber` that may wait in a turn."""

    def __init__(self, folder: str, **args: Any) -> None:
        super().__init__(**args)
        self._folder = Path(folder)

    def step(self, message: Message) -> Observation:
        """Waits while it is told to, then answers."""
        with suppress(FileNotFoundError):
            while True:
                (self._folder / (self._folder / PAUSE).read_text()).touch()
                time.sleep(0.01)
        return super().step(message)
