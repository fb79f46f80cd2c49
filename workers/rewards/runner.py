"""Runs a reward function in its own process, so that a fault costs one sample and not the run.

This isolates faults (hangs, exits, memory), not attacks: a reward function is the user's own code.
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
from dataclasses import dataclass, field
from typing import Any

from troupe.workers.contract.config import RewardFunctionConfig
from troupe.workers.isolation.descendants import end_marked, new_mark, resident_bytes
from troupe.workers.isolation.environment import child_environment
from troupe.workers.isolation.output import BoundedOutput
from troupe.workers.rewards.loading import RewardFunctionError
from troupe.workers.rewards.steps import Step, checked_steps

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Longest import of a reward function's module."""
_CHUNK = 2**16
_MAX_REPLY = 2**22
"""Longest reply for one sample, in bytes: more than 80 000 steps."""
_GRACE_S = 1.0
"""Seconds that a child gets beyond the timeout to reply for the samples that were in time."""
_MEMORY_S = 0.5
"""Seconds of a call between two looks at the memory of the child and its descendants."""
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from troupe.workers.rewards.child import main; main()"
)


@dataclass(frozen=True)
class Sample:
    """Input of a reward function."""

    response: str
    answer: str
    metadata: str
    """JSON object."""
    response_tokens: int
    finish_reason: str
    messages: str = "[]"
    """JSON list: the prompt."""
    conversation: str = ""
    """JSON list: all messages of an episode; empty: the sample is one response."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(tokens up to the end of the turn, reward) from the environment."""

    def request(self) -> dict[str, Any]:
        """The sample as it is sent to the child."""
        return {
            "response": self.response,
            "answer": self.answer,
            "metadata": self.metadata,
            "sample": {
                "response_tokens": self.response_tokens,
                "finish_reason": self.finish_reason,
                "messages": self.messages,
                "conversation": self.conversation,
            },
        }


@dataclass(frozen=True)
class Outcome:
    """Result for one sample: a number, or why there is none."""

    value: float | None
    status: str = "ok"
    steps: tuple[Step, ...] = ()
    """Process rewards, by character position in the response; only for a function with `process`."""
    cause: str = field(default="", compare=False)
    """What failures of the same cause have in common; empty: the status."""


class _OutOfMemory(Exception):
    """The child and its descendants use too much memory together."""


class _Broken(Exception):
    """The child sent an invalid reply."""


class RewardProcess:
    """One reward function in a child process, which is replaced when it hangs or dies."""

    def __init__(self, config: RewardFunctionConfig, memory_limit_mib: int) -> None:
        self.config = config
        self.memory_limit_mib = memory_limit_mib
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline = -1
        self._mark = ""
        """Of the process and all that it starts."""
        self._resident = 0
        """Memory of the process once the function is loaded, in bytes."""
        self._buffer = b""
        self._requests = 0
        self._concurrent = False
        """Whether the function is asynchronous; known once it is loaded."""

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the child and load the function in it; does nothing if a child is ready.

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
            "batched": self.config.batched,
            "timeout_s": self.config.timeout_s,
            "memory_limit_mib": self.memory_limit_mib,
        }
        try:
            reply = self._exchange(order, LOAD_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise RewardFunctionError(f"{self.config.name}: not loaded after {LOAD_TIMEOUT_S:g} s") from None
        except (EOFError, ConnectionError, _Broken):
            raise RewardFunctionError(f"{self.config.name}: the process that loads it {self._reap()}") from None
        if "ready" not in reply:
            self.close()
            raise RewardFunctionError(str(reply.get("failure")))
        self._concurrent = reply.get("concurrent") is True
        self._resident, _ = resident_bytes(self._mark)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Score the samples of a group; faults of the function never raise.

        A batched function gets all of them in one call, an asynchronous one is called for all of them at the same time,
        any other one by one. A failed sample costs the others only time, unless it ends or blocks the call they share.
        """
        try:
            self.start()
        except (RewardFunctionError, OSError) as error:  # the replacement of a dead child did not start
            self.close()
            return [Outcome(None, f"error: {error}")] * len(samples)
        if self.config.batched or self._concurrent:
            return self._score(samples)
        return [outcome for sample in samples for outcome in self._score([sample])]

    def close(self) -> None:
        """End the child and everything that it has started."""
        if self._process is None:
            return
        self._kill_group(self._process.pid)
        self._process.wait()
        self._release()
        end_marked(self._mark)

    def _score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Outcomes of one request."""
        self._requests += 1
        request = {"id": self._requests, "samples": [sample.request() for sample in samples]}
        try:
            self.start()
            reply = self._exchange(request, self.config.timeout_s + _GRACE_S * self._concurrent, len(samples))
            outcomes = self._read(reply, samples)
        except TimeoutError:
            self.close()
            return self._all_failed(f"timeout after {self.config.timeout_s:g} s", len(samples))
        except _OutOfMemory as error:
            self.close()
            return self._all_failed(str(error), len(samples))
        except (EOFError, ConnectionError):
            return self._all_failed(self._reap(), len(samples))
        except (_Broken, RewardFunctionError, OSError) as error:
            self.close()
            return self._all_failed(f"error: {error}", len(samples))
        if reply.get("last"):
            self.close()
        return outcomes

    @staticmethod
    def _all_failed(status: str, samples: int) -> list[Outcome]:
        """The same failure for every sample of a request, which says so."""
        shared = f" (one call for {samples} samples)" if samples > 1 else ""
        return [Outcome(None, status + shared, cause=status)] * samples

    def _read(self, reply: dict[str, Any], samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes in a reply. Raises _Broken for an invalid one: user code may have written it."""
        if reply.get("last") and isinstance(failure := reply.get("failure"), str):
            return self._all_failed(failure, len(samples))
        if reply.get("id") != self._requests:
            raise _Broken("the reward process replied out of turn")
        results = reply.get("results")
        if not isinstance(results, list) or len(results) != len(samples):
            raise _Broken(f"the reward process replied no results for {len(samples)} samples")
        return [self._outcome(result, len(s.response)) for result, s in zip(results, samples, strict=True)]

    def _outcome(self, result: Any, length: int) -> Outcome:
        """The outcome of one sample, with a response of `length` characters. Raises _Broken for an invalid one."""
        if not isinstance(result, dict):
            raise _Broken("the reward process replied a result that is not a JSON object")
        if isinstance(failure := result.get("failure"), str):
            return Outcome(None, failure, cause=str(result.get("cause", "")))
        value = result.get("value")
        if not isinstance(value, float) or not math.isfinite(value):
            raise _Broken("the reward process replied neither a number nor a failure")
        if not self.config.process:
            return Outcome(value)
        if (steps := result.get("steps")) is None:
            return Outcome(None, f"expected steps, got a number: {value}", cause="expected steps, got a number")
        try:
            return Outcome(value, steps=checked_steps(steps, length))
        except (OverflowError, TypeError, ValueError) as error:
            raise _Broken(f"the reward process replied invalid steps: {error}") from error

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        output, self._mark = BoundedOutput(self.config.name), new_mark()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno()), str(lifeline_read), path],
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=output.descriptor,
                env=child_environment(self._mark, self.config.env),
                pass_fds=(theirs.fileno(), lifeline_read),
                start_new_session=True,  # its own group: it ends as a whole and does not receive the terminal's Ctrl-C
            )
        except OSError:
            ours.close()
            os.close(lifeline_write)
            output.discard()
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        output.started()
        self._connection, self._lifeline, self._buffer = ours, lifeline_write, b""

    def _exchange(self, request: dict[str, Any], timeout_s: float, samples: int = 1) -> dict[str, Any]:
        """Send one line, receive one line, which may be as long as replies for this many samples.

        Raises:
            TimeoutError: there is no reply in time.
            EOFError, ConnectionError: the child has ended.
            _Broken: the reply is invalid.
        """
        if self._connection is None:
            raise EOFError
        deadline = time.monotonic() + timeout_s
        self._connection.settimeout(timeout_s)
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        while b"\n" not in self._buffer:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._connection.settimeout(min(left, _MEMORY_S))
            try:
                chunk = self._connection.recv(_CHUNK)
            except TimeoutError:
                self._check_memory()
                continue
            if not chunk:
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > samples * _MAX_REPLY:
                raise _Broken(f"the reward process replied more than {samples * _MAX_REPLY} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _Broken("the reward process replied something other than JSON") from error
        if not isinstance(reply, dict):
            raise _Broken("the reward process replied something other than a JSON object")
        return reply

    def _check_memory(self) -> None:
        """Raises _OutOfMemory where the process and all that it has started use more than the limit together."""
        used, processes = resident_bytes(self._mark)
        grown = (used - self._resident) >> 20
        if self._resident and grown > self.memory_limit_mib:
            raise _OutOfMemory(
                f"out of memory (limit {self.memory_limit_mib} MiB; {processes} processes use {grown} MiB more)"
            )

    def _reap(self) -> str:
        """Clean up a child that closed its connection; returns why it ended."""
        if self._process is None:
            return "died"
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.close()
            return "closed its connection"
        self._kill_group(self._process.pid)
        self._release()
        end_marked(self._mark)
        return f"died with exit code {code}" if code >= 0 else f"died with signal {-code} ({signal.strsignal(-code)})"

    @staticmethod
    def _kill_group(pid: int) -> None:
        """End the child and its process group; the group outlives its leader if the child started other processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            os.close(self._lifeline)
        self._process, self._connection = None, None
