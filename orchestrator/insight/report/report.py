"""`troupe report`: collects the data of runs and writes the page."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.insight.report.overview import fitting, labels, overview, sections, spec_differences, spread
from troupe.orchestrator.insight.report.page import render
from troupe.orchestrator.insight.report.samples import TokenTexts, step_block
from troupe.orchestrator.spec.locations import is_url
from troupe.orchestrator.telemetry.run_folder import METRICS, RunFolder
from troupe.workers.contract.atomic_file import write_atomic
from troupe.workers.contract.units import MIB

logger = logging.getLogger(__name__)


Json = dict[str, Any]
REPORT = "report.html"
"""Name of the file in a run's folder, unless another is given."""

SAMPLE_BYTES = 24 * MIB
"""Samples that the page holds, over all runs, unless another number is given."""
MOST_STEPS = 120
"""Steps whose samples it then holds, over all runs: reading them is most of the work of a page of long runs."""


def write_report(folders: Sequence[Path], output: Path, budget: int | None = None) -> Path:
    """Write the report of one or several runs. Raises UsageError if a folder holds no run, or `output` is a URL;
    OSError if the file cannot be written. `budget`: bytes of samples that the page may hold, over all runs; None:
    `SAMPLE_BYTES`, of `MOST_STEPS` steps."""
    if is_url(output):
        raise UsageError(f"{output} is a URL; write the report to a disk")
    text = report_text(folders, budget)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, text)
    return output


def write_last_report(folders: Sequence[Path], output: Path) -> Path | None:
    """The report at the end of runs, or None if no step was recorded; a warning if it cannot be written."""
    begun = [folder for folder in folders if (folder / METRICS).is_file()]
    if not begun:
        return None
    try:
        return write_report(begun, output)
    except (TroupeError, OSError) as error:
        logger.warning("the report was not written: %s", error)
        return None


def report_text(folders: Sequence[Path], budget: int | None = None) -> str:
    """The page of one or several runs. Raises UsageError if a folder holds no run."""
    return render(page_data([RunFolder(folder) for folder in folders], budget))


def page_data(runs: Sequence[RunFolder], budget: int | None = None) -> Json:
    """Everything that a page shows, as JSON-ready data."""
    count, texts = max(len(runs), 1), [TokenTexts(run.spec.get("model") or {}) for run in runs]
    same = [texts[next(i for i, other in enumerate(texts) if other.model == own.model)] for own in texts]
    each = (SAMPLE_BYTES if budget is None else budget) // count
    most = max(1, MOST_STEPS // count) if budget is None else None
    samples = [samples_data(run, each, own, most) for run, own in zip(runs, same, strict=True)]
    return summary(runs) | {"samples": samples}


def summary(runs: Sequence[RunFolder]) -> Json:
    names = labels([run.name for run in runs], [run.path for run in runs])
    overviews = [overview(run, len(runs)) | {"label": label} for run, label in zip(runs, names, strict=True)]
    metrics = list(dict.fromkeys(name for one in overviews for name in one["metrics"]))
    return {
        "generated": round(time.time(), 3),
        "runs": overviews,
        "sections": sections(metrics),
        "differences": spec_differences([run.spec for run in runs]) if len(runs) > 1 else [],
    }


def samples_data(run: RunFolder, budget: int, texts: TokenTexts | None = None, most: int | None = None) -> Json:
    """The samples of as many steps as fit into the budget, evenly spread.

    Args:
        budget: In bytes.
        most: Number of steps, or None for all.
        texts: Those of several runs.
    """
    texts = texts or TokenTexts(run.spec.get("model") or {})
    files = run.sample_files()
    steps, sizes = list(files), {step: _bytes(file) for step, file in files.items()}
    found = _fitting_blocks(spread(steps, len(steps) if most is None else most), sizes, budget, run, texts)
    if len(found) == 1:
        found = [first_groups(found[-1], budget)]
    return {"blocks": found, "steps": steps, "rule": _rule(len(found), len(steps)), "problem": texts.problem}


def _fitting_blocks(
    steps: Sequence[int], sizes: Mapping[int, int], budget: int, run: RunFolder, texts: TokenTexts
) -> list[Json]:
    """Blocks of evenly spread steps within the budget; of the last step in any case. The size of a block is estimated
    from the size of its file, so that only kept blocks are read."""
    blocks: dict[int, Json | None] = {}
    written: dict[int, int] = {}

    def read(*chosen: int) -> None:
        new = [step for step in chosen if step not in blocks]
        texts.learn(_distinct_ids(run, new))  # in one process, instead of one for each step
        for step in new:
            blocks[step] = sample_block(run, step, texts)
            written[step] = _size([blocks[step]])

    if not steps:
        return []
    read(steps[-1])
    ratio = written[steps[-1]] / max(sizes[steps[-1]], 1)
    while True:
        kept = fitting(steps, lambda step, ratio=ratio: round(ratio * sizes[step]), budget)
        read(*kept)
        total = sum(written[step] for step in kept)
        if len(kept) <= 1 or total <= budget:
            return [one for step in kept if (one := blocks[step]) is not None]
        ratio = 1.05 * ratio * total / budget


def _size(blocks: Sequence[Json | None]) -> int:
    return sum(len(json.dumps(one)) for one in blocks)


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # deleted since, to make room


def sample_block(run: RunFolder, step: int, texts: TokenTexts) -> Json | None:
    """One step's samples; or None if its file cannot be read."""
    try:
        return step_block(run.samples(step), step, texts)
    except (TroupeError, KeyError) as error:
        logger.warning("the samples of step %d are left out: %s", step, error)
        return None


def _distinct_ids(run: RunFolder, steps: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for step in steps:
        try:
            ids = run.samples(step, ["response_ids"])["response_ids"].combine_chunks().flatten()
        except (TroupeError, KeyError):
            continue
        found.update(ids.unique().to_pylist())
    return found


def first_groups(block: Json, budget: int) -> Json:
    """The first rows of a block that fit: whole groups. If some do not fit, `rows` is the number of all."""
    rows, size = len(block["group"]), _size([block])
    if size <= budget:
        return block
    keep = max(1, rows * budget // size)
    while keep > 1 and keep < rows and block["group"][keep] == block["group"][keep - 1]:
        keep -= 1

    def cut(value: Any) -> Any:
        return value[:keep] if isinstance(value, list) and len(value) == rows else value

    part = {name: value if name == "vocabulary" else cut(value) for name, value in block.items()}
    part["components"] = {name: cut(values) for name, values in block["components"].items()}
    part["values"] = {name: one | {"rows": one["rows"][:keep]} for name, one in block.get("values", {}).items()}
    # Prompts are numbered in the order in which rows name them.
    part["prompts"] = block["prompts"][: max(part["prompt"], default=-1) + 1]
    return part | {"rows": rows}


def _rule(kept: int, steps: int) -> str:
    if kept == steps:
        return ""
    return f"The samples of {kept} of {steps} steps are in this file, evenly spread, so that it stays small."
