"""Which settings lead self-play to the equilibrium, tried on a table of probabilities with Troupe's own loss.

    python -m benchmarks.tabular_self_play kuhn --betas 0 0.95 --entropy-coef 0.2

The policy is a logit for every information set, so that hundreds of steps take seconds. Games are sampled as a batch
of `--games`; advantages come from `rae`, the loss and the learning rate from a policy worker, the optimizer is
torch's AdamW with gradients clipped to norm 1. Prints the exploitability (`benchmarks.self_play`) at ten steps, of the
last policy and of the average of all.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.self_play import FIRST, KUHN_CARDS, SECOND, kuhn_exploitability, pennies_exploitability
from troupe.workers.algorithms.advantages import player_average_advantages
from troupe.workers.algorithms.policy_loss import PolicyTokens, policy_loss, token_weights
from troupe.workers.contract.algorithm_config import PolicyLossConfig
from troupe.workers.contract.trainer_config import OptimizerConfig
from troupe.workers.training.optimizer import learning_rate

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
PLACES = (*FIRST, *SECOND)
_DEALS = np.array(list(itertools.permutations(range(3), 2)))


class Games(NamedTuple):
    """A batch of games; samples 2 g and 2 g + 1 are the players of game g."""

    places: Ints
    """Information set of each move."""
    moves: Ints
    """1 for b (or h), 0 for p (or t)."""
    samples: Ints
    """The sample that each move belongs to."""
    returns: Floats
    """Return of each sample."""


@dataclass(frozen=True)
class Game:
    """A game of two players on a table with the probability of one of two moves in each state."""

    places: int
    play: Callable[[Floats, int, np.random.Generator], Games]
    exploitability: Callable[[Floats], float]


def play_pennies(table: Floats, count: int, random: np.random.Generator) -> Games:
    """Matching pennies; the table has the probability of h for `even` and `odd`."""
    moves = (random.random((2, count)) < table[:, None]).astype(np.int64)
    won = np.where(moves[0] == moves[1], 1.0, -1.0)
    samples = np.arange(2 * count).reshape(count, 2).T
    return Games(np.repeat([0, 1], count), moves.ravel(), samples.ravel(), np.stack([won, -won], 1).ravel())


def play_kuhn(table: Floats, count: int, random: np.random.Generator) -> Games:
    """Kuhn poker; the table has the probability of b in each of `PLACES`."""
    places = {history: np.array([PLACES.index((c, history)) for c in KUHN_CARDS]) for history in ("", "pb", "p", "b")}
    first, second = _DEALS[random.integers(len(_DEALS), size=count)].T
    samples, higher = np.arange(2 * count).reshape(count, 2).T, np.where(first > second, 1, -1)

    def move(at: Ints) -> Ints:
        return (random.random(len(at)) < table[at]).astype(np.int64)

    opened = places[""][first]
    bet = move(opened)
    answered = np.where(bet, places["b"][second], places["p"][second])
    raised = move(answered)
    asked = (bet == 0) & (raised == 1)
    last = places["pb"][first]
    called = move(last)
    folded = np.where(bet, 1, -1)  # who does not call: the second player after a bet, else the first
    won = np.where(bet, np.where(raised, 2 * higher, folded), higher)
    won = np.where(asked, np.where(called, 2 * higher, folded), won).astype(float)
    return Games(
        np.concatenate([opened, answered, last[asked]]),
        np.concatenate([bet, raised, called[asked]]),
        np.concatenate([samples[0], samples[1], samples[0][asked]]),
        np.stack([won, -won], 1).ravel(),
    )


GAMES = {
    "pennies": Game(2, play_pennies, lambda table: pennies_exploitability(*table.tolist())),
    "kuhn": Game(12, play_kuhn, lambda table: kuhn_exploitability(dict(zip(PLACES, table.tolist(), strict=True)))),
}


@dataclass(frozen=True)
class Curve:
    """Exploitability by step."""

    values: list[float]
    last: float
    """Of the policy after the last step."""
    average: float
    """Of the mean of the policies of all steps."""


def self_play(
    game: Game, optimizer: OptimizerConfig, loss: PolicyLossConfig, *, steps: int, games: int, decay: float, seed: int
) -> Curve:
    """Trains a table from random logits; `decay`: `algorithm.baseline_decay`."""
    random = np.random.default_rng(seed)
    logits = torch.tensor(random.normal(size=game.places), requires_grad=True)
    adam = torch.optim.AdamW([logits], betas=optimizer.adam_betas, eps=optimizer.adam_eps, weight_decay=0.0)
    averages: dict[str, float] = {}
    tables = [logits.detach().sigmoid().numpy()]
    for step in range(steps):
        batch = game.play(tables[-1], games, random)
        players = ("first", "second") * games
        returns = torch.from_numpy(batch.returns)
        advantages, averages = player_average_advantages(returns, players, averages, decay)
        adam.zero_grad()
        policy_loss(_tokens(logits, batch, advantages), loss).loss.backward()
        torch.nn.utils.clip_grad_norm_([logits], optimizer.max_grad_norm)
        adam.param_groups[0]["lr"] = learning_rate(optimizer, step, steps)
        adam.step()
        tables.append(logits.detach().sigmoid().numpy())
    values = [game.exploitability(table) for table in tables[:: max(1, steps // 10)]]
    return Curve(values, game.exploitability(tables[-1]), game.exploitability(np.mean(tables, axis=0)))


def _tokens(logits: torch.Tensor, batch: Games, advantages: torch.Tensor) -> PolicyTokens:
    """The moves as tokens. Each is followed by an end of turn, whose probability is 1, in the mean over tokens."""
    both = torch.stack([torch.zeros_like(logits), logits], 1).log_softmax(1)
    places, samples = torch.from_numpy(batch.places), torch.from_numpy(batch.samples)
    logprobs = both[places, torch.from_numpy(batch.moves)]
    mask = torch.ones(len(places), dtype=torch.bool)
    return PolicyTokens(
        logprobs=logprobs,
        entropy=-(both.exp() * both).sum(1)[places],
        rollout_logprobs=logprobs.detach(),
        advantages=advantages[samples],
        weights=token_weights(mask, torch.ones(len(places)), "token_mean", 2 * len(places), len(advantages), 2),
        loss_mask=mask,
        sequence=samples,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--games", type=int, default=256, help="games of a step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="linear")
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--decay", type=float, default=0.95)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    optimizer = OptimizerConfig(
        learning_rate=asked.learning_rate, schedule=asked.schedule, adam_betas=tuple(asked.betas)
    )
    loss = PolicyLossConfig(objective="policy_gradient", entropy_coef=asked.entropy_coef)
    for seed in range(asked.seeds):
        curve = self_play(
            GAMES[asked.game], optimizer, loss, steps=asked.steps, games=asked.games, decay=asked.decay, seed=seed
        )
        shown = " ".join(f"{value:.3f}" for value in curve.values)
        print(f"seed {seed}: {shown}; last {curve.last:.3f}, average {curve.average:.3f}")


if __name__ == "__main__":
    main()
