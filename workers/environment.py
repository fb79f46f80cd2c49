"""The environment worker: episodes of one environment, each in a separate process."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable

from troupe.workers.agents.interface import EnvironmentProcesses, EpisodeProcess, EpisodeProcessFailed
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.environments import EnvironmentGone, EpisodeReply, Message, Row
from troupe.workers.contract.messages import Peak, WorkerGone, WorkerHealth
from troupe.workers.isolation.interpreters import interpreter_of
from troupe.workers.rewards.thoughts import environment_with_opened_thoughts
from troupe.workers.telemetry.peak_memory import FamilyPeak

_CLOSE_TIMEOUT_S = 2.0
_WATCH_S = 0.5


class EnvironmentWorker:
    """Holds up to `episodes` episodes, which wait only for a free process. Every method names an episode by the
    caller's key. One that no call names within `episode_timeout_s` ends: its engine may have died."""

    def __init__(self, config: EnvironmentConfig, name: str, policy: ModelConfig | None = None) -> None:
        """Set up the worker. The policy's template may open the thought of every turn, which reward functions need
        to know. Raises OSError or ValueError for the tokenizer or interpreter."""
        self._config = config
        self._name = name
        args = environment_with_opened_thoughts(config, policy).args
        python = interpreter_of(config.name, config.python)
        self._processes = EnvironmentProcesses(config.name, args, config.memory_limit_mib, config.env, python)
        self._free: list[EpisodeProcess] = []
        self._taken: dict[str, EpisodeProcess] = {}
        self._family = FamilyPeak()
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._places = asyncio.Semaphore(config.episodes)
        self._waiting: set[str] = set()
        """Episodes that wait for a process."""
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> WorkerHealth:
        """Load the environment. Raises ValueError if it cannot be loaded, or refuses its arguments."""
        await self._processes.start()
        return await self.health()

    async def begin(self, episode: str, row: Row) -> EpisodeReply:
        """Start an episode once a process is free; returns the first observation. Raises EnvironmentGone."""
        self._waiting.add(episode)
        try:
            process = await self._free_process()
        finally:
            closed = episode not in self._waiting
            self._waiting.discard(episode)
        self._taken[episode] = process
        loop = asyncio.get_running_loop()
        self._deadlines[episode] = loop.call_later(self._config.episode_timeout_s, self._abandon, episode)
        if closed:
            self._release(episode)
            raise EnvironmentGone(f"{self._name}: the episode {episode} was closed before it began")
        return await self._settled(episode, process.start(row, self._config.turn_timeout_s))

    async def step(self, episode: str, message: Message) -> EpisodeReply:
        """The environment's answer to a turn of the policy. Raises EnvironmentGone without such an episode."""
        process = self._taken.get(episode)
        if process is None:
            raise EnvironmentGone(f"{self._name} has no episode {episode}")
        return await self._settled(episode, process.step(message, self._config.turn_timeout_s))

    async def end(self, episode: str) -> None:
        """Close an episode that runs or waits for a process; does nothing if there is none."""
        self._waiting.discard(episode)
        self._release(episode)

    async def end_all(self, caller: str) -> int:
        """Close all episodes whose keys begin with a caller that is gone, also waiting ones; returns how many."""
        theirs = [episode for episode in (*self._taken, *self._waiting) if episode.partition("/")[0] == caller]
        for episode in theirs:
            await self.end(episode)
        return len(theirs)

    async def health(self) -> WorkerHealth:
        """Health of the worker; an environment worker has no policy version. Raises WorkerGone if the process that
        loaded the environment has died, so that no episode can start."""
        if not self._processes.alive:
            raise WorkerGone(f"{self._name}: the process that loaded the environment has died")
        episodes = [process.pid for process in (*self._free, *self._taken.values())]
        pids = [pid for pid in (self._processes.pid, *episodes) if pid is not None]
        peak = Peak(self._family.read(pids))
        return WorkerHealth(self._name, socket.gethostname(), os.getpid(), 0, len(self._taken), peak=peak)

    async def watch(self, seconds: float) -> bool:
        """Whether the worker can still start episodes; answers as soon as it cannot, else after `seconds`."""
        deadline = time.monotonic() + seconds
        while self._processes.alive and (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(_WATCH_S, left))
        return self._processes.alive

    async def close(self) -> None:
        for deadline in self._deadlines.values():
            deadline.cancel()
        for process in (*self._free, *self._taken.values()):
            process.kill()
        self._free, self._taken, self._deadlines = [], {}, {}
        self._processes.close()

    async def _free_process(self) -> EpisodeProcess:
        """An episode process, once one is free. Raises EnvironmentGone if no more episodes can start."""
        await self._places.acquire()
        try:
            while self._free:
                if (process := self._free.pop()).alive:
                    return process
            return await self._processes.fork()
        except EpisodeProcessFailed as error:
            self._places.release()
            raise EnvironmentGone(f"{self._name}: {error}") from None
        except BaseException:
            self._places.release()
            raise

    async def _settled(self, episode: str, asking: Awaitable[EpisodeReply]) -> EpisodeReply:
        """The reply of the episode's process; the process of an episode that has failed or is done is free."""
        try:
            reply = await asking
        except BaseException:
            self._release(episode)  # no caller waits for the reply: the process was killed
            raise
        if reply.observation.done:
            self._release(episode)
        return reply

    def _abandon(self, episode: str) -> None:
        self._taken[episode].kill()
        self._release(episode)

    def _release(self, episode: str) -> None:
        """Take the episode's process back: closed in the background and used again, unless it was killed."""
        process = self._taken.pop(episode, None)
        if process is None:
            return
        self._deadlines.pop(episode).cancel()
        if not process.alive:
            self._places.release()
            return
        task = asyncio.ensure_future(self._close_episode(process))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_episode(self, process: EpisodeProcess) -> None:
        try:
            await process.end(_CLOSE_TIMEOUT_S)
            self._free.append(process)
        except EpisodeProcessFailed:
            pass
        finally:
            self._places.release()
