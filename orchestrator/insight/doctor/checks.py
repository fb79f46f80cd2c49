"""All checks of `troupe doctor`, in the order of display, and the needs of a spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from troupe.orchestrator.insight.doctor import hardware, software
from troupe.orchestrator.insight.doctor.machine import Finding, Machine, Needs
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.stages import plan_stages
from troupe.orchestrator.plan.worker_memory import WIDTHS
from troupe.orchestrator.spec.chain import PlannedRun

CHECKS: tuple[Callable[[Machine, Needs], Iterator[Finding]], ...] = (
    software.check_python,
    software.check_packages,
    software.check_engine,
    software.check_compiler,
    hardware.check_driver,
    hardware.check_gpus,
    hardware.check_cpus,
    hardware.check_memory,
    hardware.check_shm,
    hardware.check_disk,
    hardware.check_limits,
    hardware.check_network,
    hardware.check_ray,
)
_ONE_NODE = Node("this machine", 1e6, 1e6)
"""Has room for everything: the checks compare with the real machine."""
_OPTIMIZER_WIDTH = 12
"""Bytes of a parameter in an optimizer's file: the weight in float32 and Adam's two moments."""


def examine(machine: Machine, needs: Needs | None = None) -> tuple[Finding, ...]:
    """Every finding about a machine.

    Args:
        machine: The facts.
        needs: What a spec needs, or None if no spec is given.
    """
    return tuple(finding for check in CHECKS for finding in check(machine, needs or Needs()))


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing would make a run fail."""
    return all(finding.level != "problem" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """One line for each finding, its remedy below it, and a line with the result."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.check:<10} {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<10} -> {finding.remedy}")
    counts = [(kind, sum(finding.level == kind for finding in findings)) for kind in ("problem", "note")]
    shown = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts if count)
    return "\n".join([*lines, shown or "everything is fine"])


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON object."""
    document = {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2)


def needs_of(runs: Sequence[PlannedRun]) -> Needs:
    """The largest need of any run of a file, on one machine."""
    sizes = Sizes()
    found = [(run, plan) for run, plan in plan_stages(runs, [_ONE_NODE])]
    checkpoints = []
    for run, _ in found:
        size = sizes.of(run.spec.model)
        trainers = len(run.spec.roles.trainers())
        width = _OPTIMIZER_WIDTH + WIDTHS[run.spec.model.dtype]
        checkpoints.append(0 if size is None else trainers * width * size.parameters)
    parts = [part for _, plan in found for node in plan.memory.nodes for part in node.parts]
    return Needs(
        name=runs[0].spec.name,
        gpus=max(plan.asked["GPU"] for _, plan in found),
        cpus=max(plan.asked["CPU"] for _, plan in found),
        host_memory=max(node.total for _, plan in found for node in plan.memory.nodes),
        weight_file=max((part.bytes for part in parts if part.name == "weight file"), default=0),
        checkpoint=max(checkpoints),
        checkpoints=1 + max(run.spec.checkpoint.keep for run, _ in found),
    )
