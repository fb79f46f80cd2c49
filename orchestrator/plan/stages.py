"""Plans of every run of a spec file, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from troupe.orchestrator.plan.measured import Recorded
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.plan import Plan, local_node, plan
from troupe.orchestrator.spec.chain import PlannedRun


def plan_stages(
    runs: Sequence[PlannedRun],
    nodes: Sequence[Node] | None,
    *,
    advise: bool = False,
    recorded: Recorded | None = None,
) -> Iterator[tuple[PlannedRun, Plan]]:
    """Plan each run, up to and including the first that does not fit.

    A later stage may start from a model that does not exist yet; it has the size of the model that the earlier stage
    trains.

    Args:
        runs: The runs of one file.
        nodes: The nodes of the cluster, or None for this machine.
        advise: Look for changes with which a run fits.
        recorded: A benchmark, whose measurements replace estimates if they hold for a run.
    """
    sizes = Sizes()
    for run in runs:
        available = [local_node(os.cpu_count() or 1, run.spec)] if nodes is None else nodes
        planned = plan(run.spec, available, sizes, advise=advise, recorded=recorded)
        trained = sizes.of(run.spec.model)
        if trained is not None:
            sizes.known[str(run.model)] = trained
        else:
            sizes.unknown[str(run.model)] = f"it is trained from {run.spec.model.path}, whose size is not known"
            sizes.trained.add(str(run.model))
        yield run, planned
        if planned.misfit:
            return
