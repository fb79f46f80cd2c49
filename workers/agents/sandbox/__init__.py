"""A sandbox for Python code that a model wrote: `run_python` and `check_sandbox` of `troupe.sandbox`.

`docs/guides/sandbox.md` lists what it isolates and what it does not. This file imports nothing, because the processes
of the sandbox import it at every start.
"""
