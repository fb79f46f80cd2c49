"""What is wrong with environment variables that Ray reads, and what helps; without Ray, for `troupe doctor` too."""

from __future__ import annotations

import os

ADDRESS_VARIABLE = "RAY_ADDRESS"
_LONGEST_SOCKET = 107
"""Bytes of the path of a socket that Linux accepts."""
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1000000/sockets/plasma_store"
"""What Ray adds to the temporary folder for its longest socket."""


def temporary_folder() -> str:
    """Folder in which Ray puts its sessions."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def address_problem(address: str) -> str:
    """Why this is no address of a Ray head; empty where it may be one."""
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
    """Why Ray's sockets cannot be in this temporary folder; empty where they can."""
    length, most = len(folder.encode()), _LONGEST_SOCKET - len(_SOCKET)
    if length <= most:
        return ""
    return f"TMPDIR has {length} bytes, and Ray's sockets have room for {most}: use a shorter one, as in `TMPDIR=/tmp`"
