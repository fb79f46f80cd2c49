"""`troupe` in forks of a process that has imported what a run imports, and its import server in forks of another one.

Each command would spend three CPU seconds on its imports, and each run six on those of its workers. Here two processes
for each process of the tests import them; another one answers the probes of prompts (`warm_probes.py`). Runs without
engines have an import server, too. All else is the command as a user types it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from tests import fork_server, warm_probes
from tests.real.warm_nodes import TEMPLATE
from troupe.workers.contract.config import EngineProcess

ROOT = Path(__file__).resolve().parents[2]
MARKER_VARIABLE = "TROUPE_TEST_RUN"
"""Environment variable that marks a command and everything that it starts."""
FAR_VARIABLE = "TROUPE_TEST_FAR"
"""Environment variable of commands whose engines are as on another host; unset or empty for others."""
_UNMARKED = "0" * 32
ENGINE = EngineProcess(device="cpu", threads=1, enforce_eager=True)
"""The engine of most runs of tests."""
_MODULES = (
    *("troupe.orchestrator.runs.training", "troupe.orchestrator.runs.rollouts", "troupe.orchestrator.runs.parts"),
    *("troupe.orchestrator.cluster.ray_cluster", "troupe.orchestrator.cluster.worker_server", "reasoning_gym"),
    *("troupe.orchestrator.insight.report.report", "troupe.orchestrator.commands.runs"),
    *("pandas", "ray.dag", "ray.experimental.channel", "torch", "transformers"),
)
"""What commands import beside the command line."""


def start(arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[bytes]]) -> fork_server.Forked:
    """Start `troupe` with these arguments and this environment, which names its mark.

    Args:
        arguments: Its arguments.
        environment: Its environment variables.
        streams: Standard input, standard output and standard error.
    """
    request = {"arguments": arguments, "environment": {**environment, **template(), **warm_probes.server()}}
    return fork_server.Forked(_commands(), request, [stream.fileno() for stream in streams])


@contextmanager
def forked_import_servers() -> Iterator[None]:
    """While the block runs, the import servers of this process's runs are forks, too."""
    servers = "troupe.orchestrator.cluster.worker_server.subprocess"
    with mock.patch.dict(os.environ, template()), mock.patch(servers, _FORKING):
        yield


@cache
def template() -> dict[str, str]:
    """Start the process that import servers are forks of; the environment of what starts such servers."""
    return {TEMPLATE: fork_server.start("tests.real.warm:serve_template", _unmarked())}


@cache
def _commands() -> str:
    """Start the process that commands are forks of, and return the path of its socket."""
    return fork_server.start("tests.real.warm:serve_commands", _unmarked())


def _unmarked() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTEST_CURRENT_TEST", "RAY_ADDRESS")}
    return {**own, MARKER_VARIABLE: _UNMARKED}


def serve_template(listening: str, owner_pipe: str) -> None:
    """Import as an import server does, and fork one for every run."""
    from troupe.workers.preload.server import import_ahead

    import_ahead(ENGINE)
    fork_server.serve(listening, owner_pipe, _become_server)


def serve_commands(listening: str, owner_pipe: str) -> None:
    """Import what commands import, and fork a process for every command."""
    from troupe.orchestrator.cli import COMMANDS, load
    from troupe.orchestrator.cluster.ray_environment import TABLE_SETTINGS

    os.environ |= TABLE_SETTINGS
    for name, entry in COMMANDS.items():
        load(name, entry.home)
    for module in _MODULES:
        import_module(module)
    fork_server.serve(listening, owner_pipe, _become_command, with_caller=True)


def _become_server(request: dict[str, Any], listener: int, owner: int, errors: int) -> None:
    """Serve as the import server of a run."""
    os.setsid()
    environment: dict[str, str] = request["environment"]
    _mark(environment.get(MARKER_VARIABLE, _UNMARKED))
    fork_server.take_over(environment, str(ROOT), {2: errors})
    sys.path[:] = json.loads(request["path"])
    _use_python_path()
    module, function = request["entry"].split(":")
    vars(import_module(module))[function](str(listener), str(owner), request["engine"])


def _become_command(request: dict[str, Any], *streams: int) -> None:
    """Run a command."""
    os.setsid()
    environment: dict[str, str] = request["environment"]
    _mark(environment[MARKER_VARIABLE])
    fork_server.take_over(environment, str(ROOT), dict(enumerate(streams)))
    for number in (signal.SIGHUP, signal.SIGINT):  # as in a terminal, also where the tests run under `nohup`
        signal.signal(number, signal.SIG_DFL)
    sys.argv = ["troupe", *request["arguments"]]
    _use_python_path()
    from troupe.__main__ import main
    from troupe.orchestrator.roles.table import ROLES

    # Ray has read its variables at the import; it sets RAY_AUTH_MODE where it starts, which tests themselves do too.
    import_module("ray._raylet").Config.initialize("")
    _use_template()
    warm_probes.use()
    if os.environ.get(FAR_VARIABLE):
        ROLES["rollout"] = replace(ROLES["rollout"], worker="tests.pairs.far_engine:FarRolloutWorker")
    main()


def _use_python_path() -> None:
    """Search the folders of PYTHONPATH first, and import their `sitecustomize`, as an interpreter does at its start."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    if any((Path(folder) / "sitecustomize.py").is_file() for folder in folders):
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")


def _use_template() -> None:
    """Fork the import servers of this process from the template, and start one for runs without engines, too."""
    from troupe.orchestrator.cluster import worker_server
    from troupe.orchestrator.cluster.ray_cluster import Cluster
    from troupe.orchestrator.cluster.ray_environment import cluster_to_join

    fork_import_servers()
    connect = Cluster.connect

    def connected(needed: Any, address: str | None = None, server: Any = None) -> Cluster:
        if server is None and cluster_to_join(address) is None:
            server = worker_server.WorkerServer(ENGINE)
        return connect(needed, address, server)

    patched: Any = Cluster
    patched.connect = connected


def fork_import_servers() -> None:
    """From now on the import servers of this process are forks, if the environment names their template."""
    if os.environ.get(TEMPLATE):
        from troupe.orchestrator.cluster import worker_server

        patched: Any = worker_server
        patched.subprocess = _FORKING


def _mark(mark: str) -> None:
    """Make the mark visible in the environment that the kernel shows of this process and of its forks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    place = ctypes.string_at(start, end - start).index(f"{MARKER_VARIABLE}={_UNMARKED}".encode())
    ctypes.memmove(start + place + len(MARKER_VARIABLE) + 1, mark.encode(), len(_UNMARKED))


def _start(command: list[str], **options: Any) -> Any:
    """Start the import server of a run: a fork, unless its imports would be others."""
    engine = EngineProcess.model_validate_json(command[-1])
    if engine.device != "cpu" or not engine.enforce_eager:  # the template's imports have disabled compilation
        return subprocess.Popen(command, **options)
    path, entry, *_ = command[-5:]
    request = {"path": path, "entry": entry, "engine": command[-1], "environment": options["env"]}
    descriptors = [*options["pass_fds"], options["stderr"].fileno()]
    return fork_server.Forked(os.environ[TEMPLATE], request, descriptors)


_FORKING: Any = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
"""What starts an import server, instead of `subprocess`."""
