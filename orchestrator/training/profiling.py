"""Chosen updates that the workers record with torch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from troupe.orchestrator.spec.sections import ProfileConfig
from troupe.workers.contract.messages import RankPlan

PROFILES = "profile"
"""Folder of the traces in the run folder."""


class UpdateProfiles:
    """Names a trace for the first update of each role in the chosen steps."""

    def __init__(self, config: ProfileConfig | None, out: Path) -> None:
        """`out`: the run folder."""
        self._config = config
        self._folder = out.absolute() / PROFILES
        self._done: set[tuple[int, str]] = set()

    def traced(self, step: int, role: str, plans: Sequence[RankPlan]) -> list[RankPlan]:
        """The plans of an update of this role in this step, with the files that its chosen ranks write."""
        config = self._config
        if config is None or step not in config.steps or (step, role) in self._done:
            return list(plans)
        self._done.add((step, role))
        names = [str(self._folder / f"step-{step:06d}-{role}-{rank}.json.gz") for rank in range(len(plans))]
        chosen = [name if rank in config.ranks else "" for rank, name in enumerate(names)]
        return [replace(plan, trace=trace) for plan, trace in zip(plans, chosen, strict=True)]
