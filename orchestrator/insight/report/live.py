"""The data of a page that follows an active run: small answers, and only what is new since the last one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from troupe.orchestrator.insight.report.overview import MOST_POINTS, spread
from troupe.orchestrator.insight.report.page import render
from troupe.orchestrator.insight.report.report import first_groups, sample_block, span_block, summary
from troupe.orchestrator.insight.report.samples import TokenTexts
from troupe.orchestrator.insight.report.timeline import phases_from_metrics
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.units import MIB

Json = dict[str, Any]
Block = Callable[[int, int], Json | None]

_WATCHED = ("metrics.jsonl", "events.jsonl", "spec.yaml", "trajectories", "timeline")
"""Whatever changes in a run changes the time or the size of one of these."""
_NONE = "-"
_RETRY_S = 60.0
"""After this a tokenizer that did not answer is asked again: it may only be slow while a run loads its models."""
_STEP_BYTES = 8 * MIB
"""Samples of one step that the page gets."""


class LiveData:
    """What a live page asks for. Every method reads the files anew, except spans and samples of finished steps."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises UsageError if a folder holds no run."""
        self._runs = [RunFolder(folder) for folder in folders]
        self._texts = [TokenTexts(run.spec.get("model") or {}, _RETRY_S) for run in self._runs]
        self._times: dict[tuple[int, int], tuple[tuple[int, ...], Json | None]] = {}

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
        stores = {"samples": [_store([]) for _ in self._runs], "timeline": [_timeline(run, []) for run in self._runs]}
        data = _summary(self._runs, [_lines(run) for run in self._runs])
        return render(data | stores | {"mark": "", "after": -1}, live=True)

    def data(self, after: int, known: str = "", held: str = "") -> Json:
        """Everything but the metrics up to step `after`, and but all samples and spans before the last step.

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
        timeline = [
            _timeline(run, self._all_times(number, run)) | self._last(list(run.timeline_files()), number, self.timeline)
            for number, run in enumerate(runs)
        ]
        return data | {"after": after, "mark": mark, "samples": samples, "timeline": timeline}

    def samples(self, run: int, step: int) -> Json | None:
        """The samples of a step, or the first groups of many; None if it has none."""
        block = sample_block(self._runs[run], step, self._texts[run]) if self._known(run) else None
        return block and first_groups(block, _STEP_BYTES)

    def timeline(self, run: int, step: int) -> Json | None:
        """The spans of a step, or None if it has none."""
        return span_block(self._runs[run], step) if self._known(run) else None

    def _known(self, run: int) -> bool:
        return 0 <= run < len(self._runs)

    def _newest(self, number: int, run: RunFolder, held: str) -> Json:
        """The steps with samples, and the samples of the last one unless they are in the file that the page has."""
        files = run.sample_files()
        file = _identity(files)
        if file == held:
            return _store(list(files)) | {"file": file}
        store = self._last(list(files), number, self.samples)
        return store | {"file": file if store["blocks"] else _NONE}

    def _last(self, steps: list[int], number: int, block: Block) -> Json:
        found = block(number, steps[-1]) if steps else None
        return _store(steps) | {"blocks": [found] if found else []}

    def _all_times(self, number: int, run: RunFolder) -> list[Json]:
        """Busy and idle time of every step, of many steps evenly spread; a step is read again when its files change."""
        found: list[Json] = []
        files = run.timeline_files()
        for step in spread(list(files), MOST_POINTS):
            # Calls that cross the end of a step are in the next one's file.
            written = tuple(_written(files[one]) for one in (step, step + 1) if one in files)
            known = self._times.get((number, step))
            if known is None or known[0] != written:
                block = span_block(run, step)
                known = self._times[number, step] = (written, block and {"step": step, **block["times"]})
            if step > 0 and known[1]:
                found.append(known[1])
        return found


def _written(file: Path) -> int:
    """When a file was written, in nanoseconds; 0 if it is gone."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _lines(run: RunFolder) -> dict[int, str]:
    """Step and time of every line of the metrics, by step: a step that was done again has another time.

    With the number of evaluations until then that ended later: with one more, metrics that a page has are incomplete.
    """
    late = run.late_evaluations()
    steps = {step: line.get("time") for line in run.metrics() if isinstance(step := line.get("step"), int)}
    return {step: f"{step}@{time}" + "+" * sum(one <= step for one in late) for step, time in steps.items()}


def _summary(runs: Sequence[RunFolder], lines: Sequence[dict[int, str]]) -> Json:
    """The data without samples and spans; `line` of each run is its last one and identifies the page."""
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


def _timeline(run: RunFolder, times: list[Json]) -> Json:
    phases = phases_from_metrics(History.of(run.metrics()))
    return _store(list(run.timeline_files())) | {"phases": phases, "times": times}


def _later(points: Json, after: int) -> Json:
    start = next((i for i, step in enumerate(points["steps"]) if step > after), len(points["steps"]))
    return {"steps": points["steps"][start:], "values": points["values"][start:]}
