"""What the user sees of a run: a live display in a terminal, one line per step anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SHOWN_STEPS = 8
"""Steps in the live table."""


@dataclass(frozen=True)
class Column:
    """One figure of a step. Of several names the first that a step has is shown."""

    title: str
    names: tuple[str, ...]
    format: str


COLUMNS = (
    Column("reward", ("reward/mean",), ".3f"),
    Column("loss", ("policy/nll", "policy/preference_loss", "reward_model/preference_loss"), ".4f"),
    Column("accuracy", ("policy/accuracy", "reward_model/accuracy"), ".3f"),
    Column("margin", ("policy/margin", "reward_model/margin"), ".3f"),
    Column("KL", ("policy/kl_ref", "kl_ref"), ".4f"),
    Column("entropy", ("policy/entropy",), ".3f"),
    Column("length", ("response_tokens/mean",), ".0f"),
    Column("tok/s", ("response_tokens_per_s",), ".0f"),
    Column("generate s", ("seconds/generate",), ".1f"),
    Column("update s", ("seconds/update",), ".1f"),
    Column("sync s", ("seconds/sync",), ".1f"),
)


class Console:
    """Shows one run. Every method may be called whether or not `start` was; nothing is shown twice."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to `stream`, or to standard output."""
        self._stream = stream or sys.stdout
        self._terminal = Terminal(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._name = ""
        self._total = 0
        self._done = 0
        self._phase = ("", 0, 0)
        self._phase_began = time.monotonic()
        self._latest: deque[tuple[int, Mapping[str, object]]] = deque(maxlen=SHOWN_STEPS)

    def start(self, spec_name: str, total_steps: int) -> None:
        """A run begins."""
        self._name, self._total = spec_name, total_steps
        if self._terminal.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._terminal, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start()
            self._moved = _follow_live()
        else:
            self._line(f"{spec_name}: {total_steps} steps")

    def phase(self, name: str, done: int, total: int) -> None:
        """What is going on inside the step, and how far it is; shown live only."""
        if name != self._phase[0]:
            self._phase_began = time.monotonic()
        self._phase = (name, done, total)

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Step number `step` (from 1) is done."""
        self._done = step
        self._latest.append((step, metrics))
        if self._live is None:
            figures = ((column.title, cell(metrics, column)) for column in COLUMNS)
            shown = "  ".join(f"{title} {text}" for title, text in figures if text != "-")
            self._line(f"step {step}/{self._total}  {shown}".rstrip())

    def message(self, text: str) -> None:
        """Say something between steps; it stays above the live display."""
        if self._live is None:
            self._line(text)
        else:
            self._terminal.print(Text(text))

    def finish(self, summary: Mapping[str, object]) -> None:
        """The run is over: leave the display and show a table of what came of it."""
        self.close()
        if self._terminal.is_terminal:
            table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
            for name, value in summary.items():
                table.add_row(Text(name, style="bold"), Text(figure(value)))
            self._terminal.print(table)
        else:
            width = max((len(name) for name in summary), default=0)
            for name, value in summary.items():
                self._line(f"{name:<{width}}  {figure(value)}")

    def close(self) -> None:
        """Give the terminal back; needed where a run ends without `finish`."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            for handler, stream in self._moved:
                handler.setStream(stream)

    def _line(self, text: str) -> None:
        # Not through rich, which would fold long lines at a width that only a terminal has.
        self._stream.write(text + "\n")
        self._stream.flush()

    def _render(self) -> RenderableType:
        name, done, total = self._phase
        head = Table.grid(padding=(0, 1))
        progress = f"step {self._done}/{self._total}"
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=30),
            Text(progress),
            Text(f"{name} {done}/{total} ({time.monotonic() - self._phase_began:.0f} s)" if name else ""),
        )
        return Group(head, self._table()) if self._latest else head

    def _table(self) -> Table:
        columns = [column for column in COLUMNS if any(cell(m, column) != "-" for _, m in self._latest)]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("step", *(column.title for column in columns)):
            table.add_column(title, justify="right", no_wrap=True)
        for step, metrics in self._latest:
            table.add_row(str(step), *(cell(metrics, column) for column in columns))
        return table


def cell(metrics: Mapping[str, object], column: Column) -> str:
    """A step's figure under a column, or a dash."""
    for name in column.names:
        value = metrics.get(name)
        if isinstance(value, int | float):
            return format(value, column.format)
    return "-"


def figure(value: object) -> str:
    """A value of the summary: whole numbers whole, other ones to four significant digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"


def _follow_live() -> list[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """Have log handlers that hold the real standard streams write above the live display; returns what to undo."""
    moved = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__):
            moved.append((handler, handler.setStream(sys.stderr)))
    return [(handler, stream) for handler, stream in moved if stream is not None]
