"""A container by the command line of Docker, Podman or Apptainer: a separate machine for the commands of an episode.

It has no network unless the task asks for one, and it ends with the process that started it: its keeper, which is not
ended with that process's other descendants, waits for the end of its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from troupe.workers.isolation.descendants import MARK

_OUTPUT_BYTES = 64 * 1024
"""Bytes kept of the beginning of a command's output, and as many of its end."""
_END_S = 10.0
_READY = "troupe-ready"
_WAIT = f"echo {_READY}; exec cat >/dev/null"
"""What the first process of a container does."""
_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$1"; else exec sh -c "$1"; fi'
_KILL_ALL = "kill -9 -1"
"""Ends every process of the container but the first and this one."""


class ContainerError(RuntimeError):
    """A container could not be started, or does not answer."""


@dataclass(frozen=True)
class ContainerSettings:
    """What a container may use."""

    cpus: float = 1.0
    memory_mib: int = 2048
    network: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its commands."""
    options: Sequence[str] = ()
    """Further options of the runtime's command `run`, or of Apptainer's `instance start`."""


@dataclass(frozen=True)
class CommandResult:
    """The end of a command in a container."""

    output: str
    """Standard output and errors, in the order in which they were written."""
    exit_code: int | None
    """None if its time was over."""


class Runtime(Protocol):
    """The command lines of a container runtime."""

    @property
    def root(self) -> str:
        """User that may write everywhere in a container; empty if there is no choice."""
        ...

    def keep(self, name: str, image: str, settings: ContainerSettings) -> list[str]:
        """Runs a container as long as its standard input is open; writes a line once commands can run in it."""
        ...

    def execute(self, name: str, command: Sequence[str], variables: Mapping[str, str], user: str) -> list[str]: ...

    def end(self, name: str) -> list[str]: ...

    def build(self, tag: str, folder: Path) -> list[str]:
        """Builds the image of a folder with a Dockerfile. Raises ContainerError if the runtime builds none."""
        ...


@dataclass(frozen=True)
class Docker:
    """Docker, or a program with the same command line."""

    program: str
    root: str = "0"

    def keep(self, name: str, image: str, settings: ContainerSettings) -> list[str]:
        limits = [f"--cpus={settings.cpus:g}", f"--memory={settings.memory_mib}m", "--pids-limit=1024"]
        network = [] if settings.network else ["--network=none"]
        named = ["--rm", "--interactive", f"--name={name}", "--security-opt=no-new-privileges", *limits, *network]
        return [self.program, "run", *named, *settings.options, "--entrypoint=sh", image, "-c", _WAIT]

    def execute(self, name: str, command: Sequence[str], variables: Mapping[str, str], user: str) -> list[str]:
        chosen = [f"--user={user}"] if user else []
        chosen += [f"--env={key}={value}" for key, value in variables.items()]
        return [self.program, "exec", "--interactive", *chosen, name, *command]

    def end(self, name: str) -> list[str]:
        return [self.program, "rm", "--force", name]

    def build(self, tag: str, folder: Path) -> list[str]:
        return [self.program, "build", "--quiet", f"--tag={tag}", str(folder)]


@dataclass(frozen=True)
class Apptainer:
    """Apptainer, without the capabilities that it leaves to root."""

    root: str = ""

    def keep(self, name: str, image: str, settings: ContainerSettings) -> list[str]:
        limits = [f"--cpus={settings.cpus:g}", f"--memory={settings.memory_mib}M"]
        network = [] if settings.network else ["--net", "--network=none"]
        is_local = "://" in image or Path(image).exists()
        if not is_local and (image.endswith(".sif") or image.startswith(("/", "."))):
            raise ContainerError(f"{image}: no such image on this machine")
        source = image if is_local else f"docker://{image}"
        isolated = ["--containall", "--no-privs", "--writable-tmpfs", *limits, *network]
        started = [*isolated, *settings.options, source, name]
        # Nobody reads what it writes once it stops the instance: a write to the closed pipe would end it before.
        stop = f"exec apptainer instance stop {name} >/dev/null 2>&1"
        script = f'apptainer instance start "$@" >&2 && {_WAIT.replace("exec ", "")}; {stop}'
        return ["sh", "-c", script, "sh", *started]

    def execute(self, name: str, command: Sequence[str], variables: Mapping[str, str], user: str) -> list[str]:
        if user:
            raise ContainerError("Apptainer runs commands as the user who started it, and not as another one")
        # Not `--env`, which reads a value with a comma and a = as two variables.
        given = (f"{key}={value}" for key, value in variables.items())
        return ["apptainer", "--silent", "exec", "--no-privs", f"instance://{name}", "env", *given, *command]

    def end(self, name: str) -> list[str]:
        return ["apptainer", "instance", "stop", name]

    def build(self, tag: str, folder: Path) -> list[str]:
        raise ContainerError(f"Apptainer builds no Dockerfile ({folder}): name an image")


RUNTIMES: Mapping[str, Runtime] = {"docker": Docker("docker"), "podman": Docker("podman"), "apptainer": Apptainer()}
"""Runtimes by name."""


class RunningContainer:
    """A running container."""

    def __init__(
        self, runtime: Runtime, name: str, keeper: asyncio.subprocess.Process, variables: Mapping[str, str]
    ) -> None:
        self._runtime, self._name, self._keeper, self._variables = runtime, name, keeper, variables

    @classmethod
    async def start(cls, runtime: Runtime, image: str, settings: ContainerSettings) -> RunningContainer:
        """Start a container of an image. Raises ContainerError."""
        name = f"troupe-{uuid.uuid4().hex[:16]}"
        keeper = await _process(runtime.keep(name, image, settings), stdin=asyncio.subprocess.PIPE, keeper=True)
        container = cls(runtime, name, keeper, settings.variables)
        try:
            lines = list[str]()
            while (line := await _line(keeper)) is not None:
                if line == _READY:
                    return container
                lines = [*lines[-4:], line]
            raise ContainerError(f"no container of {image}: {' | '.join(filter(None, lines)) or 'its runtime ended'}")
        except BaseException:
            await container.close()
            raise

    async def run(
        self,
        command: str,
        timeout_s: float,
        *,
        variables: Mapping[str, str] | None = None,
        user: str = "",
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command of bash, or of sh if the image has no bash. What it starts in the background continues. If its
        time is over, every process of the container is ended but the first."""
        given = {**self._variables, **(variables or {})}
        argv = self._runtime.execute(self._name, ["sh", "-c", _SHELL, "sh", command], given, user)
        process, output = await _process(argv, stdin=asyncio.subprocess.PIPE), _Output()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(output.read(process), _feed(process, stdin))
                return CommandResult(output.text(), await process.wait())
        except TimeoutError:
            kill = await _process(self._runtime.execute(self._name, ["sh", "-c", _KILL_ALL], {}, self._runtime.root))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await kill.communicate()
            return CommandResult(output.text(), None)
        finally:
            _kill(process)

    async def send(self, folder: Path, target: str, timeout_s: float) -> None:
        """Copy a folder's content into a folder of the container, which is emptied before. Raises ContainerError."""
        packed = await asyncio.to_thread(_packed, folder)
        unpack = f"rm -rf {target} && mkdir -p {target} && tar -x -f - -C {target}"
        sent = await self.run(unpack, timeout_s, user=self._runtime.root, stdin=packed)
        if sent.exit_code != 0:
            raise ContainerError(f"{folder.name} cannot be copied into the container: {sent.output.strip()[-300:]}")

    async def close(self) -> None:
        """End the container and what runs in it."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._keeper.wait()
                return
        ending = await _process(self._runtime.end(self._name))
        await ending.communicate()
        _kill(self._keeper)


class _Output:
    """What a process writes: the beginning and the end, if it is long."""

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._missing = 0

    async def read(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (part := await process.stdout.read(_OUTPUT_BYTES)):
            room = _OUTPUT_BYTES - len(self._head)
            self._head, self._tail = self._head + part[:room], self._tail + part[room:]
            self._missing += max(0, len(self._tail) - _OUTPUT_BYTES)
            self._tail = self._tail[-_OUTPUT_BYTES:]

    def text(self) -> str:
        between = f"\n[... {self._missing:,} bytes missing]\n".encode() if self._missing else b""
        return (self._head + between + self._tail).decode(errors="replace")


async def built(runtime: Runtime, tag: str, folder: Path, timeout_s: float) -> None:
    """Build an image; what did not change since an earlier build takes no time. Raises ContainerError."""
    process, output = await _process(runtime.build(tag, folder)), _Output()
    try:
        async with asyncio.timeout(timeout_s):
            await output.read(process)
            if await process.wait():
                raise ContainerError(f"{folder}: the image cannot be built: {output.text().strip()[-500:]}")
    except TimeoutError:
        raise ContainerError(f"{folder}: the image is not built after {timeout_s:g} s") from None
    finally:
        _kill(process)


async def _process(
    argv: Sequence[str], stdin: int = asyncio.subprocess.DEVNULL, *, keeper: bool = False
) -> asyncio.subprocess.Process:
    """Start a program; a keeper is found neither by the mark nor in the group of this process."""
    pipe, errors = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    variables = {name: value for name, value in os.environ.items() if not (keeper and name == MARK)}
    try:
        return await asyncio.create_subprocess_exec(
            *argv, stdin=stdin, stdout=pipe, stderr=errors, env=variables, start_new_session=keeper
        )
    except FileNotFoundError:
        raise ContainerError(f"there is no program {argv[0]} on this machine") from None


async def _line(process: asyncio.subprocess.Process) -> str | None:
    """The next line of output, or None at its end."""
    line = b"" if process.stdout is None else await process.stdout.readline()
    return line.decode(errors="replace").strip() if line else None


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    """Writes the standard input of a process, which may end before it has read all."""
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()
