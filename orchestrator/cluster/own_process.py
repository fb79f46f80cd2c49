"""What a worker runs in its own process for the watch. Nothing here imports the spec, which a worker does not need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker

from troupe.workers.telemetry.stacks import FOLDER as STACKS
from troupe.workers.telemetry.stacks import write_stacks_on_signal


def register(_: object) -> tuple[str, int]:
    """Node and process of the worker that calls this; from then on it writes its stacks on SIGUSR1."""
    write_stacks_on_signal(session_logs() / STACKS)
    return ray.get_runtime_context().get_node_id(), os.getpid()


def session_logs() -> Path:
    """The log folder of Ray's session on this node."""
    node: Any = ray_worker._global_node
    return Path(node.get_logs_dir_path())
