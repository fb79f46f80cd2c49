"""Custom algorithms: what the checks find, for `troupe validate` and `troupe algorithms --check`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from troupe.orchestrator.algorithms.section import AlgorithmConfig, corrects_sampler, is_custom
from troupe.orchestrator.errors import TroupeError
from troupe.workers.contract.algorithm_config import CustomConfig

if TYPE_CHECKING:
    from troupe.workers.algorithms.custom_checks import Check
    from troupe.workers.contract.messages import RewardSummary


def check(config: AlgorithmConfig, *, old_logprobs: bool, ref_logprobs: bool, values: bool) -> list[str]:
    """What the checks find wrong with an algorithm, given what its run computes; one message each."""
    from troupe.workers.algorithms.custom_checks import Available, check_custom

    available = Available(old_logprobs, ref_logprobs, values, importance=corrects_sampler(config))
    found = check_custom(CustomConfig(name=config.name, args=config.args), seeds=1, available=available)
    return [f"{one.name}: {one.problem}" for one in found if one.problem]


def group_filter(config: AlgorithmConfig) -> Callable[[RewardSummary], bool] | None:
    """The group filter of a custom algorithm; None for a built-in one, or without a filter. It raises TroupeError if
    the user's function fails."""
    if not is_custom(config.name):
        return None
    from troupe.workers.algorithms.custom import group_rewards, load_custom

    keep = load_custom(CustomConfig(name=config.name, args=config.args)).keep_group
    if keep is None:
        return None

    def decide(rewards: RewardSummary) -> bool:
        try:
            return bool(keep(group_rewards(rewards.rewards, rewards.components)))
        except Exception as error:  # the function is the user's
            message = f"{config.name}: keep_group: {type(error).__name__}: {error}"
            raise TroupeError(f"{message} (rewards of {rewards.prompt_uid}: {rewards.rewards})") from error

    return decide


def report(checks: Sequence[Check]) -> str:
    """The outcome of every check, one line each."""
    width = max(len(one.name) for one in checks)
    return "\n".join(f"{one.name:<{width}}  {one.problem or 'ok'}" for one in checks)
