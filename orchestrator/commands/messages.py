"""Messages of the command line for errors: one line, with a remedy if there is one."""

from __future__ import annotations

import errno
import os

import typer

_REMEDIES = {
    errno.ENOSPC: "free some space, or use another disk",
    errno.EDQUOT: "free some of your quota, or use another disk",
    errno.EACCES: "change its permissions, or use another path",
    errno.EPERM: "change its permissions, or use another path",
    errno.EROFS: "use a path on another disk",
    errno.EEXIST: "use another path",
    errno.ENOTDIR: "use another path",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENOMEM: "free some memory",
    errno.EAGAIN: "raise the limit on processes (`ulimit -u`)",
}
"""What helps, by the number of an operating system's error."""


def typer_error(error: typer.TyperException) -> str:
    """One line for a command line that Typer refuses, with the command whose `--help` tells more."""
    context = vars(error).get("ctx")  # not every error has one
    command = "troupe" if context is None else context.command_path
    said = " ".join(error.format_message().split()).rstrip(".")
    if command == "troupe deploy" and said.startswith("No such option"):
        said += "; kustomize sets any other field of a manifest"
    if command == "troupe demo" and said.startswith("Got unexpected extra argument"):
        said += "; --spec chooses the example"
    return f"error: {said}; see `{command} --help`" if said else ""


def os_error(error: OSError) -> str:
    """The path of a failed operation, why it failed, and what helps."""
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    if error.errno == errno.ENOENT and not error.filename and not _has_current_folder():
        return "the current folder does not exist any more; change to another one"
    remedy = _REMEDIES.get(error.errno or 0)
    told = f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason
    return f"{told}; {remedy}" if remedy else told


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
