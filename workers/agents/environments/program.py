"""A program that an environment runs: its end, its last line of output, and why it failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from troupe.workers.isolation.child import BoundedOutput
from troupe.workers.rewards.results import ProgramFailed

_DRAIN_S = 1.0
"""Longest wait for the output of a program that has ended: a process that it left behind may hold its pipes."""


class Program:
    """A running program."""

    def __init__(self, process: asyncio.subprocess.Process, output: BoundedOutput, errors: BoundedOutput) -> None:
        self._process, self._output, self._errors = process, output, errors

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str]) -> Program:
        """Start it with further environment variables. Raises OSError if there is no such program."""
        output, errors = BoundedOutput(command[0], log=None), BoundedOutput(command[0])
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=os.environ | variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=errors.descriptor,
                start_new_session=True,
            )
        except BaseException:
            output.discard()
            errors.discard()
            raise
        output.started()
        errors.started()
        return cls(process, output, errors)

    async def last_line(self) -> str:
        """Wait for its end; the last line of its output, or nothing.

        Raises:
            ProgramFailed: it has failed.
        """
        code = await self._process.wait()
        await asyncio.gather(*(asyncio.to_thread(pipe.drain, _DRAIN_S) for pipe in (self._output, self._errors)))
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
            raise ProgramFailed(f"the command ended with {how}{self._errors.last_lines() or self._output.last_lines()}")
        return (self._output.lines() or [""])[-1]

    def kill(self) -> None:
        """End it, and what is in its process group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
