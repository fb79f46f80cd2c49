"""How far a self-played policy is from the equilibrium of matching pennies and of Kuhn poker.

    python -m benchmarks.self_play kuhn MODEL_FOLDER [MODEL_FOLDER ...]

Prints, for each model, the probability of b (bet, call) or h (heads) in every information set, the value of the game
for the first player, and the exploitability: half of what both players together could gain by the best answer to the
other.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.deploy.examples.games import KUHN_CARDS, KUHN_OVER, kuhn_prompt, value_of_first

Information = tuple[str, str]
"""Card and moves so far."""
Strategy = Mapping[Information, float]
"""Probability of b in each information set."""
FIRST = tuple((card, history) for card in KUHN_CARDS for history in ("", "pb"))
SECOND = tuple((card, history) for card in KUHN_CARDS for history in ("p", "b"))


def kuhn_value(first: Strategy, second: Strategy) -> float:
    """What `first` wins on average."""

    def value(cards: str, history: str) -> float:
        if history in KUHN_OVER:
            return value_of_first(cards, history)
        player = len(history) % 2
        bets = (first, second)[player][cards[player], history]
        return bets * value(cards, history + "b") + (1.0 - bets) * value(cards, history + "p")

    deals = list(itertools.permutations(KUHN_CARDS, 2))
    return sum(value("".join(cards), "") for cards in deals) / len(deals)


def kuhn_exploitability(policy: Strategy) -> float:
    """Half the sum of what the best answer to each player wins above the value of the game that both play."""
    best_first = max(kuhn_value(pure, policy) for pure in _pure(FIRST))
    worst_second = min(kuhn_value(policy, pure) for pure in _pure(SECOND))
    return (best_first - worst_second) / 2


def pennies_exploitability(even: float, odd: float) -> float:
    """The same for matching pennies, from each player's probability of heads."""
    return (abs(2 * odd - 1) + abs(2 * even - 1)) / 2


def equilibrium(a: float) -> dict[Information, float]:
    """One of the equilibria of Kuhn poker, for a of 0 to 1/3."""
    first = {("J", ""): a, ("Q", ""): 0.0, ("K", ""): 3 * a, ("J", "pb"): 0.0, ("Q", "pb"): a + 1 / 3, ("K", "pb"): 1.0}
    passed = {("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0}
    return first | passed | {("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0}


def _pure(places: Sequence[Information]) -> list[dict[Information, float]]:
    return [dict(zip(places, moves, strict=True)) for moves in itertools.product((0.0, 1.0), repeat=len(places))]


def move_probability(folder: Path) -> Callable[[Sequence[Mapping[str, Any]], str, str], float]:
    """Probability of one letter against another one as a model's next turn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def probability(messages: Sequence[Mapping[str, Any]], move: str, other: str) -> float:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in (move, other)]
        with torch.no_grad():
            return float(model(ids).logits[0, -1, letters].softmax(0)[0])

    return probability


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=("kuhn", "pennies"))
    parser.add_argument("models", type=Path, nargs="+")
    arguments = parser.parse_args()
    for folder in arguments.models:
        probability = move_probability(folder)
        if arguments.game == "pennies":
            even, odd = (
                probability([{"role": "user", "content": f"You are {side}"}], "h", "t") for side in ("even", "odd")
            )
            print(
                f"{folder}: even h {even:.3f}, odd h {odd:.3f}, exploitability {pennies_exploitability(even, odd):.3f}"
            )
            continue
        policy = {place: probability(kuhn_prompt(*place), "b", "p") for place in (*FIRST, *SECOND)}
        shown = ", ".join(f"{card}{history and f' {history}'} {value:.2f}" for (card, history), value in policy.items())
        value, gain = kuhn_value(policy, policy), kuhn_exploitability(policy)
        print(f"{folder}: value {value:+.4f}, exploitability {gain:.4f}; {shown}")


if __name__ == "__main__":
    main()
