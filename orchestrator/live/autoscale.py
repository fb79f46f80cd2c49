"""The autoscaling rule: more engines while the trainer waits for samples, fewer while it does not."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.orchestrator.spec.sections import AutoscaleConfig


def autoscale_step(waits: Sequence[float], rule: AutoscaleConfig) -> int:
    """Change of the number of engines: 1 if every recent step waited more than `max_wait`, -1 if every one waited less
    than `min_wait`, else 0.

    Args:
        waits: Fraction of each step (0 to 1) for which the trainer waited for samples, newest last.
        rule: Thresholds, and the number of steps that must agree.
    """
    recent = waits[-rule.steps :]
    if len(recent) < rule.steps:
        return 0
    return int(min(recent) > rule.max_wait) - int(max(recent) < rule.min_wait)
