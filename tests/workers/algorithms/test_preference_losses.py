"""Offline losses: by hand, where floats are short of digits, and invariances (padding, order, split)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workers.algorithms.offline_objectives import OBJECTIVES, ObjectiveOutput, Scored, Totals
from troupe.workers.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    Groups,
    accuracy,
    calibration,
    centering,
    differences,
    divergence_masks,
    fidelity,
    ipo,
    kto,
    kto_reference_point,
    log_odds,
    logistic,
    odds_ratio,
    plackett_luce,
    rrhf_ranking,
    sequence_logprobs,
)
from troupe.workers.contract.offline_config import (
    DpoLossConfig,
    IpoLossConfig,
    KtoLossConfig,
    OfflineLossConfig,
    OrpoLossConfig,
    RewardLossConfig,
    RrhfLossConfig,
    SftLossConfig,
)
from troupe.workers.contract.offline_messages import add_tallies, tally_means

LN2 = math.log(2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)


def close(found: torch.Tensor, *wanted: float) -> bool:
    return torch.allclose(found.double(), tensor(*wanted), atol=1e-6, rtol=1e-5)


def one(lead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(leads, better) of pairs [G], for the losses of preferences."""
    return lead[:, None, None], torch.ones(len(lead), 1, 1, dtype=torch.bool)


def ranks(*scores: float) -> torch.Tensor:
    """`better`, [1, K, K], of one example's scores in the data."""
    return differences(tensor(*scores)[None]) > 0


# By hand


def test_bradley_terry_by_hand() -> None:
    """-log sigmoid(0) = log 2; a difference of log 3 has sigmoid 3/4."""
    assert close(logistic(*one(tensor(0.0, math.log(3.0)))), LN2, math.log(4 / 3))


def test_plackett_luce_by_hand() -> None:
    """Three answers of equal value: every order has chance 1/6. Values log 2, 0: 2/3, as Bradley-Terry says."""
    assert close(plackett_luce(differences(tensor(0.0, 0.0, 0.0)[None]), ranks(3, 2, 1)), math.log(6.0))
    two = differences(tensor(LN2, 0.0, 99.0)[None])
    better = ranks(2, 1, 0)
    better[0, :, 2] = False
    assert close(plackett_luce(two, better), math.log(1.5))


def test_label_smoothing_and_ipo_by_hand() -> None:
    """A lead of 1: -log sigmoid(1) = log(1 + 1/e); smoothing 0.1 adds 0.1. IPO: (2 - 1 / (2 * 0.5))^2 = 1."""
    plain = math.log(1 + math.exp(-1))
    assert close(logistic(*one(tensor(1.0))), plain)
    assert close(logistic(*one(tensor(1.0)), 0.1), plain + 0.1)
    assert close(ipo(tensor(3.0), tensor(1.0), 0.5), 1.0)


def test_fidelity_by_hand() -> None:
    """p = 1/2 loses 1 - sqrt(1/2), p = 9/10 against a target of 9/10 nothing."""
    assert close(fidelity(*one(tensor(0.0))), 1 - math.sqrt(0.5))
    assert close(fidelity(*one(tensor(math.log(9.0))), 0.1), 0.0)


def test_centering_by_hand() -> None:
    """(3 + 1)^2 on a pair; three answers with the same mean lose as much."""
    scores = torch.tensor([[3.0, 1.0, 99.0], [3.0, 1.0, 2.0]])
    assert close(centering(scores, torch.tensor([[True, True, False], [True, True, True]])), 16.0, 16.0)


def test_orpo_by_hand() -> None:
    """p = 1/2 has odds 1, p = 1/3 odds 1/2; their ratio 2 gives -log(2/3)."""
    half, third = tensor(math.log(1 / 2)), tensor(math.log(1 / 3))
    assert close(log_odds(half), 0.0)
    assert close(odds_ratio(half, third), math.log(1.5))


def test_kto_by_hand() -> None:
    """beta (r - z0) = log 3: a desirable answer loses 1 - 3/4, an undesirable one 1 - 1/4, each by its weight."""
    ratio = tensor(math.log(3.0) + 0.5, math.log(3.0) + 0.5)
    losses = kto(ratio, torch.tensor([True, False]), 0.5, 1.0, 2.0, 4.0)
    assert close(losses, 0.5, 3.0)
    assert kto_reference_point(3.0, 2.0) == 1.5
    assert kto_reference_point(-3.0, 2.0) == kto_reference_point(0.0, 0.0) == 0.0


def test_rrhf_by_hand() -> None:
    """Scores 3, 2, 1 and log-probs -3, -1, -2: the second is 2 above the first, the third 1 above it, no more."""
    leads = differences(tensor(-3.0, -1.0, -2.0)[None])
    assert close(rrhf_ranking(leads, ranks(3, 2, 1)), 3.0)
    assert close(rrhf_ranking(leads, ranks(1, 1, 1)), 0.0)


def test_accuracy_counts_a_tie_as_half_right() -> None:
    assert accuracy(tensor(2.0, 0.0, -1.0)).tolist() == [1.0, 0.5, 0.0]


def test_calibration_error_by_hand() -> None:
    """Four pairs held 3/4 likely, half of them right: off by 1/4. Two held certain and right: off by 0."""
    unsure, sure = math.log(3.0), 40.0
    margins = tensor(unsure, unsure, -unsure, -unsure, sure, sure)
    tally = {name: (float(total), float(weight)) for name, (total, weight) in calibration(margins).items()}
    assert tally_means(tally)["calibration_error"] == pytest.approx(4 / 6 * 0.25)
    assert "calibration_error" not in tally_means({"accuracy": (1.0, 2.0)})


def test_divergence_mask_starts_at_the_first_token_that_differs() -> None:
    assert divergence_masks([[1, 2, 3], [1, 5, 3]]) == [[False, True, True], [False, True, True]]
    assert divergence_masks([[1, 2], [1, 2, 3]]) == [[False, False], [False, False, True]]
    assert divergence_masks([[1, 2, 3], [1, 2], [1, 5, 3]]) == [[False, True, True], [False, True], [False, True, True]]


def _ragged(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(policy, reference, mask), [rows, 7] double: log-probs of responses of different length."""
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, 7, generator=generator, dtype=torch.double) * 3
    reference = -torch.rand(rows, 7, generator=generator, dtype=torch.double) * 3
    lengths = torch.randint(1, 8, (rows,), generator=generator)
    mask = torch.arange(7)[None] < lengths[:, None]
    return policy, reference, mask


def _scored(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, groups: Groups, **more: Any) -> Scored:
    """Rows of a padded [B, L] as the flat form."""
    rows = len(policy)
    sequence = torch.arange(rows)[:, None].expand_as(policy)[mask]
    fields: dict[str, Any] = {
        "score": -groups.member.double(),
        "margin": torch.zeros(rows, dtype=torch.double),
        "desirable": torch.ones(rows, dtype=torch.bool),
    }
    return Scored(
        groups=groups,
        sequence=sequence,
        loss_mask=torch.ones_like(sequence, dtype=torch.bool),
        logprobs=policy[mask],
        ref_logprobs=reference[mask],
        **(fields | more),
    )


def _pairs(count: int) -> Groups:
    """chosen, rejected, chosen, rejected, ..."""
    return Groups(torch.arange(count).repeat_interleave(2), torch.tensor([0, 1] * count))


# Against the chances of all orders


def _chance(values: Sequence[float], order: Sequence[int]) -> float:
    """Of this order, best first: DPO, arXiv 2305.18290, eq. 18."""
    weights = [math.exp(values[place]) for place in order]
    return math.prod(weight / sum(weights[place:]) for place, weight in enumerate(weights))


def _naive_plackett_luce(values: Sequence[float], scores: Sequence[float]) -> float:
    """From the chances of all orders: that each answer comes before all with a lower score."""
    orders = list(permutations(range(len(values))))
    loss = 0.0
    for place, score in enumerate(scores):
        worse = [other for other, given in enumerate(scores) if given < score]
        loss -= math.log(
            sum(
                _chance(values, order)
                for order in orders
                if all(order.index(place) < order.index(other) for other in worse)
            )
        )
    return loss


scored_lists = st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 2)), min_size=2, max_size=5)


@settings(deadline=None)
@given(scored_lists)
def test_plackett_luce_is_the_chance_over_all_orders(answers: list[tuple[float, int]]) -> None:
    """Without ties it is -log of the order's own chance; with ties that every answer beats all worse ones."""
    values, scores = [value for value, _ in answers], [score for _, score in answers]
    found = plackett_luce(differences(tensor(*values)[None]), ranks(*scores)).item()
    assert found == pytest.approx(_naive_plackett_luce(values, scores), rel=1e-9, abs=1e-9)
    if len(set(scores)) == len(scores):
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        assert found == pytest.approx(-math.log(_chance(values, order)), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(scored_lists, st.randoms(), st.sampled_from(["logistic", "fidelity"]), st.sampled_from([0.0, 0.1]))
def test_the_order_of_tied_answers_carries_no_information(
    answers: list[tuple[float, int]], random: Any, preference: Any, smoothing: float
) -> None:
    """Any order of the answers gives the same loss and gradient."""
    order = list(range(len(answers)))
    random.shuffle(order)
    results = []
    for places in (range(len(answers)), order):
        values = tensor(*(answers[place][0] for place in places)).requires_grad_()
        better = ranks(*(answers[place][1] for place in places))
        loss = PREFERENCE_LOSSES[preference](differences(values[None]), better, smoothing)
        results.append((loss.item(), torch.autograd.grad(loss, values)[0]))
    (loss, gradient), (again, shuffled) = results
    assert again == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert torch.allclose(shuffled, gradient[order], atol=1e-14)


@pytest.mark.parametrize("config", [RewardLossConfig(), DpoLossConfig(), RewardLossConfig(preference="fidelity")])
@pytest.mark.parametrize("count", [2, 4])
def test_tied_answers_carry_no_signal(config: OfflineLossConfig, count: int) -> None:
    """Pairs too: where all scores are equal, loss and gradient are exactly 0; so is the share in the metrics."""
    policy, reference, mask = _ragged(6, count)
    policy.requires_grad_()
    rewards = torch.randn(count, dtype=torch.double, requires_grad=True)
    groups = Groups(torch.zeros(count, dtype=torch.int64), torch.arange(count))
    scored = _scored(policy, reference, mask, groups, score=torch.full((count,), 2.5), rewards=rewards)
    output = OBJECTIVES[type(config)](scored, config, Totals(1, 1))
    assert output.loss.item() == 0.0
    gradients = torch.autograd.grad(output.loss, [policy, rewards], allow_unused=True)
    assert not any(gradient.any() for gradient in gradients if gradient is not None)
    assert not {"accuracy", "margin", "calibration_error"} & tally_means(_floats(output)).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
def test_two_ranked_answers_are_a_pair_to_the_last_bit(dtype: torch.dtype) -> None:
    """Plackett-Luce among examples with more answers, and -log sigmoid of the difference: DPO, eq. 7."""
    values = torch.tensor([[3.1, -2.7, 0.0], [60.3, 11.1, 0.0], [-40.0, 70.7, 0.0], [1.0, 1.0, 4.0]], dtype=dtype)
    better = differences(torch.tensor([[2.0, 1.0, 0.0]]).expand(4, 3)) > 0
    better[:3, :, 2] = False
    pairs = values[:3, :2].clone().requires_grad_()
    values.requires_grad_()
    ranked = plackett_luce(differences(values), better)[:3]
    plain = -torch.nn.functional.logsigmoid(pairs[:, 0] - pairs[:, 1])
    assert torch.equal(ranked, plain)
    gradients = torch.autograd.grad(ranked.sum(), values)[0], torch.autograd.grad(plain.sum(), pairs)[0]
    assert torch.equal(gradients[0][:3, :2], gradients[1])


# In high precision, at the ends of what float32 holds


def _precise(loss: Any, *where: float) -> tuple[float, list[float]]:
    """(value, partial derivatives), with 80 digits."""
    with mpmath.workdps(80):
        point = [mpmath.mpf(x) for x in where]
        steps = [tuple(int(i == j) for j in range(len(where))) for i in range(len(where))]
        slopes = [mpmath.diff(loss, tuple(point), n=step, h=mpmath.mpf(10) ** -60) for step in steps]
        return float(loss(*point)), [float(slope) for slope in slopes]


def _precise_odds(chosen: Any, rejected: Any) -> Any:
    """-log sigmoid(log odds(chosen) - log odds(rejected)) of log-probs: ORPO, eq. 4 and 7."""
    odds = [mpmath.exp(x) / (1 - mpmath.exp(x)) for x in (chosen, rejected)]
    return mpmath.log(1 + odds[1] / odds[0])


NEAR_ONE = (-1e-4, -9.9e-7, -1e-8, -1e-12, -1e-20, -1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        *((-0.7, x) for x in NEAR_ONE),
        *((x, -0.7) for x in NEAR_ONE),
        *((x, x) for x in NEAR_ONE),
        *((x, 3 * x) for x in NEAR_ONE),
        *((-1e-6, x) for x in NEAR_ONE),
    ],
)
def test_orpo_is_right_however_close_to_1_a_probability_is(chosen: float, rejected: float, dtype: torch.dtype) -> None:
    """Value and gradient; the closer the rejected answer is to 1, the harder it is pushed down."""
    leaves = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in (chosen, rejected)]
    loss = odds_ratio(*leaves)
    found = [float(slope) for slope in torch.autograd.grad(loss.sum(), leaves)]
    value, slopes = _precise(_precise_odds, *(leaf.item() for leaf in leaves))
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    assert loss.item() == pytest.approx(value, rel=tolerance)
    assert found == pytest.approx(slopes, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
@pytest.mark.parametrize("certain", [0.0, -0.0, -1e-45])
def test_orpo_pushes_a_certain_rejected_answer_down(certain: float, dtype: torch.dtype) -> None:
    """At a log-prob of 0, the odds are those of the lowest probability that float32 rounds to 1."""
    for pair, signs in (((-0.7, certain), (-1, 1)), ((certain, -0.7), (-1, 1)), ((certain, certain), (-1, 1))):
        leaves = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in pair]
        loss = odds_ratio(*leaves)
        slopes = torch.autograd.grad(loss.sum(), leaves)
        assert all(torch.isfinite(x).all() for x in (loss, *slopes))
        assert [int(slope.sign()) for slope in slopes] == list(signs)
        below = [x if x == -0.7 else math.log1p(-(2.0**-25)) for x in pair]
        value, wanted = _precise(_precise_odds, *below)
        assert loss.item() == pytest.approx(value, rel=1e-5)
        assert [float(slope) for slope in slopes] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("lead", [0.0, 0.3, -1.0, 5.0, -5.0, 19.0, -19.0, 60.0, -60.0])
def test_fidelity_is_bounded_and_exact(lead: float, smoothing: float) -> None:
    """In float32, up to leads whose probability rounds to 1."""
    leaf = torch.tensor([lead], requires_grad=True)
    loss = fidelity(*one(leaf), smoothing)
    (slope,) = torch.autograd.grad(loss.sum(), leaf)

    def precise(x: Any) -> Any:
        p = 1 / (1 + mpmath.exp(-x))
        target = 1 - mpmath.mpf(smoothing)
        return 1 - mpmath.sqrt(target * p) - mpmath.sqrt((1 - target) * (1 - p))

    value, (wanted,) = _precise(precise, leaf.item())
    assert 0.0 <= loss.item() <= 1.0
    assert loss.item() == pytest.approx(value, rel=2e-5)
    assert slope.item() == pytest.approx(wanted, rel=2e-5)


def test_sft_is_cross_entropy_over_response_tokens() -> None:
    """torch's own, on logits; masked tokens, NaN among them, take part in nothing."""
    logits = torch.randn(9, 11, dtype=torch.double, requires_grad=True)
    targets = torch.randint(0, 11, (9,))
    mask = torch.tensor([True, True, False, True, False, True, True, True, False])
    logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    logprobs = torch.where(mask, logprobs, torch.nan)
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    alone = Groups(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    nothing = torch.zeros(3)
    scored = Scored(alone, rows, mask, nothing, nothing, nothing.bool(), logprobs=logprobs)
    loss = OBJECTIVES[SftLossConfig](scored, SftLossConfig(), Totals(3, 6)).loss
    wanted = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    assert loss.item() == pytest.approx(wanted.item())
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_shared_prefix_leaves_dpo_as_it_is_and_changes_ipo() -> None:
    """Tokens before the first difference have the same log-probs in both answers."""
    policy, reference, mask = _ragged(3, 2)
    mask[:] = True
    for table in (policy, reference):
        table[1, :3] = table[0, :3]
    late = mask.clone()
    late[:, :3] = False

    def loss(config: OfflineLossConfig, kept: torch.Tensor) -> float:
        return OBJECTIVES[type(config)](_scored(policy, reference, kept, _pairs(1)), config, Totals(1, 1)).loss.item()

    assert loss(DpoLossConfig(), late) == pytest.approx(loss(DpoLossConfig(), mask))
    assert loss(IpoLossConfig(), late) != pytest.approx(loss(IpoLossConfig(), mask))


# What must not matter


CONFIGS: list[OfflineLossConfig] = [
    SftLossConfig(),
    RewardLossConfig(lm_coef=0.5, center_coef=0.2),
    RewardLossConfig(preference="fidelity", label_smoothing=0.1),
    RewardLossConfig(level="token"),
    DpoLossConfig(label_smoothing=0.1),
    DpoLossConfig(preference="fidelity"),
    IpoLossConfig(),
    OrpoLossConfig(),
    KtoLossConfig(desirable_weight=1.3),
    RrhfLossConfig(lm_coef=0.7),
]


def _floats(output: ObjectiveOutput) -> dict[str, tuple[float, float]]:
    return {name: (float(total), float(weight)) for name, (total, weight) in output.tally.items()}


class Batch:
    """Examples with random log-probs, scores and lengths; parts of it give the same loss as the whole."""

    def __init__(self, config: OfflineLossConfig, seed: int, examples: int) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        members = {"sft": (1, 1), "kto": (1, 1), "rrhf": (2, 4), "dpo": (2, 4)}.get(config.kind, (2, 2))
        self.sizes = [min(members[0] + n % 3, members[1]) for n in range(examples)]
        rows = sum(self.sizes)
        self.policy, self.reference, self.mask = _ragged(seed + 1, rows)
        self.rewards, self.margin = (torch.randn(rows, generator=generator, dtype=torch.double) for _ in range(2))
        # The better ones first; the second of three or four is tied with the first.
        self.score = -torch.tensor([max(0.0, place - (size > 2)) for size in self.sizes for place in range(size)])
        self.targets = torch.randint(0, 3, self.mask.shape, generator=generator)
        self.desirable = torch.rand(rows, generator=generator) < 0.5
        starts = [sum(self.sizes[:n]) for n in range(examples)]
        self.rows = [list(range(start, start + size)) for start, size in zip(starts, self.sizes, strict=True)]
        self.totals = Totals(examples, int(self.mask[self.score == 0].sum()))

    def loss(self, examples: Sequence[int], policy: torch.Tensor, rewards: torch.Tensor) -> ObjectiveOutput:
        index = torch.tensor([row for example in examples for row in self.rows[example]], dtype=torch.int64)
        group = [place for place, example in enumerate(examples) for _ in self.rows[example]]
        member = [place for example in examples for place in range(self.sizes[example])]
        scored = _scored(
            policy[index],
            self.reference[index],
            self.mask[index],
            Groups(torch.tensor(group, dtype=torch.int64), torch.tensor(member, dtype=torch.int64)),
            score=self.score[index],
            margin=self.margin[index],
            desirable=self.desirable[index],
            rewards=rewards[index],
            token_rewards=policy[index][self.mask[index]],
            targets=self.targets[index][self.mask[index]],
            reference_point=0.25,
        )
        return OBJECTIVES[type(self.config)](scored, self.config, self.totals)

    def run(self, parts: Sequence[Sequence[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
        """(loss, gradient, means) of the batch cut into these parts."""
        policy, rewards = self.policy.clone().requires_grad_(), self.rewards.clone().requires_grad_()
        outputs = [self.loss(part, policy, rewards) for part in parts]
        torch.stack([output.loss for output in outputs]).sum().backward()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in (policy, rewards)]
        tallies = [_floats(output) for output in outputs]
        loss = sum(float(output.terms["loss"]) for output in outputs)
        return loss, torch.cat([gradient.flatten() for gradient in gradients]), tally_means(add_tallies(tallies))


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 5), shuffle=st.randoms())
def test_neither_split_nor_order_nor_an_empty_part_matters(
    config: OfflineLossConfig, seed: int, cut: int, shuffle: Any
) -> None:
    batch = Batch(config, seed, 5)
    whole, gradient, shown = batch.run([range(5)])
    order = list(range(5))
    shuffle.shuffle(order)
    found, again, told = batch.run([order[:cut], order[cut:], []])
    assert found == pytest.approx(whole, rel=1e-6, abs=1e-9)
    assert torch.allclose(again, gradient, atol=1e-7)
    assert told == pytest.approx(shown, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_gradients_are_those_of_finite_differences(config: OfflineLossConfig) -> None:
    batch = Batch(config, 5, 3)

    def loss(policy: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        return batch.loss(range(3), policy, rewards).loss

    inputs = (batch.policy.clone().requires_grad_(), batch.rewards.clone().requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, atol=1e-5)


def test_masked_tokens_reach_nothing() -> None:
    logprobs = torch.tensor([1.0, torch.nan, 2.0], requires_grad=True)
    sums, counts = sequence_logprobs(logprobs, torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), 2)
    assert (sums.tolist(), counts.tolist()) == ([1.0, 2.0], [1.0, 1.0])
    sums.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0, 0.0, 1.0]
