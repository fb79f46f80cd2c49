"""Checks of the reward functions and the environment that a spec names: each is loaded in another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from troupe.orchestrator.spec.preflight import Finding
from troupe.workers.contract.config import EnvironmentConfig, RewardFunctionConfig
from troupe.workers.isolation.probe import ProbeFailed, ask

LOAD_TIMEOUT_S = 120.0
"""Longest import of the modules of all reward functions."""
_ENVIRONMENT = "troupe.workers.environments.loading:find_problem"
_ENTRY = "troupe.workers.rewards.loading:find_problems"


def unusable_environment(environment: EnvironmentConfig | None) -> Iterator[Finding]:
    """An environment that cannot be imported, or that does not take its arguments."""
    if environment is None:
        return
    try:
        ((field, problem),) = ask(_ENVIRONMENT, {"name": environment.name, "args": environment.args}, LOAD_TIMEOUT_S)
    except ProbeFailed as error:
        field, problem = "name", f"{environment.name}: cannot be loaded: {error}"
    if problem:
        yield f"roles.environment.{field}", problem


def unusable_functions(functions: Sequence[RewardFunctionConfig]) -> Iterator[Finding]:
    """Reward functions that cannot be imported, or that do not take their arguments."""
    if not functions:
        return
    request = [{"name": f.name, "args": f.args, "batched": f.batched} for f in functions]
    try:
        replies = ask(_ENTRY, request, LOAD_TIMEOUT_S)
    except ProbeFailed as error:  # the import exits, crashes or hangs
        name = functions[len(error.replies)].name
        replies = [*error.replies, ["name", f"{name}: cannot be loaded: {error}"]]
    for index, (field, problem) in enumerate(replies):
        if problem:
            yield f"roles.reward.functions.{index}.{field}", problem
