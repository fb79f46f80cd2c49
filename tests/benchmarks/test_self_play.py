"""The games whose equilibrium is known, and the distance of a policy from it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.self_play import (
    FIRST,
    SECOND,
    equilibrium,
    kuhn_exploitability,
    kuhn_value,
    pennies_exploitability,
)
from troupe.deploy.examples.games import KUHN_OVER, KuhnPoker, MatchingPennies, kuhn_prompt, value_of_first
from troupe.environments import Row


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
    rewards = game.step(said(even) | {"also": [said(odd)]}).rewards
    assert rewards == {"even": 0.0 if even == odd == "x" else won[even + odd], "odd": -rewards["even"]}
