"""The first steps of a child process that runs user code (`troupe.workers.isolation.child`), and its limits."""

from __future__ import annotations

import fcntl
import io
import os
import resource
import select
import socket
import sys

from troupe.workers.isolation.descendants import MARK, PAGE, run_guarded
from troupe.workers.telemetry.stacks import write_stacks_on_signal

F_SETOWN = 8  # not in Python's fcntl module


def connection(control: int, owner_pipe: int) -> socket.socket:
    """Prepare a process for user code, which this one guards; returns the socket to the worker. It and all that it
    starts end when the worker closes the owner pipe."""
    for descriptor in (control, owner_pipe):  # or processes that user code starts would keep the connection open
        os.set_inheritable(descriptor, False)
    run_guarded(owner_pipe, os.environ[MARK])
    die_with(owner_pipe)
    write_stacks_on_signal()
    os.dup2(2, 1)  # user code prints to the log, line by line: a killed process flushes nothing
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return socket.socket(fileno=control)


def die_with(owner_pipe: int) -> None:
    """Let the kernel end this process group when the other end of the pipe closes, which it does when the worker dies.

    The default action of SIGIO ends the process. A thread that waits for the end of file is not enough: code that holds
    the interpreter lock, such as a regular expression that backtracks forever, would keep it from running.
    """
    fcntl.fcntl(owner_pipe, F_SETOWN, -os.getpgrp())
    fcntl.fcntl(owner_pipe, fcntl.F_SETFL, fcntl.fcntl(owner_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(owner_pipe, select.POLLHUP)
    if closed.poll(0):  # the worker died before the kernel was asked
        os._exit(1)


def limit_memory(limit_mib: int) -> None:
    """Limit memory for data to `limit_mib` more (not addresses, which Node.js and CUDA reserve); no core files."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[5]) * PAGE
    limit = used + limit_mib * 2**20
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
