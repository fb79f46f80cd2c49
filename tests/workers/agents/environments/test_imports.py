"""What the import of an environment's module does, and the processes of its episodes, which are forks, do with it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from troupe.workers.agents.environments.processes import EnvironmentProcesses
from troupe.workers.contract.environments import EpisodeReply, Row

HERE = "tests.workers.agents.environments.imported"


def started(name: str, seeds: list[int], timeout_s: float = 60.0) -> list[EpisodeReply]:
    """The first observations of episodes with these seeds, each in a separate process."""

    async def start() -> list[EpisodeReply]:
        processes = EnvironmentProcesses(f"{HERE}:{name}", {}, 4096)
        try:
            await processes.start()
            forks = [await processes.fork() for _ in seeds]
            rows = [Row(messages=({"role": "user", "content": "hello"},), seed=seed) for seed in seeds]
            return [await process.start(row, timeout_s) for process, row in zip(forks, rows, strict=True)]
        finally:
            processes.close()

    return asyncio.run(start())


def test_random_numbers_of_an_episode_follow_from_its_seed() -> None:
    """All are forks of one process: without a seed they would draw the same numbers from NumPy."""
    first, second, again, large = (reply.observation.info for reply in started("Draws", [1, 2, 1, 2**63 + 5]))
    for name in ("random", "numpy"):
        assert first[name] == again[name]
        assert len({first[name], second[name], large[name]}) == 3


def test_an_import_knows_how_its_processes_ended() -> None:
    assert [reply.observation.info["failed"] for reply in started("Draws", [0])] == [3.0]


def test_an_episode_without_the_threads_of_the_import_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cause = "its import started threads (helper), which no episode has: start them in `start`"
    with caplog.at_level(logging.WARNING):
        (reply,) = started("Helped", [0], timeout_s=1.0)
    assert reply.status == f"start: timeout after 1 s ({cause})"
    assert caplog.messages == [f"{HERE}:Helped: {cause}"]


def test_an_environment_without_threads_is_started_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (reply,) = started("Draws", [0])
    assert (reply.status, caplog.messages) == ("ok", [])
