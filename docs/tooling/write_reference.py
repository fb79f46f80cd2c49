"""Write the generated pages of `docs/` from the code: `python -m docs.tooling.write_reference`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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
from troupe.orchestrator.spec.errors import known_paths
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec


def _algorithms() -> str:
    return algorithm_reference(curves())


FOLDER = Path(__file__).resolve().parents[1]
README = FOLDER.parent / "README.md"


def _readme() -> str:
    return listed_in(README.read_text(encoding="utf-8"))


def _completions() -> str:
    """What Tab completes after `--set`, one to a line: the fields that are no sections, and the names of algorithms."""
    paths = sorted({*known_paths(RolloutSpec), *known_paths(OfflineSpec)})
    fields = [f"{path}=" for path, after in pairwise([*paths, ""]) if not after.startswith(f"{path}.")]
    return "\n".join([*fields, *(f"algorithm.name={name}" for name in (*ALGORITHMS, *OFFLINE_ALGORITHMS)), ""])


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
