"""Runs Python code that a model wrote, isolated from the machine.

`troupe.workers.agents.sandbox.inside` makes the isolation. This module starts it, feeds it and bounds what it returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Self

from troupe.workers.agents.sandbox.seccomp import is_supported

_OLDEST_KERNEL = (5, 14)
"""The first Linux that counts the processes of a user namespace by themselves."""
_START_S = 30.0
"""Seconds in which a sandbox must be made. They do not count against the program's time."""
_GRACE_S = 5.0
"""Seconds that the sandbox's own processes get to end after the program was killed."""
_CHUNK = 2**16
_ROOT = str(Path(__file__).absolute().parents[4])
_BOOTSTRAP = f"import sys; sys.path.insert(0, {_ROOT!r}); from troupe.workers.agents.sandbox.inside import main; main()"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_NAMESPACE_ADVICE = (
    "allow unprivileged user namespaces: `sysctl user.max_user_namespaces=15000`, on Debian also "
    "`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu also "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in a container, also a seccomp and an AppArmor profile "
    "that permit clone, mount and pivot_root (Docker: `--security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined`, Kubernetes: `seccompProfile: {type: Unconfined}`)"
)
_PROC_ADVICE = (
    "the container hides parts of /proc: run it with `--security-opt systempaths=unconfined` (Docker) or `procMount: "
    "Unmasked` (Kubernetes)"
)
_PROBE = """
import json, os
children = 0
try:
    while children < 8:
        if os.fork() == 0:
            os.read(0, 1)  # wait for the end of the sandbox's input
            os._exit(0)
        children += 1
except BlockingIOError:
    pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
facts = {key: status[key].strip() for key in ("Uid", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "CapPrm")}
facts |= {"children": children, "root": os.listdir("/")}
facts["interfaces"] = [line.split(":")[0].strip() for line in open("/proc/self/net/dev").readlines()[2:]]
print(json.dumps(facts))
"""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


class SandboxUnavailable(SandboxError):
    """This machine does not permit a sandbox; the message gives the remedy."""


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of one program and of everything that it starts."""

    timeout_s: float = 5.0
    """Wall-clock seconds of the program, with the start of its interpreter, without the start of the sandbox. Then
    everything in the sandbox is killed."""
    memory_mib: int = 512
    """Address space of a process, and private memory of all processes together."""
    disk_mib: int = 64
    """Size of the writable file system, which is in memory, and of a file in it."""
    files: int = 4096
    """Files and folders in the writable file system."""
    processes: int = 16
    """Processes and threads at the same time."""
    open_files: int = 64
    """Open files of a process."""
    output_kib: int = 64
    """Output that is kept, of stdout and of stderr each; what exceeds it is counted and discarded."""
    packages: bool = False
    """Whether the program may import the packages that are installed with Troupe, such as numpy. False: the standard
    library only."""

    def __post_init__(self) -> None:
        """Refuse limits that are not positive, and less memory than an interpreter takes."""
        for field in fields(self):
            if getattr(self, field.name) <= 0 and field.name != "packages":
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")
        if self.memory_mib < 64:
            raise ValueError(f"memory_mib must be at least 64, not {self.memory_mib}")


@dataclass(frozen=True)
class SandboxResult:
    """What a sandboxed program did. Everything in it is data that the program chose: do not trust it."""

    stdout: str
    """The first part of what was written, up to the limit. Bytes that are not UTF-8 are replaced."""
    stderr: str
    """The last part of what was written, up to the limit: a traceback ends with its cause."""
    exit_code: int | None
    """Exit code of the program; None if a signal ended it."""
    signal: int | None = None
    """Signal that ended the program; None if it exited."""
    timed_out: bool = False
    """Whether the wall-clock limit ended it."""
    out_of_memory: bool = False
    """Whether all processes together exceeded the memory limit, or the program ended with a MemoryError."""
    stdout_discarded: int = 0
    """Bytes of stdout beyond the limit."""
    stderr_discarded: int = 0
    """Bytes of stderr beyond the limit."""
    wall_s: float = 0.0
    """Seconds from the start of the sandbox until nothing of it was left."""
    program_s: float = 0.0
    """Seconds from the start of the program until it ended or was killed: what `SandboxLimits.timeout_s` bounds."""

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0."""
        return self.exit_code == 0 and not self.timed_out


def run_python(
    code: str,
    stdin: str = "",
    *,
    limits: SandboxLimits | None = None,
    modules: Mapping[str, str] | None = None,
    starter: SandboxStarter | None = None,
) -> SandboxResult:
    """Run Python code in a separate sandbox, and return when nothing of it is left.

    Args:
        code: The program.
        stdin: What it reads from standard input.
        limits: What it may use.
        modules: Source of modules that it can import, by name.
        starter: What starts the sandbox, for several sandboxes one after another, or None for a new one.

    Returns:
        What the program did. No fault of the program raises.

    Raises:
        SandboxUnavailable: the machine does not permit a sandbox. The code was not run.
        SandboxError: the sandbox failed. What the code did is unknown.
    """
    limits = limits or SandboxLimits()
    sources = {**(modules or {}), "main": code}
    if not all(name.isidentifier() and name.isascii() for name in sources):
        raise ValueError(f"modules must have plain names, got {sorted(sources)}")
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        starter = starter or stack.enter_context(SandboxStarter())
        ends = stack.enter_context(starter.start(_request(sources, limits)))
        transfer = _Transfer(ends, stdin.encode("utf-8", "replace"), limits.output_kib * 1024)
        timed_out = transfer.run(limits.timeout_s)
    end = _check_report(transfer.report, timed_out)
    wait_status = end.get("wait_status")
    code_or_signal = os.waitstatus_to_exitcode(wait_status) if wait_status is not None else -9
    stderr = transfer.stderr.text()
    return SandboxResult(
        stdout=transfer.stdout.text(),
        stderr=stderr,
        exit_code=code_or_signal if code_or_signal >= 0 else None,
        signal=-code_or_signal if code_or_signal < 0 else None,
        timed_out=timed_out,
        out_of_memory=bool(end.get("out_of_memory")) or (code_or_signal == 1 and _ends_with_memory_error(stderr)),
        stdout_discarded=transfer.stdout.discarded,
        stderr_discarded=transfer.stderr.discarded,
        wall_s=time.monotonic() - started,
        program_s=limits.timeout_s if timed_out else end["program_s"],
    )


@cache
def check_sandbox() -> None:
    """Verifies, by a program, that this machine permits a sandbox and that it isolates.

    Raises:
        SandboxUnavailable: it does not; the message gives the remedy.
    """
    if sys.platform != "linux" or not is_supported():
        raise SandboxUnavailable(f"the sandbox needs Linux on x86-64 or arm64, not {sys.platform} {platform.machine()}")
    release = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in platform.release().split(".")[:2])
    if release < _OLDEST_KERNEL:
        raise SandboxUnavailable(f"the sandbox needs Linux 5.14 or newer, not {platform.release()}")
    result = run_python(_PROBE, limits=SandboxLimits(timeout_s=20.0, processes=4))
    try:
        facts = json.loads(result.stdout)
    except ValueError:
        raise SandboxUnavailable(f"a program in the sandbox failed: {result.stderr[-400:] or result}") from None
    unsafe = _find_leaks(facts)
    if unsafe:
        raise SandboxUnavailable(f"the sandbox does not isolate on this machine: {'; '.join(unsafe)}")


def sandbox_problem() -> str:
    """Why this machine permits no sandbox, and what to change; empty if it permits one."""
    try:
        check_sandbox()
    except SandboxError as error:
        return str(error)
    return ""


def _find_leaks(facts: dict[str, Any]) -> list[str]:
    """What the probe found that it should not have found."""
    shown = {"bin", "dev", "etc", "lib", "lib32", "lib64", "nix", "proc", "program", "sbin", "tmp", "usr"}
    shown |= {Path(folder).parts[1] for folder in _interpreter(packages=False)[1]}
    found = {
        "it has capabilities": any(int(facts[key], 16) for key in ("CapEff", "CapBnd", "CapPrm")),
        "it may gain privileges": facts["NoNewPrivs"] != "1",
        "it has no seccomp filter": facts["Seccomp"] != "2",
        "it is another user than intended": set(facts["Uid"].split()) != {"1000"},
        "it sees a network": set(facts["interfaces"]) - {"lo"},
        "the process limit does not bind": facts["children"] > 3,
        f"it sees {set(facts['root']) - shown}": set(facts["root"]) - shown,
    }
    return [text for text, wrong in found.items() if wrong]


@cache
def _interpreter(packages: bool) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Path of the interpreter, the folders that it needs, and those with packages. Raises SandboxUnavailable."""
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    if not any(Path(executable).is_relative_to(prefix) for prefix in prefixes):
        prefixes.add(os.path.dirname(executable))
    found = dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    libraries = tuple(found) if packages else ()
    folders = [folder for folder in (*sorted(prefixes), *libraries) if not Path(folder).is_relative_to("/usr")]
    folders = [one for one in folders if not any(one != other and Path(one).is_relative_to(other) for other in folders)]
    home = Path(os.path.realpath(Path.home()))
    for folder in folders:
        if home.is_relative_to(folder) or folder == "/":
            raise SandboxUnavailable(f"the interpreter's folder {folder} contains the home folder {home}")
    return executable, tuple(folders), libraries


_MAIN = """\
import site, sys
site.setquit(); site.setcopyright(); site.sethelper()
sys.argv[0] = __file__ = "/program/main.py"
del site, sys
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""
"""Runs the program with what `site` defines (`exit`, `quit`, `help`, ...): -S leaves it out with the packages."""


def _request(sources: Mapping[str, str], limits: SandboxLimits) -> dict[str, Any]:
    executable, folders, libraries = _interpreter(limits.packages)
    path = os.pathsep.join(["/program", *libraries])
    return {
        "command": [executable, "-P", "-s", "-S", "-c", _MAIN],
        "environment": {**_ENVIRONMENT, "PYTHONPATH": path},
        "folders": folders,
        "modules": dict(sources),
        "limits": asdict(limits),
    }


def _ends_with_memory_error(stderr: str) -> bool:
    lines = stderr.splitlines()
    return bool(lines) and lines[-1].partition(":")[0] == "MemoryError"


@dataclass(frozen=True)
class _Ends:
    """This side of the (unbuffered) pipes of a sandbox."""

    stdin: FileIO
    stdout: FileIO
    stderr: FileIO
    status: FileIO
    """What `troupe.workers.agents.sandbox.inside` reports; closed when nothing of the sandbox is left."""
    owner: FileIO
    """Closing it kills everything in the sandbox."""


class SandboxStarter:
    """A process that makes sandboxes one after another, which saves the start of an interpreter for each.

    The sandboxes share nothing: each has separate namespaces and a separate file system. A context manager, for one
    thread at a time.
    """

    def __enter__(self) -> Self:
        """Start the process."""
        self._requests, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={},
                    cwd="/",
                )
            except BaseException:
                self._requests.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)  # a process that was forked since may have a copy
        self._requests.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def start(self, request: dict[str, Any]) -> Iterator[_Ends]:
        """Start a sandbox. What is left of it is killed at the end of the block. Raises SandboxError if the process has
        ended."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                file = theirs.enter_context(open(os.memfd_create("request"), "wb", buffering=0))
                file.write(json.dumps(request).encode())
                file.seek(0)
                pipes = [_pipe(ours, theirs, kept) for kept in ("wb", "rb", "rb", "rb", "wb")]
                try:
                    socket.send_fds(self._requests, [b"x"], [file.fileno(), *(given for _, given in pipes)])
                except OSError as error:
                    raise SandboxError(f"the process that makes sandboxes has ended: {error}") from error
            yield _Ends(*(kept for kept, _ in pipes))


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack, kept: str) -> tuple[FileIO, int]:
    """A pipe: the end that is kept, opened in the mode `kept`, and the other."""
    read, write = os.pipe()
    mine, given = (read, write) if kept == "rb" else (write, read)
    theirs.callback(os.close, given)
    return ours.enter_context(FileIO(mine, kept)), given


class _Kept:
    """The part of an output that is kept: its start, or its end."""

    def __init__(self, limit: int, end: bool) -> None:
        self._limit, self._end = limit, end
        self._kept = bytearray()
        self.discarded = 0

    def add(self, chunk: bytes) -> None:
        excess = max(0, len(self._kept) + len(chunk) - self._limit)
        self.discarded += excess
        if self._end:
            self._kept += chunk
            del self._kept[:excess]
        else:
            self._kept += chunk[: len(chunk) - excess]

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


class _Transfer:
    """Feeds a program and collects what it writes, until its sandbox has ended."""

    def __init__(self, ends: _Ends, stdin: bytes, limit: int) -> None:
        self.stdout, self.stderr = _Kept(limit, end=False), _Kept(limit, end=True)
        self.report: dict[str, Any] = {}
        self._ends = ends
        self._stdin = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        actions = {ends.stdout: self.stdout.add, ends.stderr: self.stderr.add, ends.status: self._add_report}
        for stream, action in {ends.stdin: self._feed, **actions}.items():
            os.set_blocking(stream.fileno(), False)
            kind = selectors.EVENT_WRITE if stream is ends.stdin else selectors.EVENT_READ
            self._selector.register(stream.fileno(), kind, action)

    def run(self, timeout_s: float) -> bool:
        """Transfer until the sandbox has ended, at the end of the status pipe; returns whether the time limit ended the
        program. Waits for the start of the program, `_START_S` at most; for the program, until its time is up; then for
        the end of the processes that were killed. Raises SandboxError if the sandbox did not start, or did not end."""
        deadline = time.monotonic() + _START_S
        started = cut = False
        status = self._ends.status.fileno()
        with self._selector:
            while status in self._selector.get_map():
                if self.report and not started:
                    started, deadline = True, time.monotonic() + timeout_s
                left = deadline - time.monotonic()
                if left <= 0:
                    if not started:
                        raise SandboxError(
                            f"the sandbox did not start within {_START_S:g} s: the machine is overloaded"
                        )
                    if cut:
                        raise SandboxError("the sandbox did not end after it was killed")
                    cut = True
                    deadline = time.monotonic() + _GRACE_S
                    self._ends.owner.close()
                self._step(max(0.0, left))
            while set(self._selector.get_map()) and self._step(0.0):  # the rest in the pipes
                pass
        return cut and "wait_status" not in self.report

    def _step(self, timeout_s: float) -> bool:
        """Handle what is ready. Returns whether anything was."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data == self._feed:
                self._feed(key.fd)
                continue
            try:
                chunk = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            if chunk:
                key.data(chunk)
            else:
                self._selector.unregister(key.fd)
        return bool(ready)

    def _feed(self, descriptor: int) -> None:
        try:
            self._stdin = self._stdin[os.write(descriptor, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._selector.unregister(descriptor)
            self._ends.stdin.close()

    def _add_report(self, chunk: bytes) -> None:
        for line in chunk.splitlines():  # whole lines: each is one small write
            self.report |= json.loads(line)


def _check_report(report: dict[str, Any], timed_out: bool) -> dict[str, Any]:
    """What the sandbox reported. Raises SandboxUnavailable, or SandboxError without the program's end."""
    if "failure" in report:
        raise _explain(report)
    if not timed_out and "wait_status" not in report:
        raise SandboxError("the sandbox ended without a result: a process of it was killed from outside")
    return report


def _explain(message: dict[str, Any]) -> SandboxError:
    """The error of a step that failed, with what to change."""
    step, failure = str(message["step"]), str(message["failure"])
    if step == "raise the memory limit":
        return SandboxError(
            "memory_mib is above the limit of the process that calls the sandbox: lower it, or raise "
            "roles.reward.memory_limit_mib"
        )
    if step in ("fork", "start the program"):
        return SandboxError(f"the sandbox could not start a program: {failure}")
    hint = _PROC_ADVICE if step.startswith("mount proc") else _NAMESPACE_ADVICE
    return SandboxUnavailable(f"the sandbox is not permitted here: {failure}; {hint}")
