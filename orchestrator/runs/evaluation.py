"""`troupe eval`: a model on the held-out data of a spec, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from troupe.orchestrator.data.prompts import evaluation_picks
from troupe.orchestrator.data.summary import RunData, describe, load_data
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.hub.resolve import LocalFiles, fetch
from troupe.orchestrator.roles.table import named as named_roles
from troupe.orchestrator.rollouts.endpoint import Endpoint, endpoint_sampler
from troupe.orchestrator.rollouts.evaluation import (
    Evaluator,
    HeldOutSet,
    Sampler,
    engine_sampler,
    levels_of,
    metrics_of,
)
from troupe.orchestrator.rollouts.evaluation_log import EvaluationLog, as_json, described_sets, evaluation_as_json
from troupe.orchestrator.rollouts.held_out import SetResult
from troupe.orchestrator.runs.offline import OfflineRun
from troupe.orchestrator.runs.pools import RunPools, open_pools
from troupe.orchestrator.runs.session import RunRequest, Session, open_session, say
from troupe.orchestrator.spec.derived.paths import without_adapters
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.examples import models_folder
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import write_merged
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


async def evaluate_on_prompts(
    request: RunRequest, spec: RolloutSpec, console: Console, options: EvaluationOptions
) -> dict[str, float]:
    """Metrics of a model on every held-out set of a spec, with engines and reward workers alone.

    Raises:
        UsageError: The spec names no held-out data, or cannot be evaluated at an endpoint.
    """
    if spec.evaluation is None:
        raise UsageError("the spec has no evaluation section: there is nothing to evaluate on")
    if options.endpoint is not None:
        _require_chat(spec)
    local = fetch(without_adapters(spec), console)
    model = local.spec.model
    adapter = options.adapter or (None if model.adapter is None else Path(model.adapter))
    with _whole_model(local, adapter, console) as whole:
        sets, results = await _results(replace(request, spec=whole.spec), whole, console, options)
    if options.output is not None:
        named = {"path": model.path} | ({} if adapter is None else {"adapter": str(adapter)})
        if options.endpoint is not None:
            named = {"endpoint": options.endpoint.url, "name": options.endpoint.model}
        _write(options.output, named, sets, results)
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


async def _results(
    request: RunRequest, local: LocalFiles[RolloutSpec], console: Console, options: EvaluationOptions
) -> tuple[Mapping[str, Any], dict[str, SetResult]]:
    """(how each set is sampled and scored, its result)."""
    data = load_data(local.spec)
    say(console, describe(data.pools))
    if not data.held_out:
        raise TroupeError("there are no held-out prompts to evaluate on")
    sets = described_sets(local.spec, data.held_out)
    return sets, await _sample(request, local, data, console, options.endpoint)


async def _sample(
    request: RunRequest, local: LocalFiles[RolloutSpec], data: RunData, console: Console, endpoint: Endpoint | None
) -> dict[str, SetResult]:
    """The result of every set by its label."""
    spec = local.spec
    roles = named_roles(lambda row: row.evaluates and (endpoint is None or not row.samples))
    async with (
        open_session(request, console, local=local, roles=roles) as session,
        open_pools(spec, session) as pools,
        _sampler(spec, session, endpoint) as sample,
    ):
        evaluator = held_out_evaluator(spec, pools, data, sample=sample)
        if evaluator is None:
            raise TroupeError("there are no held-out prompts to evaluate on")
        running = evaluator.results(0, lambda done, total: console.phase("evaluate", done, total))
        return await session.unless_stopped(running)


def _sampler(
    spec: RolloutSpec, session: Session, endpoint: Endpoint | None
) -> AbstractAsyncContextManager[Sampler | None]:
    """Samples at the endpoint, or None for engines."""
    if endpoint is None:
        return nullcontext()
    return endpoint_sampler(
        endpoint,
        session.cluster.put,
        max_tokens=spec.sampling.max_tokens,
        concurrency=spec.roles.rollout.max_num_seqs,
        timeout_s=spec.schedule.generate_timeout_s,
    )


def held_out_evaluator(
    spec: RolloutSpec,
    pools: RunPools,
    data: RunData,
    *,
    responses: Path | None = None,
    log: EvaluationLog | None = None,
    sample: Sampler | None = None,
) -> Evaluator | None:
    """Held-out evaluation, if the spec has one.

    Args:
        spec: The spec.
        pools: Its engines and reward workers.
        data: Its data.
        responses: Folder for the samples, or None to write none.
        log: Keeps the results, or None to return them only.
        sample: Samples the prompts from the tables themselves, or None for the engines.
    """
    if spec.evaluation is None or not data.held_out:
        return None
    sets: list[HeldOutSet] = []
    cluster, console = pools.session.cluster, pools.session.console
    for settings in held_out_sets(spec):
        if settings.solved_at is None:
            of = f" of {settings.name}" if settings.name else ""
            where = f"data.{settings.section}" if settings.name else "evaluation"
            hint = f"set {where}.solved_at to the reward of a right response"
            console.message(f"held-out accuracy{of} is not reported for this reward: {hint}")
        pool = data.held_out[settings.section]
        picks = evaluation_picks(pool, spec.seed, spec.evaluation.prompts, settings.name)
        table = cluster.put(pool.table) if sample is None else pool.table
        sets.append(HeldOutSet(settings, picks, table, levels_of(pool, settings.level)))
    return Evaluator(spec.seed, sets, sample or engine_sampler(pools.engines), pools.rewards, responses, log)


async def evaluate_offline(request: RunRequest, spec: OfflineSpec, console: Console) -> dict[str, float]:
    """Metrics of the spec's model on held-out examples: the trainers compute the loss of their algorithm, with the
    reference if it has one. Raises UsageError if the spec names no such data."""
    local = fetch(spec, console)
    data = load_data(local.spec) if spec.data.eval is not None else None
    if data is None:
        raise UsageError("the spec has no data.eval: there are no held-out examples to evaluate on")
    say(console, describe(data.pools))
    async with open_session(request, console, local=local) as session:
        evaluator = await session.unless_stopped(
            OfflineRun(spec, request.out, session).evaluator(data.held_out["eval"])
        )
        running = evaluator.run(0, lambda done, total: console.phase("evaluate", done, total))
        return await session.unless_stopped(running)


def _require_chat(spec: RolloutSpec) -> None:
    """Raises UsageError if an endpoint would not sample what the spec asks for."""
    refused = {
        "roles.environment": any(one.environment is not None for one in held_out_sets(spec)),
        "sampling.stop": bool(spec.sampling.stop),
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
