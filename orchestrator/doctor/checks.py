"""All checks of `troupe doctor`, in the order in which they are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from troupe.orchestrator.doctor import hardware, software
from troupe.orchestrator.doctor.machine import Finding, Machine, Needs

CHECKS: tuple[Callable[[Machine, Needs], Iterator[Finding]], ...] = (
    software.check_python,
    software.check_platform,
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


def examine(machine: Machine, needs: Needs | None = None) -> tuple[Finding, ...]:
    """Every finding about a machine.

    Args:
        machine: The facts.
        needs: What a spec needs; None: no spec is given.
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
