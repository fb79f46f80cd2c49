"""The data of a page that follows an active run: small answers, and only what is new since the last one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troupe.orchestrator.insight.report.page import render
from troupe.orchestrator.insight.report.report import first_groups, sample_block, summary
from troupe.orchestrator.insight.report.samples import TokenTexts
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.units import MIB

Json = dict[str, Any]

_WATCHED = ("metrics.jsonl", "events.jsonl", "spec.yaml", "trajectories")
"""Whatever changes in a run changes the time or the size of one of these."""
_NONE = "-"
_RETRY_S = 60.0
"""After this a tokenizer that did not answer is asked again: it may only be slow while a run loads its models."""
_STEP_BYTES = 8 * MIB
"""Samples of one step that the page gets."""


class LiveData:
    """What a live page asks for. Every method reads the files anew, except samples of finished steps."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises UsageError if a folder holds no run."""
        self._runs = [RunFolder(folder) for folder in folders]
        self._texts = [TokenTexts(run.spec.get("model") or {}, _RETRY_S) for run in self._runs]

    def mark(self) -> str:
        """Changes whenever the runs' records change."""
        found: list[object] = []
        for path in (run.path / name for run in self._runs for name in _WATCHED):
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append(None)
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def page(self) -> str:
        """The page with the runs' metrics; it asks for the rest itself, because token texts take seconds at first."""
        stores = {"samples": [_store([]) for _ in self._runs]}
        data = _summary(self._runs, [_lines(run) for run in self._runs])
        return render(data | stores | {"mark": "", "after": -1}, live=True)

    def data(self, after: int, known: str = "", held: str = "") -> Json:
        """Everything but the metrics up to step `after`, and but all samples before the last step.

        A run that has fewer steps than `after`, or no longer the line that the page has, was started or resumed anew:
        then all metrics are there, and `after` is -1 in the answer.

        Args:
            after: Last step that the page has of every run; -1 for none.
            known: `line` of every run in the page, separated by spaces; not checked if empty.
            held: `file` of every run's samples in the page, in the same way: the newest samples are sent only if
                they are in another file.
        """
        mark = self.mark()
        runs = [RunFolder(run.path) for run in self._runs]  # the spec is kept in them, and a resumption may change it
        lines = [_lines(run) for run in runs]
        data = _summary(runs, lines)
        lost = any(line not in own.values() for line, own in zip(known.split(), lines, strict=False))
        if lost or any(run["steps_done"] < after for run in data["runs"]):
            after = -1
        files = held.split() if after >= 0 else []  # otherwise the page drops its data
        files += [_NONE] * (len(runs) - len(files))
        for run in data["runs"]:
            for group in ("metrics", "used"):
                run[group] = {name: _later(points, after) for name, points in run[group].items()}
        samples = [self._newest(number, run, file) for number, (run, file) in enumerate(zip(runs, files, strict=False))]
        for store, texts in zip(samples, self._texts, strict=True):
            store["problem"] = texts.problem
        return data | {"after": after, "mark": mark, "samples": samples}

    def samples(self, run: int, step: int) -> Json | None:
        """The samples of a step, or the first groups of many; None if it has none."""
        if not 0 <= run < len(self._runs):
            return None
        block = sample_block(self._runs[run], step, self._texts[run])
        return block and first_groups(block, _STEP_BYTES)

    def _newest(self, number: int, run: RunFolder, held: str) -> Json:
        """The steps with samples, and the samples of the last one unless they are in the file that the page has."""
        files = run.sample_files()
        file = _identity(files)
        if file == held:
            return _store(list(files)) | {"file": file}
        found = self.samples(number, max(files)) if files else None
        return _store(list(files)) | {"blocks": [found] if found else [], "file": file if found else _NONE}


def _lines(run: RunFolder) -> dict[int, str]:
    """Step and time of every line of the metrics, by step: a step that was done again has another time.

    With the number of evaluations until then that ended later: with one more, metrics that a page has are incomplete.
    """
    late = run.late_evaluations()
    steps = {step: line.get("time") for line in run.metrics() if isinstance(step := line.get("step"), int)}
    return {step: f"{step}@{time}" + "+" * sum(one <= step for one in late) for step, time in steps.items()}


def _summary(runs: Sequence[RunFolder], lines: Sequence[dict[int, str]]) -> Json:
    """The data without samples; `line` of each run is its last one and identifies the page."""
    data = summary(runs)
    for run, own in zip(data["runs"], lines, strict=True):
        run["line"] = own[max(own)] if own else _NONE
    return data


def _identity(files: dict[int, Path]) -> str:
    """Step and time of the last file."""
    if not files:
        return _NONE
    step = max(files)
    try:
        return f"{step}@{files[step].stat().st_mtime_ns}"
    except OSError:
        return _NONE  # deleted since


def _store(steps: list[int]) -> Json:
    return {"blocks": [], "steps": steps, "rule": "", "problem": "", "file": _NONE}


def _later(points: Json, after: int) -> Json:
    start = next((i for i, step in enumerate(points["steps"]) if step > after), len(points["steps"]))
    return {"steps": points["steps"][start:], "values": points["values"][start:]}
