"""Environment variables that Ray reads: the ones that a run sets, problems of others, and remedies. Without Ray."""

from __future__ import annotations

import os

ADDRESS_VARIABLE = "RAY_ADDRESS"
JOB_SERVER_VARIABLES = ("RAY_API_SERVER_ADDRESS", ADDRESS_VARIABLE)
"""The address of the job server, the first one first."""
TABLE_SETTINGS = {"RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1"}
"""Environment of every process of the run: `troupe.workers.contract.arrow` defines how tables are pickled, not Ray."""
SETTINGS = {
    # A failed call raises when its summary is awaited; the copy of the error in the table's reference is redundant.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Ray lowers the priority of its workers, but here they do the main work.
    "RAY_worker_niceness": "0",
    # Prestarted workers would be unused: each worker of a run has its own environment and thus its own process.
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment of Ray's processes, unless the user has set these variables."""
LOCAL_SETTINGS = {
    # Every process collects Ray's metrics and task lists, unread in a cluster of a single run.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    # The time in which a process has to become a worker, before Ray starts another one. It may wait for imports.
    "RAY_worker_register_timeout_seconds": "90",
    # By default a dropped table keeps its memory for up to a second, and tables of that second are written to memory
    # that no process has touched yet: six times the time of a copy (`python -m benchmarks.data_plane`). One node
    # gains nothing from freeing many at once.
    "RAY_free_objects_period_milliseconds": "0",
    # By default a driver waits a minute for a head that is gone; nothing restarts a local cluster's.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
"""Additional environment of a cluster that is started here."""
_LONGEST_SOCKET = 107
"""Bytes of the path of a socket that Linux accepts."""
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1000000/sockets/plasma_store"
"""Longest path of a socket that Ray appends to the temporary folder."""


def temporary_folder() -> str:
    """Folder of Ray's sessions."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def cluster_to_join(address: str | None) -> str | None:
    """The address of the cluster that a run joins, given or from Ray's variable, or None to start one."""
    return address or os.environ.get(ADDRESS_VARIABLE) or None


def address_problem(address: str) -> str:
    """Why this is no address of a Ray head, or empty if it may be one."""
    _, colon, port = address.rpartition(":")
    if address.startswith(("http://", "https://")):
        return (
            "is the address of a job server: `troupe submit` takes it with --address; to start a local Ray, "
            f"`unset {ADDRESS_VARIABLE}`, to join one, give HOST:PORT of its head (port 6379)"
        )
    if "//" in address or (colon and not port.isdecimal()):
        return "is not the address of a Ray head: expected HOST:PORT, or auto"
    return ""


def sockets_problem(folder: str) -> str:
    """Why Ray's sockets cannot be in this temporary folder, or empty if they can."""
    length, most = len(folder.encode()), _LONGEST_SOCKET - len(_SOCKET)
    if length <= most:
        return ""
    return f"TMPDIR has {length} bytes, and Ray's sockets have room for {most}: use a shorter one, as in `TMPDIR=/tmp`"
