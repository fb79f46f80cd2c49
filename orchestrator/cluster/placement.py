"""Where the workers of a run are: the reserved placement groups, and the place of each worker in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.plan.placement import Placement, Seat, place, place_one, role_sizes
from troupe.orchestrator.roles.names import section_of
from troupe.orchestrator.spec.base import RunSpec


class WorkerPlacements(Mapping[str, tuple[Placement, Seat]]):
    """The places of the workers of a spec, by worker name. A place is kept while its worker is replaced."""

    def __init__(self, spec: RunSpec, cluster: Cluster) -> None:
        """Reserves nothing."""
        self._cluster = cluster
        self._timeout_s = spec.schedule.start_timeout_s
        self._sizes = {size.role: size for size in role_sizes(spec)}
        self._placements: dict[str, tuple[Placement, Seat]] = {}

    def __getitem__(self, name: str) -> tuple[Placement, Seat]:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def roles(self) -> set[str]:
        """The roles that have a place."""
        return {seat.role for _, seat in self.values()}

    def names(self, role: str) -> list[str]:
        """Names of the workers of a role that have a place, in the order of their index."""
        return [f"{role}-{index}" for index in sorted(s.index for _, s in self.values() if s.role == role)]

    async def reserve(self, only: frozenset[str] | None = None) -> None:
        """Reserves the resources of all workers of the spec, or of the sections of `roles` in `only`.

        Raises:
            DoesNotFit: The cluster has no room.
        """
        placements = [
            placement
            for placement in place(list(self._sizes.values()))
            if only is None or any(section_of(seat.role) in only for seat in placement.seats)
        ]
        await self._cluster.reserve(placements, self._timeout_s)
        for placement in placements:
            self._take(placement, only)

    async def add(self, name: str) -> None:
        """Reserves the resources of one more worker, of a role whose workers are placed one by one.

        Raises:
            DoesNotFit: The cluster has no room.
        """
        role, index = name.rsplit("-", 1)
        placement = place_one(self._sizes[role], int(index))
        await self._cluster.reserve([placement], self._timeout_s)
        self._take(placement)

    def release(self, name: str) -> None:
        """Releases the resources of a worker that has ended, if it has a place."""
        if name in self._placements:
            placement, _ = self._placements.pop(name)
            self._cluster.release(placement.name)

    def _take(self, placement: Placement, only: frozenset[str] | None = None) -> None:
        """Takes the places of a placement, or those of the sections in `only`."""
        seats = [seat for seat in placement.seats if only is None or section_of(seat.role) in only]
        self._placements |= {f"{seat.role}-{seat.index}": (placement, seat) for seat in seats}
