"""Questions to a short-lived process: what imports a user's modules or a model library does not do so in this one."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from typing import Any

from troupe.workers.contract.text import one_line
from troupe.workers.isolation.interpreters import python_command, with_programs

_LONGEST = 400


class ProbeFailed(Exception):
    """The process ended, or was too slow; `replies` came before, `raised` is the message of its ValueError."""

    def __init__(self, reason: str, replies: list[Any], raised: str = "") -> None:
        super().__init__(reason)
        self.replies = replies
        self.raised = raised


class ProbeTimeout(ProbeFailed):
    """The process did not end in time."""


def ask(entry: str, request: Any, timeout_s: float, python: str | None = None) -> list[Any]:
    """Every reply of a function (`package.module:function`) in another process; it takes the request and yields
    replies, all JSON-ready. Raises ProbeFailed if the process failed."""
    # The current directory: Ray puts it on the path of its workers.
    text = json.dumps([os.getcwd(), entry, request])
    command = python_command("troupe.workers.isolation.probe:answer", python=python)
    # A copy: inherited, it could change while the process is created, for another thread sets it.
    environment = with_programs(os.environ.copy(), python)
    try:
        done = subprocess.run(
            command, env=environment, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
        raise ProbeTimeout(f"did not end within {timeout_s:g} s", _replies(output)) from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2][:_LONGEST]
        reason = f"its process ended with exit code {done.returncode}"
        raised = last.removeprefix("ValueError: ") if last.startswith("ValueError: ") else ""
        raise ProbeFailed(f"{reason}: {last}" if last else reason, _replies(done.stdout), raised)
    return _replies(done.stdout)


def _replies(output: str) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


def answer() -> None:
    """Answer the request on standard input, in the process that `ask` starts."""
    replies = os.fdopen(os.dup(1), "w")  # a separate pipe: user code may print
    os.dup2(2, 1)
    folder, entry, request = json.load(sys.stdin)
    sys.path.append(folder)
    module, function = entry.split(":")
    try:
        for reply in vars(importlib.import_module(module))[function](request):
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    except Exception as error:
        traceback.print_exc()
        sys.exit(one_line(f"{type(error).__name__}: {error}"))  # the last line: a message may have several
    gc.freeze()  # nothing that ends with the process is collected
