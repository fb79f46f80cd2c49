"""The environment of a first spec: its section, and the reward that goes with it."""

from __future__ import annotations

from typing import Any

from troupe.orchestrator.errors import UsageError, nearest
from troupe.orchestrator.spec.checks.shared import IMPORTED
from troupe.orchestrator.starter.choices import Choices, Data
from troupe.workers.contract.config import ENVIRONMENTS
from troupe.workers.contract.rewards import ENVIRONMENT_REWARD

TURNS = 4
"""Most turns of the policy in an episode."""
_SCORED = frozenset({"retry", "tools", "single_turn"})
"""Environments that compare with the answer of the data."""
_CONFIGURED = frozenset({"agent", "openenv", "verifiers"})
"""Environments that need arguments from the user."""
_EPISODES = 64
"""Episodes under way in one worker."""


def check_environment(name: str, *, offline: bool) -> None:
    """Raise UsageError unless a first spec can be written for this environment.

    Args:
        name: A built-in environment or `module:Class`.
        offline: Whether the algorithm learns from examples.
    """
    if offline:
        raise UsageError("--environment: this algorithm learns from examples and plays no episodes")
    if name in _CONFIGURED:
        raise UsageError(
            f"--environment: {name} needs roles.environment.args that only you know: write the spec with another "
            "environment and change it as docs/guides/environments.md says"
        )
    if name not in ENVIRONMENTS and not IMPORTED.fullmatch(name):
        known = ", ".join(one for one in ENVIRONMENTS if one not in _CONFIGURED)
        hint = nearest(name, ENVIRONMENTS) or f"built in: {known}; your own: package.module:Class"
        raise UsageError(f"--environment: no environment '{name[:60]}' ({hint})")


def needs_answer(choices: Choices) -> bool:
    """Whether something compares a response with the answer of the data."""
    return choices.environment in _SCORED or not choices.environment


def reward_of(choices: Choices, data: Data) -> str:
    """The reward function of the role `reward`."""
    if choices.environment not in ("", "single_turn"):
        return ENVIRONMENT_REWARD
    return data.reward.function if data.reward is not None else ""


def environment_section(choices: Choices, data: Data) -> dict[str, Any]:
    """The role `environment`."""
    function = data.reward.function if data.reward is not None else ""
    own: dict[str, dict[str, Any]] = {
        "retry": {"args": {"function": function, "attempts": 2}},
        "tools": {"args": {"tools": ["calculator"], "function": function}, "tool_parser": "hermes"},
    }
    workers = max(1, min(8, choices.cpus // 8))
    cpus = 1 if choices.gpus else max(0.1, int(10 * choices.cpus / workers) / 100)
    return {
        "workers": workers,
        "cpus": cpus,
        "name": choices.environment,
        **own.get(choices.environment, {}),
        "max_turns": TURNS,
        "episodes": _EPISODES,
    }
