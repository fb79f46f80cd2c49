"""What to change about a spec that does not fit: each proposal is a valid spec, planned again before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from troupe.orchestrator.roles.table import row_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import Source, SpecError
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.workers.contract.config import OWN_GPU_SHARE

Changes = Mapping[str, Any]
"""New values by the dotted path of their field."""

MOST_WORKERS = 64
"""Largest number of workers that a remedy proposes to raise a role to."""
_MOST_CACHE_GIB = 64.0
_UTILIZATIONS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_MOST_SHARDS = 64
_SHOWN = 2
_ORDER = ("bundle", "parallel", "cache", "gpu", "host", "placement")
"""Kinds of misfits in the order in which they are solved. Nodes can be added to the last."""
_LARGER = {"placement": "add nodes", "bundle": "use larger nodes"}


@dataclass(frozen=True)
class Misfit:
    """The first thing of a plan that does not fit."""

    kind: Literal["bundle", "parallel", "cache", "gpu", "host", "placement"]
    """A worker that is larger than every node; workers that do not divide their model; an engine whose cache holds no
    sequence; a full GPU; a full node; a reservation without room."""
    where: str
    """The placement group, worker or node."""
    roles: tuple[str, ...]
    """Whose settings can change it, the largest first; of a node also what the roles share."""
    problem: str

    def same(self, other: Misfit) -> bool:
        """Whether the other one is the same problem, perhaps at another worker or node."""
        return self.kind == other.kind and (self.kind == "host" or self.roles[0] == other.roles[0])

    def leads_to(self, other: Misfit) -> bool:
        """Whether a change that leaves the other problem is worth proposing: its own remedies do not lead back."""
        if self.kind == other.kind:
            return not self.same(other)
        return other.kind != "parallel" and _ORDER.index(self.kind) < _ORDER.index(other.kind)


@dataclass(frozen=True)
class MisfitRemedy:
    """A change after which the misfit is gone."""

    changes: Changes
    then: Misfit | None
    """What does not fit after the change, or None if everything fits."""
    speed: float = 0.0
    """Predicted tokens per second and GPU if everything fits; 0 if unknown."""


Assess = Callable[[RunSpec], tuple[Misfit | None, float]]
"""The first misfit of a spec on the nodes of the plan, and its predicted speed (`MisfitRemedy.speed`)."""


def remedies(spec: RunSpec, misfit: Misfit, assess: Assess) -> tuple[MisfitRemedy, ...]:
    """Up to two changes without which the misfit stays: the fastest after which everything fits, or else any others."""
    found: list[MisfitRemedy] = []
    for alternatives in _alternatives(spec, misfit):
        best = _smallest(spec, misfit, alternatives, assess)
        if best is not None and all(best.changes != other.changes for other in found):
            found.append(best)
    whole = sorted((one for one in found if one.then is None), key=lambda one: -one.speed)
    return tuple((whole or found)[:_SHOWN])


def describe(spec: RunSpec, misfit: Misfit, found: Sequence[MisfitRemedy], gpus: float) -> str:
    """The misfit and what to change, in one line; `gpus` is the number of GPUs of the largest node."""
    data = spec.model_dump(mode="json")
    texts = [_sentence(data, remedy) for remedy in found]
    if misfit.kind in ("placement", "bundle"):
        return f"{misfit.problem}; {', or '.join([*texts, _LARGER[misfit.kind]])}"
    if texts:
        return f"{misfit.problem}: {', or '.join(texts)}"
    larger = "nodes with more memory" if misfit.kind == "host" else "larger GPUs"
    role = _value(data, f"roles.{misfit.roles[0]}") if misfit.kind in ("cache", "gpu") else None
    divided = role is not None and not {"tensor_parallel_size", "shards"}.isdisjoint(role) and role["gpus"] >= 1
    limit = f" on the {gpus:g} GPUs of a node" if divided else ""
    return f"{misfit.problem}: no setting makes it fit{limit}; use {larger} or a smaller model"


def changed(spec: RunSpec, changes: Changes) -> RunSpec | None:
    """The spec with fields changed, or None if that is not a valid spec."""
    data = spec.model_dump(mode="json")
    for field, value in changes.items():
        *sections, name = field.split(".")
        node = data
        for section in sections:
            node = node[section]
        node[name] = value
    try:
        return parse_spec(Document(data, Source(spec.name)))
    except SpecError:
        return None


def _smallest(spec: RunSpec, misfit: Misfit, alternatives: Iterator[Changes], assess: Assess) -> MisfitRemedy | None:
    """The first of several ever larger changes after which everything fits, else the first that ends the misfit."""
    first: MisfitRemedy | None = None
    data = spec.model_dump(mode="json")
    for alternative in alternatives:
        changes = {field: value for field, value in alternative.items() if value != _value(data, field)}
        other = changed(spec, changes) if changes else None
        if other is None:
            continue
        then, speed = assess(other)
        if then is None:
            return MisfitRemedy(changes, None, speed)
        if first is None and misfit.leads_to(then):
            first = MisfitRemedy(changes, then)
    return first


def _alternatives(spec: RunSpec, misfit: Misfit) -> Iterator[Iterator[Changes]]:
    """Changes of the same kind each, from the smallest to the largest."""
    if misfit.kind == "cache":
        yield from _of_cache(spec, misfit.roles[0])
        return
    if misfit.kind == "parallel":
        yield _fewer_ranks(spec, misfit.roles[0])
        return
    if misfit.kind == "bundle":
        for role in misfit.roles:
            yield _fewer_ranks(spec, role)
            yield _halves(spec, f"roles.{role}.cpus", 1)
        return
    if misfit.kind == "host" and spec.checkpoint.async_save:
        yield iter([{"checkpoint.async_save": False}])
    for role in misfit.roles:
        if role in spec.roles.trainers() and misfit.kind != "placement":
            yield from _of_trainer(spec, role, misfit.kind == "gpu")
        elif role in spec.roles.present() and row_of(spec, role).engine and misfit.kind != "placement":
            yield from _of_engine(spec, role, misfit.kind == "gpu")
        elif role in spec.roles.present() and misfit.kind == "gpu":
            yield _more_shards(spec, role)
        elif role == "batch":
            yield _halves(spec, "schedule.prompts_per_step", 1)
            yield _halves(spec, "schedule.examples_per_step", 1)
        elif role in spec.roles.present() and misfit.kind == "host":
            yield _halves(spec, f"roles.{role}.micro_batch_tokens", 8)
        if role in spec.roles.present() and misfit.kind != "gpu":
            yield (_with_guests(spec, role, changes) for changes in _halves(spec, f"roles.{role}.workers", 1))


def _of_cache(spec: RunSpec, role: str) -> Iterator[Iterator[Changes]]:
    """Changes after which an engine's cache is larger, or its sequences are shorter."""
    path = f"roles.{role}"
    data = _value(spec.model_dump(mode="json"), path)
    if data["gpus"] > 0:
        yield _more_ranks(spec, role)
        higher = [share for share in reversed(_UTILIZATIONS) if share > (_share(data) or 1.0)]
        yield iter([{f"{path}.gpu_memory_utilization": share} for share in higher])
    else:
        sizes = _doublings(data["kv_cache_gib"], _MOST_CACHE_GIB)
        yield iter([{f"{path}.kv_cache_gib": size} for size in sizes])
    yield _halves(spec, f"{path}.max_model_len", 8)


def _fewer_ranks(spec: RunSpec, role: str) -> Iterator[Changes]:
    """Every smaller number of processes that divide a model, or the rows of a trainer."""
    path = f"roles.{role}"
    data = _value(spec.model_dump(mode="json"), path) or {}
    for name in ("sequence_parallel_size", "tensor_parallel_size", "shards"):
        for ranks in range(data.get(name, 1) - 1, 0, -1):
            gpus = role not in spec.roles.trainers()
            yield {f"{path}.{name}": ranks, **(_gpus(spec, role, data, ranks) if gpus else {})}


def _more_ranks(spec: RunSpec, role: str) -> Iterator[Changes]:
    """An engine over ever more GPUs."""
    path = f"roles.{role}"
    data = _value(spec.model_dump(mode="json"), path)
    for ranks in (data["tensor_parallel_size"] * 2**power for power in (1, 2, 3)):
        yield {f"{path}.tensor_parallel_size": ranks, **_gpus(spec, role, data, ranks)}


def _gpus(spec: RunSpec, role: str, data: Mapping[str, Any], ranks: int) -> Changes:
    """The GPUs of a worker over so many; those of an engine on the policy's are of as many of its workers."""
    path, policies = f"roles.{role}", spec.roles.policy.workers
    if data["gpus"] == 0:
        return {}
    if data["colocate_with"] is None:
        return {f"{path}.gpus": ranks}
    whole, guests = ranks > 1, () if spec.rollouts is None else spec.rollouts.roles.guests()
    changes: Changes = {"roles.policy.gpus": 1 if whole else 0.5}
    for guest in guests:
        path, part = f"roles.{guest}", ranks if whole else 0.5 / len(guests)
        changes |= {f"{path}.workers": max(1, policies // ranks), f"{path}.gpus": part}
        changes |= {f"{path}.tensor_parallel_size": ranks}
    return changes


def _more_shards(spec: RunSpec, role: str) -> Iterator[Changes]:
    """A frozen model divided over ever more GPUs, if its role divides it and it is not inside the policy's workers."""
    path = f"roles.{role}"
    data = _value(spec.model_dump(mode="json"), path) or {}
    if "shards" in data and data["colocate_with"] is None:
        for shards in _doublings(data["shards"], _MOST_SHARDS):
            yield {f"{path}.shards": shards, f"{path}.gpus": shards}


def _of_trainer(spec: RunSpec, role: str, gpu: bool) -> Iterator[Iterator[Changes]]:
    """Changes after which a training rank needs less."""
    settings = next(trainer for name, trainer in spec.roles.trainers().items() if name == role)
    path = f"roles.{role}"
    zero = [{f"{path}.zero_stage": stage} for stage in (2, 3) if stage > settings.zero_stage]
    fields = f"{path}.gradient_checkpointing", f"{path}.recompute_products"
    partly, wholly = ({fields[0]: True, fields[1]: products} for products in (False, True))
    again: list[Changes] = [partly, wholly]
    if settings.gradient_checkpointing:
        again = [] if settings.recompute_products else [wholly]
    both = [{**one, **other} for one in again for other in zero]
    yield iter([*zero, *again, *both] if settings.workers > 1 else again)  # the fastest first
    if gpu:
        yield (
            _with_guests(spec, role, {f"{path}.workers": workers, **changes})
            for workers in _doublings(settings.workers, MOST_WORKERS)
            for changes in ({}, *zero, *again, *both)
        )
    yield _halves(spec, f"{path}.micro_batch_tokens", 8)
    if gpu:
        sizes = _doublings(settings.sequence_parallel_size, settings.workers)
        yield ({f"{path}.sequence_parallel_size": size} for size in sizes)
    if gpu and not settings.offload_optimizer:
        stage = {f"{path}.zero_stage": 1} if settings.zero_stage == 0 else {}
        offload: Changes = {f"{path}.offload_optimizer": True}
        yield iter([{**offload, **stage}, {**offload, f"{path}.zero_stage": 3}])
        yield ({**offload, f"{path}.zero_stage": 3, **changes} for changes in again or [wholly])


def _of_engine(spec: RunSpec, role: str, gpu: bool) -> Iterator[Iterator[Changes]]:
    """Changes after which an engine takes less."""
    path = f"roles.{role}"
    data = _value(spec.model_dump(mode="json"), path)
    if not gpu:
        yield _halves(spec, f"{path}.kv_cache_gib", 0.0625)
        return
    if data["colocate_with"] is not None and data.get("sleep", "weights") != "weights":
        yield iter([{f"{path}.sleep": level} for level in ("kv_cache", "weights") if data["sleep"] != level])
    if data["colocate_with"] is not None:
        yield _more_ranks(spec, role)
    lower = [share for share in _UTILIZATIONS if share < (_share(data) or 0.0)]
    yield iter([{f"{path}.gpu_memory_utilization": share} for share in lower])


def _share(engine: Mapping[str, Any]) -> float | None:
    """Share of its GPU that an engine may use, or None for what the policy leaves it."""
    given = engine["gpu_memory_utilization"]
    return OWN_GPU_SHARE if given is None and engine["colocate_with"] is None else given


def _with_guests(spec: RunSpec, role: str, changes: Changes) -> Changes:
    """The changes, with the workers of a policy and of the engines that are colocated with it in step."""
    guests = {} if spec.rollouts is None else spec.rollouts.roles.guests()
    if not guests or role not in ("policy", *guests):
        return changes
    workers, ranks = changes[f"roles.{role}.workers"], next(iter(guests.values())).tensor_parallel_size
    engines = workers if role in guests else max(1, workers // ranks)
    together = {f"roles.{guest}.workers": engines for guest in guests}
    return {**changes, **together, "roles.policy.workers": engines * ranks}


def _halves(spec: RunSpec, field: str, least: float) -> Iterator[Changes]:
    """Half, a quarter, ... of a number; nothing if the spec has no such field."""
    node = _value(spec.model_dump(mode="json"), field)
    value = node if isinstance(node, int | float) and not isinstance(node, bool) else 0
    while value / 2 >= least:
        value = value // 2 if isinstance(value, int) else value / 2
        yield {field: value}


def _value(data: Mapping[str, Any], field: str) -> Any:
    """The value at a dotted path; None if the spec has no such field."""
    node: Any = data
    for name in field.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _doublings(value: float, most: float) -> Iterator[Any]:
    while (value := 2 * value) <= most:
        yield value


def _sentence(data: Mapping[str, Any], remedy: MisfitRemedy) -> str:
    verbs: dict[str, list[str]] = {}
    for field, value in remedy.changes.items():
        before = _value(data, field)
        if isinstance(value, bool) or not isinstance(before, int | float):
            verbs.setdefault(f"set {{}}: {str(value).lower()}", []).append(field)
        else:
            verbs.setdefault(f"{'raise' if value > before else 'lower'} {{}} to {value:g}", []).append(field)
    text = " and ".join(verb.format(" and ".join(fields)) for verb, fields in verbs.items())
    if remedy.then is None:
        return text
    return f"{text} and add nodes" if remedy.then.kind == "placement" else f"{text} (then {remedy.then.problem})"
