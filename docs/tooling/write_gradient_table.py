"""Write the table of losses and gradients beside their plain loops into the page on correctness.

`python -m docs.tooling.write_gradient_table`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from tests.workers.algorithms import offline_reference, rollout_reference
from tests.workers.models import test_whole_teachers
from tests.workers.models.test_distillation import DIVERGENCES, SUPPORTS, differences
from troupe.orchestrator.algorithms.table import ALGORITHMS

PAGE = Path(__file__).resolve().parents[1] / "explanation" / "correctness.md"
BEGIN, END = "<!-- gradients: python -m docs.tooling.write_gradient_table -->", "<!-- end of gradients -->"


def measured(seeds: Sequence[int]) -> Iterator[tuple[str, float, float]]:
    """(row, largest difference of the value, and of the gradient) from the loop, both relative, over the seeds."""
    for name in ALGORITHMS:
        found = [rollout_reference.compare(name, seed) for seed in seeds]
        yield f"`{name}`", max(one.value for one in found), max(one.gradient for one in found)
    for row in offline_reference.ROWS:
        name, _, variant = row.name.partition(", ")
        found = [offline_reference.compare(row, seed) for seed in seeds]
        label = f"`{name}`" + (f", {variant.replace('_', ' ')}" if variant else "")
        yield label, max(one.value for one in found), max(one.gradient for one in found)
    for divergence, support in product(DIVERGENCES, SUPPORTS):
        yield f"`distill.divergence: {divergence}`, `{support}`", *differences(support, divergence)
    for divergence in DIVERGENCES:
        value, gradient, _ = test_whole_teachers.differences(divergence, "full", "sources", packed=True)
        yield f"`distill.divergence: {divergence}`, `full`, two teachers", value, gradient


def bound(difference: float) -> float:
    """A power of ten that is at least ten times the difference, so that it holds on another processor, and 1e-14 or
    more."""
    return 10.0 ** math.ceil(math.log10(max(10.0 * difference, 1e-14)))


def written(page: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """The page with the table between its two marks."""
    lines = ["| | value | gradient |", "|---|---:|---:|"]
    lines += [f"| {name} | {bound(value):.0e} | {bound(gradient):.0e} |" for name, value, gradient in rows]
    before, _, rest = page.partition(BEGIN)
    table = "\n".join(lines)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), [*measured(range(3))]), encoding="utf-8")


if __name__ == "__main__":
    main()
