"""Write the page of answer forms: what the rewards take for right, and the seconds of the worst responses.

Run it with `python -m docs.tooling.answer_page`.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from docs.tooling.shared_gpus import written_with
from tests.workers.rewards.test_answers import HOSTILE, LONG
from troupe.workers.rewards.functions import choice, exact_match
from troupe.workers.rewards.numeric import numeric

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "answers.md"
TABLES = ROOT / "tests" / "workers" / "rewards"
_SHOWN = 60
Reward = Callable[[str, str, dict[str, Any]], float]
Forms = dict[str, dict[str, list[str]]]
"""Right and wrong responses by answer."""


def numeric_forms() -> Forms:
    """The tables of `numeric`."""
    lines = map(json.loads, (TABLES / "answer_forms.jsonl").read_text("utf-8").splitlines())
    rows = ({"answer": one["answer"], "right" if one["numeric"] else "wrong": [one["response"]]} for one in lines)
    return _forms(chain(json.loads((TABLES / "answers.json").read_text("utf-8")), rows))


def choice_forms() -> Forms:
    """The table of `choice`."""
    return _forms(json.loads((TABLES / "choices.json").read_text("utf-8")))


def _forms(rows: Iterable[dict[str, Any]]) -> Forms:
    found: Forms = defaultdict(lambda: {"right": [], "wrong": []})
    for row in rows:
        for kind, own in found[row["answer"]].items():
            own += [said for said in row.get(kind, ()) if said not in own]
    return found


def counts() -> str:
    """The table of how many responses of each kind get the wrong verdict."""
    lines = [
        "| reward | right responses | false negatives | wrong responses | false positives |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, reward, forms in (("numeric", numeric, numeric_forms()), ("choice", choice, choice_forms())):
        cells = []
        for kind, verdict in (("right", 1), ("wrong", 0)):
            given = [(said, answer) for answer, own in forms.items() for said in own[kind]]
            cells += [len(given), sum(reward(said, answer, {}) != verdict for said, answer in given)]
        lines.append(f"| `{name}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def table(forms: Forms) -> str:
    """The responses by answer."""
    rows = (
        f"| {_code(answer)} | {' · '.join(map(_code, own['right']))} | {' · '.join(map(_code, own['wrong']))} |"
        for answer, own in forms.items()
    )
    return "\n".join(["| answer | right | wrong |", "|---|---|---|", *rows])


def seconds() -> str:
    """The table of the processor's seconds that each reward takes for the worst responses."""
    lines = ["| response | begins with | `numeric` | `choice` | `exact_match` |", "|---|---|---:|---:|---:|"]
    for name, text in _worst():
        cells = [_measured(reward, text) for reward in (numeric, choice, exact_match)]
        lines.append(f"| {name} | {_code(text[:24])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _worst() -> Iterator[tuple[str, str]]:
    yield from HOSTILE.items()
    yield from ((f"a million characters of {_code(part)}", text) for part, text in LONG.items() if part != "1 2 3")
    yield "16,000 counted numbers", LONG["1 2 3"]


def _measured(reward: Reward, text: str) -> str:
    longest = 0.0
    for said, answer in ((f"\\boxed{{{text}}}", "11"), (f"The answer is {text}.", "x^2-1")):
        begun = time.process_time()
        if reward(said, answer, {}) != 0:
            raise ValueError(f"{said[:80]!r} earns something")
        longest = max(longest, time.process_time() - begun)
    return f"{longest:.2f}"


def _code(text: str) -> str:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    shown = " ".join(repr(shown)[1:-1].replace("\\\\", "\\").replace("`", "'").split()).replace("|", "\\|")
    return f"`{shown}`" if shown else "(empty)"


def written(page: str, *, measured: bool) -> str:
    """The page with its tables; the seconds only if they are measured."""
    parts = [("numeric", table(numeric_forms())), ("choice", table(choice_forms()))]
    if measured:
        parts += [("counts", counts()), ("seconds", seconds())]
    return written_with(page, parts, "docs.tooling.answer_page")


def main() -> None:
    """Write the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), measured=True), encoding="utf-8")


if __name__ == "__main__":
    main()
