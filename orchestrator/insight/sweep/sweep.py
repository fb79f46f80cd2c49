"""`troupe sweep`: starts the trials as child processes, ends bad ones early, and writes what they show."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.bench.points import settings_label
from troupe.orchestrator.insight.report.page import render
from troupe.orchestrator.insight.report.report import REPORT, page_data
from troupe.orchestrator.insight.sweep.halving import Halving
from troupe.orchestrator.insight.sweep.results import (
    DEFAULTS,
    KL,
    REWARD,
    Lines,
    SettingResult,
    Status,
    TrialResult,
    best_of,
    default_metric,
    frontier,
    metric_value,
    sentence,
)
from troupe.orchestrator.insight.sweep.trials import Trial
from troupe.orchestrator.live.diff import field_changes
from troupe.orchestrator.runs.checkpoints import saved_run
from troupe.orchestrator.runs.children import ChildCommand, describe, stop_all
from troupe.orchestrator.runs.epochs import plan_counted
from troupe.orchestrator.signals import SIGNALS_S, STOPPED
from troupe.orchestrator.spec.chain import to_send
from troupe.orchestrator.spec.yaml_reader import read_file
from troupe.orchestrator.telemetry.run_folder import METRICS, RunFolder
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

RECORD = "sweep.json"
"""File in the sweep's folder that has the results, and which trials were ended early."""


@dataclass(frozen=True)
class SweepRequest:
    """The user's request."""

    trials: Sequence[Trial]
    folder: Path
    metric: str | None
    """Metric that settings are compared by, or None for the first of `DEFAULTS` that all have."""
    lowest: bool
    """Whether its lowest value is the best."""
    at_once: int
    halve_at: int | None = None
    """First step at which trials are compared and may end early, or None to complete all."""
    address: str | None = None


class SweepRun:
    """The trials of a sweep, and what has become of them."""

    def __init__(self, request: SweepRequest, say: Callable[[str], None]) -> None:
        self.request = request
        self._say = say
        self._running: dict[str, ChildCommand] = {}
        self._ended: dict[str, tuple[Status, str]] = {}
        """Status and reason of trials that do not go on."""
        self._compared: dict[str, int] = {}
        """Lines of a trial's metrics that have been compared."""
        self._first = {trial.setting: trial.name for trial in reversed(request.trials)}
        """The trial with the first seed of each setting."""
        steps = max(trial.spec.schedule.steps for trial in request.trials)
        self._halving = None if request.halve_at is None else Halving(request.halve_at, steps)

    def resume(self) -> None:
        """Take up what a sweep in this folder has recorded, or begin one. Raises UsageError if a trial's spec is not
        the one that it began with."""
        folder, trials = self.request.folder, self.request.trials
        known = (folder / RECORD).is_file()
        if known and (there := len([*folder.glob("trial-*.yaml")])) != len(trials):
            raise UsageError(f"{folder} has {there} trials, not {len(trials)}; use another --out")
        for trial in trials:
            self._keep_spec(trial)
        early = json.loads((folder / RECORD).read_text(encoding="utf-8"))["stopped_early"] if known else {}
        self._ended |= {name: ("stopped early", reason) for name, reason in early.items()}
        for trial in trials:
            if _complete(trial):
                self._ended[trial.name] = ("complete", "")
            self._compare(trial)

    def run(self) -> None:
        """Run every trial that is left. If it is interrupted, stop the active ones, which save."""
        try:
            while self._start_next() or self._running:
                time.sleep(SIGNALS_S)
                self._look()
        finally:
            stop_all([*self._running.values()])
            self._look()
            self._write()

    def record(self) -> dict[str, Any]:
        """The results as JSON-ready data."""
        lines = {trial.name: _lines(trial) for trial in self.request.trials}
        metric = self.request.metric or default_metric([one for one in lines.values() if one]) or ""
        settings = self._settings(metric, lines)
        best = best_of(settings, self._sign(metric))
        return {
            "folder": str(self.request.folder),
            "metric": metric,
            "best": best[0].label if best else None,
            "inseparable": [one.label for one in best[1:]],
            "sentence": sentence(best, metric),
            "settings": [one.record() for one in settings],
            "frontier": frontier(trial for one in settings for trial in one.trials),
            "stopped_early": {name: why for name, (status, why) in self._ended.items() if status == "stopped early"},
        }

    def _settings(self, metric: str, lines: Mapping[str, Lines]) -> list[SettingResult]:
        found: dict[int, list[TrialResult]] = {}
        for trial in self.request.trials:
            found.setdefault(trial.setting, []).append(self._result(trial, lines[trial.name], metric))
        values = [trial.settings for trial in self.request.trials[: len(found)]]
        return [SettingResult(settings_label(values[i]) or "the spec", values[i], tuple(found[i])) for i in found]

    def _sign(self, metric: str) -> float:
        """1 if the highest value of the metric is best, -1 if the lowest."""
        return -1.0 if self.request.lowest else DEFAULTS.get(metric, 1.0)

    def write_page(self) -> Path | None:
        """Write the report of all trials that have recorded steps, or return None without one."""
        begun = [trial for trial in self.request.trials if (trial.last / METRICS).is_file()]
        if not begun:
            return None
        data = page_data([RunFolder(trial.last) for trial in begun])
        for run, trial in zip(data["runs"], begun, strict=True):
            run["label"] = trial.label
        write_atomic(page := self.request.folder / REPORT, render(data | {"sweep": self.record()}))
        return page

    def _start_next(self) -> bool:
        """Start trials while there is room; whether any is left."""
        left = [trial for trial in self.request.trials if self._may_start(trial)]
        for trial in left[: self.request.at_once - len(self._running)]:
            self._say(f"{trial.name} ({trial.label}): started; it prints to {trial.folder}.log")
            address = [] if self.request.address is None else ["--address", self.request.address]
            arguments = ["run", f"{trial.folder}.yaml", "--out", str(trial.folder), "--resume", *address]
            self._running[trial.name] = ChildCommand(arguments, Path(f"{trial.folder}.log"))
        return bool(left)

    def _may_start(self, trial: Trial) -> bool:
        """Whether a trial neither runs nor has ended. With halving, the other seeds of a setting wait for the first,
        which decides for them."""
        if trial.name in self._ended or trial.name in self._running:
            return False
        first = self._first[trial.setting]
        return self._halving is None or trial.name == first or self._ended.get(first, ("", ""))[0] == "complete"

    def _look(self) -> None:
        """Settle the trials that have ended, and compare the others."""
        for trial in self.request.trials:
            child = self._running.get(trial.name)
            if child is None:
                continue
            if (code := child.ended()) is not None:
                del self._running[trial.name]
                self._settle(trial, code, child.last_line())
            elif (why := self._compare(trial)) and trial.name not in self._ended:
                self._ended[trial.name] = ("stopped early", why)
                self._write()
                child.stop()

    def _settle(self, trial: Trial, code: int, last_line: str) -> None:
        if _complete(trial):
            self._ended[trial.name] = ("complete", "")
        elif trial.name not in self._ended and code == STOPPED:
            self._ended[trial.name] = ("stopped", "")
        elif trial.name not in self._ended:
            self._ended[trial.name] = ("failed", f"{describe(code)}: {last_line}")
        status, reason = self._ended[trial.name]
        self._say(f"{trial.name} ({trial.label}): {status}{reason and f': {reason}'}")
        self._write()

    def _compare(self, trial: Trial) -> str:
        """Compare the new steps of a trial, if it is the first of its setting; why it ends early, or empty."""
        if self._halving is None or trial.name != self._first[trial.setting]:
            return ""
        metric, lines, why = self.request.metric or "", _lines(trial), ""
        for number in range(self._compared.get(trial.name, 0), len(lines)):
            value = metric_value(metric, lines[: number + 1]) if metric in lines[number] else None
            step = lines[number]["step"]
            if value is not None and self._halving.stops(trial.name, step, self._sign(metric) * value):
                why = why or f"{metric} {value:.4g} at step {step} is below the best third"
        self._compared[trial.name] = len(lines)
        return why

    def _result(self, trial: Trial, lines: Lines, metric: str) -> TrialResult:
        status, reason = self._ended.get(trial.name, ("running" if trial.name in self._running else "waiting", ""))
        step = max((line["step"] for line in lines if isinstance(line.get("step"), int)), default=0)
        values = [metric_value(name, lines) for name in (metric, KL, REWARD)]
        return TrialResult(trial.name, trial.spec.seed, str(trial.folder), status, reason, step, *values)

    def _keep_spec(self, trial: Trial) -> None:
        """Write a trial's file beside its folder. Raises UsageError if another one is there."""
        file = Path(f"{trial.folder}.yaml")
        if not file.is_file():
            to_send(trial.document, trial.runs).write(file)
            return
        kept = plan_counted(read_file(file), self._say, trial.folder)
        pairs = zip(kept, trial.runs, strict=False)
        changes = [(now.field(field), *of) for old, now in pairs for field, *of in field_changes(old.spec, now.spec)]
        if len(kept) != len(trial.runs):
            changes = [("the number of runs", len(kept), len(trial.runs))]
        if changes:
            changed, before, after = changes[0]
            raise UsageError(
                f"{file}: {changed} is {before}, now {after}: a sweep resumes unchanged; use another --out"
            )

    def _write(self) -> None:
        record = json.dumps(self.record(), indent=1, ensure_ascii=False)
        write_atomic(self.request.folder / RECORD, record + "\n", PRIVATE)


def _complete(trial: Trial) -> bool:
    return all(saved_run(run.spec, run.out).complete for run in reversed(trial.runs))


def _lines(trial: Trial) -> Lines:
    """The metrics of the last run."""
    return RunFolder(trial.last).metrics() if (trial.last / METRICS).is_file() else []
