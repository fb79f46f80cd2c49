"""Who sits where: pure arithmetic from the spec to placement groups, and from those to nodes.

One placement group per trainer group, and one per worker of every other role (they come and go without touching the
trainer). Ray spreads the bundles of one group; whole groups are spread here, over the nodes with the fewest of their
role. A role that is colocated takes seats in the bundles of the role it is colocated with; a reference colocated with
the policy lives inside the policy's processes and takes none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.spec_any import AnySpec
from orchestrator.spec_sections import Placement as RolePlacement
from orchestrator.spec_sections import ScaledRole, TrainerRole

Strategy = Literal["PACK", "SPREAD"]
ACCELERATOR = "ray.io/accelerator-type"
"""Ray's own label of a node with GPUs."""

GPU_GIB = {
    "T4": 15.0,
    "L4": 22.5,
    "A10": 22.5,
    "A10G": 22.5,
    "RTX4090": 24.0,
    "V100": 32.0,
    "A100-40G": 40.0,
    "L40S": 45.0,
    "A100": 80.0,
    "A100-80G": 80.0,
    "H100": 79.6,
    "H200": 140.4,
    "B200": 179.1,
}
"""Memory of a GPU by type, as nvidia-smi tells it. The names are Ray's."""


@dataclass(frozen=True)
class RoleSize:
    """What a role asks for."""

    role: str
    workers: int
    cpus: float
    gpus: float
    colocate_with: str | None = None
    in_process: bool = False
    """Lives in the processes of the role it is colocated with."""
    strategy: Strategy = "PACK"
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of the nodes it may sit on."""
    separate: bool = False
    """Each worker is placed on its own."""


@dataclass(frozen=True)
class Seat:
    """One worker in one bundle."""

    role: str
    index: int
    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Placement:
    """One placement group: bundles that are reserved together, and who sits in them."""

    name: str
    bundles: tuple[dict[str, float], ...]
    strategy: Strategy
    seats: tuple[Seat, ...]
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of the nodes that its bundles may lie on."""

    @property
    def role(self) -> str:
        """The role it is reserved for; another one's workers may sit with those of this one."""
        return self.seats[0].role

    @property
    def request(self) -> str:
        """What it asks for, in words."""
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
    """Ray's labels of the node; None: not known."""
    accelerator: str | None = None
    """Type of its GPUs, where that is all that is known."""
    id: str = ""
    """Ray's name of it; empty: not known."""

    def may_have(self, labels: Sequence[tuple[str, str]]) -> bool:
        """Whether it has these labels, as far as is known."""
        if self.labels is not None:
            return all(self.labels.get(key) == value for key, value in labels)
        return self.accelerator is None or dict(labels).get(ACCELERATOR, self.accelerator) == self.accelerator


@dataclass(frozen=True)
class Fit:
    """Where each bundle goes, and the first placement that finds no room."""

    node_of: dict[tuple[str, int], str]
    missing: Placement | None


def place(roles: Sequence[RoleSize]) -> tuple[Placement, ...]:
    """Placement groups for all roles, in the order in which they are reserved: those with GPUs first, or one without
    might take the cores beside the last free GPU; trainers before engines."""
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
    placements: Sequence[Placement], nodes: Sequence[Node], sitting: Mapping[tuple[str, str], int] | None = None
) -> Fit:
    """First-fit packing, first what only some nodes take, then by GPUs; tells the first placement that does not fit.

    A bundle that is to be spread goes, among the nodes with room for it, to the one with the fewest of its role.

    :param sitting: bundles that are reserved already, by their role and the name of the node
    """
    free = {node.name: [node.cpus, node.gpus] for node in nodes}
    held = Counter(sitting)
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


def misfit(placement: Placement, placements: Sequence[Placement], free: Sequence[Node], timeout_s: float) -> str:
    """What is told where a placement group finds no room: what it asks for, what every role does, and what is free."""
    roles = Counter((seat.role, seat.cpus, seat.gpus) for placement in placements for seat in placement.seats)
    wanted = ", ".join(f"{n} {role} of {cpus:g} CPU {gpus:g} GPU" for (role, cpus, gpus), n in roles.items())
    there = ", ".join(f"{node.name}: {node.cpus:g} CPU {node.gpus:g} GPU" for node in free)
    return (
        f"no room for {placement.name} within {timeout_s:g} s: it asks for {placement.request}; "
        f"asked for together: {wanted}; "
        f"free now: {there or 'no node'}; see `troupe plan`"
    )


def demand(placements: Sequence[Placement]) -> dict[str, float]:
    """CPUs and GPUs of all bundles together."""
    return {kind: sum(b[kind] for p in placements for b in p.bundles) for kind in ("CPU", "GPU")}


def room(spec: AnySpec) -> dict[str, float]:
    """CPUs and GPUs that a run may come to ask for: those of its roles at their `max_workers`."""
    roles = spec.roles.present()
    most = {name: role.max_workers for name, role in roles.items() if isinstance(role, ScaledRole)}
    sizes = [replace(size, workers=most.get(size.role) or size.workers) for size in role_sizes(spec)]
    return demand(place(sizes))


def _labels(role: RolePlacement) -> tuple[tuple[str, str], ...]:
    accelerator = {} if role.accelerator is None else {ACCELERATOR: role.accelerator}
    return tuple(sorted((role.node_labels | accelerator).items()))


def _placement(name: str, sharing: Sequence[RoleSize], indices: Sequence[int]) -> Placement:
    """Bundles for the host's workers `indices`; each guest worker joins the host worker of its number."""
    seats = tuple(
        Seat(role.role, index, bundle, role.cpus, role.gpus)
        for role in sharing
        for bundle, index in enumerate(indices)
        if index < role.workers
    )
    bundles = tuple(
        {
            "CPU": sum(seat.cpus for seat in seats if seat.bundle == bundle),
            "GPU": sum(seat.gpus for seat in seats if seat.bundle == bundle),
        }
        for bundle in range(len(indices))
    )
    labels = dict(pair for role in sharing for pair in role.labels)
    return Placement(name, bundles, sharing[0].strategy, seats, tuple(labels.items()))


def role_sizes(spec: AnySpec) -> tuple[RoleSize, ...]:
    """What each role of a spec asks for."""
    roles = spec.roles.present()
    return tuple(
        RoleSize(
            role=name,
            workers=role.workers,
            cpus=role.cpus,
            gpus=role.gpus,
            colocate_with=role.colocate_with,
            in_process=name == "reference" and spec.reference_in_policy,
            strategy="SPREAD" if role.strategy == "spread" else "PACK",
            labels=_labels(role),
            separate=not isinstance(role, TrainerRole) and role.colocate_with is None,
        )
        for name, role in roles.items()
    )
