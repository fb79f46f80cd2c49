"""The samples of a run as rows of examples: the answers of each group with their scores, and its best answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.chain import BEST, RANKED
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.atomic_file import write_atomic

_COLUMNS = ("prompt_uid", "messages", "response", "reward")


def write_ranked(folder: Path) -> None:
    """Write the samples of a complete run to its folder. Raises DataError if no sample has a reward.

    `best.jsonl` has a row for each group: `prompt`, the best `response` and its `reward`. `ranked.jsonl` has those with
    different rewards: `prompt`, `answers`, best first, and `scores`.
    """
    run = RunFolder(folder)
    groups = [group for step in run.sample_files() for group in _groups(run.samples(step, _COLUMNS).to_pylist())]
    if not groups:
        raise DataError(f"{folder}: no sample has a reward, so there is nothing to train the next stage on")
    best = ({"prompt": p, "response": found[0][0], "reward": found[0][1]} for p, found in groups)
    ranked = (
        {"prompt": p, "answers": [answer for answer, _ in found], "scores": [score for _, score in found]}
        for p, found in groups
        if found[0][1] > found[-1][1]
    )
    for name, rows in ((BEST, best), (RANKED, ranked)):
        write_atomic(folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _groups(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, list[tuple[str, float]]]]:
    """(prompt, answers with rewards, best first) of each group of a step, in an order that does not depend on which
    finished first. Equal answers count once, with the highest reward; samples that failed have none."""
    found: dict[str, tuple[Any, dict[str, float]]] = {}
    for sample in samples:
        reward = sample["reward"]
        if reward is None or not math.isfinite(reward):
            continue
        _, answers = found.setdefault(sample["prompt_uid"], (json.loads(sample["messages"]), {}))
        answers[sample["response"]] = max(reward, answers.get(sample["response"], reward))
    for uid in sorted(found):
        prompt, answers = found[uid]
        yield prompt, sorted(answers.items(), key=lambda pair: (-pair[1], pair[0]))
