"""Tasks in Harbor's format (harborframework.com): a folder with an instruction, an image and tests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.environments.functions import Tool, ToolCallError
from troupe.workers.agents.environments.tools import OfferedTools
from troupe.workers.agents.sandbox.containers import (
    RUNTIMES,
    ContainerError,
    ContainerSettings,
    RunningContainer,
    built,
)
from troupe.workers.contract.environments import HARBOR_TURNS, Message, Observation, Row

SYSTEM = (
    "You work in a container, by commands of the tool bash. Each command is run in a new shell; files stay. "
    "Once the task is done, say so without calling the tool."
)
_COMMAND = {"type": "string", "description": "The command."}
_PARAMETERS = {"type": "object", "properties": {"command": _COMMAND}, "required": ["command"]}
_DESCRIPTION = "Run a command of the shell in the container."
_BASH = {"type": "function", "function": {"name": "bash", "description": _DESCRIPTION, "parameters": _PARAMETERS}}
_COPY_S = 60.0
_PLAYED: Mapping[str, frozenset[str]] = {
    "": frozenset(
        {"version", "schema_version", "task", "metadata", "source", "solution", "agent", "verifier", "environment"}
    ),
    "agent": frozenset({"user", "network_mode", "timeout_sec"}),
    "verifier": frozenset({"user", "network_mode", "timeout_sec", "env"}),
    "environment": frozenset(
        {"docker_image", "build_timeout_sec", "cpus", "memory_mb", "memory", "storage_mb", "storage"}
        | {"allow_internet", "network_mode", "env"}
    ),
}
"""Settings in `task.toml`, by section, with which a task is played. Any other one may change what it measures."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])", re.IGNORECASE)


def offered(args: Mapping[str, Any]) -> Iterator[str]:
    """What `Harbor` with these arguments adds to a prompt: the system message, and as JSON its tool."""
    yield str(args.get("system", SYSTEM))
    yield json.dumps([_BASH])


class Harbor(Environment):
    """An episode is a task: the policy has a shell in the task's container, and the task's tests give the reward.

    They run once the policy calls no tool, or after `turns` turns. What the container's runtime or the tests' own
    failure prevents fails the episode; it never is a reward of 0.
    """

    def __init__(
        self,
        tasks: str,
        runtime: str = "docker",
        image: str | None = None,
        options: Sequence[str] = (),
        network: bool = False,
        turns: int = HARBOR_TURNS,
        command_timeout_s: float = 60.0,
        system: str = SYSTEM,
    ) -> None:
        """Find the tasks.

        Args:
            tasks: Folder of the tasks, each a folder with `instruction.md` and `task.toml`; or the folder of one task.
            runtime: docker, podman or apptainer.
            image: Image of tasks that neither name one (`environment.docker_image`) nor have a Dockerfile.
            options: Further options of the runtime's command `run`.
            network: Whether containers of tasks that allow it reach the network.
            turns: Turns after which the tests run; at most `roles.environment.max_turns`.
            command_timeout_s: Seconds that a command may take.
            system: System message put before the instruction, unless empty.
        """
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime: {runtime!r} is none of {', '.join(RUNTIMES)}")
        if turns < 1 or command_timeout_s <= 0:
            raise ValueError("turns and command_timeout_s must be positive")
        folder = Path(tasks).expanduser()
        found = [folder] if (folder / "task.toml").is_file() else [one.parent for one in folder.glob("*/task.toml")]
        self._tasks = {one.name: one for one in sorted(found)}
        if not self._tasks:
            raise ValueError(f"tasks: {folder} has no folders with a task.toml")
        self._runtime, self._image, self._options = RUNTIMES[runtime], image, tuple(options)
        self._network, self._most_turns, self._timeout_s, self._system = network, turns, command_timeout_s, system
        self._tools = OfferedTools([Tool("bash", _BASH, self._bash)])
        self._task = Path()
        self._config: Mapping[str, Any] = {}
        self._container: RunningContainer | None = None
        self._turns = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        for name, folder in self._tasks.items():
            yield {"prompt": (folder / "instruction.md").read_text("utf-8").strip(), "task": name}

    async def start(self, row: Row) -> Observation:
        """The instruction and the tool, with the task's container running."""
        name = str(row.metadata.get("task", ""))
        if name not in self._tasks:
            raise ValueError(f"the row's column task names no task: {name!r}; there are {', '.join(self._tasks)[:200]}")
        self._task = self._tasks[name]
        self._config = tomllib.loads((self._task / "task.toml").read_text("utf-8"))
        if unsupported := [*_unsupported(self._config)]:
            raise ValueError(f"{name}: task.toml has {', '.join(unsupported)}, which this environment does not play")
        if composed := [*(self._task / "environment").glob("docker-compose.y*ml")]:
            raise ValueError(f"{name}: {composed[0].name} starts several containers, and this environment has one")
        self._container = await RunningContainer.start(self._runtime, await self._image_of(name), self._settings())
        folders = "mkdir -p /logs/verifier /logs/agent /logs/artifacts && chmod 777 /logs/*"
        made = await self._running.run(folders, _COPY_S, user=self._runtime.root)
        if made.exit_code != 0:
            raise ContainerError(f"{name}: no shell runs in the container: {made.output.strip()[-300:]}")
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return Observation([*system, *row.messages], tools=self._tools.schemas)

    async def step(self, message: Message) -> Observation:
        """The results of the commands, or the reward."""
        self._turns += 1
        answer = await self._tools.answer(message)
        if answer is not None and self._turns < self._most_turns:
            return answer
        reward, numbers = await self._tested()
        return Observation(
            () if answer is None else answer.messages, reward, done=True, info=self._tools.info | numbers
        )

    async def close(self) -> None:
        """End the container."""
        if self._container is not None:
            await self._container.close()

    async def _bash(self, arguments: Mapping[str, Any]) -> str:
        """What a command wrote, and how it ended. Raises ToolCallError."""
        command = arguments.get("command")
        if not isinstance(command, str):
            raise ToolCallError("command: expected text")
        user = str(_value(self._config, "agent.user") or "")
        result = await self._running.run(command, self._timeout_s, user=user)
        if result.exit_code is None:
            ending = f"[not done after {self._timeout_s:g} s: it was ended, with all that runs in the container]"
        else:
            ending = f"[exit code {result.exit_code}]" if result.exit_code else ""
        return "\n".join(filter(None, [result.output.rstrip(), ending])) or "[no output]"

    @property
    def _running(self) -> RunningContainer:
        if self._container is None:
            raise RuntimeError("the episode was not started")
        return self._container

    async def _tested(self) -> tuple[float, dict[str, float]]:
        """What the task's tests say. The policy can have written none of it: both folders are emptied before. Raises
        ContainerError if they said nothing that is a reward."""
        limit, container = float(_value(self._config, "verifier.timeout_sec") or 600), self._running
        await container.send(self._task / "tests", "/tests", _COPY_S)
        settings = {
            "variables": _resolved(_value(self._config, "verifier.env") or {}),
            "user": str(_value(self._config, "verifier.user") or ""),
        }
        empty = "rm -rf /logs/verifier && mkdir -p /logs/verifier && chmod 777 /logs/verifier"
        await container.run(empty, _COPY_S, user=self._runtime.root)
        done = await container.run("chmod +x /tests/test.sh && /tests/test.sh", limit, **settings)
        written = await container.run("cd /logs/verifier && cat reward.json 2>/dev/null || cat reward.txt", _COPY_S)
        told = done.output.strip()[-300:]
        if done.exit_code is None:
            raise ContainerError(f"{self._task.name}: its tests are not done after {limit:g} s: {told}")
        try:
            return _read_reward(written.output if written.exit_code == 0 else "")
        except ValueError as error:
            raise ContainerError(f"{self._task.name}: its tests {error}: {told}") from None

    def _settings(self) -> ContainerSettings:
        environment = self._config.get("environment") or {}
        memory = environment.get("memory_mb") or _mib(str(environment.get("memory", "2G")))
        modes = {_value(self._config, f"{section}.network_mode") or "public" for section in _PLAYED if section}
        allowed = environment.get("allow_internet", True) and modes == {"public"}
        variables = _resolved(environment.get("env") or {})
        network = self._network and allowed
        return ContainerSettings(float(environment.get("cpus", 1)), int(memory), network, variables, self._options)

    async def _image_of(self, name: str) -> str:
        """The image that the task names, its Dockerfile's, or the given one."""
        if image := _value(self._config, "environment.docker_image"):
            return str(image)
        folder = self._task / "environment"
        if not (folder / "Dockerfile").is_file():
            if self._image is None:
                raise ValueError(f"{name}: it has neither environment.docker_image nor a Dockerfile: set args.image")
            return self._image
        tag = f"troupe-task:{await asyncio.to_thread(_digest, folder)}"
        await built(self._runtime, tag, folder, float(_value(self._config, "environment.build_timeout_sec") or 600))
        return tag


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings of a task with which it is not played, unless they are empty."""
    for section, known in _PLAYED.items():
        given = config if not section else config.get(section) or {}
        yield from (f"{section}.{key}".lstrip(".") for key, value in given.items() if key not in known and value)


def _value(config: Mapping[str, Any], key: str) -> Any:
    """The setting of a dotted name, or None."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _resolved(variables: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables, with `${NAME}` and `${NAME:-default}` read from this process's. Raises ValueError."""
    found = dict[str, str]()
    for name, value in variables.items():
        text = str(value)
        if text.startswith("${") and text.endswith("}"):
            key, has_default, default = text[2:-1].partition(":-")
            if key not in os.environ and not has_default:
                raise ValueError(f"the task needs the variable {key}: name it in roles.environment.env")
            text = os.environ.get(key, default)
        found[name] = text
    return found


def _mib(size: str) -> float:
    """The MiB of a size such as 2G, 512M. Raises ValueError for something else."""
    if (found := _SIZE.fullmatch(size.strip())) is None:
        raise ValueError(f"environment.memory: expected a size such as 2G, got {size!r:.40}")
    return float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2].upper()]


def _read_reward(text: str) -> tuple[float, dict[str, float]]:
    """The reward, and further numbers, that tests have written: a number, or an object with `reward`. Raises ValueError
    if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("wrote no reward to /logs/verifier") from None
    given = value if isinstance(value, dict) else {"reward": value}
    numbers = {str(key): float(one) for key, one in given.items() if isinstance(one, bool | int | float)}
    if len(numbers) == 1 and "reward" not in numbers:
        numbers = {"reward": next(iter(numbers.values()))}
    if "reward" not in numbers or not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"wrote no number as reward, but {text.strip()[:80]!r}")
    return numbers.pop("reward"), numbers


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
