"""Starts a run again from its last checkpoint when it ends unexpectedly: `troupe run --supervise`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from troupe.orchestrator.runs.children import describe, start_child
from troupe.orchestrator.signals import HANDLED, SIGNALS_S, STOPPED, ignored

DONE, USAGE = 0, 2
FINAL = frozenset({DONE, USAGE, STOPPED})
"""Exit codes after which a run is not started again: complete, a user's mistake, stopped on request."""
_LONGEST_PAUSE_S = 60.0


def supervise(
    command: Sequence[str],
    progress: Callable[[], int],
    restarts: int,
    say: Callable[[str], None],
    pause: Callable[[float], object],
) -> int:
    """Runs a command until it ends for good; the exit code of its last process.

    Args:
        command: The run; every further start gets `--resume`.
        progress: Steps that are saved in checkpoints.
        restarts: Starts without a new checkpoint in between that are tolerated.
        pause: Waits before a restart, longer each time; a signal interrupts it.
    """
    used, arguments = 0, list(command)
    while True:
        before = progress()
        code, stopped = _run(arguments)
        if code in FINAL or stopped:
            return code
        saved = progress()
        used = 0 if saved > before else used
        if used >= restarts:
            say(f"the run {describe(code)}: {used} restarts without a new checkpoint (failures.run_restarts)")
            return code if code > 0 else 128 - code
        used += 1
        say(f"the run {describe(code)}; starting it again from step {saved} (restart {used} of {restarts})")
        pause(min(_LONGEST_PAUSE_S, 2.0**used))
        arguments = [*command, *["--resume"] * ("--resume" not in command)]


def _run(command: Sequence[str]) -> tuple[int, bool]:
    """Runs one process to its end; its exit code (negative: the signal that killed it), and whether we were stopped."""
    process = start_child(command)
    with _forwarding(process) as stopped:
        while True:
            with suppress(subprocess.TimeoutExpired):  # a signal that came just before a wait does not interrupt it
                return process.wait(SIGNALS_S), bool(stopped)


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Passes signals on to the process; yields the passed ones."""
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in HANDLED if not ignored(number)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
