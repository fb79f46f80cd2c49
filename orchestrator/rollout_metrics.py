"""Figures of one batch, from the scalars that came with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from orchestrator.metrics import std
from orchestrator.scoring import ScoredGroup


def batch_metrics(groups: Sequence[ScoredGroup], version: int, seconds: float) -> dict[str, float]:
    """Reward by component, lengths, truncation, staleness (versions), throughput (tokens/s over `seconds`)."""
    samples = [sample for group in groups for sample in group.summary.samples]
    rewards = [reward for group in groups for reward in group.rewards.rewards if reward is not None]
    responses = [sample.response_tokens for sample in samples]
    staleness = [version - sample.oldest_version for sample in samples]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": std(rewards),
        "groups/mixed": fmean(len({r for r in group.rewards.rewards if r is not None}) > 1 for group in groups),
        "response_tokens/mean": fmean(responses),
        "response_tokens/max": float(max(responses)),
        "truncated": fmean(sample.finish_reason == "length" for sample in samples),
        "staleness/mean": fmean(staleness),
        "staleness/max": float(max(staleness)),
        "failed_samples": float(sum(s != "ok" for group in groups for s in group.rewards.statuses)),
        "tokens": float(sum(sample.prompt_tokens + sample.response_tokens for sample in samples)),
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
