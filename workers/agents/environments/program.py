"""A program that an environment runs: its end, its last line of output, and why it failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from troupe.workers.isolation.child import BoundedOutput
from troupe.workers.isolation.descendants import MARK, end_marked, new_mark
from troupe.workers.rewards.results import ProgramFailed


class Program:
    """A running program."""

    def __init__(
        self, process: asyncio.subprocess.Process, mark: str, output: BoundedOutput, errors: BoundedOutput
    ) -> None:
        self._process, self._mark, self._output, self._errors = process, mark, output, errors

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str]) -> Program:
        """Start it with further environment variables. Raises OSError if there is no such program."""
        output, errors = BoundedOutput(command[0], log=None), BoundedOutput(command[0])
        mark = f"{os.environ.get(MARK) or new_mark()}.{new_mark()}"
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=os.environ | variables | {MARK: mark},
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
        return cls(process, mark, output, errors)

    async def last_line(self) -> str:
        """Wait for its end; the last line of its output, or nothing.

        Raises:
            ProgramFailed: it has failed.
        """
        code = await self._process.wait()
        await asyncio.gather(*(asyncio.to_thread(pipe.drain) for pipe in (self._output, self._errors)))
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
            raise ProgramFailed(f"the command ended with {how}{self._errors.last_lines() or self._output.last_lines()}")
        return (self._output.lines() or [""])[-1]

    def kill(self) -> None:
        """End it, what is in its process group, and what it has left behind."""
        if self._process.returncode is None:  # after that its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        end_marked(self._mark)
