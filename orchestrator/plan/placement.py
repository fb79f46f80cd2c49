"""Places workers: pure arithmetic from a spec to placement groups, and from those to nodes.

Each training group has one placement group; every worker of another role has its own, so that it can be added or
removed without touching the trainer. Ray spreads the bundles of one group; whole groups are spread here, over the nodes
with the fewest of their role. A colocated role is placed in the bundles of the role it is colocated with: an engine of
N GPUs in one bundle with the N ranks that have them. A reference colocated with the policy runs inside the policy's
processes and has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.roles import EngineRole, RoleResources, ScaledRole, TrainerRole

Strategy = Literal["PACK", "SPREAD"]
ACCELERATOR = "ray.io/accelerator-type"
"""Ray's label for the type of a node's GPUs."""

_ROUNDING = 1e-4
"""Ray counts resources in units of this size."""
CPUS_PER_NODE = 128
"""CPUs of a node with GPUs whose cores are not known."""

GPU_GIB = {
    "T4": 15.0,
    "L4": 22.5,
    "A10": 22.5,
    "A10G": 22.5,
    "RTX3090": 24.0,
    "RTX4090": 24.0,
    "RTX5090": 31.8,
    "V100": 32.0,
    "A100-40G": 40.0,
    "L40": 45.0,
    "L40S": 45.0,
    "A6000": 48.0,
    "A100": 80.0,
    "A100-80G": 80.0,
    "H100": 79.6,
    "H20": 95.6,
    "H200": 140.4,
    "B200": 179.1,
}
"""Memory of a GPU by type, as nvidia-smi reports it. The names are Ray's."""


@dataclass(frozen=True)
class RoleSize:
    """Resources that a role requests."""

    role: str
    workers: int
    cpus: float
    gpus: float
    colocate_with: str | None = None
    in_process: bool = False
    """Whether it runs in the processes of the role it is colocated with."""
    strategy: Strategy = "PACK"
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that its nodes must have."""
    separate: bool = False
    """Whether each worker has a separate placement group."""
    ranks: int = 1
    """Workers of the role it is colocated with that share each of its bundles."""


@dataclass(frozen=True)
class WorkerPlacement:
    """Placement of one worker in a bundle of its group."""

    role: str
    index: int
    bundle: int
    cpus: float
    gpus: float
    borrows: bool = False
    """Whether its GPUs are those of the other workers in its bundle, and none are reserved for it."""


@dataclass(frozen=True)
class Placement:
    """One placement group: bundles that are reserved together, and the workers in them."""

    name: str
    bundles: tuple[dict[str, float], ...]
    strategy: Strategy
    workers: tuple[WorkerPlacement, ...]
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that the nodes of its bundles must have."""

    @property
    def role(self) -> str:
        """The role it is reserved for; colocated workers of another role may share it."""
        return self.workers[0].role

    @property
    def request(self) -> str:
        asked, on = demand([self]), ", ".join(f"{key}={value}" for key, value in self.labels)
        size = f"{len(self.bundles)} bundle(s), {asked['CPU']:g} CPU {asked['GPU']:g} GPU in all"
        return f"{size}, on nodes with {on}" if on else size


@dataclass(frozen=True)
class Node:
    """A node's resources."""

    name: str
    cpus: float
    gpus: float
    memory: int = 0
    """Host memory, bytes; 0: not known."""
    gpu_memory: int = 0
    """Memory of each GPU, bytes; 0: not known."""
    labels: Mapping[str, str] | None = None
    """Ray's labels of the node, or None if unknown."""
    accelerator: str | None = None
    """Type of its GPUs, if no other label is known."""
    id: str = ""
    """Ray's id of the node; empty if unknown."""
    fast_bfloat16: bool = False
    """Whether it is known that its processors have instructions for products of bfloat16."""

    @property
    def gpu_type(self) -> str:
        """Type of its GPUs; empty if unknown."""
        return (self.labels or {}).get(ACCELERATOR) or self.accelerator or ""

    def may_have(self, labels: Sequence[tuple[str, str]]) -> bool:
        """Whether the node has these labels, as far as its labels are known."""
        if self.labels is not None:
            return all(self.labels.get(key) == value for key, value in labels)
        return self.accelerator is None or dict(labels).get(ACCELERATOR, self.accelerator) == self.accelerator


@dataclass(frozen=True)
class Fit:
    """Node of each bundle, and the first placement that does not fit."""

    node_of: dict[tuple[str, int], str]
    missing: Placement | None


def place(roles: Sequence[RoleSize]) -> tuple[Placement, ...]:
    """Placement groups for all roles, in order of reservation: with GPUs first, since others could take the cores
    that the last free GPU needs; trainers before engines."""
    hosts = [role for role in roles if role.colocate_with is None]
    guests = [role for role in roles if role.colocate_with is not None and not role.in_process]
    placements: list[Placement] = []
    for host in sorted(hosts, key=lambda role: (role.gpus == 0, role.separate, role.role)):
        sharing = [host, *(guest for guest in guests if guest.colocate_with == host.role)]
        if host.separate:
            placements += [_placement(f"{host.role}-{i}", sharing, [i]) for i in range(host.workers)]
        else:
            placements.append(_placement(host.role, sharing, list(range(host.workers))))
    return tuple(placements)


def place_one(role: RoleSize, index: int) -> Placement:
    """Placement group for one more worker of a role whose workers are placed on their own."""
    return _placement(f"{role.role}-{index}", [replace(role, workers=index + 1)], [index])


def fit(
    placements: Sequence[Placement], nodes: Sequence[Node], reserved: Mapping[tuple[str, str], int] | None = None
) -> Fit:
    """Assign placement groups to nodes by first-fit packing, those with labels first, then by GPUs. A bundle with
    the strategy `SPREAD` goes to the node with the fewest of its role (`reserved`: by role and node)."""
    free = {node.name: [node.cpus, node.gpus] for node in nodes}
    held = Counter(reserved)
    node_of: dict[tuple[str, int], str] = {}
    order = sorted(placements, key=lambda p: (not p.labels, -sum(b["GPU"] for b in p.bundles)))
    for placement in order:
        role = placement.role
        for index, bundle in enumerate(placement.bundles):
            room = (
                node.name
                for node in nodes
                if node.may_have(placement.labels)
                and free[node.name][0] >= bundle["CPU"]
                and free[node.name][1] >= bundle["GPU"]
            )
            if placement.strategy == "SPREAD":
                name = min(room, key=lambda name: held[role, name], default=None)
            else:
                name = next(room, None)
            if name is None:
                return Fit(node_of, placement)
            free[name][0] -= bundle["CPU"]
            free[name][1] -= bundle["GPU"]
            held[role, name] += 1
            node_of[placement.name, index] = name
    return Fit(node_of, None)


def too_large(placement: Placement, nodes: Sequence[Node]) -> str:
    """Error message for a bundle that is larger than every node that may have it; empty if a node can hold each."""
    able = [node for node in nodes if node.may_have(placement.labels)]
    for bundle in placement.bundles if able else ():
        if not any(node.cpus >= bundle["CPU"] and node.gpus >= bundle["GPU"] for node in able):
            most = max(able, key=lambda node: (node.gpus, node.cpus))
            return (
                f"no node is large enough for {placement.name}: a worker needs {bundle['CPU']:g} CPU "
                f"{bundle['GPU']:g} GPU on one node, and the largest has {most.cpus:g} CPU {most.gpus:g} GPU"
            )
    return ""


def impossible(placements: Sequence[Placement], nodes: Sequence[Node]) -> str:
    """Error message for placement groups that no division of the nodes can hold; empty if there may be one."""
    for placement in placements:
        if problem := too_large(placement, nodes):
            return problem
    for labels in sorted({placement.labels for placement in placements} | {()}):
        asked = demand([one for one in placements if one.labels == labels or not labels])
        able = [node for node in nodes if node.may_have(labels)]
        has = {"CPU": sum(node.cpus for node in able), "GPU": sum(node.gpus for node in able)}
        if not able or any(asked[kind] > has[kind] + _ROUNDING for kind in has):
            on = " with " + ", ".join(f"{key}={value}" for key, value in labels) if labels else ""
            return (
                f"the workers need {asked['CPU']:g} CPU {asked['GPU']:g} GPU in all on nodes{on}, and these have "
                f"{has['CPU']:g} CPU {has['GPU']:g} GPU"
            )
    return ""


def misfit(placement: Placement, placements: Sequence[Placement], free: Sequence[Node], timeout_s: float) -> str:
    """Error message for a placement group that does not fit: its request, those of all roles, and what is free."""
    roles = Counter((placed.role, placed.cpus, placed.gpus) for placement in placements for placed in placement.workers)
    wanted = ", ".join(f"{n} {role} of {cpus:g} CPU {gpus:g} GPU" for (role, cpus, gpus), n in roles.items())
    there = ", ".join(f"{node.name}: {node.cpus:g} CPU {node.gpus:g} GPU" for node in free)
    return (
        f"no room for {placement.name} within {timeout_s:g} s: it asks for {placement.request}; "
        f"all roles ask for: {wanted}; "
        f"free: {there or 'no node'}; see `troupe plan`"
    )


def demand(placements: Sequence[Placement]) -> dict[str, float]:
    """CPUs and GPUs of all bundles in total."""
    return {kind: sum(b[kind] for p in placements for b in p.bundles) for kind in ("CPU", "GPU")}


def room(spec: RunSpec) -> dict[str, float]:
    """Most CPUs and GPUs that a run can request: the sum of its roles at their `max_workers`."""
    roles = spec.roles.present()
    most = {name: role.max_workers for name, role in roles.items() if isinstance(role, ScaledRole)}
    sizes = [replace(size, workers=most.get(size.role) or size.workers) for size in role_sizes(spec)]
    return demand(place(sizes))


def _labels(role: RoleResources) -> tuple[tuple[str, str], ...]:
    accelerator = {} if role.accelerator is None else {ACCELERATOR: role.accelerator}
    return tuple(sorted((role.node_labels | accelerator).items()))


def _placement(name: str, sharing: Sequence[RoleSize], indices: Sequence[int]) -> Placement:
    """One placement group: a bundle for each host worker of `indices`, or every N, shared with a colocated one."""
    ranks = max(role.ranks for role in sharing)
    workers = tuple(
        WorkerPlacement(role.role, index, place // (ranks // role.ranks), role.cpus, role.gpus, role.ranks > 1)
        for role in sharing
        for place, index in enumerate(indices)
        if index < role.workers
    )
    bundles = tuple(
        {
            "CPU": sum(placed.cpus for placed in workers if placed.bundle == bundle),
            "GPU": round(sum(placed.gpus for placed in workers if placed.bundle == bundle and not placed.borrows), 6),
        }
        for bundle in range(math.ceil(len(indices) / ranks))
    )
    labels = dict(pair for role in sharing for pair in role.labels)
    return Placement(name, bundles, sharing[0].strategy, workers, tuple(labels.items()))


def role_sizes(spec: RunSpec) -> tuple[RoleSize, ...]:
    """Resources that each role of a spec requests."""
    roles = spec.roles.present()
    return tuple(
        RoleSize(
            role=name,
            workers=role.workers,
            cpus=role.cpus,
            gpus=role.gpus,
            colocate_with=role.colocate_with,
            in_process=name in spec.in_policy,
            strategy="SPREAD" if role.strategy == "spread" else "PACK",
            labels=_labels(role),
            separate=not isinstance(role, TrainerRole) and role.colocate_with is None,
            ranks=role.tensor_parallel_size if isinstance(role, EngineRole) and role.colocate_with is not None else 1,
        )
        for name, role in roles.items()
    )
