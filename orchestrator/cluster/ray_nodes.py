"""Starts or joins a Ray cluster and lists the resources of its nodes."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook, services, worker
from ray._private import utils as ray_utils
from ray._private.node import Node as RayNode
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node
from ray.autoscaler._private.util import format_readonly_node_type
from ray.exceptions import RayError
from ray.experimental import internal_kv

from troupe.orchestrator.cluster.ray_environment import (
    ADDRESS_VARIABLE,
    LOCAL_SETTINGS,
    SETTINGS,
    TABLE_SETTINGS,
    address_problem,
    sockets_problem,
    temporary_folder,
)
from troupe.orchestrator.errors import ClusterUnreachable
from troupe.orchestrator.plan.placement import GPU_GIB, Node
from troupe.orchestrator.signals import held_back
from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic
from troupe.workers.preload import setup_worker

logger = logging.getLogger(__name__)

_INIT: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
_CONNECT_TIMEOUT_S = 10.0
_SLOW_START = "timed out during startup"
"""Part of Ray's error when a process needs more than 30 s to start; this limit cannot be configured."""
_ORDERLY_END = "Raylet received SIGTERM"
"""Words that Ray's agents look for in the log of the raylet."""
_LONGEST_REASON = 1000
"""Characters."""
_GPU_TYPE = "accelerator_type:"
"""Prefix of the Ray resource that names a node's GPU type."""


_SHARED_MEMORY = Path("/dev/shm")
_LEAST_FREE = 16 << 20
"""Free space without which Ray's processes die one by one at their start."""


def full_disks(sessions: Path) -> Iterator[str]:
    """Shared memory, and the folder of Ray's sessions, if they lack room: what is free and needed, and the remedy."""
    remedies = {
        _SHARED_MEMORY: "free some space there (files of runs that were killed: `ls -l /dev/shm`)",
        sessions: "free some space there, or set RAY_TMPDIR to a short path on another disk",
    }
    for folder, remedy in remedies.items():
        there = next(one for one in (folder, *folder.parents) if one.exists())  # Ray creates its folder
        if (free := shutil.disk_usage(there).free) < _LEAST_FREE:
            yield f"{folder} has {free >> 20} MiB free; its files take at least {_LEAST_FREE >> 20}: {remedy}"


def start(cpus: int) -> Path:
    """Starts a cluster on this machine, with Ray's token authentication; returns its session folder. Raises
    ClusterUnreachable, also without shared memory or room for sockets."""
    if wrong := sockets_problem(temporary_folder()):
        raise ClusterUnreachable(f"Ray cannot start: {wrong}")
    if not (_SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)):
        raise ClusterUnreachable(
            f"{_SHARED_MEMORY} is missing or cannot be written, and neither Ray nor vLLM starts without it: in a "
            f"container use `docker run --shm-size=1g`, else `mount -t tmpfs tmpfs {_SHARED_MEMORY}`"
        )
    for full in full_disks(Path(temporary_folder())):
        raise ClusterUnreachable(f"Ray cannot start: {full}")
    _configure(SETTINGS | LOCAL_SETTINGS)
    _create_token()
    context = _start(cpus)
    _protect_token()
    session = Path(context.address_info["session_dir"])
    _let_agents_end(session)
    return session


def join(address: str) -> Path:
    """Connects to a running cluster; returns its session folder. Raises ClusterUnreachable."""
    _configure(SETTINGS)
    host, colon, port = address.rpartition(":")
    given = "--address" if address != os.environ.get(ADDRESS_VARIABLE) else ADDRESS_VARIABLE
    if wrong := address_problem(address):
        raise ClusterUnreachable(f"{given} {address} {wrong}")
    try:
        if colon:  # ray.init would retry for many minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        with held_back():
            context: Any = ray.init(address=address, **_INIT)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ClusterUnreachable(f"{given} {address}: no Ray cluster to join: {one_line(error)}") from error
    return Path(context.address_info["session_dir"])


def connected() -> Path | None:
    """Session folder of the cluster that this process is connected to, or None."""
    if not ray.is_initialized():
        return None
    _configure({})
    node: Any = worker._global_node
    return Path(node.get_session_dir_path())


def nodes_at(address: str) -> list[Node]:
    """Nodes of a running cluster. Reserves and starts nothing; raises ClusterUnreachable."""
    join(address)
    try:
        return nodes()
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """Live nodes with their total resources."""
    return _nodes(ray.nodes())


def free() -> list[Node]:
    """Live nodes with the resources that are not reserved."""
    left = available_resources_per_node()
    return _nodes([{**node, "Resources": left.get(node["NodeID"], {})} for node in ray.nodes()])


def fixed() -> bool:
    """Whether it is known that no autoscaler adds nodes: Ray's monitor gives each node a separate type if nodes are
    started by hand. False if no monitor reports, as under an autoscaler of another program."""
    report: Any = internal_kv._internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    types: dict[str, str] = json.loads(report or "{}").get("autoscaler_report", {}).get("node_type_mapping") or {}
    return bool(types) and all(kind == format_readonly_node_type(node) for node, kind in types.items())


def one_line(error: BaseException) -> str:
    """Type and message of an error in one line, shortened to `_LONGEST_REASON` characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON)


def _configure(settings: Mapping[str, str]) -> None:
    """Sets the environment that Ray's processes inherit, and how this process pickles tables."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ |= TABLE_SETTINGS
    auto_init_hook.enable_auto_connect = False  # a call after the end of a run would start another cluster
    pickle_tables()


def _start(cpus: int, tries: int = 3) -> Any:
    """Starts Ray, again if one of its processes was too slow to start, up to `tries` times."""
    try:
        with _own_process_groups(), _without_unused_processes(), _with_own_setup(), held_back():
            return ray.init(num_cpus=cpus, include_dashboard=False, **_INIT)
    except Exception as error:  # Ray raises a bare Exception if one of its processes does not start
        if _SLOW_START in str(error) and tries > 1:
            logger.warning("Ray did not start within 30 s because the machine is busy; trying again")
            ray.shutdown()
            return _start(cpus, tries - 1)
        raise ClusterUnreachable(f"Ray could not be started on this machine: {one_line(error)}") from error


class _OwnGroup(services.ConsolePopen):
    """A process of Ray in a separate process group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group=0, **kwargs)


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Keeps signals to the run's process group (a closed terminal, `scancel`) from Ray's processes, which the run
    needs to save; the kernel ends them with the run. Nor does Ray handle SIGTERM of this process."""
    before, services.ConsolePopen = services.ConsolePopen, _OwnGroup
    handler, ray_utils.set_sigterm_handler = ray_utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        services.ConsolePopen = before
        ray_utils.set_sigterm_handler = handler


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Ray starts no dashboard, autoscaler or log monitor, and no services of the dashboard in the node's agent:
    `ray.init` waits until the dashboard has imported its libraries even without `include_dashboard`, and would
    import them in this process to look for the agent's."""
    unused = ("start_api_server", "start_monitor", "start_log_monitor")
    before = {name: getattr(RayNode, name) for name in unused}
    for name in unused:
        setattr(RayNode, name, lambda *_, **__: None)
    look, ray_utils.get_dashboard_dependency_error = ray_utils.get_dashboard_dependency_error, ImportError
    try:
        yield
    finally:
        ray_utils.get_dashboard_dependency_error = look
        for name, method in before.items():
            setattr(RayNode, name, method)


@contextmanager
def _with_own_setup() -> Iterator[None]:
    """Ray's node starts its workers by `workers/preload/setup_worker.py`."""
    ray_node: Any = RayNode
    before = ray_node.start_raylet

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> None:
        node._ray_params.setup_worker_path = setup_worker.__file__
        before(node, *args, **kwargs)

    ray_node.start_raylet = start_raylet
    try:
        yield
    finally:
        ray_node.start_raylet = before


def _let_agents_end(session: Path) -> None:
    """Keeps Ray's agents from outliving a local cluster that is killed: without the words of an orderly end in the
    raylet's log, they report its end to Ray's head for a minute, also if that is dead."""
    with (session / "logs" / "raylet.out").open("a") as log:
        log.write(f"Written by Troupe, so that Ray's agents do not outlive the raylet: {_ORDERLY_END}\n")


def _nodes(listed: Sequence[dict[str, Any]]) -> list[Node]:
    """Live nodes, named by address; if several share an address, by address and id."""
    alive = [node for node in listed if node["Alive"]]
    count = Counter(node["NodeManagerAddress"] for node in alive)
    return [_node(node, shared=count[node["NodeManagerAddress"]] > 1) for node in alive]


def _node(node: dict[str, Any], *, shared: bool) -> Node:
    """A node from Ray's description, which names the type of its GPUs but not their memory."""
    resources: dict[str, float] = node["Resources"]
    kinds = (key.removeprefix(_GPU_TYPE) for key in resources if key.startswith(_GPU_TYPE))
    # Ray itself may name a larger GPU (A100) than the one that the node was started with (A100-40G).
    gpu = min((GPU_GIB[kind] for kind in kinds if kind in GPU_GIB), default=0.0)
    host = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}" if shared else node["NodeManagerAddress"]
    return Node(name, cpus, gpus, int(host), int(gpu * 2**30), node["Labels"], id=node["NodeID"])


def _create_token() -> None:
    """Creates Ray's token, unless it exists, for its owner only: Ray would create it readable by everyone."""
    token = Path.home() / ".ray" / "auth_token"
    if token.exists() or {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    scratch = token.with_name(f".auth_token-{os.getpid()}")
    with suppress(OSError):  # Ray reports what is wrong with the folder; or another run was faster
        token.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(scratch, secrets.token_hex(32), PRIVATE)
        os.link(scratch, token)  # whole, or not at all
    with suppress(OSError):
        scratch.unlink()


def _protect_token() -> None:
    """Makes Ray's token file, which Ray creates world-readable, readable by its owner only."""
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if token.is_file():
        token.chmod(0o600)
