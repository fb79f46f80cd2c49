"""The names of workers and roles.

A worker is called `ROLE-INDEX`. A role is named after its section of `roles`: `policy`, or `environment.NAME` if the
section is a map. An index has no `-`, so that a name has one reading for any names of environments.
"""

from __future__ import annotations

import re

_WORKER = re.compile(r"([a-z_]+(?:\.[a-z0-9-]+)?)-\d+")


def is_worker(name: str) -> bool:
    """Whether a name is a worker's: `policy-0`, but not `cluster`."""
    return _WORKER.fullmatch(name) is not None


def role_of(worker: str) -> str:
    """The role of a worker: `environment.tools` of `environment.tools-0`; of what is no worker, the first word
    (`node 10.0.0.7`)."""
    found = _WORKER.fullmatch(worker)
    return found[1] if found else worker.split(" ", 1)[0]


def section_of(role: str) -> str:
    """The row of a role, and its section of `roles`: `environment` of `environment.tools`."""
    return role.partition(".")[0]
