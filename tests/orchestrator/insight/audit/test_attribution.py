"""Attribution of gaps, on synthetic logits whose cause is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from troupe.orchestrator.insight.audit.attribution import (
    NEGLIGIBLE,
    attribute,
    distance,
    explained_by_rounding,
    fit_temperature,
    of_engine,
)
from troupe.workers.audit import _endless, _truncated
from troupe.workers.contract.audit import WHOLE_MODEL, Floats, TokenScores

TOKENS, VOCABULARY = 300, 200
ENDS = (7, 11)
OWN = 0.7
GRID = OWN * np.exp(np.linspace(-np.log(4.0), np.log(4.0), 17))


def boltzmann(logits: Floats, temperature: float = OWN) -> Floats:
    return np.exp(logits / temperature)


def logprobs(logits: Floats, targets: np.ndarray, temperature: float = OWN) -> Floats:
    scaled = logits / temperature
    total = np.log(np.exp(scaled).sum(-1))
    return scaled[np.arange(len(targets)), targets] - total


def truncated(kind: str, value: float, noise: float = 0.0) -> Callable[[Floats], Floats]:
    """Chances of an engine that samples the most probable tokens only, and rounds."""

    def chances(logits: Floats) -> Floats:
        found = boltzmann(logits + OWN * noise * np.random.default_rng(1).normal(size=logits.shape))
        found /= found.sum(-1, keepdims=True)
        for row in found:
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            kept = {
                "top_p": before < value,
                "top_k": np.arange(len(row)) < value,
                "min_p": row[order] >= value * row.max(),
            }
            row[order[~kept[kind]]] = 0.0
        return found

    return chances


def above(logits: Floats, targets: np.ndarray, temperature: float) -> Floats:
    chances = np.exp(logits / temperature)
    chances /= chances.sum(-1, keepdims=True)
    return np.where(logits > logits[np.arange(len(targets)), targets][:, None], chances, 0.0).sum(-1)


class World:
    """Logits, tokens drawn from them, and the scorer's view.

    With `drawn`, the tokens come from other chances, which it makes of the logits; with `spread`, logits are as far
    apart; `border` is the scorer's.
    """

    def __init__(
        self,
        seed: int = 0,
        noise: float = 0.02,
        *,
        tokens: int = TOKENS,
        drawn: Callable[[Floats], Floats] = boltzmann,
        spread: float = 2.0,
        border: float = 0.1,
    ) -> None:
        generator = np.random.default_rng(seed)
        self.generator = generator
        self.logits = generator.normal(0.0, spread, (tokens, VOCABULARY))
        chances = drawn(self.logits)
        chances /= chances.sum(-1, keepdims=True)
        self.targets = np.array([generator.choice(VOCABULARY, p=row) for row in chances])
        self.shown = np.log(chances[np.arange(tokens), self.targets])
        self.noise = noise
        scorer = logprobs(self.logits, self.targets)
        layers = {f"layers.{n}": scorer + generator.normal(0.0, 0.2, tokens) for n in range(4)}
        whole = scorer + sum(layer - scorer for layer in layers.values())
        logits, targets = torch.from_numpy(self.logits).float(), torch.from_numpy(self.targets)[:, None]
        choices = [*_truncated(logits, targets, OWN, border), *_endless(logits, targets, OWN, ENDS)]
        self.scores = TokenScores(
            sampler=self.rounded(scorer),
            trainer=self.rounded(scorer),
            scorer=scorer,
            rounded=self.rounded(scorer),
            hypotheses={
                "head:bfloat16": scorer + generator.normal(0.0, 0.04, tokens),
                **{key: column.double().numpy() for key, column, _ in choices},
                "positions:response+1": scorer + generator.normal(0.0, 0.3, tokens),
                **{f"weights:{name}": column for name, column in layers.items()},
                f"weights:{WHOLE_MODEL}": whole,
            },
            draws={key: draw.double().numpy() for key, _, draw in choices},
            temperatures=GRID,
            tempered=np.stack([logprobs(self.logits, self.targets, float(t)) for t in GRID], -1),
            above=np.stack([above(self.logits, self.targets, float(t)) for t in GRID], -1),
            engine=("rollout-0",) * tokens,
            prompts=0,
            prompt_differences=(),
        )

    def rounded(self, values: Floats) -> Floats:
        return values + self.generator.normal(0.0, self.noise, len(values))

    def sampled_as(self, values: Floats) -> TokenScores:
        return replace(self.scores, sampler=self.rounded(values))


@pytest.mark.parametrize("noise", [1e-6, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_rounding_is_no_cause(noise: float, seed: int) -> None:
    world = World(seed, noise)
    for side in ("sampler", "trainer"):
        gap = attribute(side, world.scores)
        assert gap.passed, gap.causes
        assert gap.mean == pytest.approx(noise * np.sqrt(2 / np.pi), rel=0.2)


@pytest.mark.parametrize("noise", [1e-6, 0.02])
@pytest.mark.parametrize(
    ("key", "kind", "about"),
    [
        ("head:bfloat16", "head", "bfloat16"),
        ("positions:response+1", "positions", "response+1"),
        ("weights:layers.2", "weights", "layers.2"),
        (f"weights:{WHOLE_MODEL}", "weights", WHOLE_MODEL),
    ],
)
def test_the_hypothesis_that_holds_is_named(noise: float, key: str, kind: str, about: str) -> None:
    world = World(1, noise)
    gap = attribute("sampler", world.sampled_as(world.scores.hypotheses[key]))
    assert [(cause.kind, cause.about) for cause in gap.causes] == [(kind, about)]


@pytest.mark.parametrize("noise", [1e-6, 0.02])
@pytest.mark.parametrize("temperature", [0.35, 0.49, 0.75, 1.0, 2.0])
def test_a_wrong_temperature_is_fitted(noise: float, temperature: float) -> None:
    world = World(2, noise)
    found = world.sampled_as(logprobs(world.logits, world.targets, temperature))
    fitted, column = fit_temperature(found.sampler, found)
    assert fitted == pytest.approx(temperature, rel=0.01)
    assert distance(column, found.sampler) < noise + 1e-3
    (cause,) = attribute("sampler", found).causes
    assert (cause.kind, cause.about) == ("temperature", f"{fitted:.2g}")


def test_two_layers_of_older_weights_are_named_together() -> None:
    world = World(3)
    scorer, hypotheses = world.scores.scorer, world.scores.hypotheses
    both = hypotheses["weights:layers.1"] + hypotheses["weights:layers.3"] - scorer
    (cause,) = attribute("sampler", world.sampled_as(both)).causes
    assert (cause.kind, cause.about) == ("weights", "layers.1 and layers.3")


TRUNCATIONS = [("top_p", 0.8), ("top_p", 0.63), ("top_k", 17), ("min_p", 0.3), ("min_p", 0.07)]


@pytest.mark.parametrize(("noise", "border"), [(1e-6, 1e-4), (0.02, 0.1)])
@pytest.mark.parametrize(("kind", "value"), TRUNCATIONS)
def test_truncation_is_fitted(kind: str, value: float, noise: float, border: float) -> None:
    """By the numbers, or by the samples if the log-probs hide it."""
    world = World(5, noise, drawn=truncated(kind, value, noise), border=border)
    for found in (replace(world.scores, sampler=world.shown), world.scores):
        cause, *others = attribute("sampler", found).causes
        assert (cause.kind, cause.samples_only, others) == (kind, found is world.scores, [])
        assert float(cause.about) == pytest.approx(value, rel=0.07 if cause.samples_only else 1e-9)
    assert attribute("trainer", world.scores).passed


def test_a_token_at_the_border_does_not_hide_truncation() -> None:
    """Rounding makes it impossible under the hypothesis that holds."""
    world = World(5, drawn=truncated("top_p", 0.8))
    draws = {key: columns.copy() for key, columns in world.scores.draws.items()}
    draws["top_p:0.8"][[3, 70]] = -np.inf, 1.0
    (cause,) = attribute("sampler", replace(world.scores, draws=draws)).causes
    assert (cause.kind, cause.samples_only) == ("top_p", True)
    assert float(cause.about) == pytest.approx(0.8, rel=0.05)


def test_few_tokens_of_flat_distributions_do_not_tell_truncations_apart() -> None:
    world = World(0, tokens=160, spread=0.3, drawn=truncated("top_p", 0.6, 0.02))
    causes = attribute("sampler", world.scores).causes
    assert {cause.kind for cause in causes} == {"top_p", "top_k"}
    assert all(cause.samples_only for cause in causes)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_a_flat_distribution_are_no_truncation(seed: int, spread: float) -> None:
    """Nearly every token is as probable as the last of top-p, up to rounding."""
    assert attribute("sampler", World(seed, tokens=160, spread=spread).scores).passed


def endless(logits: Floats) -> Floats:
    chances = boltzmann(logits)
    chances[:, ENDS] = 0.0
    return chances


def test_an_engine_that_never_ends_a_turn_is_named() -> None:
    """By the samples if some ends were to be expected, and by numbers that show it."""
    world = World(5, tokens=2000, drawn=endless)
    for found in (world.scores, replace(world.scores, sampler=world.shown)):
        (cause,) = attribute("sampler", found).causes
        assert (cause.kind, cause.samples_only) == ("ends", found is world.scores)
    assert attribute("sampler", World(5, tokens=100, drawn=endless).scores).passed
    assert attribute("sampler", World(5, tokens=2000).scores).passed


def half_greedy(logits: Floats) -> Floats:
    chances = boltzmann(logits)
    greedy = np.eye(logits.shape[1])[logits.argmax(-1)]
    return chances / chances.sum(-1, keepdims=True) + greedy


HIDDEN: dict[str, Callable[[Floats], Floats]] = {
    "logits capped at 3": lambda logits: boltzmann(3.0 * np.tanh(logits / 3.0)),
    "logits of the next token": lambda logits: boltzmann(np.roll(logits, 1, -1)),
    "half of the tokens greedy": half_greedy,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HIDDEN)
def test_a_draw_that_no_hypothesis_describes_is_unexplained(name: str, seed: int) -> None:
    """The likeliest hypothesis describes the tokens better than the log-probs do, and still not well."""
    (cause,) = attribute("sampler", World(seed, tokens=1000, drawn=HIDDEN[name]).scores).causes
    assert (cause.kind, cause.samples_only) == ("unexplained", True)
    assert cause.about.startswith(("temperature", "top_p"))


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("temperature", [0.4, 0.5, 1.0, 1.4])
def test_a_temperature_that_the_logprobs_hide_is_named_by_the_samples(temperature: float, seed: int) -> None:
    world = World(seed, tokens=1000, drawn=lambda logits: boltzmann(logits, temperature))
    (cause,) = attribute("sampler", world.scores).causes
    assert (cause.kind, cause.samples_only) == ("temperature", True)
    assert float(cause.about) == pytest.approx(temperature, rel=0.15)


def test_a_gap_without_a_hypothesis_is_unexplained() -> None:
    world = World(6)
    strange = world.scores.scorer + world.generator.normal(0.0, 0.5, TOKENS)
    (cause,) = attribute("sampler", world.sampled_as(strange)).causes
    assert cause.kind == "unexplained"


@pytest.mark.parametrize("noise", [1e-6, 0.02])
@pytest.mark.parametrize("mixed", [0.3, 0.5, 0.8])
def test_a_temperature_that_explains_a_part_of_the_gap_is_a_candidate_only(noise: float, mixed: float) -> None:
    """Logits that are partly others, as with a missing norm, make a distribution flatter."""
    world = World(6, noise)
    other = world.generator.normal(0.0, 2.0, world.logits.shape)
    found = world.sampled_as(logprobs((1.0 - mixed) * world.logits + mixed * other, world.targets))
    (cause,) = attribute("sampler", found).causes
    assert cause.kind == "unexplained"
    assert cause.about.startswith("the best candidates: temperature ")


def test_a_cause_that_leaves_rounding_is_named_though_rounding_is_much_of_the_gap() -> None:
    world = World(6, 0.02)
    found = world.sampled_as(world.scores.hypotheses["head:bfloat16"])
    gap = attribute("sampler", found)
    assert [cause.kind for cause in gap.causes] == ["head"]
    assert gap.causes[0].share < 0.7


def test_the_prefix_cache_is_the_cause_where_an_empty_one_closes_the_gap() -> None:
    world = World(7)
    warm = world.sampled_as(world.scores.hypotheses["weights:layers.1"])
    (cause,) = attribute("sampler", warm, fresh=world.scores).causes
    assert cause.kind == "prefix cache"
    (cause,) = attribute("sampler", warm, fresh=warm).causes
    assert cause.kind == "weights"


def test_an_engine_without_samples_from_an_empty_cache_does_not_blame_the_cache() -> None:
    world = World(7)
    warm = world.sampled_as(world.scores.hypotheses["weights:layers.1"])
    (cause,) = attribute("sampler", warm, fresh=of_engine(world.scores, "rollout-1")).causes
    assert (cause.kind, cause.about) == ("weights", "layers.1")


def test_a_negligible_gap_needs_no_explanation() -> None:
    assert explained_by_rounding(0.9 * NEGLIGIBLE, 0.0)
    assert not explained_by_rounding(1.1 * NEGLIGIBLE, 0.0)
    assert explained_by_rounding(0.05, 0.02)
    assert not explained_by_rounding(0.07, 0.02)


def test_one_engine_of_two_is_told_apart() -> None:
    world = World(8)
    sampler = np.where(np.arange(TOKENS) % 2, world.scores.sampler, world.scores.hypotheses["weights:layers.0"])
    engines = tuple("rollout-1" if number % 2 else "rollout-0" for number in range(TOKENS))
    found = replace(world.scores, sampler=sampler, engine=engines)
    gaps = [attribute("sampler", of_engine(found, name)) for name in ("rollout-0", "rollout-1")]
    assert [(gap.worker, gap.tokens, gap.passed) for gap in gaps] == [
        ("rollout-0", TOKENS // 2, False),
        ("rollout-1", TOKENS // 2, True),
    ]
    assert gaps[0].causes[0].about == "layers.0"


def test_no_single_token_decides() -> None:
    """An impossible token under a hypothesis counts as a large gap, not as an infinite one."""
    world = World(9)
    with_hole = world.scores.hypotheses["positions:response+1"].copy()
    found = world.sampled_as(with_hole)
    with_hole[0] = -np.inf
    found = replace(found, hypotheses={**found.hypotheses, "positions:response+1": with_hole})
    assert attribute("sampler", found).causes[0].kind == "positions"
