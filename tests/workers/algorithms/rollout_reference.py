"""Every algorithm on rollouts compared with its loop: `python -m tests.workers.algorithms.rollout_reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tests.workers.algorithms.rollout_loops import LOOPS, Batch, Sample
from troupe.orchestrator.algorithms.section import AlgorithmConfig, advantage, kl_penalty, policy_loss
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.workers.algorithms import policy_loss as losses
from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.algorithms.estimators import estimate
from troupe.workers.algorithms.score_centering import mean_scores
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import PolicyLossConfig
from troupe.workers.models.distillation import divergence

LENGTHS = (4, 2, 5, 3, 1, 6, 3, 2, 4, 1)
GROUPS = (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)
PARTNERS = (3, 4, -1, -1, -1, 8, 9, -1, -1, -1)
MAX_TOKENS = 8


def make_batch(seed: int) -> Batch:
    """Two groups of five responses, after an update that moved the policy, in every third response hardly away from the
    sampler; an earlier visit of both prompts."""
    generator = torch.Generator().manual_seed(seed)

    def noise(count: int, scale: float) -> list[float]:
        return (scale * torch.randn(count, generator=generator, dtype=torch.double)).tolist()

    def near(logprobs: list[float], scale: float) -> list[float]:
        return [min(a + b, -0.01) for a, b in zip(logprobs, noise(len(logprobs), scale), strict=True)]

    def others(of_sampled: float) -> tuple[list[torch.Tensor], list[float]]:
        """Two other tokens, one of which the policy has moved beyond the cap on its weight, with most of the rest."""
        rest = 1.0 - math.exp(of_sampled)
        new, rollout = (0.5, 0.3), (0.2, 0.45)
        return [torch.tensor(math.log(rest * x), dtype=torch.double, requires_grad=True) for x in new], [
            math.log(rest * x) for x in rollout
        ]

    def sample(prompt: int, length: int, close: bool) -> Sample:
        old = [-abs(x) - 0.05 for x in noise(length, 1.5)]
        moved = near(old, 0.3)
        reward = abs(noise(1, 1.0)[0])
        return Sample(
            prompt=prompt,
            reward=reward,
            parts=[(reward**2, 2.0), (math.sin(7 * reward), 0.5)],
            greedy=(0.3, -0.4)[prompt],
            new=[torch.tensor(x, dtype=torch.double, requires_grad=True) for x in moved],
            old=old,
            ref=near(old, 0.4),
            rollout=near(moved, 0.05) if close else near(old, 0.6),
            values=noise(length, 1.0),
            others=[others(x) for x in moved],
            squares=[math.exp(2 * x) + 0.1 * (1 - math.exp(x)) ** 2 for x in old],
            turns=[(end, "xyz"[end % 3]) for end in dict.fromkeys((1, min(3, length), length))],
        )

    def visits() -> list[Sample]:
        given = enumerate(zip(GROUPS, LENGTHS, strict=True))
        return [sample(prompt, length, number % 3 == 0) for number, (prompt, length) in given]

    return Batch(visits(), MAX_TOKENS, visits())


def sampled_tokens(samples: Sequence[Sample]) -> SampledTokens:
    """The batch as the estimators take it."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for s in samples for x in vars(s)[name]], dtype=torch.double)

    return SampledTokens(
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.double),
        groups=torch.tensor([s.prompt for s in samples]),
        lengths=torch.tensor([len(s) for s in samples]),
        rollout_logprobs=flat("rollout"),
        old_logprobs=flat("old"),
        ref_logprobs=flat("ref"),
        values=flat("values"),
        square_sums=flat("squares"),
        taught=(flat("ref"), torch.ones(len(flat("ref")), dtype=torch.double)),
        prompt_rows=(0, 1),
        greedy_rewards=torch.tensor([s.greedy for s in samples], dtype=torch.double),
        turns=_turns(samples),
        partners=torch.tensor(PARTNERS),
        components={
            str(number): torch.tensor([s.parts[number] for s in samples], dtype=torch.double).T for number in range(2)
        },
    )


def _turns(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The turns of the samples, their states numbered within each prompt."""
    turns = [(end, number, (s.prompt, state)) for number, s in enumerate(samples) for end, state in s.turns]
    states = {key: number for number, key in enumerate(dict.fromkeys(key for *_, key in turns))}
    ends, numbers, keys = zip(*turns, strict=True)
    return torch.tensor(ends), torch.tensor(numbers), torch.tensor([states[key] for key in keys])


def by_product(name: str, batch: Batch) -> tuple[float, torch.Tensor]:
    """(loss, gradient by log-prob) of the product: a separate step for the earlier batch, then this one."""
    config = AlgorithmConfig(name=name)
    how, loss = advantage(config), policy_loss(config)
    state = estimate(how, sampled_tokens(batch.earlier), AdvantageState()).state
    given = sampled_tokens(batch.samples)
    estimated = estimate(how, given, state)
    new = torch.stack([x.detach() for s in batch.samples for x in s.new]).requires_grad_()
    mask = torch.ones(len(new), dtype=torch.bool)
    own, totals = given.lengths[given.sequence], (len(new), len(batch.samples))
    weights = losses.token_weights(mask, own, loss.aggregation, *totals, batch.max_tokens)
    tokens = losses.PolicyTokens(
        logprobs=new,
        entropy=torch.zeros_like(new),
        rollout_logprobs=given.rollout_logprobs,
        advantages=estimated.advantages,
        weights=_exact(weights, given, loss.aggregation, batch),
        loss_mask=mask,
        sequence=given.sequence,
        old_logprobs=given.old_logprobs,
        ref_logprobs=given.ref_logprobs,
        penalties=estimated.penalties,
        divergences=_from_teacher(new, given, loss) if loss.distill.coef else None,
    )
    if loss.recorded_top_k:
        mean, mass = _centering(batch, loss)
        tokens = replace(tokens, centering=mean, sampler_mass=mass)
    penalty = kl_penalty(config)
    output = losses.policy_loss(tokens, loss, 0.0 if penalty is None else penalty.coef)
    others = _others(batch) if loss.recorded_top_k else []
    slope, *rest = torch.autograd.grad(output.loss, [new, *others])
    return output.loss.item(), torch.cat([slope, *(one[None] for one in rest)])


def _centering(batch: Batch, loss: PolicyLossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """What the loss subtracts, over two other tokens."""
    own = [pair for s in batch.samples for pair in s.others]
    new = torch.stack([torch.stack(list(logprobs)) for logprobs, _ in own])
    return mean_scores(new, torch.tensor([list(q) for _, q in own], dtype=torch.double), loss.importance)


def _from_teacher(new: torch.Tensor, given: SampledTokens, loss: PolicyLossConfig) -> torch.Tensor:
    """The divergence over two outcomes, the sampled token and all others."""

    def both(logprobs: torch.Tensor) -> torch.Tensor:
        return torch.stack([logprobs, torch.log1p(-logprobs.exp())], -1)

    assert given.ref_logprobs is not None
    return divergence(both(new), both(given.ref_logprobs), loss.distill)


def _exact(weights: torch.Tensor, given: SampledTokens, aggregation: str, batch: Batch) -> torch.Tensor:
    """The weights in float64; the product's are the same numbers rounded to float32."""
    length = given.lengths.double()[given.sequence]
    tokens, samples = float(len(given.sequence)), float(len(batch.samples))
    exact = {
        "token_mean": torch.full_like(length, 1.0 / tokens),
        "sequence_mean": 1.0 / (samples * length),
        "sequence_sum": torch.full_like(length, 1.0 / samples),
        "constant": torch.full_like(length, 1.0 / (samples * batch.max_tokens)),
        "only_token_mean": 1.0 / length,
    }[aggregation]
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0.0)
    return exact


def _others(batch: Batch) -> list[torch.Tensor]:
    return [x for s in batch.samples for logprobs, _ in s.others for x in logprobs]


def by_loop(name: str, batch: Batch) -> tuple[float, torch.Tensor]:
    """(loss, gradient by log-prob) of the loop."""
    loss = LOOPS[name].loss(batch)
    leaves = [x for s in batch.samples for x in s.new]
    leaves += _others(batch) if policy_loss(AlgorithmConfig(name=name)).recorded_top_k else []
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.item(), torch.stack([torch.zeros(()).double() if slope is None else slope for slope in slopes])


@dataclass(frozen=True)
class Difference:
    """Largest difference of the product from the loop, relative to the loop's largest entry."""

    value: float
    gradient: float


def compare(name: str, seed: int) -> Difference:
    """The product against the loop on a random batch."""
    batch = make_batch(seed)
    (value, slope), (loop_value, loop_slope) = by_product(name, batch), by_loop(name, batch)
    largest = float(loop_slope.abs().max())
    return Difference(abs(value - loop_value) / abs(loop_value), float((slope - loop_slope).abs().max()) / largest)


def table(seeds: Sequence[int] = range(10)) -> str:
    """Largest differences of every row over the seeds, as Markdown."""
    lines = ["| algorithm | loss | gradient |", "|---|---|---|"]
    for name in ALGORITHMS:
        found = [compare(name, seed) for seed in seeds]
        worst = max(one.value for one in found), max(one.gradient for one in found)
        lines.append(f"| {name} | {worst[0]:.1e} | {worst[1]:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
