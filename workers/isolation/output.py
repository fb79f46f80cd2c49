"""The output of a process of user code: passed on to the log up to a limit, and no further."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

LIMIT = 2**20
"""Bytes that one process, with all that it starts, may write to the log."""
_CHUNK = 2**16
_LOG = 2


class BoundedOutput:
    """A pipe for a process's output, read by a thread for as long as anyone has its other end open."""

    def __init__(self, name: str, limit: int = LIMIT, log: int = _LOG) -> None:
        """Open the pipe.

        Args:
            name: Whose output it is, for the message that it was cut.
            limit: Bytes that are passed on.
            log: Descriptor that receives them.
        """
        self._name = name
        self._left = limit
        self._limit = limit
        self._log = log
        self._read, self.descriptor = os.pipe()
        """The end that the process writes to."""
        self._thread = threading.Thread(target=self._pump, name=f"output of {name}", daemon=True)

    def started(self) -> None:
        """Begin to read, once the process has its end of the pipe."""
        os.close(self.descriptor)
        self._thread.start()

    def discard(self) -> None:
        """Close the pipe: the process was not started."""
        os.close(self.descriptor)
        os.close(self._read)

    def drain(self, timeout_s: float) -> None:
        """Wait until all output of a process that has ended is in the log, but no longer than `timeout_s`."""
        self._thread.join(timeout_s)

    def _pump(self) -> None:
        """Read until the last process has closed its end, also what exceeds the limit: no writer may block."""
        try:
            while chunk := os.read(self._read, _CHUNK):
                if self._left > 0:
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
