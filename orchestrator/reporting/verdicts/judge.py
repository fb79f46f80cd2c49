"""All rules, and the verdicts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.reporting.verdicts import data, learning, pace, responses, updates
from orchestrator.reporting.verdicts.history import History
from orchestrator.reporting.verdicts.verdict import Level, Verdict

Rule = Callable[[History], Iterator[Verdict]]

RULES: tuple[Rule, ...] = (
    *(learning.entropy_collapse, learning.reward_hacking, learning.no_signal, learning.reward_falls),
    *(learning.penalty_dominates, learning.overfitting),
    *(responses.length_explosion, responses.length_collapse, responses.truncation),
    *(updates.kl_explosion, updates.steps_too_large, updates.clip_fraction_stuck, updates.sampler_gap),
    *(updates.gradient_spikes, updates.blind_critic),
    *(data.failing_rewards, data.repeated_data, data.unusable_data, data.dropped_samples),
    *(pace.slow_rewards, pace.starved_trainer, pace.starved_engines, pace.growing_memory, pace.lost_workers),
)
_ORDER = (Level.PROBLEM, Level.WARNING, Level.NOTE)


def judge(history: History) -> list[Verdict]:
    """The verdicts of every rule: problems first, then by the step at which they began."""
    found = [verdict for rule in RULES for verdict in rule(history)]
    return sorted(found, key=lambda verdict: (_ORDER.index(verdict.level), verdict.since))
