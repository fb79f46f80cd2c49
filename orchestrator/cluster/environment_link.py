"""Lets rollout workers call environment workers; keeps Ray out of worker code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from troupe.orchestrator.cluster.event_loop import within
from troupe.workers.contract.environments import EnvironmentGone, EpisodeReply, Message, Row, failed
from troupe.workers.contract.roles import EnvironmentServer
from troupe.workers.isolation.text import one_line


class ActorEnvironments:
    """The `EnvironmentLink` of a run. Pickled to every rollout worker, which counts its own episodes."""

    def __init__(self, actors: Mapping[str, Any], lost: str = "") -> None:
        """`lost`: why no worker will serve again, or empty if one can still start."""
        self._actors = dict(actors)
        self._open = dict.fromkeys(self._actors, 0)
        self._lost = lost

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        """Begins an episode on the least-loaded worker; see `EnvironmentLink.begin`."""
        if not self._open:
            if self._lost:
                return "", failed(self._lost)
            raise EnvironmentGone("no environment worker is running")
        worker = min(self._open, key=self._open.__getitem__)
        self._open[worker] += 1
        try:
            return worker, await self._call(worker, EnvironmentServer.begin.__name__, timeout_s, episode, row)
        except BaseException:
            self.end(worker, episode)  # an abandoned call would still take a seat
            raise

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        """Sends a message to an episode; see `EnvironmentLink.step`."""
        return await self._call(worker, EnvironmentServer.step.__name__, timeout_s, episode, message)

    def end(self, worker: str, episode: str) -> None:
        """Ends an episode; see `EnvironmentLink.end`."""
        self._closed(worker)
        if worker in self._actors:
            getattr(self._actors[worker], EnvironmentServer.end.__name__).remote(episode)

    async def _call(self, worker: str, method: str, timeout_s: float, *args: Any) -> EpisodeReply:
        """The reply of a worker; one that has died gets no further episodes."""
        if worker not in self._actors:
            raise EnvironmentGone(f"{worker} has died")
        try:
            reply = await within(timeout_s, getattr(self._actors[worker], method).remote(*args))
        except TimeoutError:
            reply = failed(f"{method}: {worker} did not answer in {timeout_s:g} s")
        except RayTaskError as error:
            if isinstance(error.cause, EnvironmentGone):
                raise EnvironmentGone(str(error.cause)) from None
            reply = failed(one_line(f"{method}: {worker}: {type(error.cause).__name__}: {error.cause}"))
        except RayActorError as error:
            self._actors.pop(worker, None)
            self._open.pop(worker, None)
            raise EnvironmentGone(f"{worker} has died") from error
        if reply.observation.done:
            self._closed(worker)
        return reply

    def _closed(self, worker: str) -> None:
        if worker in self._open:
            self._open[worker] = max(0, self._open[worker] - 1)
