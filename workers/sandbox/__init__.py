"""A sandbox for Python code that a model wrote. `docs/guides/sandbox.md` says what it isolates and what it does not."""

from workers.sandbox.limits import SandboxLimits, SandboxResult
from workers.sandbox.run import SandboxError, SandboxUnavailable, check_sandbox, run_python, run_python_async

__all__ = [
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailable",
    "check_sandbox",
    "run_python",
    "run_python_async",
]
