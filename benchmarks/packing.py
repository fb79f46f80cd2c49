"""Time of a policy update with packed rows, against padded rows, on sequences of log-normal length.

    python -m benchmarks.packing
    python -m benchmarks.packing --model .cache/models/tiny-llama --dtype float32

One `PolicyWorker` in this process, without Ray, trains on the same batch in three layouts: padded, as a model that does
not pack is trained; packed; packed with one copy of the prompt for each group. Its learning rate is tiny, so that all
updates start from nearly equal weights; loss and gradient of the layouts are compared in every turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from benchmarks.support.harness import NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.policy_worker import add_arguments, policy_worker
from benchmarks.support.processes import Meter
from benchmarks.support.train_rows import GroupLengths, train_batch
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.contract.messages import RankPlan, TrainRow

if TYPE_CHECKING:
    from troupe.workers.policy import PolicyWorker

LAYOUTS: dict[str, dict[str, bool]] = {
    "padded": {},
    "packed": {"packed": True},
    "packed, prompts shared": {"packed": True, "share_prompts": True},
}
"""Contenders, and their arguments of `plan_update`."""
SHORTEST, LONGEST = 8, 1024
VOCABULARY = 4000
"""Token ids are below it."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest relative difference of the norm of the gradient."""


@dataclass(frozen=True)
class Work:
    """A batch, and how it is cut."""

    table: pa.Table
    rows: tuple[TrainRow, ...]
    budget: int

    def plan(self, layout: str) -> RankPlan:
        """The plan of the only rank."""
        arguments = LAYOUTS[layout]
        everything = range(len(self.rows))
        return plan_update(self.rows, everything, 1, self.budget, skip_zero_advantage=False, **arguments)[0]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(row.tokens for row in self.rows)


def work(given: argparse.Namespace) -> Work:
    """Groups of responses of log-normal length to prompts of one length."""
    rng = np.random.default_rng(given.seed)
    lengths = rng.lognormal(np.log(given.median_tokens), given.sigma, (given.groups, given.samples))
    responses = np.clip(lengths, SHORTEST, LONGEST).astype(int).tolist()
    groups = [GroupLengths(given.prompt_tokens, tuple(own)) for own in responses]
    summary, table = train_batch(groups, VOCABULARY, given.seed)
    return Work(table, summary.rows, given.micro_batch_tokens)


class PackingContenders:
    """The turns of the layouts."""

    def __init__(self, worker: PolicyWorker, work: Work, tolerance: float) -> None:
        self._worker = worker
        self._work = work
        self._tolerance = tolerance
        self._norms: dict[str, float] = {}
        self._padding: dict[str, float] = {}
        self._gaps: list[float] = []

    async def turn(self, layout: str) -> Turn:
        """One update.

        Raises:
            NotCorrect: The gradient is not that of the padded rows.
        """
        plan = self._work.plan(layout)
        meter = Meter()
        metrics = self._worker.update(plan, self._work.table)
        figures = {"padding, %": 100 * metrics.values["padding"], "micro-batches": float(len(plan.micro_batches))}
        turn = meter.turn(float(self._work.tokens), figures=figures)
        self._norms[layout], self._padding[layout] = metrics.values["grad_norm"], metrics.values["padding"]
        if len(self._norms) == len(LAYOUTS):
            self._compare()
        return turn

    def _compare(self) -> None:
        expected = self._norms["padded"]
        gap = max(abs(norm / expected - 1.0) for norm in self._norms.values())
        if not gap <= self._tolerance:
            raise NotCorrect(f"norms of the gradient differ by layout: {self._norms}")
        self._gaps.append(gap)

    def checks(self) -> dict[str, str]:
        """The checks and their outcomes. Raises NotCorrect where packed rows have padding."""
        if any(padding for layout, padding in self._padding.items() if layout != "padded"):
            raise NotCorrect(f"packed rows have padding: {self._padding}")
        return {
            "gradient": f"norms of the layouts differ by {max(self._gaps):.1e} at most, relatively",
            "padding": "none in packed rows",
        }


async def measure(given: argparse.Namespace) -> Report:
    """Build the worker, alternate the layouts, check each turn. Raises NotCorrect."""
    worker = policy_worker(given, "packing", LONGEST)
    if not worker.packs():
        raise NotCorrect(f"{given.model} does not pack")
    contenders = PackingContenders(worker, work(given), TOLERANCE[given.dtype])
    turns = {layout: lambda _, layout=layout: contenders.turn(layout) for layout in LAYOUTS}
    try:
        taken = await take_turns(turns, given.turns)
    finally:
        worker.close()
    return Report("packing", taken, "padded", contenders.checks())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("packing", __doc__, 5)
    add_arguments(parser, groups=8)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
