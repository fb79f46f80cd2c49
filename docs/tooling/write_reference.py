"""Write the generated pages of `docs/` from the code: `python -m docs.tooling.write_reference`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from benchmarks.algorithm_curves import curves
from docs.tooling.algorithm_reference import algorithm_reference, listed_in
from docs.tooling.cli_reference import cli_reference
from docs.tooling.combination_page import combination_page
from docs.tooling.data_layout_page import data_layout_page
from docs.tooling.gateway_page import gateway_page
from docs.tooling.metric_reference import metric_reference
from docs.tooling.migration_page import migration_page
from docs.tooling.spec_reference import spec_reference
from docs.tooling.task_page import task_page
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.spec.errors import models_in
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec


def _algorithms() -> str:
    return algorithm_reference(curves())


FOLDER = Path(__file__).resolve().parents[1]
README = FOLDER.parent / "README.md"


def _readme() -> str:
    return listed_in(README.read_text(encoding="utf-8"))


def _completions() -> str:
    """What Tab completes after `--set`: a line for each field that is no section, and behind it the values of one that
    has few."""
    values: dict[str, dict[str, None]] = {}
    for model in (RolloutSpec, OfflineSpec):
        for path, words in _fields(model):
            values.setdefault(path, {}).update(words)
    values["algorithm.name"] = dict.fromkeys((*ALGORITHMS, *OFFLINE_ALGORITHMS))
    paths = [path for path, after in pairwise([*sorted(values), ""]) if not after.startswith(f"{path}.")]
    return "".join(" ".join([f"{path}=", *values[path]]) + "\n" for path in paths)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, dict[str, None]]]:
    """Dotted path and words of every field of a spec."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", dict.fromkeys(_words(info.annotation))
        for inner in models_in(info.annotation):
            yield from _fields(inner, f"{prefix}{name}.")


def _words(annotation: Any) -> Iterator[str]:
    """The words that a field may be, if it is no list of them."""
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for one in get_args(annotation):
            yield from _words(one)


PAGES: dict[str, Callable[[], str]] = {
    "reference/spec.md": spec_reference,
    "reference/algorithms.md": _algorithms,
    "reference/metrics.md": metric_reference,
    "reference/cli.md": cli_reference,
    "reference/combinations.md": combination_page,
    "reference/data-layouts.md": data_layout_page,
    "reference/gateway.md": gateway_page,
    "reference/tasks.md": task_page,
    "guides/migration.md": migration_page,
    "../README.md": _readme,
    "../orchestrator/commands/completions.txt": _completions,
}
"""Every generated page by its path in `docs/`, and the function that returns its text."""


def main() -> None:
    """Write every page whose text has changed."""
    for name, text in PAGES.items():
        path, wanted = (FOLDER / name).resolve(), text()
        if not path.exists() or path.read_text(encoding="utf-8") != wanted:
            path.write_text(wanted, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(FOLDER.parent)}\n")


if __name__ == "__main__":
    main()
