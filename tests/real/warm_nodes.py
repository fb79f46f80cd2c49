"""`ray` for a node of tests whose workers of Troupe are forks, as they are in a cluster that a run starts itself.

`python -m tests.real.warm_nodes start ...` is `ray start ...`, but for the command of a worker: each worker would spend
ten to twenty CPU seconds on its imports, and each engine as many again. The process that they are forks of is a fork
itself if the environment names its template (`warm.py`), and ends with the node. Workers that import on their own
are in test_wheel.py. The node starts no process of Ray that these tests do not ask. The same file is what it runs for a
worker.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "TROUPE_TEST_TEMPLATE"
"""Environment variable with the path of the socket of the process that import servers are forks of."""
_NO_JOBS = "--include-dashboard=false"
_CONTEXT = "--serialized-runtime-env-context="
_OF_TROUPE = "RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION"
"""Environment variable of every worker of Troupe, and of no other."""


def ray_command(forks: bool) -> list[str]:
    """What starts as `ray`; `forks`: workers of the nodes that it starts are forks."""
    return [sys.executable, "-m", "tests.real.warm_nodes"] if forks else [str(Path(sys.executable).with_name("ray"))]


def main() -> None:
    """Run Ray's command line; a node that it starts forks its workers."""
    from ray._private import utils
    from ray._private.node import Node
    from ray.scripts.scripts import main as ray

    from tests.real import warm
    from troupe.orchestrator.cluster.worker_server import WorkerServer
    from troupe.workers.preload.forked_worker import ENGINE_VARIABLE, SERVER_VARIABLE

    warm.fork_import_servers()
    server = WorkerServer(warm.ENGINE)
    os.environ |= {SERVER_VARIABLE: server.path, ENGINE_VARIABLE: warm.ENGINE.model_dump_json()}
    node: Any = Node
    unused = ["start_monitor", "start_log_monitor", "start_ray_client_server"]
    if _NO_JOBS in sys.argv or "--head" not in sys.argv:
        unused += ["start_api_server"]
        utils.get_dashboard_dependency_error = ImportError  # the node's agent has no services of the dashboard
    for name in unused:
        setattr(node, name, lambda *_, **__: None)
    start = node.start_raylet

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> None:
        node._ray_params.setup_worker_path = __file__
        start(node, *args, **kwargs)

    node.start_raylet = start_raylet
    ray()


def become_worker(arguments: list[str]) -> None:
    """Become the worker of a node by Ray's script for it, with the interpreter that asks for a fork."""
    context = {number: json.loads(one[len(_CONTEXT) :]) for number, one in enumerate(arguments) if _CONTEXT in one}
    for number, given in context.items():
        if _OF_TROUPE in (given.get("env_vars") or {}):
            forked = ROOT / "workers" / "preload" / "forked_worker.py"
            given["py_executable"] = shlex.join([sys.executable, str(forked)])
            arguments[number] = f"{_CONTEXT}{json.dumps(given)}"
    original = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, original, *arguments])


if __name__ == "__main__":
    if os.environ.get("RAY_RAYLET_PID"):
        become_worker(sys.argv[1:])
    else:
        main()
