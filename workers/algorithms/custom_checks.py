"""Checks of a custom algorithm on random batches, in float64: `troupe algorithms --check NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from troupe.workers.algorithms.custom import (
    CustomAlgorithm,
    GroupRewards,
    LossTokens,
    SampledTokens,
    TokenLoss,
    custom_advantages,
    custom_loss,
    load_custom,
)
from troupe.workers.contract.config import CustomConfig

_LENGTHS = (3, 5, 1, 4, 2, 6)
_GROUPS = (0, 0, 0, 1, 1, 1)
_STEP = 1e-6
_TOLERANCE = 1e-9
_SLOPE_TOLERANCE = 1e-5
"""Of central differences with `_STEP` in float64, relative to the gradient's largest entry."""


@dataclass(frozen=True)
class Check:
    """Outcome of one check."""

    name: str
    problem: str = ""
    """What is wrong; empty: nothing."""


@dataclass(frozen=True)
class Available:
    """What a run gives the functions besides what they always get; the rest is None."""

    old_logprobs: bool = True
    ref_logprobs: bool = True
    values: bool = True


def check_custom(config: CustomConfig, seeds: int = 5, available: Available = Available()) -> list[Check]:
    """Every check that applies to the algorithm, each on `seeds` random batches; the first problem of each.

    Raises:
        CustomAlgorithmError: the algorithm cannot be loaded.
    """
    custom = load_custom(config)
    checks: list[tuple[str, Callable[[_TestedAlgorithm, int], str]]] = []
    if custom.advantage is not None:
        checks += _ADVANTAGE_CHECKS
    if custom.loss is not None:
        checks += [check for check in _LOSS_CHECKS if not (custom.stops_gradient and check[1] is _finite_differences)]
    if custom.keep_group is not None:
        checks += _FILTER_CHECKS
    case = _TestedAlgorithm(config, custom, available)
    return [_run(name, check, case, seeds) for name, check in checks]


@dataclass(frozen=True)
class _TestedAlgorithm:
    """The algorithm under test and what it is given."""

    config: CustomConfig
    custom: CustomAlgorithm
    available: Available

    def batch(self, seed: int) -> SampledTokens:
        has = self.available
        absent = {name: None for name in ("old_logprobs", "ref_logprobs", "values") if not vars(has)[name]}
        return replace(random_batch(seed), **absent)

    def tokens(self, seed: int, drift: float = 0.3) -> LossTokens:
        tokens = random_tokens(seed, drift)
        return tokens if self.available.ref_logprobs else replace(tokens, ref_logprobs=None)

    def advantages(self, batch: SampledTokens) -> torch.Tensor:
        return custom_advantages(self.config, batch)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        return custom_loss(self.config, tokens)


def _run(name: str, check: Callable[[_TestedAlgorithm, int], str], case: _TestedAlgorithm, seeds: int) -> Check:
    for seed in range(seeds):
        try:
            problem = check(case, seed)
        except Exception as error:  # the function is the user's
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return Check(name, f"{problem} (seed {seed})")
    return Check(name)


def random_batch(seed: int, lengths: tuple[int, ...] = _LENGTHS) -> SampledTokens:
    """Two groups of three samples with rewards, log-probs and values."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    old = -torch.rand(total, generator=generator, dtype=torch.double) * 4
    return SampledTokens(
        rewards=torch.randn(len(lengths), generator=generator, dtype=torch.double),
        groups=torch.tensor(_GROUPS),
        lengths=torch.tensor(lengths),
        rollout_logprobs=old + 0.01 * torch.randn(total, generator=generator, dtype=torch.double),
        old_logprobs=old,
        ref_logprobs=old + 0.2 * torch.randn(total, generator=generator, dtype=torch.double),
        values=torch.randn(total, generator=generator, dtype=torch.double),
    )


def random_tokens(seed: int, drift: float = 0.3) -> LossTokens:
    """Six sequences with a quarter of their tokens masked, `drift` nats from the old policy."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(_LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.double)

    mask = torch.rand(total, generator=generator) > 0.25
    old = -noise(1.5).abs()
    sequence = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    tokens = LossTokens(
        logprobs=old + noise(drift),
        old_logprobs=old,
        rollout_logprobs=old + noise(0.01),
        ref_logprobs=old + noise(0.2),
        advantages=noise(1.0)[sequence],
        loss_mask=mask,
        sequence=sequence,
    )
    return _with_zeros(tokens, mask)


def _with_zeros(tokens: LossTokens, mask: torch.Tensor) -> LossTokens:
    """As the trainer passes them: 0 where the mask is False."""
    columns = {name: value for name, value in _columns(tokens).items() if value.is_floating_point()}
    return replace(tokens, **{name: torch.where(mask, value, 0.0) for name, value in columns.items()})


def _columns(tokens: LossTokens) -> dict[str, torch.Tensor]:
    values = {item.name: vars(tokens)[item.name] for item in fields(tokens)}
    return {name: value for name, value in values.items() if value is not None}


def _select(tokens: LossTokens, index: torch.Tensor) -> LossTokens:
    """The tokens at `index`, their sequences numbered from 0."""
    chosen = replace(tokens, **{name: value[index] for name, value in _columns(tokens).items()})
    return replace(chosen, sequence=chosen.sequence.unique(return_inverse=True)[1])


def _far(one: torch.Tensor, other: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    scale = max(1.0, float(other.abs().max())) if len(other) else 1.0
    return len(other) > 0 and not float((one - other).abs().max()) <= tolerance * scale


# --- advantage ---


def _advantages_are_finite(case: _TestedAlgorithm, seed: int) -> str:
    result = case.advantages(case.batch(seed))
    return "" if bool(torch.isfinite(result).all()) else "not every advantage is finite"


def _advantages_of_equal_rewards(case: _TestedAlgorithm, seed: int) -> str:
    batch = case.batch(seed)
    result = case.advantages(replace(batch, rewards=torch.ones_like(batch.rewards)))
    return "" if bool(torch.isfinite(result).all()) else "not finite where all rewards of a group are equal"


def _advantages_repeat(case: _TestedAlgorithm, seed: int) -> str:
    batch = case.batch(seed)
    before = batch.rewards.clone()
    first, second = case.advantages(batch), case.advantages(batch)
    if not torch.equal(before, batch.rewards):
        return "changes the rewards it is given"
    return "" if torch.equal(first, second) else "two calls with the same batch differ"


def _advantages_permute(case: _TestedAlgorithm, seed: int) -> str:
    batch = case.batch(seed)
    order = torch.randperm(len(_LENGTHS), generator=torch.Generator().manual_seed(seed))
    starts = batch.lengths.cumsum(0) - batch.lengths
    index = torch.cat([torch.arange(int(starts[row]), int(starts[row] + batch.lengths[row])) for row in order.tolist()])
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")
    per_token = {name: vars(batch)[name][index] for name in names if vars(batch)[name] is not None}
    moved = replace(
        batch, rewards=batch.rewards[order], groups=batch.groups[order], lengths=batch.lengths[order], **per_token
    )
    expected = case.advantages(batch)[index]
    return "depends on the order of the samples" if _far(case.advantages(moved), expected) else ""


# --- loss ---


def _loss_is_finite(case: _TestedAlgorithm, seed: int) -> str:
    for drift, what in ((0.3, "near the old policy"), (30.0, "30 nats from the old policy")):
        tokens = case.tokens(seed, drift)
        gradient = _gradient(case, tokens)
        if not bool(torch.isfinite(gradient).all()):
            return f"the gradient is not finite {what}"
    return ""


def _gradient(case: _TestedAlgorithm, tokens: LossTokens) -> torch.Tensor:
    point = tokens.logprobs.detach().clone().requires_grad_()
    loss = torch.where(tokens.loss_mask, case.loss(replace(tokens, logprobs=point)).loss, 0.0).sum()
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss is {float(loss)}")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on logprobs")
    return torch.autograd.grad(loss, point)[0]


def _finite_differences(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.tokens(seed)
    gradient = _gradient(case, tokens)

    def total(logprobs: torch.Tensor) -> float:
        result = case.loss(replace(tokens, logprobs=logprobs)).loss
        return float(torch.where(tokens.loss_mask, result, 0.0).sum())

    scale = max(1.0, float(gradient.abs().max()))
    for number in tokens.loss_mask.nonzero().flatten().tolist():
        step = torch.zeros_like(tokens.logprobs)
        step[number] = _STEP
        above, here, below = (total(tokens.logprobs + sign * step) for sign in (1, 0, -1))
        right, left = (above - here) / _STEP, (here - below) / _STEP
        slope = float(gradient[number])
        # At a kink (a clip bound) the slope of one side is right too.
        if min(abs(slope - (right + left) / 2), abs(slope - right), abs(slope - left)) > _SLOPE_TOLERANCE * scale:
            return (
                f"autograd says {slope:.6g} for token {number}, finite differences {(right + left) / 2:.6g}; "
                "set stops_gradient where the loss detaches something on purpose"
            )
    return ""


def _loss_permutes(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.tokens(seed)
    order = torch.randperm(len(_LENGTHS), generator=torch.Generator().manual_seed(seed)).tolist()
    index = torch.cat([(tokens.sequence == row).nonzero().flatten() for row in order])
    moved = replace(tokens, **{name: value[index] for name, value in _columns(tokens).items()})
    moved = replace(moved, sequence=torch.repeat_interleave(torch.arange(len(order)), torch.tensor(_LENGTHS)[order]))
    expected = case.loss(tokens).loss[index]
    mask = moved.loss_mask
    return "depends on the order of the sequences" if _far(case.loss(moved).loss[mask], expected[mask]) else ""


def _loss_splits(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.tokens(seed)
    whole = case.loss(tokens).loss
    for rows in ((0, 1, 2), (3, 4), (5,)):
        index = torch.cat([(tokens.sequence == row).nonzero().flatten() for row in rows])
        mask = tokens.loss_mask[index]
        part = case.loss(_select(tokens, index)).loss
        if _far(part[mask], whole[index][mask]):
            return "a token's loss depends on the other sequences of its micro-batch: the split would change the update"
    return ""


def _loss_ignores_masked(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.tokens(seed)
    kept = _select(tokens, tokens.loss_mask.nonzero().flatten())
    expected = case.loss(kept).loss
    got = case.loss(tokens).loss[tokens.loss_mask]
    return "a token's loss depends on masked tokens" if _far(got, expected) else ""


# --- keep_group ---


def _filter_answers(case: _TestedAlgorithm, seed: int) -> str:
    keep = case.custom.keep_group
    if keep is None:
        return ""
    rewards = case.batch(seed).rewards.tolist()
    for values in (tuple(rewards), (1.0,) * 4, (0.0,) * 4, (1.0, 0.0), (0.5,)):
        answer = keep(GroupRewards(values, {"reward": values}))
        if not isinstance(answer, bool):
            return f"keep_group returned a {type(answer).__name__}, not a bool"
        turned = tuple(reversed(values))
        if keep(GroupRewards(turned, {"reward": turned})) != answer:
            return "keep_group depends on the order of the samples"
    return ""


_ADVANTAGE_CHECKS: list[tuple[str, Callable[[_TestedAlgorithm, int], str]]] = [
    ("advantage: finite", _advantages_are_finite),
    ("advantage: equal rewards", _advantages_of_equal_rewards),
    ("advantage: repeatable", _advantages_repeat),
    ("advantage: order of samples", _advantages_permute),
]
_LOSS_CHECKS: list[tuple[str, Callable[[_TestedAlgorithm, int], str]]] = [
    ("loss: finite", _loss_is_finite),
    ("loss: finite differences", _finite_differences),
    ("loss: order of sequences", _loss_permutes),
    ("loss: split into micro-batches", _loss_splits),
    ("loss: masked tokens", _loss_ignores_masked),
]
_FILTER_CHECKS: list[tuple[str, Callable[[_TestedAlgorithm, int], str]]] = [("keep_group: answer", _filter_answers)]
