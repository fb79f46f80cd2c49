"""Training that overlaps with sampling, by staleness: a real engine and a real trainer with a core each.

    python -m benchmarks.async_overlap --groups 4 --samples 8 --max-tokens 16 --steps 12

Each turn is a run of the product for each staleness, with the same seed and number of samples. Engine and trainer have
one thread each, and their processes are kept on one core each. With staleness 0 they alternate, which gives the seconds
of the two stages alone: R to sample and score a step's groups, T to prepare and train them. No schedule takes less than
max(R, T) for a step; this bound is the baseline. What the driver, the reward worker and weight syncs take from the two
cores is part of the difference. With staleness the phase `sync` is the wait for the publication of the weights alone:
the engine loads them beside the next update.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.support.harness import (
    NotCorrect,
    Report,
    Turn,
    Unfit,
    Unit,
    command_parser,
    progress,
    rotated,
    run_benchmark,
)
from benchmarks.support.processes import Meter, RemoteObject
from benchmarks.support.workload import MAX_GAP, PHASES, Settings, add_settings, grpo_spec
from troupe.orchestrator.live.diff import changed
from troupe.orchestrator.telemetry.console import Console

BOUND = "bound"
SAMPLES = Unit("samples", "sample", digits=2)
REWARD, GAP = "reward of the measured steps", "gap between sampler and trainer, nats"
STALENESS = "mean staleness of a sample"
WARM_UP = 2
"""First steps, in which the pipeline fills; they are not measured. Nor are the last ones, in which it drains."""
_RUN_TIMEOUT_S = 1800.0
Line = Mapping[str, float]


def name_of(staleness: int) -> str:
    """The contender's name."""
    return f"staleness {staleness}"


class MeteredConsole(Console):
    """Reads the meter while the run's processes are there: Ray leaves the CPU time of ended ones to no parent."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self._meter = Meter()
        self.taken = (0.0, 0.0)
        """CPU seconds and other load until the last step."""

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """See `Console.step`."""
        super().step(step, metrics)
        self.taken = self._meter.read()


class OverlapRun:
    """One run of the product, in a process of its own."""

    def __init__(self, settings: Settings, learning_rate: float) -> None:
        self._settings = settings
        self._learning_rate = learning_rate

    def run(self, staleness: int, steps: int) -> tuple[list[dict[str, float]], float, float]:
        """Train; returns the lines of metrics.jsonl, CPU seconds and other load. Raises NotCorrect, TroupeError."""
        from benchmarks.support.pinned_workers import PinnedPolicy, PinnedRollout
        from troupe.orchestrator.runs.session import RunRequest
        from troupe.orchestrator.runs.training import train

        settings = self._settings
        spec = grpo_spec(settings, settings.model, steps, settings.groups * (steps + staleness), self._learning_rate)
        with tempfile.TemporaryDirectory() as folder:
            out, console = Path(folder) / "run", MeteredConsole()
            classes = {"rollout": PinnedRollout, "policy": PinnedPolicy}
            spec = changed(spec, {"schedule.max_staleness": staleness}, "async_overlap")
            request = RunRequest(spec, out, False, None, classes)
            outcome = train(request, console)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        trained = outcome.ledger["trained"] + outcome.ledger["dropped"]
        if (stalest := max(line["staleness/max"] for line in lines)) > staleness:
            raise NotCorrect(f"a sample was {stalest:g} versions old, with a limit of {staleness}")
        if outcome.steps_done != steps or trained != steps * settings.sequences:
            raise NotCorrect(f"{outcome.steps_done} of {steps} steps ended, the ledger has {outcome.ledger}")
        return lines, *console.taken


def measured(lines: Sequence[Line], drained: int) -> Sequence[Line]:
    """The steps between those in which the pipeline fills and those in which it drains. Raises NotCorrect."""
    chosen = lines[WARM_UP : len(lines) - drained]
    if not chosen:
        raise NotCorrect(f"no step of {len(lines)} is measured: give more --steps")
    return chosen


def turn_of(lines: Sequence[Line], sequences: int, cpu_s: float, foreign: float) -> Turn:
    """A run's measured steps; CPU seconds and load are those of the whole run."""
    phases = {name: sum(line[f"seconds/{name}"] for line in lines) for name in PHASES}
    wall_s = sum(line["seconds/step"] for line in lines)
    figures = {
        "step, s": wall_s / len(lines),
        REWARD: fmean(line["reward/mean"] for line in lines),
        GAP: fmean(line["policy/rollout_logprob_gap"] for line in lines),
        "largest mean gap of a step": max(line["policy/rollout_logprob_gap"] for line in lines),
        STALENESS: fmean(line["staleness/mean"] for line in lines),
    }
    return Turn(wall_s, float(len(lines) * sequences), cpu_s, foreign, phases, figures)


def bound_of(alone: Turn) -> Turn:
    """max(R, T) of the stages of a run with staleness 0, for as many steps."""
    generate, train = alone.phases["generate"], alone.phases["prepare"] + alone.phases["update"]
    steps = alone.wall_s / alone.figures["step, s"]
    figures = {
        "step, s": max(generate, train) / steps,
        "R of a step, s": generate / steps,
        "T of a step, s": train / steps,
        "weight sync of a step, s": alone.phases["sync"] / steps,
    }
    return Turn(max(generate, train), alone.amount, 0.0, alone.foreign_cores, figures=figures)


def measure(given: argparse.Namespace) -> Report:
    """Run every staleness in every turn. Raises NotCorrect, ChildFailed, Unfit."""
    if (cores := len(os.sched_getaffinity(0))) < 2:
        raise Unfit(f"engine and trainer need a core each, {cores} is available")
    # With vowels every group has a signal, and so every step an update.
    settings = Settings.of(given, lengths="natural", task="vowels", engines=1, threads=1)
    staleness, steps, turns = given.staleness, given.steps, given.turns
    names = {name_of(bound): bound for bound in staleness}
    taken: dict[str, list[Turn]] = {BOUND: [], **{name: [] for name in names}}
    for turn in range(turns):
        for name in rotated(list(names), turn):
            child = RemoteObject(name, OverlapRun, settings, given.learning_rate)
            try:
                lines, cpu_s, foreign = child.call("run", names[name], steps, timeout_s=_RUN_TIMEOUT_S)
            finally:
                child.close()
            taken[name].append(turn_of(measured(lines, max(staleness)), settings.sequences, cpu_s, foreign))
            progress(f"turn {turn + 1} of {turns}, {name}: {taken[name][-1].figures}")
        taken[BOUND].append(bound_of(taken[name_of(0)][-1]))
    gap = max(turn.figures["largest mean gap of a step"] for turn in taken[name_of(0)])
    if gap > MAX_GAP:
        raise NotCorrect(f"sampler and trainer differ by {gap:.3f} nats per token with staleness 0, at most {MAX_GAP}")
    checks = {
        "samples": f"every run trained {steps} x {settings.sequences} samples, each once, none beyond its staleness",
        "sampler to trainer": f"at most {gap:.2g} nats per token with staleness 0",
    }
    return Report("async_overlap", taken, BOUND, checks, SAMPLES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("async_overlap", __doc__, 1)
    add_settings(parser, groups=4, samples=8, max_tokens=16, concurrency=32, micro_batch_tokens=1024, seed=17)
    add = parser.add_argument
    add("--staleness", type=int, nargs="+", default=[0, 1, 2], help="limits of staleness; 0 must be one of them")
    add("--steps", type=int, default=12, help="steps of each run (default: 12)")
    add("--learning-rate", type=float, default=3e-5)
    given = parser.parse_args(arguments)
    if 0 not in given.staleness:
        parser.error("--staleness needs 0: it gives the seconds of the stages alone")
    return given


if __name__ == "__main__":
    run_benchmark(parse, measure)
