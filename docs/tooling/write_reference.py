"""Write the generated pages of `docs/` from the code: `python -m docs.tooling.write_reference`."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def _algorithms() -> str:
    return algorithm_reference(curves())


FOLDER = Path(__file__).resolve().parents[1]
README = FOLDER.parent / "README.md"


def _readme() -> str:
    return listed_in(README.read_text(encoding="utf-8"))


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
