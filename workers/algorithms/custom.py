"""A custom algorithm: functions that replace parts of a shipped algorithm.

`algorithm.name: package.module:attribute` in a spec names a `CustomAlgorithm`, or a function that returns one from
`algorithm.args`. The driver imports it to check the spec, every policy worker imports it to train.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.contract.algorithm_config import CustomConfig

__all__ = ["CustomAlgorithm", "GroupRewards", "LossTokens", "SampledTokens", "TokenLoss"]


class CustomAlgorithmError(ValueError):
    """A custom algorithm cannot be used: not importable, not one, or it returned something else."""


@dataclass(frozen=True)
class LossTokens:
    """T response tokens of a micro-batch. Tokens with `loss_mask` False have 0 everywhere and carry no loss."""

    logprobs: torch.Tensor
    """float [T]: log-probs under the policy being trained, with gradient."""
    old_logprobs: torch.Tensor
    """float [T]: under the policy before the first update on the batch; in that update the same as `logprobs`."""
    rollout_logprobs: torch.Tensor
    """float [T]: under the engine that sampled."""
    ref_logprobs: torch.Tensor | None
    """float [T]: under the reference model; None without one."""
    advantages: torch.Tensor
    """float [T]."""
    loss_mask: torch.Tensor
    """bool [T]."""
    sequence: torch.Tensor
    """int64 [T]: number of each token's sequence in the micro-batch, which holds whole sequences. A sequence is a
    sample, also if an episode has several rows."""


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token, before it is weighted."""

    loss: torch.Tensor
    """float [T], with gradient. Weights of the aggregation and of the sampler's correction are multiplied to it."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float or bool [T] by name; reported as `policy/NAME`, the mean over loss tokens."""


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of the samples of one group that have one."""

    rewards: tuple[float, ...]
    components: Mapping[str, tuple[float, ...]]
    """The same samples' rewards by component."""


@dataclass(frozen=True)
class CustomAlgorithm:
    """Functions that replace parts of the shipped algorithm `base`; None keeps its part."""

    base: str = "grpo"
    """Name of the shipped algorithm whose roles, options and defaults apply."""
    advantage: Callable[[SampledTokens], torch.Tensor] | None = None
    """From a batch of N samples with T tokens to float64 [T]. `whiten` and `advantage_clip` apply to the result. With a
    critic, its targets are advantage plus value."""
    loss: Callable[[LossTokens], TokenLoss] | None = None
    """Loss of every token of a micro-batch, also if all advantages of a row are 0. It may only depend on the token's
    own sequence."""
    keep_group: Callable[[GroupRewards], bool] | None = None
    """Whether to train on a group; others are replaced while `dynamic_sampling` allows it."""
    summary: str = ""
    """One sentence for `troupe algorithms`."""
    stops_gradient: bool = False
    """Set it if `loss` detaches something on purpose: its gradient is then not compared with finite differences."""


def load_custom(config: CustomConfig) -> CustomAlgorithm:
    """The algorithm that `config.name` names, built with `config.args`. Raises CustomAlgorithmError if it cannot be
    imported, does not take the arguments, or is no `CustomAlgorithm`."""
    return _load(config.name, json.dumps(config.args, sort_keys=True))


@cache
def _load(name: str, args: str) -> CustomAlgorithm:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not look into the folder that it starts in
    try:
        found = vars(importlib.import_module(module_name)).get(attribute)
    except Exception as error:  # the module is the user's
        raise CustomAlgorithmError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    if found is None:
        raise CustomAlgorithmError(f"module {module_name} has no {attribute!r}")
    given: dict[str, Any] = json.loads(args)
    if callable(found):
        try:
            found = found(**given)
        except Exception as error:
            shown = ", ".join(f"{argument}={value!r}" for argument, value in given.items())
            raise CustomAlgorithmError(f"{name}({shown}): {type(error).__name__}: {error}") from error
    elif given:
        raise CustomAlgorithmError(f"{name} takes no arguments: algorithm.args is for a function that returns one")
    if not isinstance(found, CustomAlgorithm):
        raise CustomAlgorithmError(f"{name} is a {type(found).__name__}, not a troupe.algorithms.CustomAlgorithm")
    if found.advantage is None and found.loss is None and found.keep_group is None:
        raise CustomAlgorithmError(f"{name} is {found.base}: it has neither advantage nor loss nor keep_group")
    return found


def custom_advantages(config: CustomConfig, batch: SampledTokens) -> torch.Tensor:
    """float64 [T]: the result of the algorithm's `advantage`. Raises CustomAlgorithmError if the result has another
    shape or type."""
    function = load_custom(config).advantage
    if function is None:
        raise CustomAlgorithmError(f"{config.name} has no advantage")
    result, tokens = function(batch), len(batch.rollout_logprobs)
    _require_shape(f"{config.name}: advantage", result, tokens)
    return result.detach().double()


def custom_loss(config: CustomConfig, tokens: LossTokens) -> TokenLoss:
    """The result of the algorithm's `loss`. Raises CustomAlgorithmError if the result has other shapes or types."""
    function = load_custom(config).loss
    if function is None:
        raise CustomAlgorithmError(f"{config.name} has no loss")
    result = function(tokens)
    if not isinstance(result, TokenLoss):
        raise CustomAlgorithmError(f"{config.name}: loss returned a {type(result).__name__}, not a TokenLoss")
    for name, values in {"loss": result.loss, **result.metrics}.items():
        _require_shape(f"{config.name}: loss: {name}", values, len(tokens.logprobs))
    return result


def _require_shape(what: str, values: object, tokens: int) -> None:
    if not isinstance(values, torch.Tensor):
        raise CustomAlgorithmError(f"{what} returned a {type(values).__name__}, not a tensor")
    if values.shape != (tokens,):
        raise CustomAlgorithmError(f"{what} has shape {list(values.shape)}, not [{tokens}]: one number for each token")


def group_rewards(rewards: Sequence[float | None], components: Mapping[str, Sequence[float | None]]) -> GroupRewards:
    """The rewards of samples that have one, and their components."""
    kept = [number for number, reward in enumerate(rewards) if reward is not None]
    own = {name: tuple(float(values[n] or 0.0) for n in kept) for name, values in components.items()}
    return GroupRewards(tuple(float(rewards[n] or 0.0) for n in kept), own)
