"""Checks of a custom algorithm on random batches, in float64: `troupe algorithms --check NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from troupe.workers.algorithms.custom import (
    CustomAlgorithm,
    GroupRewards,
    LossTokens,
    TokenLoss,
    custom_advantages,
    custom_loss,
    load_custom,
)
from troupe.workers.algorithms.sampled_tokens import SampledTokens
from troupe.workers.contract.config import CustomConfig

_LENGTHS = (3, 5, 1, 4, 2, 6)
_GROUPS = (0, 0, 0, 1, 1, 1)
_UNEQUAL = (0, 0, 0, 0, 1, 1)
_LONE = ((0,), (0, 1, 2), (0, 0, 0, 0, 0, 1))
_EMPTY_LENGTHS = (3, 0, 1, 4, 2, 0)
_ARMS = 5
_STEP = 1e-6
_TOLERANCE = 1e-9
_SLOPE_TOLERANCE = 1e-5
"""Tolerance of central differences with `_STEP` in float64, relative to the gradient's largest entry."""


@dataclass(frozen=True)
class Check:
    """RewardResult of one check."""

    name: str
    problem: str = ""
    """What is wrong; empty if nothing is."""


@dataclass(frozen=True)
class Available:
    """What a run gives the functions besides what they always get; the rest is None."""

    old_logprobs: bool = True
    ref_logprobs: bool = True
    values: bool = True
    importance: bool = True
    """Whether the run corrects for the sampler (`algorithm.importance`)."""


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
        left_out = {_finite_differences} if custom.stops_gradient else set()
        left_out |= set() if available.importance else {_loss_leaves_the_sampler}
        checks += [check for check in _LOSS_CHECKS if check[1] not in left_out]
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

    def batch(self, seed: int, lengths: tuple[int, ...] = _LENGTHS, groups: tuple[int, ...] = _GROUPS) -> SampledTokens:
        has = self.available
        absent = {name: None for name in ("old_logprobs", "ref_logprobs", "values") if not vars(has)[name]}
        return replace(random_batch(seed, lengths, groups), **absent)

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


def random_batch(seed: int, lengths: tuple[int, ...] = _LENGTHS, groups: tuple[int, ...] = _GROUPS) -> SampledTokens:
    """Samples with these lengths and groups, with rewards, log-probs and values."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    old = -torch.rand(total, generator=generator, dtype=torch.double) * 4
    return SampledTokens(
        rewards=torch.randn(len(lengths), generator=generator, dtype=torch.double),
        groups=torch.tensor(groups),
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
    """As the trainer passes them: masked tokens are 0."""
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
    return _not_finite(case, case.batch(seed))


def _not_finite(case: _TestedAlgorithm, batch: SampledTokens) -> str:
    finite = bool(torch.isfinite(case.advantages(batch)).all())
    return "" if finite else f"not every advantage is finite, with {_sizes(batch)}"


def _sizes(batch: SampledTokens) -> str:
    """The sizes of the groups, as text."""
    return f"groups of {', '.join(map(str, batch.groups.bincount().tolist()))}"


def _advantages_of_equal_rewards(case: _TestedAlgorithm, seed: int) -> str:
    return _not_finite_if_equal(case, case.batch(seed))


def _not_finite_if_equal(case: _TestedAlgorithm, batch: SampledTokens) -> str:
    result = case.advantages(replace(batch, rewards=torch.ones_like(batch.rewards)))
    finite = bool(torch.isfinite(result).all())
    return "" if finite else f"not finite where all rewards of a group are equal, with {_sizes(batch)}"


def _advantages_of_unequal_groups(case: _TestedAlgorithm, seed: int) -> str:
    """A sample without a reward is dropped, and its group is smaller than the others."""
    batch = case.batch(seed, groups=_UNEQUAL)
    return _not_finite(case, batch) or _not_finite_if_equal(case, batch) or _order_matters(case, batch, seed)


def _advantages_of_lone_samples(case: _TestedAlgorithm, seed: int) -> str:
    """All others of the group were dropped, or it has one sample."""
    for groups in _LONE:
        batch = case.batch(seed, _LENGTHS[: len(groups)], groups)
        if problem := _not_finite(case, batch) or _not_finite_if_equal(case, batch):
            return problem
    return ""


def _advantages_without_loss(case: _TestedAlgorithm, seed: int) -> str:
    """Samples that are masked, and samples without a token of the policy, are in the statistics of their group."""
    batch = case.batch(seed, _EMPTY_LENGTHS)
    batch = replace(batch, masked=torch.tensor([False, True, False, False, True, False]))
    problem = _not_finite(case, batch) or _order_matters(case, batch, seed)
    return f"{problem}, some samples masked or without tokens" if problem else ""


def _advantages_repeat(case: _TestedAlgorithm, seed: int) -> str:
    batch = case.batch(seed)
    before = batch.rewards.clone()
    first, second = case.advantages(batch), case.advantages(batch)
    if not torch.equal(before, batch.rewards):
        return "changes the rewards it is given"
    return "" if torch.equal(first, second) else "two calls with the same batch differ"


def _advantages_permute(case: _TestedAlgorithm, seed: int) -> str:
    return _order_matters(case, case.batch(seed), seed)


def _order_matters(case: _TestedAlgorithm, batch: SampledTokens, seed: int) -> str:
    order = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(seed))
    starts = batch.lengths.cumsum(0) - batch.lengths
    index = torch.cat([torch.arange(int(starts[row]), int(starts[row] + batch.lengths[row])) for row in order.tolist()])
    by_index = {"rewards": order, "groups": order, "lengths": order, "masked": order}
    by_index |= dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs", "values"), index)
    given = {name: vars(batch)[name] for name in by_index}
    moved = replace(batch, **{name: value[by_index[name]] for name, value in given.items() if value is not None})
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


def _loss_leaves_the_sampler(case: _TestedAlgorithm, seed: int) -> str:
    """On a bandit: the expected gradient must not depend on who samples the arms.

    The trainer multiplies pi_old / sampler to the loss of an arm (`algorithm.importance`), which makes the expectation
    over the sampler that over pi_old. A loss that corrects for the sampler too has another expected gradient.
    """
    for drift in (0.0, 0.3):
        on_policy = _bandit(seed, drift, gap=0.0)
        if not case.available.ref_logprobs:
            on_policy = replace(on_policy, ref_logprobs=None)
        known = _bandit_gradient(case, on_policy)
        found = _bandit_gradient(case, replace(on_policy, rollout_logprobs=_bandit(seed, drift, 0.7).rollout_logprobs))
        if _far(found, known):
            cosine = float(torch.nn.functional.cosine_similarity(found, known, dim=0))
            return (
                f"the expected gradient on a bandit depends on the sampler (cosine {cosine:.3f} to the one on policy): "
                "the loss corrects for the sampler, and so does algorithm.importance; leave rollout_logprobs to the "
                "trainer, or set algorithm.importance: {mode: none}"
            )
    return ""


def _bandit(seed: int, drift: float, gap: float) -> LossTokens:
    """One token for each arm. The policy is `drift` nats, and the sampler `gap` nats, from the old policy."""
    generator = torch.Generator().manual_seed(seed)
    old, moved, sampled, reference, rewards = torch.randn(5, _ARMS, generator=generator, dtype=torch.double)
    return LossTokens(
        logprobs=(old + drift * moved).log_softmax(0),
        old_logprobs=old.log_softmax(0),
        rollout_logprobs=(old + gap * sampled).log_softmax(0),
        ref_logprobs=(old + 0.2 * reference).log_softmax(0),
        advantages=rewards,
        loss_mask=torch.ones(_ARMS, dtype=torch.bool),
        sequence=torch.arange(_ARMS),
    )


def _bandit_gradient(case: _TestedAlgorithm, arms: LossTokens) -> torch.Tensor:
    """The expected gradient by the policy's logits over the sampler's arms, with the trainer's weights."""
    slopes = _gradient(case, arms)
    weights = (arms.old_logprobs - arms.rollout_logprobs).exp()
    expected = arms.rollout_logprobs.exp() * weights * slopes
    return expected - arms.logprobs.exp() * expected.sum()


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
    ("advantage: unequal groups", _advantages_of_unequal_groups),
    ("advantage: lone samples", _advantages_of_lone_samples),
    ("advantage: samples without loss", _advantages_without_loss),
]
_LOSS_CHECKS: list[tuple[str, Callable[[_TestedAlgorithm, int], str]]] = [
    ("loss: finite", _loss_is_finite),
    ("loss: finite differences", _finite_differences),
    ("loss: order of sequences", _loss_permutes),
    ("loss: split into micro-batches", _loss_splits),
    ("loss: masked tokens", _loss_ignores_masked),
    ("loss: corrected once", _loss_leaves_the_sampler),
]
_FILTER_CHECKS: list[tuple[str, Callable[[_TestedAlgorithm, int], str]]] = [("keep_group: answer", _filter_answers)]
