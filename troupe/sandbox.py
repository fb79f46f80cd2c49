"""A sandbox for Python code that a model wrote."""

from troupe.workers.agents.sandbox.limits import SandboxLimits
from troupe.workers.agents.sandbox.run import SandboxStarter, check_sandbox, run_python

__all__ = ["SandboxLimits", "SandboxStarter", "check_sandbox", "run_python"]
