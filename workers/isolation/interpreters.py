"""Virtual environments that user code runs in: packages that cannot be installed beside Troupe's, or need not be.

A process with such an interpreter imports `troupe` from this installation and every other package from its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

_LOCKS = Path(__file__).parent / "locks"
_CALL = "module, function = sys.argv[2].split(':'); vars(importlib.import_module(module))[function](*sys.argv[3:])"
_HERE = f"import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); {_CALL}"
_FOREIGN = (
    "import importlib, importlib.util, json, sys; folder, *paths = json.loads(sys.argv[1]); sys.path += paths; "
    "spec = importlib.util.spec_from_file_location("
    "'troupe', folder + '/__init__.py', submodule_search_locations=[folder]); "
    "sys.modules['troupe'] = package = importlib.util.module_from_spec(spec); spec.loader.exec_module(package); "
    f"{_CALL}"
)


class NoInterpreter(ValueError):
    """There is no such interpreter on this machine."""


def cache_folder() -> Path:
    """The folder `troupe` in the user's cache folder (XDG)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # By the XDG specification, a relative path is as if it were not set.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "troupe"


def locked() -> tuple[str, ...]:
    """Names of the environments for which Troupe ships a lock of packages."""
    return tuple(sorted(path.stem for path in _LOCKS.glob("*.txt")))


def lock_of(name: str) -> Path:
    """The lock of an environment, a file of pip's requirements."""
    return _LOCKS / f"{name}.txt"


def installed_folder(name: str) -> Path:
    """Where the packages of a lock are installed. Another lock has another folder."""
    digest = hashlib.sha256(lock_of(name).read_bytes()).hexdigest()[:12]
    return cache_folder() / "environments" / f"{name}-{digest}"


def installed_mark(name: str) -> Path:
    """The file that says that an installation is complete."""
    return installed_folder(name) / "installed.json"


def interpreter_of(name: str, python: str | None) -> str | None:
    """The interpreter of an environment: `python`, or what `troupe env install` has made, or None for this one.
    Raises NoInterpreter if the user names none that can be run."""
    if python is not None:
        found = Path(python)
        if not os.access(found, os.X_OK) or not found.is_file():
            raise NoInterpreter(f"{python}: no interpreter of Python that can be run; name VENV/bin/python")
        return str(found.absolute())
    if name in locked() and installed_mark(name).is_file():
        return str(installed_folder(name) / "bin" / "python")
    return None


def python_command(entry: str, *args: str, python: str | None = None) -> list[str]:
    """The command of a process that calls `entry`, by default with this interpreter and `sys.path`."""
    if python is None:
        python, code, paths = sys.executable, _HERE, [folder or os.getcwd() for folder in sys.path]
    else:
        code, paths = _FOREIGN, [str(Path(__file__).absolute().parents[2]), *_own_folders()]
    return [python, "-P", "-c", code, json.dumps(paths), entry, *args]


def with_programs(environment: dict[str, str], python: str | None) -> dict[str, str]:
    """The environment variables of a process with this interpreter: it finds the programs beside it."""
    if python is None:
        return environment
    beside = str(Path(python).parent)
    return environment | {"PATH": f"{beside}:{environment.get('PATH', os.defpath)}"}


def _own_folders() -> list[str]:
    """Folders of `sys.path` with the user's modules: neither packages that are installed nor the standard library."""
    prefixes = {str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    folders = [str(Path(folder or os.getcwd()).resolve()) for folder in sys.path if not folder.endswith(".zip")]
    return [one for one in folders if not any(one == prefix or one.startswith(f"{prefix}/") for prefix in prefixes)]
