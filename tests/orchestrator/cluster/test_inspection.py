"""What the kernel says about real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from troupe.orchestrator.cluster.inspection import InspectRequest, ProcessFacts, inspect_node
from troupe.orchestrator.cluster.proc import stat_fields
from troupe.workers.telemetry.peak_memory import resident_peak
from troupe.workers.telemetry.stacks import VARIABLE

NAME = "fourteen bytes\u00e9".encode()
"""The kernel keeps 15 bytes of it: half of the last character."""
NAMED = f"""
import pathlib, sys
from troupe.workers.telemetry.stacks import write_stacks_on_signal
write_stacks_on_signal()
pathlib.Path("/proc/self/comm").write_bytes({NAME!r})
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def named(folder: Path) -> Iterator[int]:
    """A process whose name is not UTF-8."""
    command, env = [sys.executable, "-c", NAMED], {"PYTHONPATH": ":".join(sys.path), VARIABLE: str(folder)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.kill()


def test_a_name_that_is_not_utf8_hides_no_process(tmp_path: Path) -> None:
    with named(tmp_path) as pid:
        assert stat_fields(pid)[0] in "RS"
        assert resident_peak([pid]) > resident_peak()
        report = inspect_node(InspectRequest({pid: "reward-0"}, tmp_path))
    (found,) = report.processes
    assert found.state in "RS" and found.threads


def test_a_command_line_that_is_not_utf8_can_be_written(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "read line", b"\xff"], stdin=subprocess.PIPE) as process:
        (found,) = inspect_node(InspectRequest({process.pid: "reward-0"}, tmp_path)).processes
        process.kill()
    assert found.title == "sh -c read line \ufffd"
    assert TypeAdapter(ProcessFacts).dump_json(found)


def test_a_process_that_looks_sends_itself_no_signal(tmp_path: Path) -> None:
    """The handler can crash a process whose threads run Python meanwhile."""
    code = f"""
import os, pathlib
from troupe.orchestrator.cluster.inspection import InspectRequest, inspect_node
from troupe.workers.telemetry.stacks import stack_file, write_stacks_on_signal
folder = pathlib.Path({str(tmp_path)!r})
write_stacks_on_signal(folder)
(process,) = inspect_node(InspectRequest({{os.getpid(): "driver-0"}}, folder)).processes
print(process.worker, process.threads, stack_file(folder, os.getpid()).stat().st_size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["driver-0", "()", "0"]
