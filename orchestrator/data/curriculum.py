"""A curriculum: how often a prompt is drawn follows from how many of its samples were solved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.sections import CurriculumConfig
from troupe.workers.contract.messages import RewardSummary
from troupe.workers.contract.rewards import is_solved


@dataclass(frozen=True)
class Results:
    """Solved samples of one prompt; counts of earlier steps weigh less."""

    solved: float = 0.0
    samples: float = 0.0

    @property
    def pass_rate(self) -> float:
        """(solved + 1) / (samples + 2): the mean of the pass rate's posterior under a uniform prior (Laplace)."""
        return (self.solved + 1.0) / (self.samples + 2.0)

    def followed_by(self, later: Results, decay: float) -> Results:
        """These results times `decay`, plus later ones."""
        return Results(decay * self.solved + later.solved, decay * self.samples + later.samples)


def draw_probability(pass_rate: float, floor: float) -> float:
    """max(floor, 4 p (1 - p)): p (1 - p) is the variance of a sample's outcome, and the lower bound of the policy's
    improvement is proportional to it (arXiv 2504.03380). A prompt without results has p = 1/2."""
    return max(floor, 4.0 * pass_rate * (1.0 - pass_rate))


class Curriculum:
    """Decides which prompts a pass over the data draws, from the seed, the epoch, the row and the results of
    finished steps (`mark_trained`) alone, whatever their order: a resumed run decides alike."""

    def __init__(self, config: CurriculumConfig, seed: int, solved_at: RowTable[float]) -> None:
        self._config = config
        self._seed = seed
        self._solved_at = solved_at
        """Least reward of a solved sample, by row."""
        self._results: dict[int, Results] = {}
        """Results by row; rows without results are absent."""
        self._step: dict[int, Results] = {}
        """Results since the last finished step."""
        self._skipped: int = 0
        """Prompts not drawn since the last finished step."""
        self._set_aside: int = 0
        self._metrics: dict[str, float] = {}

    def draws(self, row: int, epoch: int) -> bool:
        """Whether this pass over the data draws the prompt."""
        digest = hashlib.blake2b(f"{self._seed}:{epoch}:{row}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest) >> 11) / 2**53
        drawn = uniform < self._probability(self._results.get(row, Results()))
        self._skipped += not drawn
        return drawn

    def observe(self, row: int, rewards: RewardSummary) -> None:
        """Adds the results of a group; samples without a reward have none."""
        component = self._config.component
        values = rewards.rewards if component is None else rewards.components[component]
        usable = [v for v, reward in zip(values, rewards.rewards, strict=True) if v is not None and reward is not None]
        solved_at = self._solved_at[row]
        solved = sum(is_solved(value, solved_at) for value in usable)
        self._step[row] = self._step.get(row, Results()).followed_by(Results(solved, len(usable)), decay=1.0)

    def mark_trained(self) -> None:
        """Ends a step: its results count for the draws that follow."""
        for row, results in self._step.items():
            before = self._results.get(row, Results())
            self._results[row] = before.followed_by(results, self._config.decay)
            self._set_aside += self._is_set_aside(self._results[row]) - self._is_set_aside(before)
        samples = sum(results.samples for results in self._step.values())
        self._metrics = {
            "curriculum/pass_rate": sum(results.solved for results in self._step.values()) / max(samples, 1.0),
            "curriculum/skipped": float(self._skipped),
            "curriculum/seen": float(len(self._results)),
            "curriculum/set_aside": float(self._set_aside),
        }
        self._step, self._skipped = {}, 0

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def state(self) -> dict[str, Any]:
        """All results, JSON-ready; its size follows the prompts that have some."""
        return {"results": _listed(self._results), "step": _listed(self._step), "skipped": self._skipped}

    def restore(self, state: Any, rows: int) -> None:
        """Resume from a value of `state`, for a pool of `rows` prompts. Raises DataError if it is damaged."""
        try:
            results, step = _results(state["results"], rows), _results(state["step"], rows)
            skipped = int(state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"cannot resume: the curriculum's state is damaged ({error!r})") from None
        self._results, self._step, self._skipped = results, step, skipped
        self._set_aside = sum(map(self._is_set_aside, results.values()))

    def _probability(self, results: Results) -> float:
        return draw_probability(results.pass_rate, self._config.floor)

    def _is_set_aside(self, results: Results) -> bool:
        return self._probability(results) < 0.5


def _listed(results: dict[int, Results]) -> list[list[float]]:
    return [[row, one.solved, one.samples] for row, one in sorted(results.items())]


def _results(listed: Iterable[tuple[int, float, float]], rows: int) -> dict[int, Results]:
    """The inverse of `_listed`. Raises ValueError, TypeError."""
    found = {int(row): Results(float(solved), float(samples)) for row, solved, samples in listed}
    for row, one in found.items():
        if not (0 <= row < rows and 0.0 <= one.solved <= one.samples):
            raise ValueError(f"row {row} has {one.solved} solved of {one.samples}")
    return found
