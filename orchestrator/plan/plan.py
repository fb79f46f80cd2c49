"""Plans a run: places its workers on nodes and adds up their memory, before anything starts (`troupe plan`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.balance import Division
from troupe.orchestrator.plan.fit import MemoryPlan, memory_plan
from troupe.orchestrator.plan.memory import PlacedWorker, Sizes
from troupe.orchestrator.plan.placement import GPU_GIB, Node, Placement, demand, fit, place, role_sizes, room, too_large
from troupe.orchestrator.plan.remedies import Misfit, MisfitRemedy, changed, describe, remedies
from troupe.orchestrator.plan.speed import Prediction, Rates, predict
from troupe.orchestrator.plan.worker_memory import Part
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.workers.contract.units import GIB

_MOST_GIB = 1_000_000
FASTER_BFLOAT16 = (
    "this processor has instructions for products of bfloat16, so that an update takes about half as long as in "
    "float32, which has the smaller gap between sampler and trainer"
)


@dataclass(frozen=True)
class Plan:
    """Placement and memory of a spec's workers on a set of nodes."""

    rows: tuple[PlacedWorker, ...]
    in_process: tuple[tuple[str, str], ...]
    """Roles that run inside other workers, and the role of those workers."""
    asked: dict[str, float]
    there: dict[str, float]
    misfit: str
    """Empty, or the first reservation or memory that does not fit, and what to change if that was looked for."""
    memory: MemoryPlan
    steps: int
    remedies: tuple[MisfitRemedy, ...] = ()
    """Changes after which the misfit is gone."""
    predicted: Prediction | None = None
    """The speed of a run that fits; None without a known type of GPU and size of the model."""
    balance: Division | None = None
    """The division of its GPUs that fits and is faster, if one was looked for and there is one."""
    faster_dtype: str = ""
    """The dtype that the processors multiply faster than the spec's, or empty without GPUs or such a dtype."""


def plan(
    spec: RunSpec,
    nodes: Sequence[Node],
    known: Sizes | None = None,
    *,
    advise: bool = False,
    rates: Rates | None = None,
) -> Plan:
    """Place every worker of a spec on nodes, and add up its memory.

    Args:
        known: Sizes of models that were read before, or that an earlier stage will write.
        advise: Plan changes with which it fits, or is faster.
        rates: Measured rates of the spec's engines, or None if they are predicted. Remedies change engines, whose rates
            are predicted.
    """
    sizes = known if known is not None else Sizes()
    placed = _Placed.of(spec, nodes, sizes, rates)
    misfit = placed.misfit
    found: tuple[MisfitRemedy, ...] = ()
    text = "" if misfit is None else misfit.problem
    if misfit is not None and advise:
        found = remedies(spec, misfit, lambda other: _Placed.of(other, nodes, sizes).assessed)
        text = describe(spec, misfit, found, max((node.gpus for node in nodes), default=0.0))
    faster = _faster(spec, placed, lambda other: _Placed.of(other, nodes, sizes, rates)) if advise else ()
    return Plan(
        rows=placed.rows,
        in_process=tuple((size.role, size.colocate_with or "") for size in role_sizes(spec) if size.in_process),
        asked=demand(placed.placements),
        there={"CPU": sum(n.cpus for n in nodes), "GPU": sum(n.gpus for n in nodes)},
        misfit=text,
        memory=placed.memory,
        steps=spec.schedule.steps,
        remedies=found,
        predicted=placed.predicted,
        balance=next(iter(faster), None),
        faster_dtype=_faster_dtype(spec, nodes),
    )


def _faster_dtype(spec: RunSpec, nodes: Sequence[Node]) -> str:
    if spec.model.dtype == "bfloat16" or not all(node.fast_bfloat16 and not node.gpus for node in nodes):
        return ""
    return "" if changed(spec, {"model.dtype": "bfloat16"}) is None else "bfloat16"


def _faster(spec: RunSpec, placed: _Placed, assess: Callable[[RunSpec], _Placed]) -> Iterator[Division]:
    """Divisions of the GPUs that fit and are predicted to make a step shorter."""
    if placed.predicted is None or spec.rollouts is None:
        return
    for division in placed.predicted.shorter:
        other = changed(spec, division.changes(spec.rollouts))
        speed = None if other is None else assess(other).predicted
        if speed is not None and speed.step_s < placed.predicted.step_s:
            yield replace(division, step_s=speed.step_s)


@dataclass(frozen=True)
class _Placed:
    """Workers on nodes, and the first thing that does not fit."""

    placements: tuple[Placement, ...]
    rows: tuple[PlacedWorker, ...]
    memory: MemoryPlan
    misfit: Misfit | None
    predicted: Prediction | None

    @property
    def assessed(self) -> tuple[Misfit | None, float]:
        """The first misfit, and the predicted speed if there is none."""
        return self.misfit, 0.0 if self.predicted is None else self.predicted.tokens_per_gpu

    @classmethod
    def of(cls, spec: RunSpec, nodes: Sequence[Node], sizes: Sizes, rates: Rates | None = None) -> _Placed:
        placements = place(role_sizes(spec))
        fitted = fit(placements, nodes)
        rows = tuple(
            PlacedWorker(
                f"{placed.role}-{placed.index}",
                placed.cpus,
                placed.gpus,
                placement.name,
                placed.bundle,
                fitted.node_of.get((placement.name, placed.bundle), ""),
            )
            for placement in placements
            for placed in placement.workers
        )
        memory = memory_plan(spec, rows, nodes, sizes)
        misfit = _first(placements, nodes, fitted.missing, memory.misfit)
        speed = None if misfit is not None else predict(spec, rows, nodes, sizes, memory.caches, rates)
        return cls(placements, rows, memory, misfit, speed)


def _first(
    placements: Sequence[Placement], nodes: Sequence[Node], missing: Placement | None, full: Misfit | None
) -> Misfit | None:
    """The first misfit of workers: one that no node can hold, one without room next to the others, or `full`."""
    for placement in placements:
        if problem := too_large(placement, nodes):
            roles = tuple(dict.fromkeys(placed.role for placed in placement.workers))
            return Misfit("bundle", placement.name, roles, problem)
    if missing is None or (full is not None and full.kind == "parallel"):
        return full
    problem = f"no room for {missing.name}: it asks for {missing.request}"
    return Misfit("placement", missing.name, (missing.role,), problem)


def local_node(cpus: int, spec: RunSpec) -> Node:
    """This machine as the node of Troupe's local cluster, with at least the spec's CPUs: roles share the cores."""
    return Node(
        "this machine", max(float(cpus), room(spec)["CPU"]), 0.0, _own_memory(), fast_bfloat16=has_fast_bfloat16()
    )


@cache
def has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processors have instructions for products of bfloat16 (AMX or AVX-512 BF16): an update
    takes 0.56 or 0.57 of its time in float32 (docs/explanation/benchmarks.md)."""
    with suppress(OSError):
        return re.search(r"^flags\s*:.*\b(amx|avx512)_bf16\b", cpuinfo.read_text(), re.MULTILINE) is not None
    return False


def _own_memory() -> int:
    """Memory of this machine, or of the control group that limits it, in bytes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max": no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def described_nodes(text: str, cpus: int, node_gib: float = 0.0) -> list[Node]:
    """Nodes of a cluster that is described as text. Raises UsageError if the text has another form, or names an unknown
    type of GPU; or the memory is no number.

    Args:
        text: NODESxGPUS (2x8: two nodes of eight GPUs) or NODESxGPUSxTYPE (2x8xH200).
        node_gib: Host memory of each node in GiB; 0: not known.
    """
    if not 0 <= node_gib <= _MOST_GIB:  # also for nan
        raise UsageError(f"--gib-per-node: must be between 0 and {_MOST_GIB}, got {node_gib:g}")
    match = re.fullmatch(r"([1-9]\d{0,4})x(\d{1,3})(?:x(.+))?", text)
    if match is None:
        raise UsageError(f"--cluster: '{text}' is not NODESxGPUS, as in 2x8, or NODESxGPUSxTYPE, as in 2x8xH200")
    if match[3] is not None and match[3].upper() not in GPU_GIB:
        raise UsageError(f"--cluster: no GPU type '{match[3][:60]}' (known: {', '.join(GPU_GIB)})")
    gpu = int(GPU_GIB[match[3].upper()] * GIB) if match[3] is not None else 0
    # The type of GPU is the only label that may be known of a described cluster.
    kind = match[3].upper() if match[3] is not None else None
    size = (float(cpus), float(match[2]), int(node_gib * GIB), gpu)
    return [Node(f"node-{i}", *size, accelerator=kind) for i in range(int(match[1]))]


def as_json(name: str, planned: Plan) -> dict[str, Any]:
    """The plan as plain data; memory in bytes."""
    memory = planned.memory
    return {
        "name": name,
        "seats": [asdict(row) for row in planned.rows],
        "inside": dict(planned.in_process),
        "asked": planned.asked,
        "there": planned.there,
        "memory": [
            {"worker": w.worker, "of": w.where, "parts": _by_name(w.parts), "total": w.total} for w in memory.workers
        ],
        "shared_gpus": [
            {"workers": list(u.workers), **u.periods, "most": u.most, "alone": u.alone, "capacity": u.capacity}
            for u in memory.shared
        ],
        "kv_caches": {engine: asdict(cache) for engine, cache in memory.caches.items()},
        "nodes": [
            {"node": n.node, "parts": _by_name(n.parts), "total": n.total, "capacity": n.capacity or None}
            for n in memory.nodes
        ],
        "unknown": {model.path: model.why for model in memory.unknown},
        "misfit": planned.misfit or None,
        "remedies": [dict(remedy.changes) for remedy in planned.remedies],
        "warnings": list(memory.warnings),
        "predicted": None if planned.predicted is None else planned.predicted.as_json(),
        "balance": None if planned.balance is None else asdict(planned.balance),
        "faster_dtype": planned.faster_dtype or None,
    }


def _by_name(parts: Sequence[Part]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


def plan_stages(
    runs: Sequence[PlannedRun], nodes: Sequence[Node] | None, *, advise: bool = False, rates: Rates | None = None
) -> Iterator[tuple[PlannedRun, Plan]]:
    """Plan each run on nodes (None: this machine), up to the first that does not fit. A later stage may start from a
    model that does not exist yet; it has the size of the one that the earlier stage trains. `rates`: measured ones of
    the only run's engines."""
    sizes = Sizes()
    for run in runs:
        available = [local_node(os.cpu_count() or 1, run.spec)] if nodes is None else nodes
        planned = plan(run.spec, available, sizes, advise=advise, rates=rates)
        trained = sizes.of(run.spec.model)
        if trained is not None:
            sizes.known[str(run.model)] = trained
        else:
            sizes.unknown[str(run.model)] = f"it is trained from {run.spec.model.path}, whose size is not known"
            sizes.trained.add(str(run.model))
        yield run, planned
        if planned.misfit:
            return
