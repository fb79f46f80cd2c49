"""`troupe eval`: a model on the held-out data of a spec, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.hub.resolve import LocalFiles, fetch
from troupe.orchestrator.roles.table import named as named_roles
from troupe.orchestrator.rollouts.endpoint import Endpoint, endpoint_sampler
from troupe.orchestrator.rollouts.evaluation import Evaluator, Sampler, engine_sampler, metrics_of, sets_of
from troupe.orchestrator.rollouts.evaluation_log import as_json, described_sets, evaluation_as_json
from troupe.orchestrator.rollouts.held_out import SetResult
from troupe.orchestrator.runs.offline import OfflineRun
from troupe.orchestrator.runs.pools import open_pools
from troupe.orchestrator.runs.session import RunRequest, Session, open_session
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

    endpoint: Endpoint | None = None
    """Samples instead of engines, or None for engines with the spec's model."""
    output: Path | None = None
    """File for the results with their intervals, or None to only return them."""
    adapter: Path | None = None
    """Adapters to merge with the spec's model, instead of the spec's adapters."""


async def evaluate_on_prompts(request: RunRequest, console: Console, options: EvaluationOptions) -> dict[str, float]:
    """Metrics of a model on every held-out set of a spec, with engines and reward workers alone.

    Raises:
        UsageError: The spec names no held-out data, or cannot be evaluated at an endpoint.
    """
    spec, endpoint = request.spec.rollouts, options.endpoint
    if spec.evaluation is None or spec.data.eval is None:
        raise UsageError("the spec has no evaluation section: there is nothing to evaluate on")
    if endpoint is not None:
        _require_chat(spec)
    local = fetch(without_adapters(spec), console)
    model = local.spec.model
    adapter = options.adapter or (None if model.adapter is None else Path(model.adapter))
    roles = named_roles(lambda row: row.evaluates and (endpoint is None or not row.samples))
    with _whole_model(local, adapter, console) as whole:
        spec = whole.spec
        async with (
            open_session(replace(request, spec=spec), console, local=whole, roles=roles, reads=True) as session,
            open_pools(spec, session) as pools,
            nullcontext() if endpoint is None else _endpoint_sampler(spec, session, endpoint) as at_endpoint,
        ):
            held_out = session.data.held_out
            put = session.cluster.put if at_endpoint is None else lambda table: table  # its prompts are read here
            sets = sets_of(spec, held_out, put, console.message)
            evaluator = Evaluator(spec.seed, sets, at_endpoint or engine_sampler(pools.engines), pools.rewards)
            running = evaluator.results(0, lambda done, total: console.phase("evaluate", done, total))
            results = await session.unless_stopped(running)
    if options.output is not None:
        named = {"path": model.path} | ({} if adapter is None else {"adapter": str(adapter)})
        if endpoint is not None:
            named = {"endpoint": endpoint.url, "name": endpoint.model}
        _write(options.output, named, described_sets(spec, held_out), results)
    return metrics_of(results, held_out_sets(spec))


@contextmanager
def _whole_model(
    local: LocalFiles[RolloutSpec], adapter: Path | None, console: Console
) -> Iterator[LocalFiles[RolloutSpec]]:
    """The files with a model for engines that load no adapters: merged if any, for as long as this is open.

    Raises:
        CheckpointError: The adapters cannot be merged with the model.
    """
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


def _endpoint_sampler(spec: RolloutSpec, session: Session, endpoint: Endpoint) -> AbstractAsyncContextManager[Sampler]:
    """Samples at the endpoint."""
    return endpoint_sampler(
        endpoint,
        session.cluster.put,
        max_tokens=spec.sampling.max_tokens,
        concurrency=spec.roles.rollout.max_num_seqs,
        timeout_s=spec.schedule.generate_timeout_s,
    )


async def evaluate_offline(request: RunRequest, console: Console) -> dict[str, float]:
    """Metrics of the spec's model on held-out examples: the trainers compute the loss of their algorithm, with the
    reference if it has one. Raises UsageError if the spec names no such data."""
    if request.spec.offline.data.eval is None:
        raise UsageError("the spec has no data.eval: there are no held-out examples to evaluate on")
    async with open_session(request, console, reads=True) as session:
        evaluator = await session.unless_stopped(OfflineRun(session).evaluator())
        running = evaluator.run(0, lambda done, total: console.phase("evaluate", done, total))
        return await session.unless_stopped(running)


def _require_chat(spec: RolloutSpec) -> None:
    """Raises UsageError if an endpoint would not sample what the spec asks for."""
    refused = {
        "roles.environment": any(one.environment is not None for one in held_out_sets(spec)),
        "sampling.stop": any(
            spec.sampling.stop if one.sampling.stop is None else one.sampling.stop for one in held_out_sets(spec)
        ),
        "sampling.structured": spec.sampling.structured is not None,
        "model.chat_template: none": spec.model.plain,
    }
    if fields := [field for field, used in refused.items() if used]:
        raise UsageError(f"an endpoint answers chat messages alone; this spec has {', '.join(fields)}")


def _write(
    file: Path, model: Mapping[str, str | None], sets: Mapping[str, Any], results: Mapping[str, SetResult]
) -> None:
    """Writes the results, in the form of a run's `evaluation.json`. Raises OSError."""
    content = as_json(sets, [evaluation_as_json(0, results)]) | {"model": model}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(content, indent=1) + "\n")
