"""Actor classes for worker classes that the driver does not import: only the worker's process loads torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from troupe.workers.contract.imports import without_collections
from troupe.workers.isolation.lifetime import exit_with
from troupe.workers.preload.forked_worker import serves

_RAYLET = "RAY_RAYLET_PID"
"""Ray's variable with the process that starts workers. Ray looks for its id, which a dead process keeps until it is
reaped."""


def actor_class(path: str, protocol: type[Any], *, concurrent: bool) -> type[Any]:
    """A class of the same name that imports the worker class in the actor's process and forwards calls to it.

    Args:
        path: The worker class, as `module:Class`.
        protocol: The methods that can be called.
        concurrent: Whether the methods of the worker class are coroutines.
    """
    module, _, name = path.partition(":")

    def create(self: Any, *args: Any) -> None:
        serves()
        if raylet := int(os.environ.get(_RAYLET, 0)):
            exit_with(raylet)
        with without_collections():
            worker_class = getattr(importlib.import_module(module), name)
        self.worker = worker_class(*args)

    forward = _forward_coroutine if concurrent else _forward
    methods = {method: forward(method) for method in dir(protocol) if not method.startswith("_")}
    return type(name, (), {"__init__": create, "__module__": module, **methods})


def _forward(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)

    call.__name__ = method
    return call


def _forward_coroutine(method: str) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker, method)(*args, **kwargs)

    call.__name__ = method
    return call
