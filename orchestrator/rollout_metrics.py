"""Figures of one batch, from the scalars that came with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from orchestrator.metrics import std
from orchestrator.scoring import ScoredGroup


def batch_metrics(groups: Sequence[ScoredGroup], version: int, seconds: float) -> dict[str, float]:
    """Rewards by component, lengths, truncation, staleness (versions), throughput (tokens/s over `seconds`), and what
    share of the prompt tokens engines had in their cache."""
    rewards = [reward for group in groups for reward in group.rewards.rewards if reward is not None]
    counts = (
        (one.prompt_tokens, one.response_tokens, one.oldest_version, one.finish_reason)
        for group in groups
        for one in group.summary.samples
    )
    prompts, responses, oldest, reasons = zip(*counts, strict=True)  # thousands of samples: once through all of them
    failed = sum(len(group.rewards.statuses) - group.rewards.statuses.count("ok") for group in groups)
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": std(rewards),
        "groups/mixed": fmean([len({r for r in group.rewards.rewards if r is not None}) > 1 for group in groups]),
        "prompt_tokens/mean": fmean(prompts),
        "prompt_tokens/cached": sum(group.summary.cached_tokens for group in groups) / sum(prompts),
        "response_tokens/mean": fmean(responses),
        "response_tokens/max": float(max(responses)),
        "truncated": reasons.count("length") / len(reasons),
        "staleness/mean": version - fmean(oldest),
        "staleness/max": float(version - min(oldest)),
        "failed_samples": float(failed),
        "tokens": float(sum(prompts) + sum(responses)),
        "response_tokens_per_s": sum(responses) / seconds if seconds > 0 else 0.0,
    }
    for name in groups[0].rewards.components:
        values = [v for group in groups for v in group.rewards.components[name] if v is not None]
        if values:
            metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": std(values)}
    return metrics


def mean_of(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every figure over those dicts that have it."""
    names = dict.fromkeys(name for figures in dicts for name in figures)
    return {name: fmean(figures[name] for figures in dicts if name in figures) for name in names}
