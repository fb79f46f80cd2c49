"""Checks of a custom algorithm on random batches, in float64: `troupe algorithms --check NAME`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.algorithms.custom import (
    CustomAlgorithm,
    GroupRewards,
    LossTokens,
    TokenLoss,
    custom_advantages,
    custom_loss,
    load_custom,
)
from troupe.workers.contract.algorithm_config import CustomConfig

_LENGTHS = (3, 5, 1, 4, 2, 6)
_LONE = ((0,), (0, 1, 2), (0, 0, 0, 0, 0, 1))
_ARMS = 5
_STEP = 1e-6
_TOLERANCE = 1e-9
_SLOPE_TOLERANCE = 1e-5
"""Tolerance of central differences with `_STEP` in float64, relative to the gradient's largest entry."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

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


@dataclass(frozen=True)
class _Sizes:
    """The samples of a batch."""

    lengths: tuple[int, ...] = _LENGTHS
    groups: tuple[int, ...] = (0, 0, 0, 1, 1, 1)
    masked: tuple[bool, ...] = ()


def check_custom(config: CustomConfig, seeds: int = 5, available: Available = Available()) -> list[Check]:
    """Every check that applies to the algorithm, each on `seeds` random batches; the first problem of each. Raises
    CustomAlgorithmError if the algorithm cannot be loaded."""
    custom = load_custom(config)
    checks = dict[str, _Check]()
    if custom.advantage is not None:
        checks |= _ADVANTAGE_CHECKS
    if custom.loss is not None:
        left_out = {_finite_differences} if custom.stops_gradient else set()
        left_out |= set() if available.importance else {_loss_leaves_the_sampler}
        checks |= {name: check for name, check in _LOSS_CHECKS.items() if check not in left_out}
    if custom.keep_group is not None:
        checks["keep_group: answer"] = _filter_answers
    case = _TestedAlgorithm(config, custom, available)
    return [_run(name, check, case, seeds) for name, check in checks.items()]


@dataclass(frozen=True)
class _TestedAlgorithm:
    """The algorithm under test and what it is given."""

    config: CustomConfig
    custom: CustomAlgorithm
    available: Available

    def batch(self, seed: int, sizes: _Sizes = _Sizes()) -> SampledTokens:
        has = self.available
        absent = {name: None for name in ("old_logprobs", "ref_logprobs", "values") if not vars(has)[name]}
        return replace(random_batch(seed, sizes), **absent)

    def given(self, tokens: LossTokens) -> LossTokens:
        return tokens if self.available.ref_logprobs else replace(tokens, ref_logprobs=None)

    def advantages(self, batch: SampledTokens) -> torch.Tensor:
        return custom_advantages(self.config, batch)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        return custom_loss(self.config, tokens)


_Check = Callable[[_TestedAlgorithm, int], str]
"""Takes the algorithm and a seed; returns what is wrong, or an empty text."""


def _run(name: str, check: _Check, case: _TestedAlgorithm, seeds: int) -> Check:
    for seed in range(seeds):
        try:
            problem = check(case, seed)
        except Exception as error:  # the function is the user's
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return Check(name, f"{problem} (seed {seed})")
    return Check(name)


def random_batch(seed: int, sizes: _Sizes = _Sizes()) -> SampledTokens:
    """Samples with these lengths and groups, with rewards, log-probs and values."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes.lengths)
    old = -torch.rand(total, generator=generator, dtype=torch.double) * 4
    rewards = torch.randn(len(sizes.lengths), generator=generator, dtype=torch.double)
    return SampledTokens(
        rewards=rewards,
        components={"first": torch.stack([0.5 * rewards, torch.full_like(rewards, 2.0)])},
        groups=torch.tensor(sizes.groups),
        lengths=torch.tensor(sizes.lengths),
        rollout_logprobs=old + 0.01 * torch.randn(total, generator=generator, dtype=torch.double),
        old_logprobs=old,
        ref_logprobs=old + 0.2 * torch.randn(total, generator=generator, dtype=torch.double),
        values=torch.randn(total, generator=generator, dtype=torch.double),
        masked=torch.tensor(sizes.masked) if sizes.masked else None,
    )


def random_tokens(seed: int, drift: float = 0.3) -> LossTokens:
    """Six sequences with a quarter of their tokens masked, `drift` nats from the old policy. Masked tokens are 0, as
    the trainer passes them."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(_LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.double)

    mask = torch.rand(total, generator=generator) > 0.25
    old = -noise(1.5).abs()
    sequence = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    columns = {
        "logprobs": old + noise(drift),
        "old_logprobs": old,
        "rollout_logprobs": old + noise(0.01),
        "ref_logprobs": old + noise(0.2),
        "advantages": noise(1.0)[sequence],
    }
    masked = {name: torch.where(mask, value, 0.0) for name, value in columns.items()}
    return LossTokens(**masked, loss_mask=mask, sequence=sequence)


def _far(one: torch.Tensor, other: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    scale = max(1.0, float(other.abs().max())) if len(other) else 1.0
    return len(other) > 0 and not float((one - other).abs().max()) <= tolerance * scale


# --- advantage ---


def _finite(case: _TestedAlgorithm, batch: SampledTokens, seed: int) -> str:
    finite = bool(torch.isfinite(case.advantages(batch)).all())
    return "" if finite else f"not every advantage is finite, with {_groups(batch)}"


def _finite_if_equal(case: _TestedAlgorithm, batch: SampledTokens, seed: int) -> str:
    result = case.advantages(replace(batch, rewards=torch.ones_like(batch.rewards)))
    finite = bool(torch.isfinite(result).all())
    return "" if finite else f"not finite where all rewards of a group are equal, with {_groups(batch)}"


def _groups(batch: SampledTokens) -> str:
    """The sizes of the groups, as text."""
    return f"groups of {', '.join(map(str, batch.groups.bincount().tolist()))}"


def _repeatable(case: _TestedAlgorithm, batch: SampledTokens, seed: int) -> str:
    before = batch.rewards.clone()
    first, second = case.advantages(batch), case.advantages(batch)
    if not torch.equal(before, batch.rewards):
        return "changes the rewards it is given"
    return "" if torch.equal(first, second) else "two calls with the same batch differ"


def _any_order(case: _TestedAlgorithm, batch: SampledTokens, seed: int) -> str:
    order = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(seed))
    starts = batch.lengths.cumsum(0) - batch.lengths
    index = torch.cat([torch.arange(int(starts[row]), int(starts[row] + batch.lengths[row])) for row in order.tolist()])
    by_index = {"rewards": order, "groups": order, "lengths": order, "masked": order}
    by_index |= dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs", "values"), index)
    given = {name: vars(batch)[name] for name in by_index}
    moved = replace(
        batch,
        components={name: pairs[:, order] for name, pairs in batch.components.items()},
        **{name: value[by_index[name]] for name, value in given.items() if value is not None},
    )
    expected = case.advantages(batch)[index]
    return "depends on the order of the samples" if _far(case.advantages(moved), expected) else ""


_Property = Callable[[_TestedAlgorithm, SampledTokens, int], str]


def _advantages(*properties: _Property, of: Sequence[_Sizes] = (_Sizes(),)) -> _Check:
    """The check that the advantages of random batches of these sizes have all the properties."""

    def check(case: _TestedAlgorithm, seed: int) -> str:
        for sizes in of:
            batch = case.batch(seed, sizes)
            if problem := next(filter(None, (wrong(case, batch, seed) for wrong in properties)), ""):
                return f"{problem}, some samples masked or without tokens" if sizes.masked else problem
        return ""

    return check


_ADVANTAGE_CHECKS: dict[str, _Check] = {
    "advantage: finite": _advantages(_finite),
    "advantage: equal rewards": _advantages(_finite_if_equal),
    "advantage: repeatable": _advantages(_repeatable),
    "advantage: order of samples": _advantages(_any_order),
    # A sample without a reward is dropped, and its group is smaller than the others.
    "advantage: unequal groups": _advantages(
        *(_finite, _finite_if_equal, _any_order), of=[_Sizes(groups=(0, 0, 0, 0, 1, 1))]
    ),
    # All others of the group were dropped, or it has one sample.
    "advantage: lone samples": _advantages(
        *(_finite, _finite_if_equal), of=[_Sizes(_LENGTHS[: len(groups)], groups) for groups in _LONE]
    ),
    # Samples that are masked, and samples without a token of the policy, are in the statistics of their group.
    "advantage: samples without loss": _advantages(
        *(_finite, _any_order), of=[_Sizes((3, 0, 1, 4, 2, 0), masked=(False, True, False, False, True, False))]
    ),
}


# --- loss ---


def _loss_is_finite(case: _TestedAlgorithm, seed: int) -> str:
    for drift, what in ((0.3, "near the old policy"), (30.0, "30 nats from the old policy")):
        gradient = _gradient(case, case.given(random_tokens(seed, drift)))
        if not bool(torch.isfinite(gradient).all()):
            return f"the gradient is not finite {what}"
    return ""


def _total(case: _TestedAlgorithm, tokens: LossTokens, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.where(tokens.loss_mask, case.loss(replace(tokens, logprobs=logprobs)).loss, 0.0).sum()


def _gradient(case: _TestedAlgorithm, tokens: LossTokens) -> torch.Tensor:
    point = tokens.logprobs.detach().clone().requires_grad_()
    loss = _total(case, tokens, point)
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss is {float(loss)}")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on logprobs")
    return torch.autograd.grad(loss, point)[0]


def _finite_differences(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.given(random_tokens(seed))
    gradient = _gradient(case, tokens)
    scale = max(1.0, float(gradient.abs().max()))
    for number in tokens.loss_mask.nonzero().flatten().tolist():
        step = torch.zeros_like(tokens.logprobs)
        step[number] = _STEP
        above, here, below = (float(_total(case, tokens, tokens.logprobs + sign * step)) for sign in (1, 0, -1))
        right, left = (above - here) / _STEP, (here - below) / _STEP
        slope = float(gradient[number])
        # At a kink (a clip bound) the slope of one side is right too.
        if min(abs(slope - (right + left) / 2), abs(slope - right), abs(slope - left)) > _SLOPE_TOLERANCE * scale:
            return (
                f"autograd says {slope:.6g} for token {number}, finite differences {(right + left) / 2:.6g}; "
                "set stops_gradient where the loss detaches something on purpose"
            )
    return ""


def _differs(case: _TestedAlgorithm, tokens: LossTokens, index: torch.Tensor) -> bool:
    """Whether tokens have another loss when they are a micro-batch alone, in this order."""
    columns = {name: value[index] for name, value in vars(tokens).items() if value is not None}
    numbers = {row: number for number, row in enumerate(dict.fromkeys(columns["sequence"].tolist()))}
    columns["sequence"] = torch.tensor([numbers[row] for row in columns["sequence"].tolist()])
    mask = columns["loss_mask"]
    return _far(case.loss(replace(tokens, **columns)).loss[mask], case.loss(tokens).loss[index][mask])


def _in_rows(tokens: LossTokens, rows: Sequence[int]) -> torch.Tensor:
    """Where the tokens of these sequences are, in this order."""
    return torch.cat([(tokens.sequence == row).nonzero().flatten() for row in rows])


def _loss_permutes(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.given(random_tokens(seed))
    order = torch.randperm(len(_LENGTHS), generator=torch.Generator().manual_seed(seed)).tolist()
    return "depends on the order of the sequences" if _differs(case, tokens, _in_rows(tokens, order)) else ""


def _loss_splits(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.given(random_tokens(seed))
    if any(_differs(case, tokens, _in_rows(tokens, rows)) for rows in ((0, 1, 2), (3, 4), (5,))):
        return "a token's loss depends on the other sequences of its micro-batch: the split would change the update"
    return ""


def _loss_ignores_masked(case: _TestedAlgorithm, seed: int) -> str:
    tokens = case.given(random_tokens(seed))
    unmasked = tokens.loss_mask.nonzero().flatten()
    return "a token's loss depends on masked tokens" if _differs(case, tokens, unmasked) else ""


def _loss_leaves_the_sampler(case: _TestedAlgorithm, seed: int) -> str:
    """On a bandit: the expected gradient must not depend on who samples the arms. The trainer multiplies pi_old /
    sampler to the loss of an arm (`algorithm.importance`), which makes the expectation over the sampler that over
    pi_old. A loss that corrects for the sampler too has another expected gradient."""
    for drift in (0.0, 0.3):
        on_policy, off_policy = (case.given(_bandit(seed, drift, gap)) for gap in (0.0, 0.7))
        known, found = _bandit_gradient(case, on_policy), _bandit_gradient(case, off_policy)
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


_LOSS_CHECKS: dict[str, _Check] = {
    "loss: finite": _loss_is_finite,
    "loss: finite differences": _finite_differences,
    "loss: order of sequences": _loss_permutes,
    "loss: split into micro-batches": _loss_splits,
    "loss: masked tokens": _loss_ignores_masked,
    "loss: corrected once": _loss_leaves_the_sampler,
}


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
