"""Run every benchmark with the arguments of its goal, and write the table of docs/explanation/benchmarks.md: `make
bench`.

    python -m benchmarks.suite                    # all that is not recorded yet for this code and this kind of machine
    python -m benchmarks.suite --minutes 30       # those of them that end within 30 minutes; call again for the rest
    python -m benchmarks.suite --list             # no measurement: what is recorded, stale or missing, and its seconds
    python -m benchmarks.suite --only data_plane  # some of them
    python -m benchmarks.suite --again            # recorded ones as well
    python -m benchmarks.suite --page             # no measurement: the table from the recorded results

Each benchmark writes its results to `benchmarks/recorded/KIND/NAME.json`, where KIND is the kind of machine. Nothing
else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.controller_limits import MEMORY, P99
from benchmarks.data_plane import BATCH, TORCH_BATCH
from benchmarks.data_plane import TORCH as _TORCH
from benchmarks.recording_cost import SHARE as RECORDING
from benchmarks.roofline import DECODE, UPDATE
from benchmarks.save_cost import BESIDE
from benchmarks.save_cost import SHARE as WAITED
from benchmarks.support.code_state import CodeState, code_state, of_benchmark
from benchmarks.support.goals import Benchmark, Goal
from benchmarks.support.grpo_setup import KERNELS
from benchmarks.support.harness import SKIPPED, command_parser, kind_of, machine
from benchmarks.support.records import Row, columns, fitting, note_command, path_of, row_of
from benchmarks.support.suite_page import PAGE, table, write_page
from benchmarks.weight_sync_delta import CHANGED
from benchmarks.zero3_loading import PARTITIONED, PEAK

LONGEST_S = 4 * 3600
SPARE = 1.15
"""A benchmark starts only if so many times its seconds are left of `--minutes`."""

_FLOAT = ("--dtype", "float32")
_TROUPE, _EIGHT, _OVER_RAY = "troupe", "troupe, 8 samples a prompt", "troupe over Ray, 8 samples a prompt"
_ENGINES = "16000 engines"
_ROLLOUT = (*_FLOAT, "--groups", "8", "--samples", "8", "--runs", "3", "--turns", "4")
_SIXTEEN = ("--lengths", "natural", "--max-tokens", "16")
_TAIL = ("--lengths", "long-tail", "--max-tokens", "64")
_GROUPS = ("--groups", "4", "--samples", "8")
_FOUR_GROUPS = (*_GROUPS, "--micro-batch-tokens", "1024")
_FEW_SHOT = ("--groups", "1", "--samples", "16", "--examples", "8", "--micro-batch-tokens", "1536")
_QUEUE = ("--groups", "16", "--concurrency", "32")


def _sampling(variant: str, what: str, estimate_s: int, *arguments: str) -> Benchmark:
    """A variant of rollout_throughput, against the baseline that is faster on this machine."""
    goal = Goal(f"tokens/s {what}, of `AsyncLLM`", _TROUPE, "ratio", 0.97)
    command = (*_ROLLOUT, "--baseline", "AsyncLLM", *arguments)
    return Benchmark("rollout_throughput", command, (goal,), variant, estimate_s)


SUITE = (
    Benchmark(
        "rollout_throughput",
        (*_ROLLOUT, *_SIXTEEN),
        (Goal("tokens/s, of the better of bare `LLM.generate` and `AsyncLLM`", _TROUPE, "ratio", 0.97),),
        estimate_s=330,
    ),
    _sampling("2-engines", "with two engines", 280, *_SIXTEEN, "--engines", "2", "--threads", "1"),
    _sampling("concurrency-16", "with 16 sequences at a time", 250, *_SIXTEEN, "--concurrency", "16"),
    _sampling("fixed", "with responses of one length", 230, "--lengths", "fixed", "--max-tokens", "16"),
    _sampling("long-tail", "with long-tailed lengths", 250, *_TAIL),
    _sampling("queue", "with long-tailed lengths, a quarter of the sequences at a time", 340, *_TAIL, *_QUEUE),
    _sampling("no-prefix-caching", "without prefix caching", 250, *_SIXTEEN, "--no-prefix-caching"),
    Benchmark(
        "episode_throughput",
        (*_FLOAT, "--turns", "5"),
        (Goal("tokens/s of episodes of one turn, of the plain path", "episodes", "ratio", 0.97),),
        "one-turn",
        estimate_s=250,
    ),
    Benchmark(
        "episode_throughput",
        (*_FLOAT, "--episode-turns", "8", "--samples", "4", "--max-tokens", "8", "--turns", "5"),
        (Goal("tokens/s of episodes of eight turns, of a bare `AsyncLLM` loop", "episodes", "ratio", 0.95),),
        "eight-turns",
        estimate_s=310,
    ),
    Benchmark(
        "grpo_step",
        (*_FLOAT, "--trl", *_FOUR_GROUPS, "--turns", "5"),
        (
            Goal("tokens/s of a step, of the bare loop", _TROUPE, "ratio", 1.3),
            Goal("tokens/s of a step, of TRL's GRPOTrainer", _TROUPE, "ratio", 5.0, over="TRL", digits=2),
        ),
        estimate_s=380,
    ),
    Benchmark(
        "grpo_step",
        # With 1024, Ray killed a worker for memory in the last turns, on 24 GiB.
        (*_FLOAT, "--kernels", *_GROUPS, "--micro-batch-tokens", "768", "--turns", "5"),
        (
            Goal("the same, of the bare loop with the product's kernels", _TROUPE, "ratio", 0.93, over=KERNELS),
            Goal("that loop, of the bare loop", KERNELS, "ratio", 1.3),
        ),
        "kernels",
        estimate_s=380,
    ),
    Benchmark(
        "grpo_step",
        (*_FLOAT, "--trl", *_FEW_SHOT, "--turns", "3"),
        (
            Goal("tokens/s of a step, 16 samples behind few-shot prompts, of the bare loop", _TROUPE, "ratio", 2.0),
            Goal("the same, of TRL's GRPOTrainer", _TROUPE, "ratio", 5.0, over="TRL", digits=2),
        ),
        "few-shot",
        estimate_s=300,
    ),
    Benchmark(
        "ppo_step",
        (*_FLOAT, "--turns", "3"),
        (Goal("tokens/s of a step with four models, of its stages one by one", _TROUPE, "ratio", 0.95),),
        estimate_s=300,
    ),
    Benchmark(
        "weight_sync",
        (*_FLOAT, "--turns", "7", "--max-tokens", "8"),
        (
            Goal("rate of new weights with publishing, of copy + load", _TROUPE, "ratio", 0.87),
            Goal("from pause to resumption alone", "troupe, pause to resume", "ratio", 0.87),
        ),
        estimate_s=120,
    ),
    Benchmark(
        "weight_sync_delta",
        ("--learning-rate", "1e-5"),
        (
            Goal("times fewer bytes where 2 % of the weights change", CHANGED, "times fewer bytes", 50.0, digits=1),
            Goal("rate of new weights on another node, of sending all", CHANGED, "ratio", 1.0, digits=2),
        ),
        estimate_s=60,
    ),
    Benchmark(
        "data_plane",
        ("--turns", "5"),
        (
            Goal("GB/s of `put`, of `memcpy`", "troupe put", "ratio", 0.9),
            Goal("GB/s of `put`, of torch tensors", "troupe put", "ratio", 10.0, over=_TORCH, digits=1),
            Goal("GB/s from `get` to a first batch, of tensors", BATCH, "ratio", 1.0, over=TORCH_BATCH, digits=1),
        ),
        estimate_s=60,
    ),
    Benchmark(
        "data_plane",
        ("--samples", "62000", "--repeat", "1", "--turns", "3"),
        (Goal("GB/s of `put` of 4 GB, of `memcpy`", "troupe put", "ratio", 0.9),),
        "4-gb",
        estimate_s=150,
    ),
    Benchmark(
        "controller_cost",
        ("--turns", "5"),
        (Goal("CPU us of the driver for a sequence", _EIGHT, "cpu_us_per_sequence", 50.0, most=True, digits=1),),
        estimate_s=60,
    ),
    Benchmark(
        "controller_cost",
        ("--groups", "64", "--turns", "5"),
        (Goal("the same over Ray actors", _OVER_RAY, "cpu_us_per_sequence", 12.5, most=True, digits=1),),
        "over-ray",
        estimate_s=240,
    ),
    Benchmark(
        "pipeline_bubble",
        ("--turns", "3"),
        (Goal("max(R, T)/step at staleness 4", "staleness 4", "ratio", 0.97),),
        estimate_s=240,
    ),
    Benchmark(
        "async_overlap",
        (*_FLOAT, "--steps", "10", "--turns", "3"),
        (
            Goal("samples/s at staleness 1, of a core each for engine and trainer", "staleness 1", "ratio", 0.9),
            Goal("the same, of staleness 0", "staleness 1", "ratio", 1.5, over="staleness 0", digits=2),
        ),
        estimate_s=720,
    ),
    Benchmark(
        "controller_scale",
        ("--engines", "1000", "16000", "--paced-steps", "2"),
        (
            Goal("sequences/s with 16 000 engines, of 1 000", _ENGINES, "ratio", 0.9),
            Goal("p99 dispatch with 16 000 engines, ms", _ENGINES, "p99 dispatch, ms", 5.0, most=True, digits=1),
        ),
        estimate_s=200,
    ),
    Benchmark(
        "controller_limits",
        ("--engines", "1000", "16000", "--steps", "3", "--turns", "2"),
        (
            Goal("GiB of the controller, a million samples in flight", _ENGINES, MEMORY, 1.5, most=True, digits=2),
            Goal("p99 delay of its event loop, ms", _ENGINES, P99, 10.0, most=True, digits=1),
        ),
        estimate_s=240,
    ),
    Benchmark(
        "recording_cost",
        (*_FLOAT, *_FOUR_GROUPS, "--turns", "6"),
        (Goal("CPU time of recording, % of the step's", _TROUPE, RECORDING, 1.0, most=True, digits=2),),
        estimate_s=190,
    ),
    Benchmark(
        "recovery",
        (*_FLOAT, "--turns", "5"),
        (Goal("engine killed until all it held is sampled again, of a bare engine's start", _TROUPE, "ratio", 0.91),),
        estimate_s=300,
    ),
    Benchmark(
        "startup",
        ("--turns", "3"),
        (Goal("seconds of `troupe run` to its first token, tiny model", _TROUPE, "seconds", 8.0, most=True, digits=1),),
        estimate_s=120,
    ),
    Benchmark(
        "startup",
        ("--turns", "3", "--spec", "deploy/specs/laptop-grpo.yaml"),
        (Goal("the same with SmolLM2-135M", _TROUPE, "seconds", 12.0, most=True, digits=1),),
        "smollm2",
        estimate_s=160,
    ),
    Benchmark(
        "startup",
        ("--turns", "3", "--running"),
        (Goal("the same on a running cluster, tiny model", _TROUPE, "seconds", 5.0, most=True, digits=1),),
        "running",
        estimate_s=120,
    ),
    Benchmark(
        "packing",
        ("--groups", "2", "--turns", "3"),
        (
            Goal("updates a second with packed rows, of padded ones", "packed", "ratio", 1.3, digits=2),
            Goal("the same with shared prompts", "packed, prompts shared", "ratio", 1.5, digits=2),
        ),
        estimate_s=100,
    ),
    Benchmark(
        "zero3_loading",
        (),
        (Goal("peak host memory of each of 2 ranks, of the model", PARTITIONED, PEAK, 0.7, most=True, digits=2),),
        estimate_s=60,
    ),
    Benchmark(
        "save_cost",
        ("--turns", "3"),
        (
            Goal("steps/s with a save each beside training, of saves that wait", BESIDE, "ratio", 1.1, digits=2),
            Goal("time that training waits for such a save, % of the step", BESIDE, WAITED, 10.0, most=True, digits=1),
        ),
        estimate_s=120,
    ),
    Benchmark(
        "roofline",
        (*_FLOAT, "--turns", "5"),
        (
            Goal("update in float32, of the peak of matrix products", UPDATE, "ratio", 0.6, digits=2),
            Goal("decode of 64 sequences, of the peak that limits it", DECODE, "ratio", 0.7, digits=2),
        ),
        estimate_s=300,
    ),
    Benchmark(
        "roofline",
        ("--dtype", "bfloat16", "--turns", "5"),
        (
            Goal("update in bfloat16, of the peak of matrix products", UPDATE, "ratio", 0.4, digits=2),
            Goal("decode of 64 sequences in bfloat16, of the peak that limits it", DECODE, "ratio", 0.7, digits=2),
        ),
        "bfloat16",
        estimate_s=200,
    ),
    Benchmark(
        "time_to_reward",
        ("--no-trl",),
        (Goal("runs to a reward of 0.8 a second, of the bare loop", _TROUPE, "ratio", 1.0, digits=2),),
        estimate_s=1100,
    ),
    Benchmark(
        "time_to_reward",
        ("--seeds", "19", "--steps", "10"),
        (Goal("the same, of TRL, cut after ten steps", _TROUPE, "ratio", 1.0, over="TRL", digits=2),),
        "trl",
        estimate_s=1100,
    ),
)  # fmt: skip


def rows(names: Sequence[str], kind: str, code: CodeState) -> list[Row]:
    """The benchmarks of these names on this kind of machine, in the order of the suite."""
    return [
        row_of(benchmark, kind, of_benchmark(f"benchmarks.{benchmark.module}", code))
        for benchmark in SUITE
        if benchmark.name in names
    ]


def show(listed: Sequence[Row], kind: str, code: CodeState) -> None:
    """Print what is recorded, stale or missing, and how long it takes."""
    printed = Table(title=f"{kind}, {code.text}")
    for title in ("benchmark", "state", "seconds"):
        printed.add_column(title, justify="right" if title == "seconds" else "left")
    for row in listed:
        printed.add_row(row.benchmark.name, row.state, f"{row.seconds:.0f}{'' if row.measured else ' (estimate)'}")
    Console(width=None if sys.stdout.isatty() else 140).print(printed)
    left = [row.seconds for row in listed if row.state != "recorded"]
    print(f"{len(listed) - len(left)} recorded; {len(left)} to measure, about {sum(left) / 60:.0f} minutes")


def run(benchmark: Benchmark, kind: str) -> bool:
    """Run a benchmark; returns whether it succeeded, or said why this machine cannot run it."""
    arguments = (*benchmark.arguments, "--json", str(path_of(benchmark, kind)))
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}", *arguments]
    print(f"\n{benchmark.command}", flush=True)
    try:
        ended = subprocess.run(command, timeout=LONGEST_S).returncode
    except subprocess.TimeoutExpired:
        return False
    if not ended:
        note_command(benchmark, kind)
    return ended in (0, SKIPPED)


def measure(waiting: Sequence[Row], kind: str, limit_s: float) -> tuple[list[str], list[str]]:
    """Run benchmarks, and write the page after each.

    Args:
        waiting: The benchmarks.
        kind: The kind of this machine.
        limit_s: Seconds within which all must end; one that would not is left out.

    Returns:
        The names of those that failed, and of those that were left out.
    """
    ends, failed, left = time.monotonic() + limit_s, list[str](), list(waiting)
    while (row := fitting(left, (ends - time.monotonic()) / SPARE)) is not None:
        left.remove(row)
        if not run(row.benchmark, kind):
            failed.append(row.benchmark.name)
        write_page(table(SUITE, columns(SUITE)))
    return failed, [row.benchmark.name for row in left]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("suite", __doc__)
    names = [benchmark.name for benchmark in SUITE]
    add = parser.add_argument
    add("--only", nargs="+", choices=names, default=names, help="benchmarks to run (default: all)")
    add("--again", action="store_true", help="run benchmarks as well that are recorded for this code and machine")
    add("--minutes", type=float, default=float("inf"), help="start no benchmark that would not end in time")
    add("--list", action="store_true", help="print what is recorded, stale or missing, without measuring")
    add("--page", action="store_true", help="write the page from the recorded results, without measuring")
    given = parser.parse_args(arguments)
    if not given.minutes > 0:
        parser.error(f"--minutes must be above 0, got {given.minutes:g}")
    return given


def main() -> int:
    """Measure and write the page; returns exit code 1 if a benchmark failed."""
    given = parse(sys.argv[1:])
    began, kind, code = time.monotonic(), kind_of(machine()), code_state()
    listed = rows(given.only, kind, code)
    if given.list:
        show(listed, kind, code)
        return 0
    waiting = [] if given.page else [row for row in listed if given.again or row.state != "recorded"]
    failed, left = measure(waiting, kind, 60 * given.minutes)
    write_page(table(SUITE, columns(SUITE)))
    print(f"wrote {PAGE} after {time.monotonic() - began:.0f} s")
    if left:
        print(f"left for another call, with more --minutes: {', '.join(left)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
