"""`troupe eval`: a model on the held-out data of a spec, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.hub.resolve import LocalFiles, fetch
from troupe.orchestrator.roles.table import named as named_roles
from troupe.orchestrator.rollouts.evaluation import Evaluator, engine_sampler, metrics_of, sets_of
from troupe.orchestrator.rollouts.evaluation_log import as_json, described_sets, evaluation_as_json
from troupe.orchestrator.rollouts.held_out import SetResult
from troupe.orchestrator.runs.offline import OfflineRun
from troupe.orchestrator.runs.offsets import RewardOffsets
from troupe.orchestrator.runs.pools import open_pools
from troupe.orchestrator.runs.session import RunRequest, open_session
from troupe.orchestrator.spec.derived.paths import without_adapters
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.examples import models_folder
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.export import write_merged
from troupe.workers.contract.atomic_file import write_atomic


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation."""

    output: Path | None = None
    """File for the results with their intervals, or None to only return them."""
    adapter: Path | None = None
    """Adapters to merge with the spec's model, instead of the spec's adapters."""


async def evaluate_on_prompts(request: RunRequest, console: Console, options: EvaluationOptions) -> dict[str, float]:
    """Metrics of a model on every held-out set of a spec, with engines and reward workers alone. Raises UsageError."""
    spec = request.spec.rollouts
    if spec.evaluation is None or spec.data.eval is None:
        raise UsageError("the spec has no evaluation section: there is nothing to evaluate on")
    local = fetch(without_adapters(spec), console)
    model = local.spec.model
    adapter = options.adapter or (None if model.adapter is None else Path(model.adapter))
    roles = named_roles(lambda row: row.evaluates)
    with _whole_model(local, adapter, console) as whole:
        spec = whole.spec
        async with (
            open_session(replace(request, spec=spec), console, local=whole, roles=roles, reads=True) as session,
            open_pools(spec, session) as pools,
        ):
            await RewardOffsets(session, pools.rewards).open()
            held_out = session.data.held_out
            sets = sets_of(spec, held_out, session.cluster.put, console.message)
            evaluator = Evaluator(spec.seed, sets, engine_sampler(pools.engines), pools.rewards)
            running = evaluator.results(0, partial(console.phase, "evaluate", unit="prompts"))
            results = await session.unless_stopped(running)
    if options.output is not None:
        named = {"path": model.path} | ({} if adapter is None else {"adapter": str(adapter)})
        _write(options.output, named, described_sets(spec, held_out), results)
    return metrics_of(results, held_out_sets(spec))


@contextmanager
def _whole_model(
    local: LocalFiles[RolloutSpec], adapter: Path | None, console: Console
) -> Iterator[LocalFiles[RolloutSpec]]:
    """The files with a model for engines that load no adapters: merged if any, for as long as this is open."""
    if adapter is None:
        yield local
        return
    model = local.spec.model
    cache = models_folder().parent
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="merged-", dir=cache) as folder:
        console.message(f"merging {adapter} with {model.path}")
        merged = write_merged(adapter, Path(folder) / "model", Path(model.path))
        whole = model.model_copy(update={"path": str(merged), "adapter": None})
        yield replace(local, spec=local.spec.model_copy(update={"model": whole}))


async def evaluate_offline(request: RunRequest, console: Console) -> dict[str, float]:
    """Metrics of the spec's model on held-out examples, by the loss of their algorithm. Raises UsageError."""
    if request.spec.offline.data.eval is None:
        raise UsageError("the spec has no data.eval: there are no held-out examples to evaluate on")
    async with open_session(request, console, reads=True) as session:
        evaluator = await session.unless_stopped(OfflineRun(session).evaluator())
        running = evaluator.run(0, partial(console.phase, "evaluate", unit="prompts"))
        return await session.unless_stopped(running)


def _write(
    file: Path, model: Mapping[str, str | None], sets: Mapping[str, Any], results: Mapping[str, SetResult]
) -> None:
    """Writes the results, in the form of a run's `evaluation.json`. Raises OSError."""
    content = as_json(sets, [evaluation_as_json(0, results)]) | {"model": model}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(content, indent=1) + "\n")
