"""Ray itself: started on this machine or joined, and what its nodes have."""

from __future__ import annotations

import logging
import os
import socket
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from orchestrator.errors import ClusterUnreachable
from orchestrator.placement import GPU_GIB, Node

log = logging.getLogger(__name__)

_INIT: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "troupe"}
OWN_TABLES = {"RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1"}
"""Tables are pickled as `workers.tables` says, in every process of ours."""
_CONNECT_TIMEOUT_S = 10.0
_SLOW_START = "timed out during startup"
"""Ray gives its processes 30 s, and cannot be told to give them more."""
_LONGEST_REASON = 1000
_GPU_TYPE = "accelerator_type:"
"""What Ray calls the resource that names a node's GPUs."""


_SETTINGS = {
    # A failed call is raised where its summary is awaited; the table's own copy of the error is no news.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Ray lowers the priority of its workers; here they are the ones who do the work.
    "RAY_worker_niceness": "0",
    # Nor are workers started ahead: each of ours has an environment, and gets a process of its own.
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment of Ray's processes, where the user has not said otherwise."""
_OWN_SETTINGS = {
    # Nobody asks a cluster of our own for Ray's metrics and task lists, which every process collects.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""The same, of a cluster that is started here."""


def start(cpus: int) -> Path:
    """Start a cluster of our own on this machine; returns the folder of its session. Raises ClusterUnreachable.

    Ray's token authentication (its default for local clusters) guards the ports it listens on.
    """
    _settle(_SETTINGS | _OWN_SETTINGS)
    context = _start(cpus)
    _protect_token()
    _end_idlers()
    return Path(context.address_info["session_dir"])


def join(address: str) -> Path:
    """Connect to a running cluster; returns the folder of its session. Raises ClusterUnreachable."""
    _settle(_SETTINGS)
    host, colon, port = address.rpartition(":")
    if "//" in address or (colon and not port.isdecimal()):
        raise ClusterUnreachable(f"--address {address}: expected HOST:PORT of a Ray head, or auto")
    try:
        if colon:  # Ray itself would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        context: Any = ray.init(address=address, **_INIT)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ClusterUnreachable(f"--address {address}: no Ray cluster to join: {one_line(error)}") from error
    return Path(context.address_info["session_dir"])


def nodes() -> list[Node]:
    """Live nodes with their total resources."""
    return _nodes(ray.nodes())


def free() -> list[Node]:
    """Live nodes with what nobody has reserved."""
    left = available_resources_per_node()
    return _nodes([{**node, "Resources": left.get(node["NodeID"], {})} for node in ray.nodes()])


def one_line(error: BaseException) -> str:
    """Type and text of an error."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON)


def _settle(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ |= OWN_TABLES


def _start(cpus: int, tries: int = 3) -> Any:
    try:
        return ray.init(num_cpus=cpus, include_dashboard=False, **_INIT)
    except Exception as error:  # Ray raises a bare Exception where one of its processes does not come up
        if _SLOW_START in str(error) and tries > 1:
            log.warning("Ray did not come up within its own bound, the machine is busy: once more")
            ray.shutdown()
            return _start(cpus, tries - 1)
        raise ClusterUnreachable(f"Ray could not be started on this machine: {one_line(error)}") from error


def _end_idlers() -> None:
    """End what a cluster of our own has no use for: Ray's dashboard, its autoscaler, and what reads all logs to send
    them to drivers. On two cores they take a seventieth of one even while nothing happens, in the engine's way."""
    node: Any = worker._global_node
    for end in (node.kill_dashboard, node.kill_monitor, node.kill_log_monitor):
        end(check_alive=False)


def _nodes(told: Sequence[dict[str, Any]]) -> list[Node]:
    """Live nodes, named by their addresses; where several share one, by their ids besides."""
    alive = [node for node in told if node["Alive"]]
    alike = Counter(node["NodeManagerAddress"] for node in alive)
    return [_node(node, shared=alike[node["NodeManagerAddress"]] > 1) for node in alive]


def _node(node: dict[str, Any], *, shared: bool) -> Node:
    """A node as Ray tells it; of a GPU it tells the type."""
    resources: dict[str, float] = node["Resources"]
    kinds = (key.removeprefix(_GPU_TYPE) for key in resources if key.startswith(_GPU_TYPE))
    gpu = max((GPU_GIB.get(kind, 0.0) for kind in kinds), default=0.0)
    host = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}" if shared else node["NodeManagerAddress"]
    return Node(name, cpus, gpus, int(host), int(gpu * 2**30), node["Labels"], id=node["NodeID"])


def _protect_token() -> None:
    """Ray writes its token file readable by all; only the owner needs it."""
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if token.is_file():
        token.chmod(0o600)
