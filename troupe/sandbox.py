"""A sandbox for Python code that a model wrote."""

from troupe.workers.agents.sandbox.run import SandboxLimits, SandboxStarter, check_sandbox, run_python

__all__ = ["SandboxLimits", "SandboxStarter", "check_sandbox", "run_python"]
