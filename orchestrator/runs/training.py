"""Training from a spec to its outcome, on rollouts or on offline data."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.runs.session import RunRequest, open_session
from troupe.orchestrator.telemetry.console import Console


def train(request: RunRequest, console: Console) -> RunOutcome:
    """Trains as the spec specifies. Raises TroupeError if the run cannot start or cannot continue."""
    return asyncio.run(_train(request, console))


async def _train(request: RunRequest, console: Console) -> RunOutcome:
    async with open_session(request, console, trains=True) as session:
        if request.spec.rollouts is None:
            from troupe.orchestrator.runs.offline import train_offline as train_in
        else:
            from troupe.orchestrator.runs.rollouts import train_on_rollouts as train_in
        ended = await train_in(session)
    return replace(ended, interrupted=session.stop.is_set())
