"""Checks of the reward functions that a spec names: each is loaded, with its arguments, in another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.spec.preflight import Finding
from orchestrator.spec.probe import ProbeFailed, ask
from workers.contract.config import RewardFunctionConfig

LOAD_TIMEOUT_S = 120.0
"""Longest import of the modules of all reward functions."""
_ENTRY = "workers.rewards.loading:find_problems"


def unusable_functions(functions: Sequence[RewardFunctionConfig]) -> Iterator[Finding]:
    """Reward functions that cannot be imported, or that do not take their arguments."""
    if not functions:
        return
    request = [{"name": function.name, "args": function.args} for function in functions]
    try:
        replies = ask(_ENTRY, request, LOAD_TIMEOUT_S)
    except ProbeFailed as error:  # the import exits, crashes or hangs
        name = functions[len(error.replies)].name
        replies = [*error.replies, ["name", f"{name}: cannot be loaded: {error}"]]
    for index, (field, problem) in enumerate(replies):
        if problem:
            yield f"roles.reward.functions.{index}.{field}", problem
