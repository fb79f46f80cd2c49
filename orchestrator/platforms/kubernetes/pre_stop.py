"""The preStop hook of pods: keeps a pod whose cluster is being deleted until the run has saved.

Deleting a RayJob, suspending it, a preemption by a queue and a drained node all delete pods. Kubernetes runs this hook
first and sends SIGTERM afterwards. In the head pod (`--stop-jobs`) it stops the running jobs, which save and exit; in a
worker pod it waits for the end of the actors, because the run needs them to save.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import psutil

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.platforms.ray_jobs import JobServer

logger = logging.getLogger(__name__)

_SERVER = "http://127.0.0.1:8265"
_ACTIVE = ("PENDING", "RUNNING")
_POLL_S = 1.0
_OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Titles of processes that every Ray node has, with no run on it."""


def stop_jobs(server: JobServer, timeout_s: float) -> None:
    """Stop every running job and wait until all have ended. Raises TroupeError if one does not end in time."""
    deadline = time.monotonic() + timeout_s
    for state in server.jobs():
        if state.status in _ACTIVE:
            server.stop(state.job, max(0.0, deadline - time.monotonic()))


def wait_for_actors(timeout_s: float, busy: Callable[[], bool]) -> bool:
    """Wait until no actor runs in this pod; whether that happened in time."""
    deadline = time.monotonic() + timeout_s
    while busy():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def has_actors(processes: Iterable[psutil.Process]) -> bool:
    """Whether an actor of a run is among the processes: Ray gives the process of each its name as title."""
    for process in processes:
        try:
            title = next(iter(process.cmdline()), "")
        except psutil.Error:  # it has just ended, or is not ours
            continue
        if title.startswith("ray::") and not title.startswith(_OF_RAY):
            return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Run the hook; the exit code is 1 if the run has not ended in time."""
    parser = argparse.ArgumentParser(prog="pre_stop", description=__doc__)
    parser.add_argument("--stop-jobs", action="store_true", help="stop the running jobs: this is the head pod")
    parser.add_argument("--timeout-s", type=float, required=True, help="longest time to wait, in seconds")
    flags = parser.parse_args(arguments)
    try:
        if flags.stop_jobs:
            stop_jobs(JobServer(_SERVER), flags.timeout_s)
        elif not wait_for_actors(flags.timeout_s, lambda: has_actors(psutil.process_iter())):
            raise TroupeError(f"actors still run after {flags.timeout_s:g} s")
    except TroupeError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
