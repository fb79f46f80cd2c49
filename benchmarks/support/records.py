"""What the suite has recorded: a folder for each kind of machine, and in it a file for each benchmark.

`benchmarks/recorded/KIND/NAME.json`, where KIND is `harness.kind_of` the machine: results of one kind never replace
those of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from benchmarks.support.code_state import UNKNOWN, CodeState
from benchmarks.support.goals import Benchmark

RECORDED = Path(__file__).parents[1] / "recorded"
COMMAND = "command"
"""Field of a results file with the suite's command, which `note_command` adds."""
State = Literal["recorded", "stale", "missing"]


@dataclass(frozen=True)
class Recorded:
    """The results file of a benchmark on a kind of machine."""

    document: Mapping[str, Any]
    command: str
    """The suite's command of the benchmark."""

    @property
    def of_command(self) -> bool:
        """Whether the command was measured that the suite has now."""
        return self.document.get(COMMAND) == self.command

    @property
    def code(self) -> CodeState:
        """The code that was measured."""
        return CodeState(**self.document["code"]) if "code" in self.document else UNKNOWN

    @property
    def elapsed_s(self) -> float | None:
        """Seconds that the command took; None if it has not ended, or ended before results said so."""
        return self.document.get("elapsed_s")

    @property
    def day(self) -> str:
        """The date of the results."""
        return self.document["time"][:10]


@dataclass(frozen=True)
class Column:
    """What is recorded on one kind of machine."""

    kind: str
    found: Mapping[str, Recorded]
    """By name of the benchmark."""

    @cached_property
    def newest(self) -> Recorded:
        """The results that were recorded last."""
        return max(self.found.values(), key=lambda one: one.document["time"])

    @property
    def machine(self) -> str:
        """Processor and threads."""
        machine = self.newest.document["machine"]
        return f"{machine['cpu']}, {machine['cores']} threads"

    def older(self, name: str) -> bool:
        """Whether results are of another product than the newest ones, of one without a name, or of another command."""
        own = self.found[name]
        return own.code == UNKNOWN or own.code.digest != self.newest.code.digest or not own.of_command


def path_of(benchmark: Benchmark, kind: str, folder: Path = RECORDED) -> Path:
    """The results file of a benchmark on a kind of machine."""
    return folder / kind / f"{benchmark.name}.json"


def recorded(benchmark: Benchmark, kind: str, folder: Path = RECORDED) -> Recorded | None:
    """What is recorded of a benchmark on a kind of machine; None where nothing is."""
    path = path_of(benchmark, kind, folder)
    return Recorded(json.loads(path.read_text()), benchmark.command) if path.is_file() else None


def note_command(benchmark: Benchmark, kind: str, folder: Path = RECORDED) -> None:
    """Adds the command to the results that it has left; nothing where it left none."""
    path = path_of(benchmark, kind, folder)
    if path.is_file():
        document = json.loads(path.read_text()) | {COMMAND: benchmark.command}
        path.write_text(json.dumps(document, indent=2) + "\n")


def columns(benchmarks: Sequence[Benchmark], folder: Path = RECORDED) -> list[Column]:
    """The kinds of machines with results of these benchmarks, by name."""
    kinds = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [
        Column(kind, {one.name: own for one in benchmarks if (own := recorded(one, kind, folder)) is not None})
        for kind in kinds
    ]
    return [column for column in found if column.found]


@dataclass(frozen=True)
class Row:
    """A benchmark on this machine: what is recorded of it, and how long it takes."""

    benchmark: Benchmark
    state: State
    seconds: float
    """Of the recorded command on this kind of machine, else on the slowest other kind, else the estimate."""
    measured: bool
    """Whether the seconds are recorded."""


def row_of(benchmark: Benchmark, kind: str, code: CodeState, folder: Path = RECORDED) -> Row:
    """The state of a benchmark on this kind of machine: stale is what other code or commands, or one cut short, left.

    Args:
        benchmark: The benchmark.
        kind: The kind of this machine.
        code: That of the checkout, with the benchmark's modules.
        folder: Where results are recorded.
    """
    own = recorded(benchmark, kind, folder)
    if own is not None and own.elapsed_s is not None:
        same = own.code.measures_as(code) and own.of_command
        return Row(benchmark, "recorded" if same else "stale", own.elapsed_s, measured=True)
    others = (column.found.get(benchmark.name) for column in columns([benchmark], folder))
    elapsed = [one.elapsed_s for one in others if one is not None and one.elapsed_s is not None]
    state: State = "missing" if own is None else "stale"
    return Row(benchmark, state, max(elapsed, default=benchmark.estimate_s), bool(elapsed))


def fitting(rows: Sequence[Row], left_s: float) -> Row | None:
    """The first row that ends within the seconds that are left; None if none does."""
    return next((row for row in rows if row.seconds <= left_s), None)
