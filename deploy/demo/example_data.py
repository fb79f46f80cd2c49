"""Write the small data sets under deploy/specs/data/: sums with right and wrong answers, in every data format.

python deploy/demo/example_data.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "specs" / "data"
TRAIN, EVAL = 48, 16


def sums() -> list[tuple[int, int]]:
    """Distinct pairs of numbers in a fixed random order; the first TRAIN pairs are for training."""
    pairs = [(a, b) for a in range(2, 30) for b in range(2, 10)]
    random.Random(1).shuffle(pairs)
    return pairs[: TRAIN + EVAL]


def question(a: int, b: int) -> str:
    """The prompt."""
    return f"What is {a} + {b}?"


def right(a: int, b: int) -> str:
    """The right answer."""
    return f"{a} + {b} = {a + b}."


def wrong(a: int, b: int, by: int) -> str:
    """A wrong answer, off by `by`."""
    return f"{a} + {b} = {a + b + by}, I guess."


def demonstration(a: int, b: int, number: int) -> dict[str, Any]:
    """A row for sft."""
    return {"prompt": question(a, b), "response": right(a, b)}


def pair(a: int, b: int, number: int) -> dict[str, Any]:
    """A row for reward_model, dpo, ipo and orpo; the margin grows with the error of the wrong answer."""
    by = 1 + number % 3
    return {"prompt": question(a, b), "chosen": right(a, b), "rejected": wrong(a, b, by), "margin": 0.1 * by}


def ranked(a: int, b: int, number: int) -> dict[str, Any]:
    """A row for rrhf and reward_model: three or four answers with scores."""
    answers = [right(a, b), *(wrong(a, b, by) for by in range(1, 3 + number % 2))]
    return {"prompt": question(a, b), "answers": answers, "scores": [1.0 - 0.4 * n for n in range(len(answers))]}


def labelled(a: int, b: int, number: int) -> dict[str, Any]:
    """A row for kto: right and wrong answers alternate."""
    good = number % 2 == 0
    return {"prompt": question(a, b), "response": right(a, b) if good else wrong(a, b, 1), "label": good}


def answer(a: int, b: int, number: int) -> dict[str, Any]:
    """A row for algorithms on rollouts: the question and its right answer."""
    return {"prompt": question(a, b), "answer": str(a + b)}


def text(a: int, b: int) -> dict[str, Any]:
    """A row of plain text for ppo with `ptx_coef`."""
    return {"text": f"Numbers add up in any order: {a} + {b} = {b} + {a} = {a + b}."}


FORMATS = {
    "demonstrations": demonstration,
    "pairs": pair,
    "ranked": ranked,
    "labelled": labelled,
    "answers": answer,
}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write every file."""
    FOLDER.mkdir(exist_ok=True)
    numbers = sums()
    for name, make in FORMATS.items():
        rows = [make(a, b, number) for number, (a, b) in enumerate(numbers)]
        write(FOLDER / f"{name}-train.jsonl", rows[:TRAIN])
        write(FOLDER / f"{name}-eval.jsonl", rows[TRAIN:])
    write(FOLDER / "texts.jsonl", (text(a, b) for a, b in numbers))


if __name__ == "__main__":
    main()
