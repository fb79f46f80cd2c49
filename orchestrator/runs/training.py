"""Training from a spec to its outcome, on rollouts or on offline data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.data.prompt_check import COUNTED, PROMPTS, PromptCheck, check_prompts
from troupe.orchestrator.data.summary import Pools, describe, load_data
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.hub.resolve import fetch
from troupe.orchestrator.runs.checkpoints import RunCheckpoints, open_checkpoints
from troupe.orchestrator.runs.lock import kept, locked
from troupe.orchestrator.runs.offline import train_offline
from troupe.orchestrator.runs.resume import require_same_rows, resumption
from troupe.orchestrator.runs.rollouts import train_on_rollouts
from troupe.orchestrator.runs.session import RunRequest, open_session, say
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.telemetry.console import Console


@dataclass(frozen=True)
class _Kind:
    """What differs between training on rollouts and on offline data."""

    read: Callable[[Any], Any]
    """Reads the data sets of a spec whose models are folders. Raises DataError."""
    rendered: int
    """Prompts of each section that are rendered at most, to check them."""
    train: Callable[..., Awaitable[RunOutcome]]


_ROLLOUTS = _Kind(load_data, COUNTED, train_on_rollouts)
_OFFLINE = _Kind(load_data, PROMPTS, train_offline)


def train(request: RunRequest, console: Console) -> RunOutcome:
    """Trains as the spec specifies.

    Raises:
        TroupeError: The run cannot start or cannot continue, with one clear message.
    """
    request.out.mkdir(parents=True, exist_ok=True)
    with locked(request.out) as lock, kept(lock, request.out / RESOLVED_SPEC):
        checkpoints = open_checkpoints(request.spec, request.out, request.resume)
        _announce(request, checkpoints, console)
        return asyncio.run(_train(request, checkpoints, console))


def _announce(request: RunRequest, checkpoints: RunCheckpoints, console: Console) -> None:
    """Writes the spec of a new run, or compares the folder's; shows the changes and warnings.

    Raises:
        UsageError: The run cannot resume with this spec.
    """
    spec, file = request.spec, request.out / RESOLVED_SPEC
    if checkpoints.found is None:
        spec.write(file)
    else:
        say(console, resumption(request.out, checkpoints.found, spec, file).lines())
    say(console, [f"warning: {line}" for line in warnings_of(spec)])


async def _train(request: RunRequest, checkpoints: RunCheckpoints, console: Console) -> RunOutcome:
    """Trains in a folder that no other run uses."""
    kind = _OFFLINE if request.spec.rollouts is None else _ROLLOUTS
    local = fetch(request.spec, console)
    data = kind.read(local.spec)
    require_same_rows(checkpoints.found, data.drawn)
    checks = _check(local.spec, data.pools, kind.rendered, console)
    async with open_session(request, console, local=local, resume_at=checkpoints.done, checks=checks) as session:
        found = await session.unless_stopped(checks)
        return await kind.train(request, session, replace(data, refused=found.refused), checkpoints)


def _check(spec: RunSpec, pools: Pools, most: int, console: Console) -> asyncio.Task[PromptCheck]:
    """Starts to render the first `most` prompts of each section in another process, while the workers start."""
    loop = asyncio.get_running_loop()
    rendering = loop.run_in_executor(None, check_prompts, spec, pools, most)
    return loop.create_task(_usable(pools, rendering, console))


async def _usable(pools: Pools, rendering: Awaitable[PromptCheck], console: Console) -> PromptCheck:
    """Shows what the data are, and which of the rendered prompts cannot be used.

    Raises:
        UsageError: No prompt can be used with the model.
    """
    found = await rendering
    if found.problems:
        raise UsageError("\n".join(f"{field}: {problem}" for field, problem in found.problems))
    say(console, [*describe(pools), *found.lines])
    return found
