"""What Ray's node runs for each worker of a cluster that a run starts: it sets the environment and becomes the worker.

Ray's own script does the same, but imports a third of Ray first, which takes a fifth of a second for each worker. Falls
back to it for runtime environments it does not support. Keep imports minimal: this runs before every worker.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import sys

_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="
_KNOWN = {"env_vars", "py_executable"}
"""What this script does of the context in which a worker starts."""
_PR_SET_PDEATHSIG = 1
_MISSING = re.compile(r"\$\{[A-Z0-9_]+\}")


def main(arguments: list[str]) -> None:
    """Become the worker. The arguments are Ray's script for workers, its arguments, the context and the language."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the worker ends with the node, too
    if os.environ.get("RAY_RAYLET_PID") not in (None, str(os.getppid())):  # it has ended before the kernel was asked
        sys.exit(1)
    rest = [one for one in arguments if not one.startswith((_CONTEXT, _LANGUAGE))]
    given = dict(one.split("=", 1) for one in arguments if one.startswith((_CONTEXT, _LANGUAGE)))
    context = json.loads(given.get(_CONTEXT.rstrip("="), "{}"))
    asked = {name for name, value in context.items() if value}
    if given.get(_LANGUAGE.rstrip("=")) != "PYTHON" or asked - _KNOWN:
        original = os.path.join(os.path.dirname(rest[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, original, *arguments])
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = _MISSING.sub("", os.path.expandvars(value))
    command = [*shlex.split(context.get("py_executable") or shlex.quote(sys.executable)), *rest]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
