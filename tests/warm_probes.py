"""Probes of prompts in forks of one process for each process of the tests: others spend two CPU seconds on its imports.

A command that tests start asks here what it would ask an interpreter of its own, with the same input and output. Probes
of a user's code start their own interpreter, as everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

from tests import fork_server
from troupe.workers.isolation import probe

WARM = "troupe.workers.data.tokenizer_probe:measure"
_SOCKET = "TROUPE_TEST_PROBES"
"""Environment variable with the path of the server's socket."""


@cache
def server() -> dict[str, str]:
    """Start the server, and return the environment of commands that use it."""
    silent = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}  # it would note on every start that it has no torch
    return {_SOCKET: fork_server.start("tests.warm_probes:serve", silent)}


def use() -> None:
    """Answer the probes of this process, a command, in forks of the server, if the environment names one."""
    if os.environ.get(_SOCKET):
        patched: Any = probe
        patched.subprocess = _Processes


@contextmanager
def forked_probes() -> Iterator[None]:
    """While the block runs, answer the probes of this process in forks of the server."""
    with mock.patch.dict(os.environ, server()), mock.patch.object(probe, "subprocess", _Processes):
        yield


class _Processes:
    """What probes use of `subprocess`."""

    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def run(command: list[str], *, env: dict[str, str], input: str, timeout: float, **options: Any) -> Any:
        """As `subprocess.run` with text in pipes."""
        cwd, entry, _ = json.loads(input)
        if entry != WARM or command[0] != sys.executable:
            return subprocess.run(command, env=env, input=input, timeout=timeout, **options)
        request = {"path": json.loads(command[-2]), "environment": env, "cwd": cwd}
        with ExitStack() as files:
            given, out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            given.write(input)
            given.seek(0)
            process = fork_server.Forked(os.environ[_SOCKET], request, [file.fileno() for file in (given, out, err)])
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out.seek(0)
                raise subprocess.TimeoutExpired(command, timeout, out.read().encode()) from None
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())


def serve(listening: str, owner_pipe: str) -> None:
    """Import as a probe does, and fork a process for every probe."""
    vars(sys)["modules"]["torch"] = None  # as in a probe, which blocks its import
    for module in (WARM.partition(":")[0], "jinja2.sandbox", "transformers.models.auto.tokenization_auto"):
        import_module(module)
    fork_server.serve(listening, owner_pipe, _become)


def _become(request: Mapping[str, Any], *streams: int) -> None:
    """Answer as the process that a probe starts, in a fork of the server."""
    fork_server.take_over(request["environment"], request["cwd"], dict(enumerate(streams)))
    sys.path[:] = request["path"]
    sys.stdin = os.fdopen(0)
    probe.answer()
