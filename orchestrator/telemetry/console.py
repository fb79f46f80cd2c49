"""Terminal output of a run: a live display in a terminal; otherwise one line per step, and some in a long phase."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TextIO

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from troupe.orchestrator.telemetry.run_summary import RunSummary, duration
from troupe.workers.contract.text import printable

SHOWN_STEPS = 8
"""Rows of the live table."""
UNWRITABLE = (OSError, ValueError)
"""What a stream raises and what ends no run: a full disk, no reader, a stream that is closed or lacks a character."""
NO_UPDATE = "no update: no sample has an advantage"
QUIET_S = 30.0
"""Without a terminal: seconds of silence after which the progress of the current phase is printed."""


@dataclass(frozen=True)
class Column:
    """A column of the live table. It shows the first of the named metrics that a step has."""

    title: str
    names: tuple[str, ...]
    format: str


COLUMNS = (
    Column("reward", ("reward/mean",), ".3f"),
    Column("loss", ("policy/nll", "policy/preference_loss", "reward_model/preference_loss"), ".4f"),
    Column("accuracy", ("policy/accuracy", "reward_model/accuracy"), ".3f"),
    Column("margin", ("policy/margin", "reward_model/margin"), ".3f"),
    Column("KL", ("kl_ref", "policy/kl_ref"), ".4f"),
    Column("entropy", ("policy/entropy",), ".3f"),
    Column("length", ("response_tokens/mean",), ".0f"),
    Column("tok/s", ("response_tokens_per_s",), ".0f"),
    Column("generate s", ("seconds/generate",), ".1f"),
    Column("update s", ("seconds/update",), ".1f"),
    Column("sync s", ("seconds/sync",), ".1f"),
)


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    steps: int
    """Steps that have ended."""
    total: int
    phase: str
    """The current phase; empty before the first."""
    done: int
    """Parts of the phase that have ended."""
    parts: int
    phase_s: float
    """Seconds since the phase began."""
    step_s: float
    """Seconds since the last step ended."""


class _Phase(NamedTuple):
    """What `Console.phase` shows; see its arguments."""

    name: str = ""
    done: int = 0
    total: int = 0
    waiting_for: str = ""
    unit: str = ""

    @property
    def text(self) -> str:
        """Its name, and its parts if there are several."""
        return f"{self.name} {self.done}/{self.total} {self.unit}".rstrip() if self.total > 1 else self.name


class EndLines(NamedTuple):
    """What the terminal shows of the verdicts on a run that has ended."""

    alarms: list[str]
    """The lines of all alarms; without one, that the run is healthy, if it is complete."""
    faster: list[str]
    """What would make the run faster, a line for each change."""


class RunVerdicts(Protocol):
    """Looks at the records of a run while it trains: `orchestrator/insight/verdicts/apply.py`."""

    def after_step(self, step: int) -> None:
        """Look at them, if it is time to. Does not wait for the result."""
        ...

    def at_end(self, complete: bool) -> EndLines:
        """The verdicts on a run that has ended, completely or with an error."""
        ...


class Console:
    """Shows one run. Every method may be called before `start`; shows everything once."""

    def __init__(self, stream: TextIO | None = None, quiet_s: float = QUIET_S) -> None:
        """Write to `stream`, or to standard output. Without a terminal, no silence is much longer than `quiet_s`."""
        self._stream = stream or sys.stdout
        self._terminal = Terminal(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._redirected: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._name = ""
        self._total = 0
        self._done = 0
        self._phase = _Phase()
        self._phase_started = self._started = self._step_ended = time.monotonic()
        self._summary = RunSummary(0)
        self._latest: deque[tuple[int, Mapping[str, object]]] = deque(maxlen=SHOWN_STEPS)
        self._quiet_s = quiet_s
        self._printed = time.monotonic()
        self._writing = threading.RLock()
        self._closed = threading.Event()
        self._verdicts: RunVerdicts | None = None

    def start(self, spec_name: str, total_steps: int, verdicts: RunVerdicts | None = None) -> None:
        """Start showing a run; with `verdicts`, also what these say about its records."""
        self._verdicts = verdicts
        self._name, self._total = spec_name, total_steps
        self._started, self._summary = time.monotonic(), RunSummary(total_steps)
        if self._terminal.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._terminal, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start()
            self._redirected = _follow_live()
        else:
            self._line(f"{spec_name}: {total_steps} steps")
            threading.Thread(target=self._break_silences, name="console", daemon=True).start()

    def phase(self, name: str, done: int = 0, total: int = 1, waiting_for: str = "", *, unit: str = "") -> None:
        """Show the current phase of the step and its progress: in the live display, or after a silence."""
        if name != self._phase.name:
            self._phase_started = time.monotonic()
        self._phase = _Phase(name, done, total, waiting_for, unit)

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Show the metrics of the finished step `step`, counted from 1."""
        self._done = step
        self._step_ended = time.monotonic()
        self._latest.append((step, metrics))
        self._summary.add(step, metrics)
        if self._live is None:
            cells = ((column.title, cell(metrics, column)) for column in COLUMNS)
            shown = [f"{title} {text}" for title, text in cells if text != "-"]
            line = [f"step {step}/{self._total}", *shown, note(metrics), self._summary.left()]
            self._line("  ".join(filter(None, line)))
        if self._verdicts is not None and step < self._total:  # the last step's are in the summary
            self._verdicts.after_step(step)

    def evaluation(self, step: int, metrics: Mapping[str, object]) -> None:
        """Takes in an evaluation that ended after its step was shown; `message` shows it."""

    def progress(self) -> Progress:
        """Where the run is. May be called from any thread."""
        now = time.monotonic()
        phase, in_phase, in_step = self._phase, now - self._phase_started, now - self._step_ended
        return Progress(self._done, self._total, phase.name, phase.done, phase.total, in_phase, in_step)

    def message(self, text: str) -> None:
        """Print a line; it stays above the live display."""
        text = printable(text)
        if self._live is None:
            self._line(text)
        else:
            with suppress(*UNWRITABLE):
                self._terminal.print(Text(text))

    def aside(self, text: str) -> None:
        """Print a line of another thread than the run's; nothing once the run has ended, whose lines are the last."""
        with self._writing:
            if not self._closed.is_set():
                self.message(text)

    def finish(self, summary: Mapping[str, object], *, hurried: bool = False) -> None:
        """Close the live display and print a summary: these lines, the steps', and the verdicts unless `hurried`."""
        self.close()
        judge = None if hurried else self._verdicts
        verdicts = EndLines([], []) if judge is None else judge.at_end(complete=True)
        taken = duration(time.monotonic() - self._started)
        summarized = {
            "learning": self._summary.learns(),
            "time": ", ".join(filter(None, [taken, self._summary.bound(), self._summary.balance()])),
            "bottleneck": self._summary.bottleneck(),
            "to go faster": "; ".join(verdicts.faster),
        }
        summary = {**summary, **{name: text for name, text in summarized.items() if text}}
        if self._terminal.is_terminal:
            table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
            for name, value in summary.items():
                table.add_row(Text(name, style="bold"), Text(format_value(value)))
            with suppress(*UNWRITABLE):
                self._terminal.print(table)
        else:
            width = max((len(name) for name in summary), default=0)
            for name, value in summary.items():
                self._line(f"{name:<{width}}  {format_value(value)}")
        for line in verdicts.alarms:
            self._line(line)

    def fail(self) -> None:
        """Close the live display of a run that failed and print what is wrong with the steps it made."""
        self.close()
        if self._verdicts is not None and self._done:
            for line in self._verdicts.at_end(complete=False).alarms:
                self._line(line)

    def close(self) -> None:
        """Restore the terminal; required if a run ends without `finish` or `fail`."""
        with self._writing:
            self._closed.set()
        if self._live is not None:
            with suppress(*UNWRITABLE):
                self._live.stop()
            self._live = None
            for handler, stream in self._redirected:
                handler.setStream(stream)

    def _line(self, text: str) -> None:
        # Not through rich, which wraps long lines at a width even without a terminal.
        with self._writing, suppress(*UNWRITABLE):
            self._stream.write(text + "\n")
            self._stream.flush()
        self._printed = time.monotonic()

    def _break_silences(self) -> None:
        """Prints the current phase after each `quiet_s` of silence, in a thread until `close`: a phase may report
        nothing for minutes, or block the event loop."""
        while not self._closed.wait(max(0.0, self._printed + self._quiet_s - time.monotonic())):
            if time.monotonic() - self._printed < self._quiet_s:
                continue
            if progress := self._progress():
                step = f"step {self._done + 1}/{self._total}: " if 0 < self._done < self._total else ""
                self.aside(step + progress)
            else:
                self._printed = time.monotonic()

    def _progress(self) -> str:
        """The current phase, what it has done, and for how long; empty before the first phase."""
        phase, seconds = self._phase, round(time.monotonic() - self._phase_started)
        taken = f" for {seconds} s" if seconds else ""  # a phase may begin at the end of a silence
        rest = f", waiting for {phase.waiting_for}" if phase.waiting_for else ""
        return f"{phase.text}{taken}{rest}" if phase.name else ""

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        progress = f"step {self._done}/{self._total}"
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=30),
            Text(progress),
            Text(self._progress()),
        )
        summary = " · ".join(filter(None, [self._summary.learns(), self._summary.left(), self._summary.bound()]))
        return Group(head, Text(summary, style="dim"), self._table()) if self._latest else head

    def _table(self) -> Table:
        latest = [*self._latest]  # a step may end while this thread draws
        columns = [column for column in COLUMNS if any(cell(m, column) != "-" for _, m in latest)]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("step", *(column.title for column in columns)):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column()
        for step, metrics in latest:
            table.add_row(str(step), *(cell(metrics, column) for column in columns), note(metrics))
        return table


def cell(metrics: Mapping[str, object], column: Column) -> str:
    """A step's value in a column, or a dash."""
    for name in column.names:
        value = metrics.get(name)
        if isinstance(value, int | float):
            return format(value, column.format)
    return "-"


def note(metrics: Mapping[str, object]) -> str:
    """Why a step has no metrics of an update, or empty. Without an advantage it is made, for every rank to
    participate, but moves nothing."""
    empty = "policy/empty_updates" in metrics and "policy/loss" not in metrics
    return NO_UPDATE if empty or not metrics.get("updates", 1.0) else ""


def format_value(value: object) -> str:
    """Format a summary value: whole numbers without decimals, others to four significant digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"


def _follow_live() -> list[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """Redirect log handlers of the standard streams above the live display; returns each with its stream."""
    redirected = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__):
            redirected.append((handler, handler.setStream(sys.stderr)))
    return [(handler, stream) for handler, stream in redirected if stream is not None]
