"""The runs on which the verdicts are tested.

Real runs come from `make_recorded.py`. Modelled runs are a real healthy run with one series changed by a documented,
seeded model (`fault_models.py`). The thresholds were chosen on the cases in `TUNED`; the cases in `HELD_OUT` were only
tested on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.load import parse_spec

from . import fault_models as models

RECORDED = Path(__file__).resolve().parent / "recorded"


@dataclass(frozen=True)
class Case:
    """A run, and the verdicts of which one must be found; none: the run is healthy."""

    name: str
    expected: frozenset[str]
    history: Callable[[], History]

    def __str__(self) -> str:
        return self.name


def lines_of(name: str) -> list[dict[str, Any]]:
    """The recorded metrics of a real run."""
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def recorded_spec(name: str) -> RunSpec:
    """Its spec. The file has what differs from the defaults."""
    return parse_spec(yaml_reader.read_file(RECORDED / f"{name}.yaml"))


def spec_of(name: str) -> dict[str, Any]:
    """Its spec as the rules read it: with every default."""
    return recorded_spec(name).model_dump(mode="json")


def real(name: str, *expected: str) -> Case:
    """A real run."""
    return Case(name, frozenset(expected), lambda: History.of(lines_of(name), spec_of(name)))


def modelled(base: str, model: models.Model, seed: int, *expected: str, spec: dict[str, Any] | None = None) -> Case:
    """A real healthy run with a modelled fault, and with changes of its spec's sections."""

    def history() -> History:
        changed = {name: {**spec_of(base).get(name, {}), **section} for name, section in (spec or {}).items()}
        return History.of(models.sick(lines_of(base), model, seed), {**spec_of(base), **changed})

    return Case(f"{model.__name__}-on-{base}", frozenset(expected), history)


TUNED = (
    real("sick-constant-reward", "no-signal"),
    real("sick-failing-reward", "failing-rewards"),
    real("sick-epochs", "steps-too-large", "kl-explosion"),
    real("sick-learning-rate", "steps-too-large", "kl-explosion"),
    real("sick-collapse-grpo", "entropy-collapse", "no-signal"),
    real("sick-collapse-ppo", "entropy-collapse", "no-signal"),
    real("sick-extreme-reward", "gradient-spikes", "clipped-gradients"),
    real("healthy-grpo"),
    real("healthy-ppo"),
    modelled("healthy-grpo", models.nothing, 8),
    modelled("healthy-grpo", models.length_grows_with_reward, 9),
    modelled("healthy-grpo", models.one_spike, 10),
    real("healthy-tiny-grpo"),
    real("healthy-tiny-ppo"),
    real("healthy-async"),
    modelled("healthy-grpo-kl", models.nothing, 21),
    modelled("healthy-grpo", models.gap_jumps, 1, "sampler-gap"),
    modelled("healthy-grpo", models.length_explodes, 2, "length-explosion"),
    modelled("healthy-grpo", models.spikes, 3, "gradient-spikes"),
    modelled("healthy-ppo", models.critic_never_learns, 4, "blind-critic"),
    modelled("healthy-grpo", models.held_out_falls, 5, "reward-hacking"),
    modelled("healthy-grpo", models.memory_grows, 6, "growing-memory"),
    modelled("healthy-grpo", models.memory_flattens, 26),
    modelled("healthy-grpo", models.entropy_collapses, 7, "entropy-collapse"),
)
HELD_OUT = (
    real("sick-never-solved", "no-signal"),
    real("sick-slow-reward", "slow-rewards"),
    real("sick-slow-update", "starved-engines"),
    real("sick-one-letter", "reward-hacking"),
    real("sick-critic-rate", "blind-critic"),
    real("sick-stale", "steps-too-large", "sampler-gap"),
    real("sick-leaking-reward", "growing-memory"),
    real("sick-few-prompts", "repeated-data"),
    real("sick-kl-coef", "penalty-dominates"),
    modelled("healthy-ppo", models.gap_grows, 11, "sampler-gap"),
    modelled("healthy-ppo", models.length_collapses, 12, "length-collapse"),
    modelled("healthy-grpo", models.truncation_rises, 13, "truncation"),
    modelled("healthy-ppo", models.not_finite, 14, "gradient-spikes"),
    modelled("healthy-ppo", models.clipped, 15, "clip-fraction"),
    modelled("healthy-ppo", models.leaves_reference, 16, "kl-explosion"),
    modelled("healthy-ppo", models.rewards_fail, 17, "failing-rewards"),
    modelled("healthy-grpo", models.workers_die, 18, "lost-workers"),
    modelled("healthy-grpo", models.rows_lost, 19, "unusable-data"),
    modelled("healthy-grpo", models.trainer_waits, 20, "starved-trainer", spec={"schedule": {"max_staleness": 1}}),
    real("healthy-grpo-kl"),
    real("healthy-sft"),
    real("healthy-dpo"),
    real("healthy-grpo-seed-11"),
    real("healthy-ppo-seed-5"),
    real("healthy-rloo"),
    real("healthy-laptop"),
    modelled("healthy-grpo", models.entropy_falls_slowly, 22),
    modelled("healthy-async", models.stale_gap, 23),
    modelled("healthy-grpo", models.few_failures, 24),
    modelled("healthy-grpo", models.rewards_fluctuate, 25),
)
"""Never looked at while thresholds were chosen."""
