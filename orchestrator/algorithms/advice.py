"""Advice on each algorithm: when to use it, what to watch, and the options that select it in TRL, verl and OpenRLHF."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True)
class Advice:
    """Advice on one row of the tables, as Markdown."""

    use: str
    """When to use it."""
    watch: str
    """Metrics by their names, and what to do about them."""
    trl: str
    """Options that select it in TRL, and differences; `-` where TRL does not have it."""
    verl: str
    """The same for verl. `actor.` stands for `actor_rollout_ref.actor.`."""
    openrlhf: str
    """The same for OpenRLHF's `openrlhf.cli.train_ppo_ray`, or the command that the text names."""


def advice_on(name: str) -> Advice | None:
    """Advice on an algorithm; None for a custom one."""
    return all_advice().get(name)


@cache
def all_advice() -> dict[str, Advice]:
    """The advice in `advice.yaml`, by name of the algorithm."""
    text = files("troupe.orchestrator.algorithms").joinpath("advice.yaml").read_text(encoding="utf-8")
    return {name: Advice(**fields) for name, fields in yaml.safe_load(text).items()}
