"""A tool that runs Python code in the sandbox."""

from __future__ import annotations

from troupe.workers.agents.sandbox.limits import SandboxLimits, SandboxResult
from troupe.workers.agents.sandbox.run import run_python

LIMITS = SandboxLimits(timeout_s=10.0, output_kib=64)
"""What the code of one call may use."""
LONGEST_ANSWER = 4000
"""Characters of an answer: it becomes a part of the conversation."""
_TRACEBACK_LINES = 8


def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept from one call to the next.

    Args:
        code: The program. It has the standard library, no network and no files, and must print its results.

    Returns:
        What the program printed; if it failed, also the end of its error message.
    """
    return describe_result(run_python(code, limits=LIMITS))


def describe_result(result: SandboxResult, longest: int = LONGEST_ANSWER) -> str:
    """A result as a tool answers it, in at most `longest` characters: the start of the output and the whole error."""
    error = _describe_error(result, longest // 2)
    output = result.stdout.rstrip()
    room = longest - len(error) - 1
    if result.stdout_discarded or len(output) > room:
        note = f"\n[output cut: {len(result.stdout) + result.stdout_discarded} characters]"
        output = output[: max(0, room - len(note))] + note
    return "\n".join(part for part in (output, error) if part) or "[no output: print the result]"


def _describe_error(result: SandboxResult, longest: int) -> str:
    """Why a program failed, in at most `longest` characters; empty if it did not fail."""
    if result.ok:
        return ""
    lines = result.stderr.strip().splitlines()[-_TRACEBACK_LINES:]
    if result.timed_out:
        lines = [f"[stopped after {LIMITS.timeout_s:g} seconds]"]
    elif result.out_of_memory:
        lines.append(f"[out of memory: the limit is {LIMITS.memory_mib} MiB]")
    elif result.signal is not None:
        lines.append(f"[ended by signal {result.signal}]")
    elif not lines:
        lines = [f"[exit code {result.exit_code}]"]
    return "\n".join(lines)[-longest:]
