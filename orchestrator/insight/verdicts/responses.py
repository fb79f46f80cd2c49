"""Rules on the length of responses."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.learning import add_kl, lower_learning_rate
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict, field, flow, while_it_lasts

_GROWTH, _SHRINKAGE = 2.0, 0.4
_CUT = 0.3
"""Share of cut responses above which most of the work is lost."""


def _longest(run: History) -> int:
    return int(run.get("sampling.max_tokens", 0)) or int(run["response_tokens/max"].highest)


def _overlong(run: History) -> str:
    """The run's reward functions, and one that charges for length; empty if the spec does not have them."""
    longest = _longest(run)
    charge = {"name": "overlong", "args": {"limit": longest, "buffer": max(1, longest // 4)}, "weight": 0.2}
    functions = run.get("roles.reward.functions", [])
    return flow("roles.reward.functions", [*functions, charge]) if functions else ""


def length_explosion(run: History) -> Iterator[Verdict]:
    """Responses become much longer, and longer does not mean better."""
    length, cut = run["response_tokens/mean"], run["truncated"]
    limit = _GROWTH * length.first
    found = length.stretch(lambda value: value > limit, at_least=2)
    pays = run.reward_rises and not cut.trend().rises
    if found is None or not length.trend().rises:
        return
    yield Verdict(
        "length-explosion",
        Level.NOTE if pays else while_it_lasts(found, Level.WARNING),
        "Responses become much longer",
        f"Responses grew from {length.first:.0f} to {length.typical(found):.0f} tokens"
        + (" while the reward rises." if pays else f"; {cut.typical(found):.0%} are cut, and the reward stands still."),
        found.start,
        found.until,
        (length.name, cut.name, "reward/mean"),
        (
            Remedy("Make length cost something near the limit.", _overlong(run)),
            Remedy("Do not let a length's share of the loss grow with it.", field("algorithm.name", "dr_grpo")),
        ),
    )


def length_collapse(run: History) -> Iterator[Verdict]:
    """Responses shrink to almost nothing."""
    length = run["response_tokens/mean"]
    limit = _SHRINKAGE * length.first
    found = length.stretch(lambda value: value < limit, at_least=2)
    if found is None:
        return
    yield Verdict(
        "length-collapse",
        while_it_lasts(found, Level.WARNING if run.reward_rises else Level.PROBLEM),
        "Responses become very short",
        f"Responses shrank from {length.first:.0f} to {length.typical(found):.1f} tokens. "
        "Check that the reward pays for what a short response leaves out.",
        found.start,
        found.until,
        (length.name, "reward/mean", "policy/entropy"),
        (
            Remedy("Read the shortest samples, and let the reward ask for an answer."),
            add_kl(run),
            lower_learning_rate(run),
        ),
    )


def truncation(run: History) -> Iterator[Verdict]:
    """Responses are cut before they end, and may earn nothing for it."""
    cut = run["truncated"]
    limit = _CUT
    found = cut.stretch(lambda value: value > limit, at_least=2)
    if found is None:
        return
    rises = cut.trend().rises and cut.last > cut.first + 0.2
    always = min(cut.values) > 0.99 and run["reward/std"].last > 0.0  # then the reward scores cut responses as such
    harmless = (run.reward_rises or always) and not rises
    longest = _longest(run)
    yield Verdict(
        "truncation",
        Level.NOTE if harmless else while_it_lasts(found, Level.WARNING),
        "Responses are truncated",
        f"{cut.typical(found):.0%} of the responses reach `sampling.max_tokens` ({longest})"
        + ("; the reward still tells them apart." if harmless else "; the truncated part earns no reward."),
        found.start,
        found.until,
        (cut.name, "response_tokens/mean", "reward/mean"),
        (
            Remedy("Allow longer responses.", field("sampling.max_tokens", 2 * longest)),
            Remedy("Leave truncated responses out of the loss.", field("algorithm.mask_truncated", "true")),
        ),
    )
