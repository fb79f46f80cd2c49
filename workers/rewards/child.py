"""The process of a reward function, controlled by `troupe.workers.rewards.runner`.

Requests and replies are JSON, one per line, over a socket that user code does not see. The first request is
``{"function", "args", "batched", "timeout_s", "memory_limit_mib"}``, answered by
``{"ready": true, "pid", "concurrent": bool}`` or ``{"failure": why}``. Samples follow as
``{"id", "samples": [{"response", "answer", "metadata", "sample"}, ...]}``, each answered by ``{"id", "results"}`` with
one reply per sample (`troupe.workers.rewards.results`), or by ``{"failure", "last": true}`` before the process ends.
"""

from __future__ import annotations

import inspect
import json
import os
import reprlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from troupe.workers.isolation.inside import connection, limit_memory
from troupe.workers.rewards.loading import RewardFunctionError, check_machine, load
from troupe.workers.rewards.results import ErrorReplies, Reply, describe, parse_batch, parse_value

if TYPE_CHECKING:
    import asyncio


def main(control: str, owner_pipe: str) -> None:
    """Serve requests until the socket closes. The arguments are the ones of `troupe.workers.isolation.child.Child`."""
    with connection(int(control), int(owner_pipe)) as parent, parent.makefile("rb") as requests:
        start = requests.readline()
        if not start:
            return
        order = json.loads(start)
        try:
            caller = FunctionCaller(load(order["function"], order["args"], order["batched"]), order)
            check_machine(order["function"])
        except RewardFunctionError as error:
            _reply(parent, {"failure": str(error)})
            return
        limit_memory(order["memory_limit_mib"])
        _reply(parent, {"ready": True, "pid": os.getpid(), "concurrent": caller.concurrent})
        _serve(parent, requests, caller, f"out of memory (limit {order['memory_limit_mib']} MiB)")


def _serve(parent: socket.socket, requests: Any, caller: FunctionCaller, exhausted: str) -> None:
    # Prepared in advance: there may be no memory left for it later.
    last = json.dumps({"failure": exhausted, "last": True}).encode() + b"\n"
    for line in requests:
        request = json.loads(line)
        try:
            results = caller.results(request["samples"])
        except MemoryError as error:
            with suppress(MemoryError):  # the function may have raised it with memory left
                reply = {"failure": f"{exhausted}: {describe(error)['failure']}", "last": True}
                last = json.dumps(reply).encode() + b"\n"
            parent.sendall(last)
            return
        _reply(parent, {"id": request["id"], "results": results})


class FunctionCaller:
    """Calls one reward function. Whatever it raises but MemoryError, SystemExit included, becomes a reply."""

    def __init__(self, function: Callable[..., Any], order: dict[str, Any]) -> None:
        """`order`: `args`, `batched` and `timeout_s` of the function."""
        self._function = function
        self._args: dict[str, Any] = order["args"]
        self._batched: bool = order["batched"]
        self._timeout_s: float = order["timeout_s"]
        self._errors = ErrorReplies()
        self._runner: asyncio.Runner | None = None
        is_async = any(inspect.iscoroutinefunction(target) for target in (function, type(function).__call__))
        self.concurrent = is_async and not self._batched
        """Whether the function is asynchronous, so that the samples of a request run at the same time."""

    def results(self, samples: Sequence[dict[str, Any]]) -> list[Reply]:
        """One reply per sample. Raises MemoryError if the function used up its memory."""
        if self._batched:
            return self._batch(samples)
        if self.concurrent:
            return self._wait(self._all(samples))
        return [self._one(sample) for sample in samples]

    def _batch(self, samples: Sequence[dict[str, Any]]) -> list[Reply]:
        responses = [sample["response"] for sample in samples]
        try:
            metadata = [read_metadata(sample) for sample in samples]
            answers = [sample["answer"] for sample in samples]
            return parse_batch(self._settled(self._function(responses, answers, metadata, **self._args)), responses)
        except MemoryError:
            raise
        except BaseException as error:
            reply = self._errors.describe(error)
            reply["failure"] += f" (one call for {len(samples)} samples)"
            return [reply] * len(samples)

    def _one(self, sample: dict[str, Any]) -> Reply:
        try:
            return parse_value(self._settled(self._call(sample)), sample["response"])
        except MemoryError:
            raise
        except BaseException as error:
            return self._errors.describe(error)

    async def _all(self, samples: Sequence[dict[str, Any]]) -> list[Reply]:
        import asyncio

        return await asyncio.gather(*(self._one_of_several(sample) for sample in samples))

    async def _one_of_several(self, sample: dict[str, Any]) -> Reply:
        import asyncio

        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await self._call(sample)
            return parse_value(value, sample["response"])
        except MemoryError:
            raise
        except BaseException as error:
            if limit.expired():
                return {"failure": f"timeout after {self._timeout_s:g} s", "cause": "timeout"}
            return self._errors.describe(error)

    def _call(self, sample: dict[str, Any]) -> Any:
        return self._function(sample["response"], sample["answer"], read_metadata(sample), **self._args)

    def _settled(self, value: Any) -> Any:
        """What the function returned, awaited if it is a coroutine."""
        return self._wait(value) if inspect.iscoroutine(value) else value

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end, always in the same event loop: clients that a function keeps belong to it."""
        if self._runner is None:
            import asyncio

            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)


def read_metadata(sample: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a request's sample, with the facts about the sample. Raises ValueError or TypeError."""
    metadata = json.loads(sample["metadata"])
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is not a JSON object: {reprlib.repr(metadata)}")
    facts = dict(sample["sample"])
    conversation = facts.pop("conversation", "")
    facts["messages"] = json.loads(facts["messages"])
    return {**metadata, "sample": facts | ({"conversation": json.loads(conversation)} if conversation else {})}


def _reply(parent: socket.socket, reply: dict[str, Any]) -> None:
    parent.sendall(json.dumps(reply).encode() + b"\n")
