"""A worker that runs a user's code, without Ray; arguments: `score` or `play`, and the files `bug` and `ready`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from troupe.workers.agents.environments.processes import EnvironmentProcesses
from troupe.workers.contract.environments import Row
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.runner import RewardProcess, Sample
from troupe.workers.telemetry.stacks import write_stacks_on_signal

_LONG_S = 300.0


def score(control: str, ready: Path) -> None:
    """As a reward worker does."""
    function = RewardFunctionConfig(
        name="stalling_user_code:letter_share", args={"control": control}, timeout_s=_LONG_S
    )
    process = RewardProcess(function, memory_limit_mib=1024)
    process.start()
    ready.touch()
    process.score([Sample("aeb", "", "{}", 3, "stop")])


async def play(control: str, ready: Path) -> None:
    """As an environment worker does."""
    processes = EnvironmentProcesses("stalling_user_code:Stalling", {"control": control}, memory_limit_mib=1024)
    await processes.start()
    process = await processes.fork()
    await process.start(Row(({"role": "user", "content": "?"},), "", {}, 1), _LONG_S)
    ready.touch()
    await process.step({"role": "assistant", "content": "five"}, _LONG_S)


if __name__ == "__main__":
    write_stacks_on_signal()
    what, control, ready = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if what == "score":
        score(control, ready)
    else:
        asyncio.run(play(control, ready))
