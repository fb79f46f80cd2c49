"""The process a reward function runs in. It is started, fed and ended by `workers.rewards.runner`.

Requests and replies are JSON, one a line, over a socket that user code does not know of. First comes
``{"function", "args", "memory_limit_mib"}``, answered by ``{"ready": true}`` or ``{"failure": why}``; then samples
``{"id", "response", "answer", "metadata", "sample"}``, each answered by ``{"id", "value"}``, for process rewards by
``{"id", "value", "steps": [[end, reward], ...]}``, or by ``{"id", "failure"}``.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import numbers
import os
import reprlib
import resource
import select
import socket
import sys
import traceback
from collections.abc import Callable
from statistics import fmean
from typing import Any

from workers.rewards.loading import RewardFunctionError, load
from workers.rewards.steps import Steps, checked_steps

F_SETOWN = 8  # not in Python's fcntl module


def main() -> None:
    """Serve the socket given as first argument, and die when the pipe given as second argument is closed."""
    control, lifeline = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (control, lifeline):  # or what user code starts would keep the connection open after our end
        os.set_inheritable(descriptor, False)
    _die_with(lifeline)
    os.dup2(2, 1)  # what user code prints goes to the log, line by line: a process that is killed flushes nothing
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with socket.socket(fileno=control) as connection, connection.makefile("rb") as requests:
        start = requests.readline()
        if not start:
            return
        order = json.loads(start)
        try:
            function = load(order["function"], order["args"])
        except RewardFunctionError as error:
            _reply(connection, {"failure": str(error)})
            return
        _limit_memory(order["memory_limit_mib"])
        _reply(connection, {"ready": True})
        _serve(connection, requests, function, order["args"], order["memory_limit_mib"])


def _serve(connection: socket.socket, requests: Any, function: Callable[..., Any], args: Any, limit_mib: int) -> None:
    # Made beforehand: there may be no memory left to make it.
    exhausted = json.dumps({"failure": f"out of memory (limit {limit_mib} MiB)", "last": True}).encode() + b"\n"
    shown = False
    for line in requests:
        request = json.loads(line)
        try:
            reply = judge(call(function, request, args), request["response"])
        except MemoryError:
            connection.sendall(exhausted)
            return
        except BaseException as error:  # whatever user code raises, SystemExit included, fails this sample alone
            reply = {"failure": describe(error)}
            if not shown:  # one traceback is enough to find the fault
                shown = True
                traceback.print_exception(error)
        _reply(connection, {"id": request["id"], **reply})


def call(function: Callable[..., Any], request: dict[str, Any], args: dict[str, Any]) -> Any:
    """Apply a reward function to one request; raises what the function raises."""
    metadata = json.loads(request["metadata"])
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is not a JSON object: {reprlib.repr(metadata)}")
    return function(request["response"], request["answer"], {**metadata, "sample": request["sample"]}, **args)


def judge(value: object, response: str) -> dict[str, Any]:
    """Reply for what a reward function returned: a finite real number, steps of the response, or why it is neither."""
    if isinstance(value, Steps):
        try:
            steps = checked_steps(value.rewards, len(response))
        except ValueError as error:
            return {"failure": f"not steps: {error}"}
        outcome = fmean(reward for _, reward in steps) if value.outcome is None else value.outcome
        reply = judge(outcome, response)
        return reply if "failure" in reply else {**reply, "steps": steps}
    if not isinstance(value, numbers.Real):
        return {"failure": f"not a number: {reprlib.repr(value)} ({type(value).__name__})"}
    number = float(value)
    return {"value": number} if math.isfinite(number) else {"failure": f"not a finite number: {number}"}


def describe(error: BaseException) -> str:
    """One line of at most about 300 characters."""
    try:
        text = " ".join(str(error).split())[:300]
    except Exception:
        text = "(its text cannot be shown)"
    return f"error: {type(error).__name__}" + (f": {text}" if text else "")


def _reply(connection: socket.socket, reply: dict[str, Any]) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _die_with(lifeline: int) -> None:
    """Have the kernel end this process group when the other end of the pipe is closed, as it is when the parent dies.

    The default action of SIGIO is to end the process. A thread that waits for the end of file would not do: code
    that holds the interpreter lock, such as a regular expression that backtracks for ever, would keep it from running.
    """
    fcntl.fcntl(lifeline, F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(lifeline, select.POLLHUP)
    if closed.poll(0):  # the parent died before the kernel was asked
        os._exit(1)


def _limit_memory(limit_mib: int) -> None:
    """Bound the address space to what is in use now plus the limit; no core files."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + limit_mib * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
