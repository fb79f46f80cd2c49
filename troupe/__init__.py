"""Reinforcement learning for language models on Ray.

    import troupe

    outcome = troupe.run("spec.yaml", set={"schedule.steps": 20}, on_step=lambda step, metrics: ...)
    outcome.metrics, outcome.checkpoint, outcome.verdicts, outcome.report()

Further classes for your own code are in `troupe.environments`, `troupe.rewards`, `troupe.algorithms` and
`troupe.sandbox`. The folders `orchestrator/`, `workers/` and `deploy/` of a checkout are linked into this package; a
wheel contains them here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupe.orchestrator.errors import StopRequested as StopRequested
    from troupe.orchestrator.errors import TroupeError as TroupeError
    from troupe.orchestrator.errors import UsageError as UsageError
    from troupe.orchestrator.library import Outcome as Outcome
    from troupe.orchestrator.library import evaluate as evaluate
    from troupe.orchestrator.library import export as export
    from troupe.orchestrator.library import load_spec as load_spec
    from troupe.orchestrator.library import plan as plan
    from troupe.orchestrator.library import run as run
    from troupe.orchestrator.library import samples as samples
    from troupe.orchestrator.spec.errors import SpecError as SpecError
    from troupe.workers.agents.environments import Environment as Environment

    __version__: str

_LIBRARY = "troupe.orchestrator.library"
_HOMES = {
    **dict.fromkeys(("Outcome", "evaluate", "export", "load_spec", "plan", "run", "samples"), _LIBRARY),
    "Environment": "troupe.workers.agents.environments",
    "SpecError": "troupe.orchestrator.spec.errors",
    **dict.fromkeys(("StopRequested", "TroupeError", "UsageError"), "troupe.orchestrator.errors"),
}
"""The public names, and the module of each: it is imported when the name is first used."""

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a checker that sees it accepts any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("troupe-rl")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
