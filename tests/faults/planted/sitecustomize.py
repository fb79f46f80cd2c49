"""Code that stalls or kills a process of a run, as a bug in it would: imported by every Python process of the run.

SIGUSR2 runs what the file TROUPE_PLANTED says (`loop` or `sleep`) for as long as that file exists.

TROUPE_DEATHS is a JSON list of deaths, `{"at": "package.module:Class.method", "call": 3, "mark": FILE, "begin": FILE}`:
the process that makes this call of the function dies of SIGKILL at its beginning, unless the file `mark` is there,
which it leaves. Calls count once the file `begin` is there.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import signal
import sys
import time
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_ORDER = Path(os.environ.get("TROUPE_PLANTED", ""))


def planted_bug(*_: object) -> None:
    """Stalls the main thread."""
    sleeps = _ORDER.is_file() and _ORDER.read_text() == "sleep"
    while os.path.exists(_ORDER):
        if sleeps:
            time.sleep(0.2)


class _Deadly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a module and plants the deaths in it."""

    def __init__(self, deaths: list[dict[str, Any]]) -> None:
        self._deaths = deaths

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own place, with this loader, if it has a death."""
        if not any(death["at"].startswith(f"{fullname}:") for death in self._deaths):
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            self._own, found.loader = found.loader, self
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        self._own.exec_module(module)
        _plant_all(module, self._deaths)


def _plant_all(module: ModuleType, deaths: list[dict[str, Any]]) -> None:
    for death in deaths:
        name, _, path = death["at"].partition(":")
        if name == module.__name__:
            _plant(module, path.split("."), death)


def _plant(owner: Any, path: list[str], death: dict[str, Any]) -> None:
    for name in path[:-1]:
        owner = getattr(owner, name)
    own, mark, begin, calls = getattr(owner, path[-1]), Path(death["mark"]), Path(death["begin"]), 0

    @wraps(own)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += begin.exists()
        if calls == death["call"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    setattr(owner, path[-1], deadly)


if _deaths := json.loads(os.environ.get("TROUPE_DEATHS", "[]")):
    sys.meta_path.insert(0, _Deadly(_deaths))
    for _name in {death["at"].partition(":")[0] for death in _deaths} & sys.modules.keys():
        _plant_all(sys.modules[_name], _deaths)  # a fork has imported them before (`tests/real/warm.py`)
if _ORDER.name:
    signal.signal(signal.SIGUSR2, planted_bug)
