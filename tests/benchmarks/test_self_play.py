"""The games whose equilibrium is known, and the distance of a policy from it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.self_play import (
    FIRST,
    SECOND,
    equilibrium,
    kuhn_exploitability,
    kuhn_value,
    pennies_exploitability,
)
from benchmarks.tabular_self_play import GAMES, PLACES, play_kuhn, self_play
from troupe.deploy.examples.games import KUHN_OVER, KuhnPoker, MatchingPennies, kuhn_prompt, value_of_first
from troupe.environments import Row
from troupe.workers.contract.algorithm_config import PolicyLossConfig
from troupe.workers.contract.trainer_config import OptimizerConfig


def said(move: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f" {move}"}


@pytest.mark.parametrize("a", [0.0, 0.1, 1 / 3])
def test_nobody_gains_against_an_equilibrium_of_kuhn_poker(a: float) -> None:
    assert kuhn_value(equilibrium(a), equilibrium(a)) == pytest.approx(-1 / 18)
    assert kuhn_exploitability(equilibrium(a)) == pytest.approx(0.0, abs=1e-12)
    assert kuhn_exploitability(equilibrium(a) | {("Q", "b"): 0.5}) > 0.01


def test_the_exploitability_of_random_players() -> None:
    assert kuhn_exploitability(dict.fromkeys((*FIRST, *SECOND), 0.5)) == pytest.approx(11 / 24)
    assert (pennies_exploitability(0.5, 0.5), pennies_exploitability(1.0, 0.5)) == (0.0, 0.5)


@pytest.mark.parametrize("history", KUHN_OVER)
def test_a_game_of_kuhn_poker(history: str) -> None:
    game = KuhnPoker()
    asked = [game.start(Row((), seed=3))]
    asked += [game.step(said(move)) for move in history]
    players = ["first", "second", "first"][: len(history)]
    assert [observation.player for observation in asked] == [*players, None]
    cards = asked[0].messages[0]["content"] + asked[1].messages[0]["content"][0]
    for turn, observation in enumerate(asked[:-1]):
        assert list(observation.messages) == kuhn_prompt(cards[turn % 2], history[:turn])[-1:]
    won = value_of_first(cards, history)
    assert (asked[-1].done, asked[-1].rewards) == (True, {"first": won, "second": -won})


def test_the_higher_card_wins_what_is_staked_and_a_fold_loses_the_ante() -> None:
    assert [value_of_first("KJ", history) for history in KUHN_OVER] == [1, 1, 2, -1, 2]
    assert [value_of_first("JK", history) for history in KUHN_OVER] == [-1, 1, -2, -1, -2]


def test_a_turn_that_is_no_move_loses() -> None:
    game = KuhnPoker()
    game.start(Row((), seed=3))
    assert game.step(said("x")).rewards == {"first": -2.0, "second": 2.0}


@pytest.mark.parametrize(("even", "odd"), itertools.product("htx", repeat=2))
def test_a_game_of_matching_pennies(even: str, odd: str) -> None:
    game = MatchingPennies()
    (other,) = game.start(Row(())).also
    assert (other.player, game.start(Row(())).player) == ("odd", "even")
    won = {"hh": 1, "tt": 1, "ht": -1, "th": -1, "xx": 1, "hx": 1, "tx": 1, "xh": -1, "xt": -1}
    score = 0.0 if even == odd == "x" else won[even + odd]
    assert game.step(said(even) | {"also": [said(odd)]}).rewards == {"even": score, "odd": -score}


def test_a_table_plays_as_the_environment_does() -> None:
    """Kuhn poker by arrays: moves in order, and the returns of the histories they make."""
    table = np.random.default_rng(1).random(12)
    batch = play_kuhn(table, 500, np.random.default_rng(2))
    games: dict[int, list[tuple[str, str, str]]] = {}
    for place, move, sample in zip(batch.places.tolist(), batch.moves.tolist(), batch.samples.tolist(), strict=True):
        card, before = PLACES[place]
        games.setdefault(sample // 2, []).append((card, before, "pb"[move]))
        assert len(before) % 2 == sample % 2
    histories = set[str]()
    for number, moves in games.items():
        card, history = moves[0][0] + moves[1][0], "".join(move for _, _, move in moves)
        assert [before for _, before, _ in moves] == [history[:turn] for turn in range(len(history))]
        won = value_of_first(card, history)
        assert (batch.returns[2 * number], batch.returns[2 * number + 1]) == (won, -won)
        histories.add(history)
    assert histories == set(KUHN_OVER) and len(games) == 500
    for place, wanted in enumerate(table):
        assert np.mean(batch.moves[batch.places == place]) == pytest.approx(wanted, abs=0.15)


@pytest.mark.parametrize(
    ("betas", "entropy_coef", "least", "most"), [((0.9, 0.95), 0.0, 0.3, 1.0), ((0.0, 0.95), 0.5, 0.0, 0.05)]
)
def test_players_with_momentum_chase_each_other_and_those_with_an_entropy_bonus_meet(
    betas: tuple[float, float], entropy_coef: float, least: float, most: float
) -> None:
    optimizer = OptimizerConfig(learning_rate=0.05, schedule="linear", adam_betas=betas)
    loss = PolicyLossConfig(objective="policy_gradient", entropy_coef=entropy_coef)
    found = self_play(GAMES["pennies"], optimizer, loss, steps=150, games=64, decay=0.95, seed=1)
    assert found.values[0] > 0.2 and least <= found.last <= most
