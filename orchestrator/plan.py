"""`troupe plan`: who goes where, against what there is, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from orchestrator.errors import TroupeError
from orchestrator.placement import Node, demand, fit, place, role_sizes
from orchestrator.spec_any import AnySpec


@dataclass(frozen=True)
class PlanRow:
    """One worker's seat."""

    worker: str
    cpus: float
    gpus: float
    group: str
    bundle: int
    node: str
    """Empty: no room."""


@dataclass(frozen=True)
class Plan:
    """The seating of a spec on a set of nodes."""

    rows: tuple[PlanRow, ...]
    in_process: tuple[tuple[str, str], ...]
    """Roles that live inside other workers, and whose."""
    asked: dict[str, float]
    there: dict[str, float]
    misfit: str
    """Empty, or the first reservation that finds no room and what to change."""


def plan(spec: AnySpec, nodes: Sequence[Node]) -> Plan:
    """Seat every worker of the spec on the nodes."""
    sizes = role_sizes(spec)
    placements = place(sizes)
    seating = fit(placements, nodes)
    rows = tuple(
        PlanRow(
            f"{seat.role}-{seat.index}",
            seat.cpus,
            seat.gpus,
            placement.name,
            seat.bundle,
            seating.node_of.get((placement.name, seat.bundle), ""),
        )
        for placement in placements
        for seat in placement.seats
    )
    there = {"CPU": sum(n.cpus for n in nodes), "GPU": sum(n.gpus for n in nodes)}
    misfit = ""
    if seating.missing is not None:
        need = demand([seating.missing])
        role = seating.missing.seats[0].role
        misfit = (
            f"no room for {seating.missing.name}: it asks for {len(seating.missing.bundles)} bundle(s), "
            f"{need['CPU']:g} CPU {need['GPU']:g} GPU in all; lower roles.{role}.workers, .cpus or .gpus, or add nodes"
        )
    in_process = tuple((size.role, size.colocate_with or "") for size in sizes if size.in_process)
    return Plan(rows, in_process, demand(placements), there, misfit)


def local_node(cpus: int, spec: AnySpec) -> Node:
    """This machine as Troupe's own local cluster would offer it: roles may take turns on its cores."""
    return Node("this machine", max(float(cpus), demand(place(role_sizes(spec)))["CPU"]), 0.0)


def described_nodes(text: str, cpus: int) -> list[Node]:
    """Nodes of a cluster given as NODESxGPUS (2x8: two nodes of eight GPUs), each with `cpus` cores."""
    match = re.fullmatch(r"([1-9]\d{0,4})x(\d{1,3})", text)
    if match is None:
        raise TroupeError(f"--cluster: '{text}' is not NODESxGPUS, as in 2x8")
    return [Node(f"node-{i}", float(cpus), float(match[2])) for i in range(int(match[1]))]


def render(seating: Plan) -> Table:
    """The seating as a table for the terminal."""
    table = Table(title="who goes where")
    for column in ("worker", "cpus", "gpus", "placement group", "bundle", "node"):
        table.add_column(column, justify="right" if column in ("cpus", "gpus", "bundle") else "left")
    for row in seating.rows:
        table.add_row(
            row.worker, f"{row.cpus:g}", f"{row.gpus:g}", row.group, str(row.bundle), row.node or "[red]no room[/red]"
        )
    for role, host in seating.in_process:
        table.add_row(role, "-", "-", f"inside {host}", "-", "-")
    asked, there = seating.asked, seating.there
    table.caption = (
        f"asked: {asked['CPU']:g} CPU, {asked['GPU']:g} GPU; the cluster has {there['CPU']:g} CPU, {there['GPU']:g} GPU"
    )
    return table


def show(seating: Plan) -> None:
    """Print the seating."""
    Console().print(render(seating))
