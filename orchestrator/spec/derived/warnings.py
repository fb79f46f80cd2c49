"""What works in a spec, and is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.algorithms import section
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.adapters import forgotten_templates, unverified_adapters
from troupe.orchestrator.spec.derived.sampling import group_settings
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.rewards import RIGHT_OR_WRONG

_SCORERS = ("reference", "teacher", "reward", "environment")
"""Roles whose workers have one sample at a time."""

_LENGTHS = frozenset({"overlong", "length"})
"""Reward functions of a response's length alone."""


def warnings_of(spec: RunSpec) -> list[str]:
    """One line for each allowed setting that is likely not meant: adapters, templates, data, rates, prices, roles."""
    return [
        *unverified_adapters(spec.models()),
        *forgotten_templates(spec.models()),
        *_unused_eval(spec),
        *_limited_restarts(spec),
        *_rising_rates(spec),
        *(() if spec.rollouts is None else _idle_workers(spec.rollouts)),
        *(() if spec.rollouts is None else _priced_lengths(spec.rollouts)),
    ]


def _unused_eval(spec: RunSpec) -> Iterator[str]:
    if spec.evaluation is None and any(name.partition(".")[0] == "eval" for name in spec.data.sources()):
        yield "data.eval: the run never evaluates on it; add `evaluation: {}` (without it, only `troupe eval` does)"


def _limited_restarts(spec: RunSpec) -> Iterator[str]:
    """Trainers that can be restarted only in some of the steps, if the spec sets one of the two fields."""
    failures, every = spec.failures, min(spec.checkpoint.every_steps or spec.schedule.steps, spec.schedule.steps)
    kept, defaults = failures.replay_steps, type(failures).model_fields
    ours = all(dict(failures)[name] == defaults[name].default for name in ("replay_steps", "trainer_restarts"))
    if not ours and failures.trainer_restarts and kept < every:
        yield (
            f"failures.replay_steps: {kept}, but {every} steps lie between checkpoints (checkpoint.every_steps): a "
            f"trainer that is lost more than {kept} steps after one is not restarted, and the run ends"
        )


def _rising_rates(spec: RunSpec) -> Iterator[str]:
    """Runs that end before a learning rate has reached its peak."""
    for name, role in spec.roles.trainers().items():
        updates = spec.updates_of(name)
        if 0 < updates <= role.warmup_updates:
            yield (
                f"roles.{name}.warmup_updates: {role.warmup_updates}, but the run has {updates}: the learning rate "
                f"stays below roles.{name}.learning_rate"
            )


def _idle_workers(spec: RolloutSpec) -> Iterator[str]:
    if section.dynamic_sampling(spec.algorithm):  # more groups are dispatched than a step trains on
        return
    groups = spec.schedule.prompts_per_step * (1 + spec.schedule.max_staleness)
    samples = groups * max(spec.group_sizes)
    most = {"rollout": (groups, "groups")} | dict.fromkeys(_SCORERS, (samples, "samples"))
    for name, role in spec.roles.scaled().items():
        bound = most.get(name.partition(".")[0])
        if bound is not None and role.workers > bound[0]:
            yield (
                f"roles.{name}.workers: {role.workers}, but at most {bound[0]} {bound[1]} are in progress at a "
                "time (schedule.prompts_per_step, max_staleness, algorithm.group_size); the other workers are idle"
            )


def _priced_lengths(spec: RolloutSpec) -> Iterator[str]:
    """Length rewards that train groups without a right sample, or that no response reaches."""
    for number, group in enumerate(group_settings(spec)):
        path = group.rewards or "roles.reward"
        own = spec.data.mixture[number].rewards if group.rewards else None
        functions = [one for one in (spec.roles.reward.components if own is None else own) if one.weight]
        others = [one for one in functions if one.name not in _LENGTHS]
        # A response of the right form may have a wrong answer.
        others.sort(key=lambda one: 1 if one.name == "regex" else -(one.name in RIGHT_OR_WRONG))
        deciding = [one.component for one in others]
        priced = next((one.component for one in functions if one.name in _LENGTHS), None)
        if priced and deciding and group.signal_in is None and section.dynamic_sampling(spec.algorithm):
            field = f"data.train.{number}" if group.source else "algorithm"
            yield (
                f"{field}.dynamic_sampling_on: null keeps groups whose samples are all wrong and differ in {priced}: "
                f"they would be trained for their length; set {deciding[0]}"
            )
        longest = group.max_tokens or spec.sampling.max_tokens
        for one in functions if group.environment is None else ():
            limit, buffer = one.args.get("limit"), one.args.get("buffer")
            if one.name != "overlong" or not isinstance(limit, int) or not isinstance(buffer, int):
                continue
            if one.args.get("unit", "tokens") == "tokens" and limit - buffer >= longest:
                yield (
                    f"{path}: {one.component} begins at {limit - buffer} tokens (limit - buffer), and a response has "
                    f"at most {longest} (max_tokens): it has no effect"
                )
