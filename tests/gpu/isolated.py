"""Runs a part of a test in processes of its own, which end with it.

A program that hangs inside CUDA cannot be interrupted by a signal, and one that fails there leaves a GPU that no later
test of its process can use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from tests.real.commands import Command, running

BOUND_S = 540.0
"""Time for the processes of a test, which are killed after it. The test has more (`GPU_TIMEOUT_S`)."""
Measurements = Mapping[str, float | str]


def finish(command: Command) -> str:
    """Wait until the command has ended with exit code 0, and return its output."""
    with running(command):
        assert command.wait(BOUND_S) == 0, command.output
        return command.stdout


def isolated(folder: Path, measure: Callable[..., Measurements], *arguments: str) -> Measurements:
    """Call a function of a module in a process of its own.

    Args:
        folder: For files of the process.
        measure: Measures, or raises.
        arguments: Of the call.
    """
    file = folder / "measurements.json"
    called = (measure.__module__, measure.__name__, str(file), *arguments)
    print(finish(Command(folder, [sys.executable, "-m", __name__, *called])))
    return json.loads(file.read_text())


def main(module: str, function: str, file: str, *arguments: str) -> None:
    """Call the function and write its measurements."""
    Path(file).write_text(json.dumps(getattr(import_module(module), function)(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
