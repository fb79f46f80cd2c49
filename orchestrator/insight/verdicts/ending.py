"""Rules on how a run ended: with an error, or before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict

FAILED: Final = "failed-run"


def failed(run: History) -> Iterator[Verdict]:
    end = run.end
    if end.get("how") != "failed":
        return
    why = ": ".join(str(end[name]) for name in ("error", "detail") if end.get(name)) or "its error is not recorded"
    yield Verdict(
        FAILED,
        Level.PROBLEM,
        "The run has failed",
        f"It ended after step {run.last_step}: {why}",
        run.last_step,
        remedies=(
            Remedy("`troupe why RUN` shows what was known; `troupe run --resume` continues from its checkpoint."),
        ),
    )


def no_steps(run: History) -> Iterator[Verdict]:
    how = run.end.get("how")
    if run.last_step or how == "failed":
        return
    yield Verdict(
        "no-steps",
        Level.WARNING,
        "No step is recorded",
        f"The run was {how} before its first step." if how else "It is starting, or has ended before its first step.",
        0,
        remedies=() if how else (Remedy("`troupe why RUN` tells whether it is still starting."),),
    )
