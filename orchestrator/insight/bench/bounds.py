"""The bottleneck of each point and what to change, as lines for the spec; and the results as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from troupe.orchestrator.insight.bench.points import WORKERS, Point, measured_fields
from troupe.orchestrator.insight.bench.results import Measures, Result
from troupe.orchestrator.roles.settings import rollout_config
from troupe.orchestrator.spec.roles import environment_role

MAX_NUM_SEQS = "roles.rollout.max_num_seqs"
_FULL = 0.9
"""A limit counts as reached at this share of it."""
_WAITS = 0.5
"""Mean number of sequences waiting in an engine that counts as a queue."""
_IDLE = 0.75
"""An engine that computes for less than this share of the time is idle too often."""
_UNEVEN = 0.8
"""Share of the mean engine's work below which the least busy engine has too little."""
_DRAINS = 0.6
"""Share of the most sequences that run together below which their mean shows a long end of the batch."""
_GAIN = 1.03
"""Least gain in throughput that counts as one."""
_MOST_GPU_MEMORY = 0.92
Json = dict[str, Any]


class Kind(Enum):
    """The bottleneck of a point."""

    KV_CACHE = "KV cache"
    SLOTS = "max_num_seqs"
    ENVIRONMENT = "environment"
    UNEVEN = "uneven engines"
    DRIVER = "outside the engines"
    TAIL = "the longest sequences"
    LOAD = "too few sequences"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Bound:
    """The bottleneck of a point, and what to change."""

    kind: Kind
    why: str
    """The measurements that show it, as a sentence."""
    lines: tuple[str, ...] = ()
    """Lines for the spec (`roles.rollout.max_num_seqs: 128`), or empty if there is nothing to set."""
    note: str = ""
    """What the spec cannot say."""


def bound_of(result: Result, results: Sequence[Result], cores: int | None) -> Bound | None:
    """The bottleneck of a result, or None if not measured; advises no change that a point tried without gain."""
    if result.measures is None:
        return None
    kind = kind_of(result.point, result.measures)
    found = _EXPLAIN[kind](result.point, result.measures)
    if kind is Kind.SLOTS and (tried := _without_gain(result, results, MAX_NUM_SEQS)):
        why = f"{found.why}, but {tried}: the engines compute as fast as they can"
        found = Bound(Kind.DECODE, why)
    if found.kind is Kind.DECODE and not found.lines:
        found = _compute(result, results, cores, found.why)
    return found


def best_of(results: Sequence[Result]) -> Result | None:
    """The result with the most tokens per second; or None if nothing was measured."""
    measured = [result for result in results if result.measures is not None]
    return max(measured, key=lambda result: result.measures.tokens_per_s if result.measures else 0.0, default=None)


def kind_of(point: Point, measures: Measures) -> Kind:
    role = point.spec.roles.rollout
    if measures.preemptions or (measures.most_kv_use >= _FULL and measures.waiting >= _WAITS):
        return Kind.KV_CACHE
    if measures.waiting >= _WAITS and measures.most_running >= _FULL * role.max_num_seqs:
        return Kind.SLOTS
    if measures.busy < _IDLE:
        return Kind.ENVIRONMENT if point.spec.roles.environments() else Kind.DRIVER
    if measures.least_busy < _UNEVEN * measures.busy:
        return Kind.UNEVEN
    if measures.running < _DRAINS * measures.most_running:
        return Kind.TAIL
    if measures.prefill_share > 0.5:
        return Kind.PREFILL
    if measures.most_running < _DRAINS * role.max_num_seqs:
        return Kind.LOAD
    return Kind.DECODE


def _kv_cache(point: Point, measures: Measures) -> Bound:
    role = point.spec.roles.rollout
    wanted = (measures.running + measures.waiting) / max(measures.running, 1.0)
    why = (
        f"the KV cache is full up to {measures.most_kv_use:.0%}: {measures.preemptions} sequences lost their place, "
        f"{measures.waiting:.1f} wait for one"
    )
    fits = max(1, int(measures.running))
    fewer = f"{MAX_NUM_SEQS}: {fits}"
    if point.spec.device == "cpu":
        gib = math.ceil(10 * role.kv_cache_gib * max(wanted, 1.25)) / 10
        return Bound(Kind.KV_CACHE, why, (f"roles.rollout.kv_cache_gib: {gib:g}",), f"or {fewer}")
    if role.gpu_share < _MOST_GPU_MEMORY and role.colocate_with is None:
        return Bound(Kind.KV_CACHE, why, (f"roles.rollout.gpu_memory_utilization: {_MOST_GPU_MEMORY}",), f"or {fewer}")
    return Bound(Kind.KV_CACHE, why, (fewer,), "or more GPUs for each engine (roles.rollout.tensor_parallel_size)")


def _slots(point: Point, measures: Measures) -> Bound:
    role = point.spec.roles.rollout
    wanted = min(4 * role.max_num_seqs, 2 ** math.ceil(math.log2(measures.running + measures.waiting + 1)))
    wanted = max(wanted, 2 * role.max_num_seqs)
    lines = [f"{MAX_NUM_SEQS}: {wanted}"]
    used = measures.most_kv_use * wanted / role.max_num_seqs
    if used > 1 and point.spec.device == "cpu":
        lines.append(f"roles.rollout.kv_cache_gib: {math.ceil(10 * role.kv_cache_gib * used) / 10:g}")
    why = (
        f"{measures.waiting:.1f} sequences wait in an engine that decodes {measures.most_running} at once, "
        f"with {measures.most_kv_use:.0%} of its KV cache in use"
    )
    return Bound(Kind.SLOTS, why, tuple(lines))


def _environment(point: Point, measures: Measures) -> Bound:
    environments = point.spec.roles.environments()
    why = f"the engines compute {measures.busy:.0%} of the time and wait for the environment"
    lines = tuple(f"roles.{environment_role(name)}.workers: {2 * one.workers}" for name, one in environments.items())
    return Bound(Kind.ENVIRONMENT, why, lines)


def _driver(point: Point, measures: Measures) -> Bound:
    why = f"the engines compute {measures.busy:.0%} of the time"
    if point.workers > 1 and measures.most_running < point.spec.roles.rollout.max_num_seqs:
        return Bound(Kind.DRIVER, why, (f"{WORKERS}: {max(1, point.workers // 2)}",), "they have too little to do")
    note = "batches this short are dominated by what happens around them: measure with more --prompts"
    return Bound(Kind.DRIVER, why, (), note)


def _uneven(point: Point, measures: Measures) -> Bound:
    why = (
        f"the least busy engine computes {measures.least_busy:.0%} of the time, the mean one {measures.busy:.0%}: "
        "the last groups run on a few engines"
    )
    return Bound(Kind.UNEVEN, why, _overlap(point))


def _tail(point: Point, measures: Measures) -> Bound:
    why = (
        f"an engine decodes {measures.running:.1f} sequences on average and {measures.most_running} at most: "
        f"it waits for the longest ones (p99 {measures.latency_s.p99:.2f} s, median {measures.latency_s.p50:.2f} s)"
    )
    return Bound(Kind.TAIL, why, _overlap(point))


def _overlap(point: Point) -> tuple[str, ...]:
    """What fills the end of a batch."""
    schedule = point.spec.schedule
    if schedule.max_staleness == 0:
        return ("schedule.max_staleness: 1",)
    return (f"schedule.prompts_per_step: {2 * schedule.prompts_per_step}",)


def _load(point: Point, measures: Measures) -> Bound:
    role, schedule = point.spec.roles.rollout, point.spec.schedule
    why = f"an engine decodes {measures.most_running} sequences at most, with room for {role.max_num_seqs}"
    if point.workers > 1:
        enough = max(1, math.ceil(point.workers * measures.most_running / role.max_num_seqs))
        return Bound(Kind.LOAD, why, (f"{WORKERS}: {enough}",), "the same work fits on fewer engines")
    prompts = math.ceil(schedule.prompts_per_step * role.max_num_seqs / max(measures.most_running, 1))
    return Bound(Kind.LOAD, why, (f"schedule.prompts_per_step: {prompts}",), "more sequences decode in the same time")


def _prefill(point: Point, measures: Measures) -> Bound:
    why = (
        f"{measures.prefill_share:.0%} of the engines' time goes into prompts, of which "
        f"{measures.cached:.0%} are found in the cache"
    )
    if not point.spec.roles.rollout.enable_prefix_caching:
        return Bound(Kind.PREFILL, why, ("roles.rollout.enable_prefix_caching: true",))
    return Bound(Kind.PREFILL, why, (), "shorter prompts, or more samples for each (algorithm.group_size)")


def _decode(point: Point, measures: Measures) -> Bound:
    why = (
        f"the engines compute {measures.busy:.0%} of the time, {1 - measures.prefill_share:.0%} of it in decoding "
        f"{measures.running:.1f} sequences together"
    )
    role, lines = point.spec.roles.rollout, list[str]()
    if point.spec.device == "cuda" and role.enforce_eager:
        lines.append("roles.rollout.enforce_eager: false")
    if point.spec.device == "cuda" and point.spec.model.dtype == "float32":
        lines.append("model.dtype: bfloat16")
    return Bound(Kind.DECODE, why, tuple(lines))


def _compute(result: Result, results: Sequence[Result], cores: int | None, why: str) -> Bound:
    """The engines compute all the time: more of them help, unless the machine is full or a point shows otherwise."""
    point = result.point
    more = f"{WORKERS}: {2 * point.workers}"
    if tried := _without_gain(result, results, WORKERS):
        return Bound(Kind.DECODE, why, (), f"{tried}: this is the machine's limit")
    if cores is None:
        return Bound(Kind.DECODE, why, (more,), "if the cluster has room")
    threads = max(1, rollout_config(point.spec).engine.threads)
    if point.spec.device == "cpu" and threads * point.workers >= cores:
        return Bound(Kind.DECODE, why, (), f"the engines use all {cores} cores of this machine")
    return Bound(Kind.DECODE, why, (more,))


def _without_gain(result: Result, results: Sequence[Result], field: str) -> str:
    """This point's value of a field and a smaller one that is as fast, all else equal; empty if there is none."""
    mine = result.point.settings
    if result.measures is None or field not in mine:
        return ""
    own = mine[field], result.measures.tokens_per_s
    for other in results:
        if other.measures is None or not _differs_in(other.point.settings, mine, field):
            continue
        (less, few), (more, many) = sorted([own, (other.point.settings[field], other.measures.tokens_per_s)])
        if many < _GAIN * few:
            return f"{field}: {more} gained nothing over {less}"
    return ""


def _differs_in(one: Mapping[str, Any], other: Mapping[str, Any], field: str) -> bool:
    return one.keys() == other.keys() and {name for name in one if one[name] != other[name]} == {field}


_EXPLAIN = {
    Kind.KV_CACHE: _kv_cache,
    Kind.SLOTS: _slots,
    Kind.ENVIRONMENT: _environment,
    Kind.DRIVER: _driver,
    Kind.UNEVEN: _uneven,
    Kind.TAIL: _tail,
    Kind.LOAD: _load,
    Kind.PREFILL: _prefill,
    Kind.DECODE: _decode,
}


def record_of(results: Sequence[Result], cores: int | None) -> Json:
    """The whole benchmark. `cores`: the machine's, or None for a cluster, whose free resources are unknown."""
    spec, best = results[0].point.spec, best_of(results)
    return {
        "name": spec.name,
        "model": spec.model.path,
        "device": spec.device,
        "gpu": "" if best is None else best.gpu_type,
        "prompts": [result.point.spec.schedule.prompts_per_step for result in results],
        "fields": list(results[0].point.settings),
        "best": None if best is None else results.index(best),
        "points": [_point(result, bound_of(result, results, cores)) for result in results],
    }


def _point(result: Result, bound: Bound | None) -> Json:
    spec = result.point.spec
    return {
        "settings": dict(result.point.settings),
        "label": result.point.label,
        "workers": result.point.workers,
        "group_size": spec.group_size,
        "prompts": spec.schedule.prompts_per_step,
        "measured_with": measured_fields(spec),
        "memory": asdict(result.peak),
        "measures": None if result.measures is None else asdict(result.measures),
        "problem": result.problem,
        "bound": None
        if bound is None
        else {"kind": bound.kind.value, "why": bound.why, "lines": list(bound.lines), "note": bound.note},
    }
