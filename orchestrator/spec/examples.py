"""The example specs that are part of Troupe: `examples:tiny-grpo` names one wherever a command takes a spec.

They are the files of `deploy/specs/`, which the wheel has at the same place relative to this package. In a checkout
their paths start at its root: models in `.cache/models`, data in `deploy/specs/data`. Read as an example, a spec has
the same paths absolute, with models in the user's cache folder, so that it works in any folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from troupe.orchestrator.errors import UsageError, nearest
from troupe.workers.isolation.interpreters import cache_folder

PREFIX = "examples:"
DEFAULT = "laptop-grpo"
"""The example that `troupe demo` trains."""
MODELS_VARIABLE = "TROUPE_MODELS"
"""Environment variable with the folder of the example models."""
FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "specs"
RECIPES = "recipes/"
"""Beginning of the names of known results. Each has a folder in `deploy/recipes/`, with rows of its data."""
MODEL_CONFIGS = FOLDER / "models"
"""Folders of the example models with nothing but `config.json`, by name."""

_RECIPE_FOLDER = FOLDER.parent / "recipes"
_PATH = re.compile(r"(?<=path: )(?P<root>\.cache/models|deploy/specs)/(?P<rest>[\w./-]+)")
_PLAIN = re.compile(r"[\w./~+@-]+")
"""A path that YAML reads as text without quotes."""


def example_name(spec: str | os.PathLike[str]) -> str | None:
    """The name after `examples:`; None for the path of a file."""
    text = os.fspath(spec)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def examples() -> Mapping[str, str]:
    """Name and first comment of every example: whole specs, those of single algorithms, then recipes."""
    files = sorted(FOLDER.rglob("*.yaml"), key=lambda file: (len(file.relative_to(FOLDER).parts), file))
    named = {str(file.relative_to(FOLDER).with_suffix("")): file for file in files}
    named |= {f"{RECIPES}{file.parent.name}": file for file in sorted(_RECIPE_FOLDER.glob("*/spec.yaml"))}
    return {name: _summary(file.read_text("utf-8")) for name, file in named.items()}


def example_file(name: str) -> Path:
    recipe = name.removeprefix(RECIPES)
    return FOLDER / f"{name}.yaml" if recipe == name else _RECIPE_FOLDER / recipe / "spec.yaml"


def example_text(name: str, models: Path | None = None) -> str:
    """An example as YAML with absolute paths, as in its file. Raises UsageError if there is none of the name."""
    known = examples()
    if name not in known:
        raise UsageError(f"{PREFIX}{name[:60]}: no such example ({nearest(name, known) or 'see `troupe demo --list`'})")
    roots = {".cache/models": models or models_folder(), "deploy/specs": FOLDER}
    text = example_file(name).read_text("utf-8").replace(f"deploy/specs/{name}.yaml", f"{PREFIX}{name}")
    return _PATH.sub(lambda match: _scalar(str(roots[match["root"]] / match["rest"])), text)


def models_folder() -> Path:
    """Folder of the example models: TROUPE_MODELS, or `models` in the cache folder."""
    if given := os.environ.get(MODELS_VARIABLE):
        return Path(given).expanduser().absolute()
    return cache_folder() / "models"


def _summary(text: str) -> str:
    """The comment at the top, up to the command."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#") or line.startswith("#   "):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).partition(". ")[0].rstrip(".")


def _scalar(path: str) -> str:
    return path if _PLAIN.fullmatch(path) else json.dumps(path, ensure_ascii=False)
