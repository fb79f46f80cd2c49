"""Two games of two players whose equilibrium is known: matching pennies and Kuhn poker.

Every move is one letter, so that a small model can play. Both games have a rule for a turn that is no move: the player
loses what a lost game costs most.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from troupe.environments import Environment, Message, Observation, Row

KUHN_CARDS = "JQK"
KUHN_OVER: Mapping[str, tuple[int, bool]] = {
    "pp": (1, True),
    "bp": (1, False),
    "bb": (2, True),
    "pbp": (1, False),
    "pbb": (2, True),
}
"""Histories that end a game of Kuhn poker: the stake, and whether the cards decide; if not, the last player folded."""


class MatchingPennies(Environment):
    """Both name a side of a coin, h or t, unseen by the other: `even` wins 1 if they are the same, else `odd`. In
    equilibrium both name each side with probability 1/2, and the value is 0."""

    def start(self, row: Row) -> Observation:
        return Observation(
            _asked("You are even"), player="even", also=[Observation(_asked("You are odd"), player="odd")]
        )

    def step(self, message: Message) -> Observation:
        sides = [turn["content"].strip() for turn in (*message["also"], message)]
        wrong = [side not in ("h", "t") for side in sides]
        even = 1.0 if sides[0] == sides[1] else -1.0
        if any(wrong):
            even = float(wrong[0]) - float(wrong[1])
        return Observation(rewards={"even": even, "odd": -even}, done=True)


class KuhnPoker(Environment):
    """Three cards J < Q < K, an ante of 1 and one bet of 1: p passes (or folds), b bets (or calls).

    The value for `first` is -1/18 (Kuhn 1950). In equilibrium, with some a of 0 to 1/3, `first` bets with J in a third
    of the games in which it bets with K (a and 3a), never with Q, and calls with Q with a + 1/3; `second` bets with J
    and calls with Q with 1/3, and bets and calls with K always.
    """

    def __init__(self) -> None:
        self._cards, self._history = "", ""

    def start(self, row: Row) -> Observation:
        self._cards, self._history = "".join(random.Random(row.seed).sample(KUHN_CARDS, 2)), ""
        return self._turn()

    def step(self, message: Message) -> Observation:
        """The other player's turn, or the end."""
        move, player = message["content"].strip(), len(self._history) % 2
        if move not in ("p", "b"):
            return _ended(-2.0 if player == 0 else 2.0)
        self._history += move
        if self._history not in KUHN_OVER:
            return self._turn()
        return _ended(value_of_first(self._cards, self._history))

    def _turn(self) -> Observation:
        player = len(self._history) % 2
        messages = kuhn_prompt(self._cards[player], self._history)
        return Observation(messages[-1:], player=("first", "second")[player])


def value_of_first(cards: str, history: str) -> float:
    """What `first` wins of a game of Kuhn poker that has ended."""
    stake, shown_down = KUHN_OVER[history]
    # Without a showdown the last one folded, which is `second` after an even number of moves.
    first_wins = KUHN_CARDS.index(cards[0]) > KUHN_CARDS.index(cards[1]) if shown_down else len(history) % 2 == 0
    return float(stake if first_wins else -stake)


def kuhn_prompt(card: str, history: str) -> list[Message]:
    """What a player of Kuhn poker has seen at its turn: its card, and the moves so far."""
    if len(history) < 2:
        return _asked(f"{card} {history}".strip())
    return [*_asked(card), {"role": "assistant", "content": history[0]}, *_asked(history[1])]


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _ended(value: float) -> Observation:
    return Observation(rewards={"first": value, "second": -value}, done=True)
