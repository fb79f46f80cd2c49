"""Weights & Biases. Online or not, and which account, is wandb's own configuration (`WANDB_MODE`, `WANDB_API_KEY`)."""

from __future__ import annotations

import importlib
import secrets
from typing import Any

from troupe.orchestrator.telemetry.sinks.base import LoggedRun, Metrics, numbers

_STEP = "step"


class WandbSink:
    """One run of wandb; a resumed run continues it. Its files are in `wandb/` in the run folder."""

    def __init__(self, run: LoggedRun) -> None:
        """Start or continue the run. May wait for the server."""
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=_identity(run),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            reinit="create_new",
            allow_val_change=True,
        )
        # wandb's own step must not decrease, but a resumed run records steps again.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, metrics: Metrics) -> None:
        """Record every number."""
        self._run.log({_STEP: step, **numbers(metrics)})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


def _identity(run: LoggedRun) -> str:
    """The id of the run at wandb: kept in the run folder, and new for a run that starts from the beginning."""
    file = run.folder / "wandb-id"
    if run.resume_at > 0 and file.exists():
        return file.read_text().strip()
    name = secrets.token_hex(8)
    file.write_text(f"{name}\n")
    return name
