"""Runs the episodes of one environment, each in a separate process, so that a fault costs one episode.

This isolates faults (hangs, exits, memory), not attacks: an environment is the user's own code. Code that a model wrote
belongs in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Collection, Mapping
from typing import Any

from troupe.workers.contract.environments import EpisodeReply, Message, Row, failed, read_observation
from troupe.workers.isolation.child import BoundedOutput, Child, LoadFailed
from troupe.workers.isolation.descendants import end_marked

logger = logging.getLogger(__name__)

MAX_REPLY = 2**24
"""Longest reply of an environment, in bytes."""
_FORK_TIMEOUT_S = 30.0
_ENTRY = "troupe.workers.agents.environments.child:main"


class EpisodeProcessFailed(Exception):
    """The process of an episode hung, died or replied nonsense; it has been killed. The message is the reason."""


class EpisodeProcess:
    """One process, in which one episode runs at a time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pid: int,
        mark: str,
        output: BoundedOutput,
        hint: str = "",
    ) -> None:
        """A connected process. `mark` is the loading process's; `hint` says in messages why it may hang."""
        self._reader = reader
        self._writer = writer
        self._mark = mark
        self._output = output
        self._hint = hint
        self._asking = asyncio.Lock()
        self.pid = pid

    @property
    def alive(self) -> bool:
        """Whether it was not killed."""
        return not self._writer.is_closing()

    async def start(self, row: Row, timeout_s: float) -> EpisodeReply:
        """Start an episode; the first observation."""
        return await self._observe("start", timeout_s, row=vars(row))

    async def step(self, message: Message, timeout_s: float) -> EpisodeReply:
        """The environment's answer to a turn of the policy."""
        return await self._observe("step", timeout_s, message=message)

    async def end(self, timeout_s: float) -> None:
        """Close the episode. A process that cannot close it may hold what it began, and ends. Raises
        EpisodeProcessFailed."""
        reply = await self._ask({"op": "close"}, timeout_s)
        if "failure" in reply:
            self.kill()
            raise EpisodeProcessFailed(str(reply["failure"]))

    async def _observe(self, op: str, timeout_s: float, **fields: Any) -> EpisodeReply:
        """The reply to a request; whatever goes wrong is its status."""
        try:
            reply = await self._ask({"op": op, **fields}, timeout_s)
            if "failure" in reply:
                return failed(f"{op}: {reply['failure']}")
            return EpisodeReply(read_observation(reply.get("observation")))
        except EpisodeProcessFailed as error:
            return failed(f"{op}: {error}")
        except (TypeError, ValueError) as error:  # user code can write to the connection
            self.kill()
            return failed(f"{op}: error: {error}")

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to a request, which waits for the reply to the one before. Raises EpisodeProcessFailed if there is
        no reply."""
        try:
            async with asyncio.timeout(timeout_s), self._asking:
                if not self.alive:
                    raise EpisodeProcessFailed("its process was killed")
                self._output.forget()
                self._writer.write(json.dumps(request).encode() + b"\n")
                line = await self._reader.readline()
            reply = json.loads(line) if line else None
        except TimeoutError:
            self.kill()
            raise EpisodeProcessFailed(f"timeout after {timeout_s:g} s{self._hint}") from None
        except EpisodeProcessFailed:
            raise
        except (ValueError, RecursionError, OSError) as error:
            self.kill()
            raise EpisodeProcessFailed(f"error: {error}") from None
        except BaseException:
            self.kill()  # no caller waits for the reply, which would be taken for that to the next request
            raise
        if reply is None:
            self.kill()
            await asyncio.to_thread(self._output.drain)
            raise EpisodeProcessFailed(f"its process died{self._output.last_lines()}")
        if not isinstance(reply, dict):
            self.kill()
            raise EpisodeProcessFailed("error: its process replied something other than a JSON object")
        if reply.get("last"):
            self.kill()
            raise EpisodeProcessFailed(str(reply["failure"]))
        return reply

    def kill(self) -> None:
        """Ends the process and its descendants."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._writer.close()
            end_marked(f"{self._mark}.{self.pid}")


class EnvironmentProcesses:
    """The loading process of one environment, and the episode processes that it forks."""

    def __init__(
        self,
        name: str,
        args: Mapping[str, Any],
        memory_limit_mib: int,
        env: Collection[str] = (),
        python: str | None = None,
    ) -> None:
        """`memory_limit_mib` bounds each episode, and `env` names the secrets that it may read."""
        self._python = python
        self._order = {"name": name, "args": dict(args), "memory_limit_mib": memory_limit_mib}
        self._env = tuple(env)
        self._child: Child | None = None
        self.pid: int | None = None
        """Process id of the loading process, once it has loaded the environment."""
        self._hint = ""

    @property
    def alive(self) -> bool:
        """Whether the loading process runs."""
        return self._child is not None and self._child.alive

    async def start(self) -> None:
        """Start the loading process. Raises LoadFailed if the environment cannot be loaded."""
        reply = await asyncio.to_thread(self._load)
        self.pid = int(reply["pid"])
        if threads := reply["threads"]:
            cause = f"its import started threads ({', '.join(threads)}), which no episode has: start them in `start`"
            logger.warning("%s: %s", self._order["name"], cause)
            self._hint = f" ({cause})"

    def _load(self) -> dict[str, Any]:
        self._child = child = Child(_ENTRY, str(self._order["name"]), self._env, self._python)
        try:
            return child.load(self._order)
        except LoadFailed:
            self._child = None
            raise

    async def fork(self) -> EpisodeProcess:
        """Fork a process for one episode after another. Raises EpisodeProcessFailed if the loading process has died, or
        cannot fork."""
        if (child := self._child) is None:
            raise EpisodeProcessFailed("the environment's processes are closed")
        ours, theirs = socket.socketpair()
        output = BoundedOutput(str(self._order["name"]))
        try:
            socket.send_fds(child.connection, [b"+"], [theirs.fileno(), output.descriptor])
        except OSError as error:
            ours.close()
            output.discard()
            raise EpisodeProcessFailed(f"the process that loads the environment cannot be reached: {error}") from None
        finally:
            theirs.close()
        output.started()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_REPLY)
        try:
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                line = await reader.readline()
            return EpisodeProcess(reader, writer, int(json.loads(line)["pid"]), child.mark, output, self._hint)
        except (TimeoutError, ValueError, OSError) as error:
            writer.close()
            raise EpisodeProcessFailed(f"no process could be started for the episode: {error or 'no answer'}") from None

    def close(self) -> None:
        """End the loading process; its forks end with it."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
