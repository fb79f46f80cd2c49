"""Every offline algorithm against its loop: the difference in value and gradient, as a table.

python -m tests.workers.algorithms.offline_reference
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.workers.algorithms import offline_loops as loops
from tests.workers.algorithms.offline_loops import Answer, Example, RewardOptions
from troupe.workers.algorithms.offline_objectives import OBJECTIVES, Scored, Totals
from troupe.workers.algorithms.preference_losses import Groups, kto_reference_point
from troupe.workers.contract.offline_config import (
    DpoLossConfig,
    IpoLossConfig,
    KdLossConfig,
    KtoLossConfig,
    OfflineLossConfig,
    OrpoLossConfig,
    ProcessLossConfig,
    RewardLossConfig,
    RrhfLossConfig,
    SftLossConfig,
)

EXAMPLES = 9
PREFIX = 2


@dataclass(frozen=True)
class Row:
    """One variant of an algorithm: its configuration, its data and its loop."""

    name: str
    config: OfflineLossConfig
    loop: Callable[..., torch.Tensor]
    """Of the examples and, for KTO, the mismatched answers."""
    answers: tuple[int, int] = (2, 2)
    """Fewest and most answers of an example."""
    tied: bool = False
    """Scores repeat, in one example all of them; otherwise all differ."""
    margin: bool = False
    certain: float = 0.0
    """Log-prob of every token of the rejected answers; 0: random."""


ROWS = (
    Row("sft", SftLossConfig(), loops.sft, (1, 1)),
    Row("kd, sampled", KdLossConfig(compares="sampled"), loops.kd, (1, 1)),
    Row("reward_model", RewardLossConfig(), partial(loops.reward_model, options=RewardOptions())),
    Row("reward_model, margin", RewardLossConfig(), partial(loops.reward_model, options=RewardOptions()), margin=True),
    Row(
        "reward_model, margin, smoothed",
        RewardLossConfig(label_smoothing=0.1),
        partial(loops.reward_model, options=RewardOptions(smoothing=0.1)),
        margin=True,
    ),
    Row(
        "reward_model, fidelity",
        RewardLossConfig(preference="fidelity"),
        partial(loops.reward_model, options=RewardOptions(preference="fidelity")),
    ),
    Row(
        "reward_model, fidelity, margin, smoothed",
        RewardLossConfig(preference="fidelity", label_smoothing=0.1),
        partial(loops.reward_model, options=RewardOptions(preference="fidelity", smoothing=0.1)),
        margin=True,
    ),
    Row("reward_model, ranked", RewardLossConfig(), partial(loops.reward_model, options=RewardOptions()), (2, 5)),
    Row(
        "reward_model, ranked, tied",
        RewardLossConfig(),
        partial(loops.reward_model, options=RewardOptions()),
        (2, 5),
        tied=True,
    ),
    Row(
        "reward_model, ranked, tied, fidelity",
        RewardLossConfig(preference="fidelity"),
        partial(loops.reward_model, options=RewardOptions(preference="fidelity")),
        (2, 5),
        tied=True,
    ),
    Row(
        "reward_model, token",
        RewardLossConfig(level="token"),
        partial(loops.reward_model, options=RewardOptions(by_token=True)),
    ),
    Row(
        "reward_model, token, fidelity, margin, smoothed",
        RewardLossConfig(level="token", preference="fidelity", label_smoothing=0.1),
        partial(loops.reward_model, options=RewardOptions("fidelity", 0.1, by_token=True)),
        margin=True,
    ),
    Row(
        "reward_model, centred",
        RewardLossConfig(center_coef=0.3),
        partial(loops.reward_model, options=RewardOptions(center_coef=0.3)),
    ),
    Row(
        "reward_model, ranked, tied, centred, lm_coef",
        RewardLossConfig(center_coef=0.3, lm_coef=0.5),
        partial(loops.reward_model, options=RewardOptions(center_coef=0.3, lm_coef=0.5)),
        (2, 5),
        tied=True,
    ),
    Row("process_reward_model", ProcessLossConfig(), loops.process, (1, 1)),
    Row("dpo", DpoLossConfig(beta=0.3), partial(loops.dpo, beta=0.3)),
    Row("dpo, smoothed", DpoLossConfig(beta=0.3, label_smoothing=0.1), partial(loops.dpo, beta=0.3, smoothing=0.1)),
    Row(
        "dpo, fidelity",
        DpoLossConfig(beta=0.3, preference="fidelity"),
        partial(loops.dpo, beta=0.3, preference="fidelity"),
    ),
    Row("dpo, ranked", DpoLossConfig(beta=0.3), partial(loops.dpo, beta=0.3), (2, 5)),
    Row("dpo, ranked, tied", DpoLossConfig(beta=0.3), partial(loops.dpo, beta=0.3), (2, 5), tied=True),
    Row(
        "dpo, ranked, tied, smoothed",
        DpoLossConfig(beta=0.3, label_smoothing=0.1),
        partial(loops.dpo, beta=0.3, smoothing=0.1),
        (2, 5),
        tied=True,
    ),
    Row("ipo", IpoLossConfig(beta=0.3), partial(loops.ipo, beta=0.3)),
    Row("orpo", OrpoLossConfig(beta=0.3), partial(loops.orpo, beta=0.3)),
    Row("orpo, rejected near 1", OrpoLossConfig(beta=0.3), partial(loops.orpo, beta=0.3), certain=-1e-9),
    Row(
        "kto",
        KtoLossConfig(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8),
        partial(loops.kto, beta=0.3, weights=(1.2, 0.8)),
        (1, 1),
    ),
    Row("rrhf", RrhfLossConfig(), partial(loops.rrhf, lm_coef=1.0), (2, 5)),
    Row("rrhf, tied", RrhfLossConfig(lm_coef=0.5), partial(loops.rrhf, lm_coef=0.5), (2, 5), tied=True),
)


@dataclass(frozen=True)
class Data:
    """Answers of all examples, as flat leaves in `dtype` and as examples of the loop in float64."""

    examples: list[Example]
    """Their scalars depend on `leaves`."""
    leaves: dict[str, torch.Tensor]
    """float64, with gradients: `logprobs` and `rewards` of all tokens."""
    reference: torch.Tensor


def make_data(row: Row, seed: int) -> Data:
    """Random examples; the numbers are exact in float32, so that both sides read the same ones."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    sizes = integers(*row.answers, EXAMPLES)
    lengths = [[PREFIX + extra for extra in integers(1, 5, size)] for size in sizes]
    tokens = sum(map(sum, lengths))
    logprobs, reference = ((-3.0 * torch.rand(tokens, generator=generator)).double() for _ in range(2))
    rewards = torch.randn(tokens, generator=generator).double()
    leaves = {"logprobs": logprobs, "rewards": rewards}
    spans = iter(torch.arange(tokens).split([length for of_example in lengths for length in of_example]))
    drawn: list[list[tuple[torch.Tensor, list[int], float]]] = []
    for number, of_example in enumerate(lengths):
        steps = integers(0, 1, len(of_example)) if row.tied else [1] * len(of_example)
        scores = torch.tensor([0 if number == 0 and row.tied else step for step in steps]).cumsum(0).neg().tolist()
        prefix = integers(0, 9, PREFIX)
        first = integers(10, 11)[0]
        drawn.append([])
        for member, (length, score) in enumerate(zip(of_example, scores, strict=True)):
            ids = [*prefix, first + 2 * member, *integers(0, 9, length - PREFIX - 1)]
            span = next(spans)
            if row.certain and member:
                logprobs[span] = torch.tensor(row.certain, dtype=torch.float32).double()
            drawn[-1].append((span, ids, float(score)))
    for leaf in leaves.values():
        leaf.requires_grad_()
    examples = [
        Example(
            [
                Answer(ids, score, list(logprobs[span]), list(reference[span]), list(rewards[span]))
                for span, ids, score in answers
            ],
            margin=0.1 * (1 + number % 3) if row.margin else 0.0,
            desirable=number % 3 > 0,
        )
        for number, answers in enumerate(drawn)
    ]
    return Data(examples, leaves, reference)


def mismatched(data: Data) -> list[Answer]:
    """Answers from which KTO takes its reference point: here those of all examples, under a lower reference."""
    return [
        Answer(answer.ids, 0.0, answer.logprobs, [2.0 * value for value in answer.ref_logprobs[::-1]])
        for example in data.examples
        for answer in example.answers
    ]


def by_loop(row: Row, data: Data) -> tuple[float, torch.Tensor]:
    """(loss, gradient) of the loop."""
    more = (mismatched(data),) if isinstance(row.config, KtoLossConfig) else ()
    loss = row.loop(data.examples, *more)
    return loss.item(), _gradient(loss, list(data.leaves.values()))


def by_product(row: Row, data: Data, dtype: torch.dtype, parts: int = 2) -> tuple[float, torch.Tensor]:
    """(loss, gradient) of the product's objective, summed over micro-batches, on numbers of type `dtype`."""
    leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in data.leaves.items()}
    best_tokens = sum(len(answer.ids) for example in data.examples for answer in loops.best(example))
    if isinstance(row.config, ProcessLossConfig):
        best_tokens = sum(len(loops.step_labels(answer)) for e in data.examples for answer in e.answers)
    totals = Totals(len(data.examples), best_tokens)
    point = 0.0
    if isinstance(row.config, KtoLossConfig):
        ratios = _mismatched_scored(data, dtype).ratios(per_token=False)
        point = kto_reference_point(float(ratios.sum()), len(ratios))
    losses = [
        OBJECTIVES[type(row.config)](scored, row.config, totals).loss
        for scored in _micro_batches(data, leaves, dtype, point, parts, row.config)
    ]
    loss = torch.stack(losses).sum()
    return loss.item(), _gradient(loss, list(leaves.values()))


def _micro_batches(
    data: Data,
    leaves: dict[str, torch.Tensor],
    dtype: torch.dtype,
    point: float,
    parts: int,
    config: OfflineLossConfig,
) -> Iterator[Scored]:
    """The examples dealt out to `parts` micro-batches, in another order."""
    starts, start = [], 0
    for example in data.examples:
        starts.append(start)
        start += sum(len(answer.ids) for answer in example.answers)
    for part in range(parts):
        chosen = range(len(data.examples) - 1 - part, -1, -parts)
        examples = [data.examples[number] for number in chosen]
        tokens = [
            torch.arange(starts[number], starts[number] + sum(len(answer.ids) for answer in example.answers))
            for number, example in zip(chosen, examples, strict=True)
        ]
        index = torch.cat(tokens)
        given = (leaves["logprobs"][index], data.reference.to(dtype)[index], leaves["rewards"][index])
        yield _scored(examples, *given, point, by_step=isinstance(config, ProcessLossConfig))


def _scored(
    examples: Sequence[Example],
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    token_rewards: torch.Tensor,
    point: float,
    *,
    by_step: bool = False,
) -> Scored:
    answers = [answer for example in examples for answer in example.answers]
    lengths = torch.tensor([len(answer.ids) for answer in answers])
    sizes = [len(example.answers) for example in examples]
    sequence = torch.repeat_interleave(torch.arange(len(answers)), lengths)
    per_row: dict[str, list[Any]] = {
        "score": [answer.score for answer in answers],
        "margin": [example.margin for example in examples for _ in example.answers],
        "desirable": [example.desirable for example in examples for _ in example.answers],
    }
    labels = [label for answer in answers for label in loops.step_labels(answer).values()]
    starts = [0, *lengths.cumsum(0).tolist()]
    ends = [starts[n] + place for n, answer in enumerate(answers) for place in loops.step_labels(answer)]
    return Scored(
        groups=Groups(
            torch.repeat_interleave(torch.arange(len(examples)), torch.tensor(sizes)),
            torch.tensor([member for size in sizes for member in range(size)]),
        ),
        sequence=sequence,
        loss_mask=torch.ones_like(sequence, dtype=torch.bool),
        score=torch.tensor(per_row["score"], dtype=torch.double),
        margin=torch.tensor(per_row["margin"], dtype=torch.double),
        desirable=torch.tensor(per_row["desirable"]),
        targets=torch.tensor([token for answer in answers for token in answer.ids]),
        logprobs=logprobs,
        ref_logprobs=reference,
        rewards=token_rewards[lengths.cumsum(0) - 1],
        token_rewards=token_rewards[ends] if by_step else token_rewards,
        step_labels=torch.tensor(labels, dtype=torch.double),
        reference_point=point,
    )


def _mismatched_scored(data: Data, dtype: torch.dtype) -> Scored:
    examples = [Example([answer]) for answer in mismatched(data)]
    logprobs, reference = (
        torch.stack([value for example in examples for value in vars(example.answers[0])[name]]).detach().to(dtype)
        for name in ("logprobs", "ref_logprobs")
    )
    return _scored(examples, logprobs, reference, torch.zeros_like(logprobs), 0.0)


def _gradient(loss: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """Flat gradient by all leaves; 0 by those that the loss does not read."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return torch.cat([torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]).double()


@dataclass(frozen=True)
class Differences:
    """Relative differences of product and loop on one row."""

    value: float
    gradient: float
    """Of the largest entry's size."""
    value_float32: float
    """With log-probs and scores in float32, as the models give them."""
    gradient_float32: float


def compare(row: Row, seed: int = 0) -> Differences:
    """The row's differences on random data."""
    data = make_data(row, seed)
    value, gradient = by_loop(row, data)
    figures = []
    for dtype in (torch.double, torch.float32):
        found, slope = by_product(row, data, dtype)
        figures += [abs(found - value) / abs(value), float((slope - gradient).abs().max() / gradient.abs().max())]
    return Differences(*figures)


def table(seeds: Sequence[int] = range(5)) -> str:
    """Largest relative differences of every row over the seeds, as Markdown."""
    lines = ["| row | value | gradient | value, float32 inputs | gradient, float32 inputs |", "|---|---|---|---|---|"]
    for row in ROWS:
        found = [vars(compare(row, seed)).values() for seed in seeds]
        lines.append(f"| {row.name} | {' | '.join(f'{max(column):.1e}' for column in zip(*found, strict=True))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
