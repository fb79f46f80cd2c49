"""A child process that runs user code: its start, its connection, its output, and its removal with all that it started.

The parent side. A child begins with `troupe.workers.isolation.inside.connection`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from troupe.workers.isolation.descendants import child_environment, end_marked, new_mark
from troupe.workers.isolation.interpreters import python_command, with_programs

LOAD_TIMEOUT_S = 120.0
"""Maximum duration of the import of user code."""
MAX_REPLY = 2**22
"""Default size limit of a reply, in bytes."""
_CHUNK = 2**16
_WATCH_S = 0.5
"""Seconds between two calls of the function that watches an exchange."""
_GUARD_S = 2.0
"""Time in which the guard of a child ends it."""
_REAP_S = 1.0
"""Longest time from the end of a child's connection to its exit."""
_DRAIN_S = 1.0
"""Longest wait, in seconds, for the output of a child that has ended: a process that escaped may hold its pipe."""


class InvalidReply(Exception):
    """The child sent something other than one JSON object per line."""


class LoadFailed(ValueError):
    """The user's code does not load."""


class Child:
    """A running child process: a guard and below it the user code (`run_guarded`). It ends when this process ends."""

    def __init__(self, entry: str, name: str, keep: Collection[str] = (), python: str | None = None) -> None:
        """Start the child: `entry` (`package.module:function`) with the descriptors of socket and owner pipe as
        strings; `keep` names the secrets that user code may read. Raises OSError."""
        self._name = name
        self.mark = new_mark()
        """Identifies the child and all processes that it starts."""
        self.connection, theirs = socket.socketpair()
        owner_pipe, self._owner_pipe = os.pipe()
        self._output = output = BoundedOutput(name)
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                python_command(entry, str(theirs.fileno()), str(owner_pipe), python=python),
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=output.descriptor,
                env=with_programs(child_environment(self.mark, keep), python),
                pass_fds=(theirs.fileno(), owner_pipe),
                start_new_session=True,  # it does not receive the terminal's Ctrl-C
            )
        except OSError:
            self._disconnect()
            output.discard()
            raise
        finally:
            theirs.close()
            os.close(owner_pipe)
        output.started()

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the child load the user's code; returns what it says. One that does not is ended. Raises LoadFailed."""
        try:
            reply = self.exchange(order, LOAD_TIMEOUT_S, first=True)
        except TimeoutError:
            problem = f"{self._name}: not loaded after {LOAD_TIMEOUT_S:g} s"
        except (EOFError, ConnectionError):
            how = self.wait()
            raise LoadFailed(f"{self._name}: the process that loads it {how}{self.last_lines()}") from None
        except InvalidReply as error:
            problem = f"{self._name}: the process that loads it {error}"
        else:
            if "ready" in reply:
                return reply
            problem = str(reply.get("failure"))
        self.close()
        raise LoadFailed(problem)

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    def exchange(
        self,
        request: dict[str, Any],
        timeout_s: float,
        max_reply: int = MAX_REPLY,
        watch: Callable[[], None] | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        """Send one line and receive one, both JSON objects. `watch` is called about twice a second, and may raise.
        With `first`, what the child has written so far is about this request. Raises TimeoutError, EOFError or
        ConnectionError if the child has ended, and InvalidReply beyond `max_reply` bytes or without a JSON
        object."""
        deadline = time.monotonic() + timeout_s
        if not first:
            self._output.forget()
        self.connection.settimeout(timeout_s)
        self.connection.sendall(json.dumps(request).encode() + b"\n")
        while b"\n" not in self._buffer:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(min(left, _WATCH_S))
            try:
                chunk = self.connection.recv(_CHUNK)
            except TimeoutError:
                if watch is not None:
                    watch()
                continue
            if not chunk:
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > max_reply:
                raise InvalidReply(f"replied more than {max_reply} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidReply("replied something other than JSON") from error
        if not isinstance(reply, dict):
            raise InvalidReply("replied something other than a JSON object")
        return reply

    def wait(self) -> str:
        """End a child that closed its connection; returns how it ended."""
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        finally:
            self.close()
        return f"died with exit code {code}" if code >= 0 else f"died with signal {-code} ({signal.strsignal(-code)})"

    def last_lines(self) -> str:
        """The last lines of its output since the last request, behind a colon; empty if there are none."""
        return self._output.last_lines()

    def close(self) -> None:
        """End the child and all processes that it started."""
        self._disconnect()  # upon which its guard ends all of them
        try:
            self._process.wait(_GUARD_S)
        except subprocess.TimeoutExpired:  # user code has stopped it
            self._process.kill()
            self._process.wait()
        end_marked(self.mark)
        self._output.drain()

    def _disconnect(self) -> None:
        self.connection.close()
        os.close(self._owner_pipe)


logger = logging.getLogger(__name__)

OUTPUT_LIMIT = 2**20
"""Bytes that one process, with all that it starts, may write to the log."""
_LOG = 2
_TAIL = 2**16
"""Bytes at the end of an output that are kept."""
_LAST_LINES, _LAST_CHARS = 12, 800
_FRAME = "at "
"""Begins a frame of a stack in JavaScript and Java; the error stands before them."""


class BoundedOutput:
    """A pipe for a process's output, read by a thread for as long as anyone has its other end open."""

    def __init__(self, name: str, limit: int = OUTPUT_LIMIT, log: int | None = _LOG) -> None:
        """Open the pipe of `name`'s output, of which `limit` bytes go to the descriptor `log`, if any."""
        self._tail, self._old = b"", 0
        self._reads = threading.Lock()
        """Held from reading the pipe until the tail has what was read."""
        self._name = name
        self._left = limit
        self._limit = limit
        self._log = log
        self._read, self.descriptor = os.pipe()
        """The end that the process writes to."""
        self._readable = select.poll()
        self._readable.register(self._read, select.POLLIN)
        self._thread = threading.Thread(target=self._pump, name=f"output of {name}", daemon=True)

    def started(self) -> None:
        """Begin to read, once the process has its end of the pipe."""
        os.close(self.descriptor)
        self._thread.start()

    def discard(self) -> None:
        """Close the pipe: the process was not started."""
        os.close(self.descriptor)
        os.close(self._read)

    def drain(self, timeout_s: float = _DRAIN_S) -> None:
        """Wait until all output of a process that has ended is in the log, but no longer than `timeout_s`."""
        self._thread.join(timeout_s)

    def forget(self) -> None:
        """Keep only lines that are written from now on."""
        waiting = bytearray(4)
        with self._reads:
            with contextlib.suppress(OSError):  # the pipe is closed
                fcntl.ioctl(self._read, termios.FIONREAD, waiting)
            self._old, self._tail = int.from_bytes(waiting, sys.byteorder), b""

    def lines(self) -> list[str]:
        """The last lines that are not empty, at most about 64 KiB of them."""
        lines = self._tail.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()]

    def last_lines(self) -> str:
        """The last lines in so many characters as a status can have, behind a colon; empty if there are none."""
        words = ""
        told = [line for line in self.lines() if not line.startswith(_FRAME)]
        for line in reversed(told[-_LAST_LINES:]):
            if words and len(words) + len(line) > _LAST_CHARS:
                break
            words = f"{line[:_LAST_CHARS]} | {words}" if words else line[:_LAST_CHARS]
        return f": {words}" if words else ""

    def _pump(self) -> None:
        """Read until the last process has closed its end, also what exceeds the limit: no writer may block."""
        try:
            while chunk := self._next():
                if self._left > 0 and self._log is not None:
                    os.write(self._log, chunk[: self._left])
                    self._left -= len(chunk)
                    if self._left <= 0:
                        logger.warning(
                            "%s: more than %d KiB of output; the rest is discarded", self._name, self._limit >> 10
                        )
        except OSError:
            return  # the log is gone
        finally:
            os.close(self._read)

    def _next(self) -> bytes:
        """What is written next, which is in the tail then unless it is forgotten; nothing at the end."""
        self._readable.poll()
        with self._reads:
            chunk = os.read(self._read, _CHUNK)
            self._tail = (self._tail + chunk[self._old :])[-_TAIL:]
            self._old = max(0, self._old - len(chunk))
        return chunk
