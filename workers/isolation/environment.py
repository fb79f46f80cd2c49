"""The environment variables of a process that runs user code."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from troupe.workers.telemetry.stacks import VARIABLE, stacks_folder

MARK = "TROUPE_CHILD"
"""Variable that identifies all descendants of a process, whatever session and parent they have given themselves."""
_SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|API_KEY|ACCESS_KEY|PRIVATE_KEY)(?:_|$)"
    r"|SECRET|_TOKEN$|PASSWORD|_KEY$|(?:^|_)(?:PAT|CONNECTION_STRING)$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold a token or a password."""
    return _SECRET.search(name) is not None


def child_environment(mark: str, keep: Collection[str] = (), of: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without secrets, and with the mark of a child process.

    Args:
        mark: Unique; see `MARK`.
        keep: Names of secrets that the user code needs.
        of: The environment (default: this process's).
    """
    inherited = os.environ if of is None else of
    visible = {name: value for name, value in inherited.items() if name in keep or not is_secret(name)}
    stacks = {VARIABLE: folder} if of is None and (folder := stacks_folder()) else {}
    return visible | stacks | {MARK: mark}
