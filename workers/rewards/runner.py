"""Runs a reward function in a process of its own, so that whatever it does costs one sample and not the run.

This contains faults (hangs, exits, memory), not attacks: a reward function is the user's own code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.config import RewardFunctionConfig
from workers.rewards.loading import RewardFunctionError
from workers.rewards.steps import Step, checked_steps

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Longest import of a reward function's module."""
_CHUNK = 2**16
_MAX_REPLY = 2**22
"""Longest reply, in bytes: more than 80 000 steps."""
_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from workers.rewards.child import main; main()"


@dataclass(frozen=True)
class Sample:
    """What a reward function is asked to judge."""

    response: str
    answer: str
    metadata: str
    """JSON object."""
    response_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Outcome:
    """A number, or why there is none."""

    value: float | None
    status: str = "ok"
    steps: tuple[Step, ...] = ()
    """Process rewards, by character positions of the response; only of a function whose steps are asked for."""


class _Broken(Exception):
    """The child sent something that is not a reply."""


class RewardProcess:
    """One reward function in a child process, which is replaced whenever it hangs or dies."""

    def __init__(self, config: RewardFunctionConfig, memory_limit_mib: int) -> None:
        self.config = config
        self.memory_limit_mib = memory_limit_mib
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline = -1
        self._buffer = b""
        self._requests = 0

    @property
    def pid(self) -> int | None:
        """Process id of the child, if there is one now."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the child and have it load the function; does nothing where a child is ready.

        Raises:
            RewardFunctionError: the function cannot be loaded or does not take its arguments.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return
            self.close()
        self._spawn()
        order = {
            "function": self.config.name,
            "args": self.config.args,
            "memory_limit_mib": self.memory_limit_mib,
        }
        try:
            reply = self._exchange(order, LOAD_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise RewardFunctionError(f"{self.config.name}: not loaded after {LOAD_TIMEOUT_S:g} s") from None
        except (EOFError, ConnectionError, _Broken):
            raise RewardFunctionError(f"{self.config.name}: the process that loads it {self._bury()}") from None
        if "ready" not in reply:
            self.close()
            raise RewardFunctionError(str(reply.get("failure")))

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Judge samples one by one; a sample that fails costs no other one anything but time. Never raises for what
        the function does."""
        return [self._score(sample) for sample in samples]

    def close(self) -> None:
        """End the child, and every process it started and left in its group."""
        if self._process is None:
            return
        self._kill_group(self._process.pid)
        self._process.wait()
        self._release()

    def _score(self, sample: Sample) -> Outcome:
        self._requests += 1
        request = {
            "id": self._requests,
            "response": sample.response,
            "answer": sample.answer,
            "metadata": sample.metadata,
            "sample": {"response_tokens": sample.response_tokens, "finish_reason": sample.finish_reason},
        }
        try:
            self.start()
            reply = self._exchange(request, self.config.timeout_s)
            outcome = self._read(reply, len(sample.response))
        except TimeoutError:
            self.close()
            return Outcome(None, f"timeout after {self.config.timeout_s:g} s")
        except (EOFError, ConnectionError):
            return Outcome(None, self._bury())
        except _Broken as error:
            self.close()
            return Outcome(None, f"error: {error}")
        except (RewardFunctionError, OSError) as error:  # the replacement of a dead child could not start
            self.close()
            return Outcome(None, f"error: {error}")
        if reply.get("last"):
            self.close()
        return outcome

    def _read(self, reply: dict[str, Any], length: int) -> Outcome:
        """Check a reply as strictly as if a stranger had sent it."""
        if not reply.get("last") and reply.get("id") != self._requests:
            raise _Broken("the reward process replied out of turn")
        if isinstance(failure := reply.get("failure"), str):
            return Outcome(None, failure)
        value = reply.get("value")
        if not isinstance(value, float) or not math.isfinite(value):
            raise _Broken("the reward process replied neither a number nor a failure")
        if not self.config.process:
            return Outcome(value)
        if (steps := reply.get("steps")) is None:
            return Outcome(None, f"no steps, but a number: {value}")
        try:
            return Outcome(value, steps=checked_steps(steps, length))
        except (OverflowError, TypeError, ValueError) as error:
            raise _Broken(f"the reward process replied steps that are none: {error}") from error

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno()), str(lifeline_read), path],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline_read),
                start_new_session=True,  # its own group: ended as a whole, and out of reach of the terminal's Ctrl-C
            )
        except OSError:
            ours.close()
            os.close(lifeline_write)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        self._connection, self._lifeline, self._buffer = ours, lifeline_write, b""

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one line, receive one line.

        Raises TimeoutError, EOFError or ConnectionError (the child is gone), _Broken.
        """
        if self._connection is None:
            raise EOFError
        deadline = time.monotonic() + timeout_s
        self._connection.settimeout(timeout_s)
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        while b"\n" not in self._buffer:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            if not (chunk := self._connection.recv(_CHUNK)):
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > _MAX_REPLY:
                raise _Broken("the reward process replied more than a reply")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise _Broken("the reward process replied something that is not JSON") from error
        if not isinstance(reply, dict):
            raise _Broken("the reward process replied something that is not an object")
        return reply

    def _bury(self) -> str:
        """Why a child that closed its connection is gone; it is cleared away."""
        if self._process is None:
            return "died"
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.close()
            return "closed its connection"
        self._kill_group(self._process.pid)
        self._release()
        return f"died with exit code {code}" if code >= 0 else f"died with signal {-code} ({signal.strsignal(-code)})"

    @staticmethod
    def _kill_group(pid: int) -> None:
        """End the child and what it started; the group outlives its leader where the child left processes behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            os.close(self._lifeline)
        self._process, self._connection = None, None
