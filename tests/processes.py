"""Processes below one that a test started, or below the test itself."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> str:
    """Its arguments or the title that it gave itself; empty if it has ended, as a zombie has."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def descendants(pid: int | None = None, title: str = "") -> list[psutil.Process]:
    """Running processes below this one (by default the test's), whose command line contains `title`."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if (line := command_line(process)) and title in line]
