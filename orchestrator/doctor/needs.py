"""What a spec needs from one machine, from its plan."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.orchestrator.capacity.placement import Node
from troupe.orchestrator.capacity.stages import plan_stages
from troupe.orchestrator.doctor.machine import Needs
from troupe.orchestrator.roles.memory import Sizes
from troupe.orchestrator.roles.worker_memory import WIDTHS
from troupe.orchestrator.spec.stages import PlannedRun

_ONE_NODE = Node("this machine", 1e6, 1e6)
"""Has room for everything: the checks compare with the real machine."""
_OPTIMIZER_WIDTH = 12
"""Bytes of a parameter in an optimizer's file: the weight in float32 and Adam's two moments."""


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
