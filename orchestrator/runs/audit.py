"""The audit of a run: sampler and trainer against plain float32 transformers, alone or before the first step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.audit.auditor import AuditedWeights, Auditor, AuditReport, token_scorer
from troupe.orchestrator.roles.table import named as named_roles
from troupe.orchestrator.runs.pools import RunPools, load_trainers, open_pools
from troupe.orchestrator.runs.session import RunRequest, Session, open_session, say
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import MODEL, Checkpoint
from troupe.orchestrator.training.parts import RunPart

AUDIT = "audit.json"
"""File of a run folder with the report of the audit at its start."""


def audit(request: RunRequest, console: Console) -> AuditReport:
    """Compares sampler and trainer with plain float32 transformers, without training. One engine and the policy are
    started. With `request.resume`, the policy loads the newest checkpoint in the run folder, and its weights are pushed
    to the engine as the run pushes them. Raises UsageError if the spec has no rollouts, or the folder no checkpoint."""
    if request.spec.rollouts is None:
        raise UsageError("the run has no rollouts: there is no sampler to compare with the trainer")
    return asyncio.run(_audit(replace(request, spec=one_engine(request.spec.rollouts)), console))


def one_engine(spec: RolloutSpec) -> RolloutSpec:
    """The spec of an audit: one engine unless engines share the policy's GPUs."""
    rollout = spec.roles.rollout
    if rollout.colocate_with is None:
        rollout = rollout.model_copy(update={"workers": 1, "min_workers": 1, "max_workers": None})
    roles = spec.roles.model_copy(update={"rollout": rollout})
    return spec.model_copy(update={"roles": roles})


def audited_roles(spec: RolloutSpec) -> frozenset[str]:
    """The roles of an audit: those of the sampler and the trainer, and a judge that plays against the policy."""
    plays = spec.roles.judge_plays
    return named_roles(lambda row: row.audited or (plays and row.kind == "judge"))


async def _audit(request: RunRequest, console: Console) -> AuditReport:
    async with (
        open_session(request, console, roles=audited_roles(request.spec.rollouts), reads=True) as session,
        open_pools(session.spec.rollouts, session) as pools,
    ):
        spec, found = session.spec.rollouts, session.checkpoints.found
        if spec.trains_adapters:
            await session.unless_stopped(pools.require_sync().push(0))
        load = None if found is None else partial(load_trainers, found, spec, pools)
        return await session.unless_stopped(RunAudit(session, pools).run(found, load))


@dataclass(frozen=True)
class RunAudit:
    """The engines and the policy of a run, to be compared with the float32 scorer."""

    session: Session
    pools: RunPools

    async def run(self, found: Checkpoint | None, load: Callable[[], Awaitable[object]] | None = None) -> AuditReport:
        """Compares the initial weights, or a checkpoint's. `found`: the checkpoint, or None for the initial weights."""
        session, spec, data = self.session, self.session.spec.rollouts, self.session.data
        policy = session.workers.require_policy()
        prompts = data.train, session.cluster.put(data.train.table)
        scorer = token_scorer(spec, session.cluster, session.launcher.placement(policy.workers[0].name))
        auditor = Auditor(spec, self.pools.engines, policy, prompts, scorer)
        session.console.phase("audit")
        if found is not None:
            await auditor.warm()
            if load is not None:
                await load()
            await self.pools.require_sync().push(found.step)
        report = await auditor.run(self._weights(found))
        await auditor.forget()
        return report

    def _weights(self, found: Checkpoint | None) -> AuditedWeights:
        spec = self.session.spec.rollouts
        model, adapter = Path(spec.model.path), spec.model.adapter
        own = None if adapter is None else Path(adapter)
        if found is None:
            return AuditedWeights("the initial weights", 0, model, adapter=own)
        label, trained = f"the checkpoint of step {found.step}", found.path / MODEL
        if spec.trains_adapters:
            return AuditedWeights(label, found.step, model, adapter=trained, previous_adapter=own)
        return AuditedWeights(label, found.step, trained, model)


@dataclass(frozen=True)
class AuditAtStart(RunPart):
    """Compares sampler and trainer with the float32 scorer before the first step, and keeps the report."""

    audited: RunAudit
    found: Checkpoint | None

    async def open(self) -> None:
        """Raises TroupeError if there is a gap that rounding does not explain."""
        session = self.audited.session
        report = await session.unless_stopped(self.audited.run(self.found))
        say(session.console, report.lines())
        (session.request.out / AUDIT).write_text(json.dumps(report.as_json(), indent=1) + "\n")
        report.require()
