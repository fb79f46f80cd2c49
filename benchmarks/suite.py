"""Run every benchmark with the arguments of its goal, and write the table of docs/explanation/benchmarks.md: `make
bench`.

    python -m benchmarks.suite                    # all benchmarks, one after another: hours on two cores
    python -m benchmarks.suite --only data_plane  # some of them
    python -m benchmarks.suite --page             # no measurement: the table from the recorded results

Each benchmark writes its results to `benchmarks/recorded/NAME.json`. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recording_cost import SHARE as RECORDING
from benchmarks.save_cost import BESIDE
from benchmarks.save_cost import SHARE as WAITED
from benchmarks.support.harness import Spread, Turn, command_parser, ratios, where
from benchmarks.zero3_loading import PARTITIONED, PEAK

RECORDED = Path(__file__).parent / "recorded"
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "benchmarks.md"
BEGIN, END = "<!-- measured: python -m benchmarks.suite --page -->", "<!-- end of measured -->"
LONGEST_S = 4 * 3600
MORE_LOAD = 0.2
"""Other load, in cores, above which a row of the table is highlighted."""


@dataclass(frozen=True)
class Goal:
    """The goal for one measurement of a benchmark."""

    what: str
    contender: str
    figure: str
    """`ratio`, or a name in the contender's summary or its figures."""
    goal: float
    over: str = ""
    """The contender that a ratio is relative to; empty for the baseline."""
    most: bool = False
    """Whether the goal is a maximum; otherwise it is a minimum."""
    digits: int = 3
    """Decimals in the table."""

    def met(self, found: float) -> bool:
        """Whether a measured value meets the goal."""
        return found <= self.goal if self.most else found >= self.goal


@dataclass(frozen=True)
class Benchmark:
    """One command of the suite."""

    module: str
    arguments: tuple[str, ...]
    goals: tuple[Goal, ...]
    variant: str = ""
    """Distinguishes benchmarks of the same module."""

    @property
    def name(self) -> str:
        """Name of the results file, without its suffix."""
        return "-".join(filter(None, (self.module, self.variant)))

    @property
    def command(self) -> str:
        """The command line as a user types it."""
        return " ".join(("python -m", f"benchmarks.{self.module}", *self.arguments))


_FLOAT = ("--dtype", "float32")
_TROUPE, _EIGHT, _TORCH = "troupe", "troupe, 8 samples a prompt", "ray.put of torch tensors"
_ENGINES = "16000 engines"
_ROLLOUT = (*_FLOAT, "--groups", "8", "--samples", "8", "--runs", "3", "--turns", "4")
_SIXTEEN = ("--lengths", "natural", "--max-tokens", "16")
_TAIL = ("--lengths", "long-tail", "--max-tokens", "64")
_FOUR_GROUPS = ("--groups", "4", "--samples", "8", "--micro-batch-tokens", "1024")
_QUEUE = ("--groups", "16", "--concurrency", "32")


def _sampling(variant: str, what: str, *arguments: str) -> Benchmark:
    """A variant of rollout_throughput, against the baseline that is faster on this machine."""
    goal = Goal(f"tokens/s {what}, of `AsyncLLM`", _TROUPE, "ratio", 0.97)
    return Benchmark("rollout_throughput", (*_ROLLOUT, "--baseline", "AsyncLLM", *arguments), (goal,), variant)


SUITE = (
    Benchmark(
        "rollout_throughput",
        (*_ROLLOUT, *_SIXTEEN),
        (Goal("tokens/s, of the better of bare `LLM.generate` and `AsyncLLM`", _TROUPE, "ratio", 0.97),),
    ),
    _sampling("2-engines", "with two engines", *_SIXTEEN, "--engines", "2", "--threads", "1"),
    _sampling("concurrency-16", "with 16 sequences at a time", *_SIXTEEN, "--concurrency", "16"),
    _sampling("fixed", "with responses of one length", "--lengths", "fixed", "--max-tokens", "16"),
    _sampling("long-tail", "with long-tailed lengths", *_TAIL),
    _sampling("queue", "with long-tailed lengths, a quarter of the sequences at a time", *_TAIL, *_QUEUE),
    _sampling("no-prefix-caching", "without prefix caching", *_SIXTEEN, "--no-prefix-caching"),
    _sampling("training", "beside a process that trains", *_SIXTEEN, "--training"),
    Benchmark(
        "episode_throughput",
        (*_FLOAT, "--turns", "5"),
        (Goal("tokens/s of episodes of one turn, of the plain path", "episodes", "ratio", 0.97),),
        "one-turn",
    ),
    Benchmark(
        "episode_throughput",
        (*_FLOAT, "--episode-turns", "8", "--samples", "4", "--max-tokens", "8", "--turns", "5"),
        (Goal("tokens/s of episodes of eight turns, of a bare `AsyncLLM` loop", "episodes", "ratio", 0.95),),
        "eight-turns",
    ),
    Benchmark(
        "grpo_step",
        (*_FLOAT, "--trl", *_FOUR_GROUPS, "--turns", "5"),
        (
            Goal("tokens/s of a step, of the bare loop", _TROUPE, "ratio", 0.93),
            Goal("tokens/s of a step, of TRL's GRPOTrainer", _TROUPE, "ratio", 4.0, over="TRL", digits=2),
        ),
    ),
    Benchmark(
        "ppo_step",
        (*_FLOAT, "--turns", "3"),
        (Goal("tokens/s of a step with four models, of its stages one by one", _TROUPE, "ratio", 0.95),),
    ),
    Benchmark(
        "weight_sync",
        (*_FLOAT, "--turns", "7", "--max-tokens", "8"),
        (
            Goal("rate of new weights with publishing, of copy + load", _TROUPE, "ratio", 0.87),
            Goal("from pause to resumption alone", "troupe, pause to resume", "ratio", 0.87),
        ),
    ),
    Benchmark(
        "data_plane",
        ("--turns", "5"),
        (
            Goal("GB/s of `put`, of `memcpy`", "troupe put", "ratio", 0.9),
            Goal("GB/s of `put`, of torch tensors", "troupe put", "ratio", 10.0, over=_TORCH, digits=1),
        ),
    ),
    Benchmark(
        "controller_cost",
        ("--turns", "5"),
        (Goal("CPU us of the driver for a sequence", _EIGHT, "cpu_us_per_sequence", 50.0, most=True, digits=1),),
    ),
    Benchmark("pipeline_bubble", (), (Goal("max(R, T)/step at staleness 4", "staleness 4", "ratio", 0.97),)),
    Benchmark(
        "controller_scale",
        ("--engines", "1000", "16000", "--paced-steps", "2"),
        (
            Goal("sequences/s with 16 000 engines, of 1 000", _ENGINES, "ratio", 0.9),
            Goal("p99 dispatch with 16 000 engines, ms", _ENGINES, "p99 dispatch, ms", 5.0, most=True, digits=1),
        ),
    ),
    Benchmark(
        "recording_cost",
        (*_FLOAT, *_FOUR_GROUPS, "--turns", "10"),
        (Goal("CPU time of recording, % of the step's", _TROUPE, RECORDING, 1.0, most=True, digits=2),),
    ),
    Benchmark(
        "recovery",
        (*_FLOAT, "--turns", "5"),
        (Goal("engine killed until all it held is sampled again, of a bare engine's start", _TROUPE, "ratio", 0.91),),
    ),
    Benchmark(
        "startup",
        ("--turns", "3"),
        (Goal("seconds of `troupe run` to its first token, tiny model", _TROUPE, "seconds", 8.0, most=True, digits=1),),
    ),
    Benchmark(
        "startup",
        ("--turns", "3", "--spec", "deploy/specs/laptop-grpo.yaml"),
        (Goal("the same with SmolLM2-135M", _TROUPE, "seconds", 12.0, most=True, digits=1),),
        "smollm2",
    ),
    Benchmark(
        "startup",
        ("--turns", "3", "--running"),
        (Goal("the same on a running cluster, tiny model", _TROUPE, "seconds", 5.0, most=True, digits=1),),
        "running",
    ),
    Benchmark(
        "packing",
        ("--groups", "2", "--turns", "3"),
        (
            Goal("updates a second with packed rows, of padded ones", "packed", "ratio", 1.3, digits=2),
            Goal("the same with shared prompts", "packed, prompts shared", "ratio", 1.5, digits=2),
        ),
    ),
    Benchmark(
        "zero3_loading",
        (),
        (Goal("peak host memory of each of 2 ranks, of the model", PARTITIONED, PEAK, 0.7, most=True, digits=2),),
    ),
    Benchmark(
        "save_cost",
        ("--turns", "3"),
        (
            Goal("steps/s with a save each beside training, of saves that wait", BESIDE, "ratio", 1.1, digits=2),
            Goal("time that training waits for such a save, % of the step", BESIDE, WAITED, 10.0, most=True, digits=1),
        ),
    ),
    Benchmark(
        "time_to_reward",
        (),
        (
            Goal("runs to a reward of 0.8 a second, of the bare loop", _TROUPE, "ratio", 1.0, digits=2),
            Goal("runs to a reward of 0.8 a second, of TRL", _TROUPE, "ratio", 1.0, over="TRL", digits=2),
        ),
    ),
)  # fmt: skip


def recorded(benchmark: Benchmark) -> Mapping[str, Any] | None:
    """The recorded results of a benchmark; None where there are none."""
    path = RECORDED / f"{benchmark.name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def figure_of(document: Mapping[str, Any], goal: Goal) -> Spread:
    """The measurement of a goal in a benchmark's results. Raises KeyError where the results do not have it."""
    if goal.over:
        own, other = ([Turn(**turn) for turn in document["turns"][name]] for name in (goal.contender, goal.over))
        return Spread.of(ratios(own, other))
    summary = document["summary"][goal.contender]
    return Spread(**(summary[goal.figure] if goal.figure in summary else summary["figures"][goal.figure]))


def table(benchmarks: Sequence[Benchmark] = SUITE) -> str:
    """The Markdown table of goals and measurements, with other load, command and machine."""
    lines = ["| what | measured | goal | | other load, cores | command |", "|---|---|---|---|---|---|"]
    machines: dict[str, str] = {}
    for benchmark in benchmarks:
        document = recorded(benchmark)
        for goal in benchmark.goals:
            wanted = f"{'at most' if goal.most else 'at least'} {goal.goal:g}"
            if document is None:
                cells = (goal.what, "not measured", wanted, "", "", f"`{benchmark.command}`")
            else:
                found = figure_of(document, goal)
                load = Spread(**document["summary"][goal.contender]["foreign_cores"])
                verdict = "met" if goal.met(found.median) else "missed"
                loaded = f"**{load.text(2)}**" if load.median > MORE_LOAD else load.text(2)
                cells = (goal.what, found.text(goal.digits), wanted, verdict, loaded, f"`{benchmark.command}`")
                machines[benchmark.name] = where(document["machine"], document["versions"], document["time"][:10])
            lines.append(f"| {' | '.join(cells)} |")
    measured_on = [
        f"- {machine}: {', '.join(name for name, own in machines.items() if own == machine)}"
        for machine in dict.fromkeys(machines.values())
    ]
    return "\n".join([*lines, "", "Median (least .. greatest) of the turns. Measured on", "", *measured_on])


def write_page(page: Path = PAGE) -> None:
    """Replace the table between the marks of the page. Raises ValueError where the page has no marks."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no marks for the table: add the lines {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


def run(benchmark: Benchmark) -> bool:
    """Run a benchmark; returns whether it succeeded."""
    path = RECORDED / f"{benchmark.name}.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}", *benchmark.arguments, "--json", str(path)]
    print(f"\n{benchmark.command}", flush=True)
    try:
        return subprocess.run(command, timeout=LONGEST_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    """Measure and write the page; returns exit code 1 if a benchmark failed."""
    parser = command_parser("suite", __doc__)
    names = [benchmark.name for benchmark in SUITE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="benchmarks to run (default: all)")
    parser.add_argument(
        "--page", action="store_true", help="write the page from the recorded results, without measuring"
    )
    given = parser.parse_args()
    began = time.monotonic()
    chosen = [] if given.page else [benchmark for benchmark in SUITE if benchmark.name in given.only]
    failed = [benchmark.name for benchmark in chosen if not run(benchmark)]
    write_page()
    print(f"wrote {PAGE} after {time.monotonic() - began:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
