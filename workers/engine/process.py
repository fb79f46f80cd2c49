"""The processes of a vLLM engine: they and their temporary files end with the worker, also after kill -9.

By default vLLM spawns them: two imports of vLLM, one after the other, each some seconds of a core. On the CPU the
engine is forked from a fork server, a process without engine, event loop or model that has imported vLLM. It is a fork
of the worker if that is one itself (`workers/preload/`), so that one import serves all; otherwise it imports vLLM at
the same time as the worker.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import multiprocessing
import os
import secrets
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, shared_memory, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from troupe.workers.contract.config_base import Device
from troupe.workers.isolation.compiled_code import keep_compiled_code
from troupe.workers.isolation.lifetime import exit_with, remove_at_death
from troupe.workers.telemetry.process_end import ended_by, log_of

_CORE = "vllm.v1.engine.core"
IMPORTED_AHEAD = [_CORE, "vllm.v1.worker.cpu_worker"]
FRONT_END = "vllm.v1.engine.async_llm"
"""Module that an engine's worker also imports."""
_NO_COLLECTIONS = "troupe.workers.engine.no_collections"
THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Environment variable with the compute threads of a process."""
OWNER_VARIABLE = "TROUPE_ENGINE_OWNER"
"""Environment variable with the process id of the rollout worker that owns the engine's processes."""
FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable with the folder of its sockets."""
_UNKNOWN = 255
"""Exit code that multiprocessing gives a process whose fork server has ended with it."""
_spawn: Callable[..., int] = util.spawnv_passfds
"""How multiprocessing starts a process with a command."""


def import_ahead() -> None:
    """Start a fork server that imports vLLM, if there is none. Set the environment that vLLM reads first."""
    multiprocessing.set_forkserver_preload([_NO_COLLECTIONS, *IMPORTED_AHEAD])
    with _temporary_files_in(temporary_folder()):  # its socket
        forkserver.ensure_running()


def fork_server() -> None:
    """Make a fork of this process, with all imports, the fork server. Raises RuntimeError if it has other threads: a
    lock that one holds would stay locked."""
    if threads := len(os.listdir("/proc/self/task")) - 1:
        raise RuntimeError(f"a process with {threads} more threads cannot be forked")
    multiprocessing.set_forkserver_preload([])
    resource_tracker.ensure_running()  # spawned, as the fork server would start it
    util.spawnv_passfds = _fork
    try:
        with _temporary_files_in(temporary_folder()):
            forkserver.ensure_running()
    finally:
        util.spawnv_passfds = _spawn


def _fork(_: object, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Serve in a fork that has these descriptors, as the command of a fork server would: `python -c 'main(...)'`."""
    if pid := os.fork():
        return pid
    try:
        util.spawnv_passfds = _spawn  # an engine spawns its ranks
        close_descriptors(but=descriptors)
        _serve(command[-1])
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def close_descriptors(but: Collection[int]) -> None:
    """Close all descriptors except the standard streams and these."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > sys.stderr.fileno() and descriptor not in but:
            with suppress(OSError):  # the listing's own descriptor
                os.close(descriptor)


def _serve(code: str) -> None:
    """Call `multiprocessing.forkserver.main` with the arguments in the code of its command, which are literals."""
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    (keywords,) = call.keywords
    forkserver.main(*map(ast.literal_eval, call.args), **ast.literal_eval(keywords.value))


class _ForkedProcess(ForkServerProcess):
    """A process with the environment and logs of the one that starts it, not of the older fork server."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        self._logs = {descriptor: str(log) for descriptor in (1, 2) if (log := log_of(descriptor))}
        super().start()

    def run(self) -> None:
        for descriptor, log in self._logs.items():
            with suppress(OSError), open(log, "ab") as file:
                os.dup2(file.fileno(), descriptor)
        # Only what differs: resetting a variable hides the memory that holds the process title.
        os.environ |= dict(self._environment.items() - os.environ.items())
        _run(super().run)


class _SpawnedProcess(SpawnProcess):
    def run(self) -> None:
        _run(super().run)


@contextmanager
def engine_processes(device: Device) -> Iterator[list[BaseProcess]]:
    """Inside the block vLLM's engines end with this process, and CPU engines are forked. Yields the processes."""
    utils: Any = import_module("vllm.v1.engine.utils")
    original = utils.get_mp_context
    context: Any = ForkServerContext() if device == "cpu" else SpawnContext()
    create = _ForkedProcess if device == "cpu" else _SpawnedProcess
    processes: list[BaseProcess] = []

    def record(*args: Any, **kwargs: Any) -> BaseProcess:
        processes.append(create(*args, **kwargs))
        return processes[-1]

    context.Process = record
    utils.get_mp_context = lambda: context
    try:
        yield processes
    finally:
        utils.get_mp_context = original


def how_ended(processes: Sequence[BaseProcess]) -> str:
    """Signal or exit code of the first of these processes that has ended, or empty if it is unknown."""
    codes = (process.exitcode for process in processes)
    return next((ended_by(code) for code in codes if code not in (None, _UNKNOWN)), "")


@cache
def temporary_folder() -> str:
    """A private folder that is removed when this process ends. vLLM itself leaves its sockets in the shared one."""
    folder = tempfile.mkdtemp(prefix="troupe-")
    remove_at_death(folder)
    return folder


@cache
def die_with_owner() -> None:
    """Exit, with the processes in between, when the rollout worker named in the environment ends: vLLM's engine core
    outlives a killed parent. What this process shares from now on is named after the owner
    (`private_shared_memory`)."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    exit_with(owner, _ancestors_below(owner))
    prefix = f"/{_shared_by(owner)}"
    for name, value in {"_SHM_NAME_PREFIX": prefix, "_SHM_SAFE_NAME_LENGTH": len(prefix) + 16}.items():
        setattr(shared_memory, name, value)


@cache
def private_shared_memory() -> None:
    """Name the semaphores of multiprocessing, also of children, after this process; remove them and what its engine
    shares when it ends. The process that would remove them is killed together with a lost worker."""
    prefix = f"troupe-{os.getpid()}"
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{prefix}"
    remove_at_death(f"/dev/shm/sem.{prefix}-", prefix=True)
    remove_at_death(f"/dev/shm/{_shared_by(os.getpid())}", prefix=True)


def _shared_by(owner: int) -> str:
    """Beginning of the names of what an engine's processes share."""
    return f"troupe.{owner}."


def _name_ranks() -> None:
    """Name the file by which the ranks of an engine on the CPU meet after the owner."""
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is None or _CORE not in sys.modules:  # the process runs no engine
        return
    from vllm.v1.executor import multiproc_executor

    setattr(  # noqa: B010  # bound in the module that calls it
        multiproc_executor,
        "get_file_store_init_method",
        lambda: f"file://{tempfile.gettempdir()}/{_shared_by(int(owner))}{secrets.token_hex(8)}",
    )


def _ancestors_below(owner: int) -> list[int]:
    """Processes between this one and its ancestor `owner`; empty if `owner` is no ancestor."""
    between: list[int] = []
    pid = os.getppid()
    while pid > 1:
        if pid == owner:
            return between
        between.append(pid)
        with open(f"/proc/{pid}/stat", "rb") as stat:
            pid = int(stat.read().rpartition(b")")[2].split()[1])
    return []


def use_threads() -> None:
    """Compute with the threads of the environment: in a fork, OpenMP has read the parent's environment."""
    torch: Any = import_module("torch")
    threads = os.environ.get(THREADS_VARIABLE, "")
    if threads.isdecimal() and torch.get_num_threads() != int(threads):
        torch.set_num_threads(int(threads))


def progress_without_semaphore() -> None:
    """Let progress bars of this process use a lock of threads, not a named semaphore, which an engine that is ended
    does not remove, so that multiprocessing warns of it."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _run(target: Callable[[], None]) -> None:
    """Run an engine so that no process and no temporary file of it outlives the worker."""
    faulthandler.enable(all_threads=False)
    die_with_owner()  # vLLM waits minutes for a worker that has ended, before it imports anything of ours
    gc.freeze()  # a collection neither walks nor copies the memory that the engine shares with the fork server
    gc.enable()
    use_threads()
    progress_without_semaphore()
    _name_ranks()
    keep_compiled_code()
    with _temporary_files_in(os.environ[FOLDER_VARIABLE]):
        target()


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    original, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = original
