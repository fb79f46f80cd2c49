"""Learning curves of every algorithm: its shipped spec, run with `troupe run` on this machine with several seeds.

    python -m benchmarks.algorithm_curves                     # every algorithm: two hours on two cores
    python -m benchmarks.algorithm_curves grpo --seeds 7 8    # some runs; the others stay as recorded
    python -m benchmarks.algorithm_curves --missing           # only runs that are not recorded
    python -m benchmarks.algorithm_curves --draw              # no run: the figure from the recorded curves
    python -m benchmarks.algorithm_curves --draw --missing    # the same, and which runs are not recorded

Results go to `benchmarks/recorded/algorithm_curves.json` and the figure to `docs/reference/images/`; the reference of
the algorithms (`python -m docs.tooling.write_reference`) shows both.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.harness import command_parser, machine, versions, where
from docs.tooling.algorithm_reference import Curves, spec_of
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS, TAUGHT
from troupe.orchestrator.rollouts.held_out import MeanEstimate, mean_estimate
from troupe.orchestrator.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
RECORDED = Path(__file__).parent / "recorded" / "algorithm_curves.json"
IMAGE = "images/algorithm-curves.svg"
"""The figure, relative to the page that shows it."""
FIGURE = ROOT / "docs" / "reference" / IMAGE
STEPS = 20
SEEDS = (7, 8, 9, 10, 11)
LONGEST_S = 900
METRIC, OFFLINE_METRIC = "reward/mean", "eval/loss"
METRIC_OF = dict.fromkeys(TAUGHT, "kl_ref")
"""What a run optimizes, where it is not the reward: the divergence from its teacher."""
SMOLLM2 = Path(".cache/models/smollm2-135m-instruct")
STUDENT_NOISE = 0.15
"""The student of a teacher is that teacher with normal noise in every matrix but the embedding, of this many standard
deviations of the matrix. From a random model, the log-ratios of single tokens are too noisy to learn from in 20
steps."""
SETTINGS = dict.fromkeys(TAUGHT, ("roles.policy.learning_rate=3e-5", "sampling.max_tokens=16"))
"""What a run changes in its spec."""
COLUMNS = 5
LINE, TEXT, GRID = "#3b82c4", "#808080", "#80808040"
"""Colours that are legible on a white and on a dark page."""


@dataclass(frozen=True)
class Run:
    """A run of an algorithm's shipped spec with one seed: its metric, by step."""

    values: Mapping[str, float]
    """Value by step, as JSON has it: the steps are strings."""
    step_s: float | None
    """Median seconds of a step, or None if they were not recorded."""
    machine: str
    """Where and when it ran."""


@dataclass(frozen=True)
class Runs:
    """The runs of an algorithm's shipped spec."""

    metric: str
    overrides: tuple[str, ...]
    seeds: Mapping[str, Run]
    """Runs by seed, as JSON has it: the seeds are strings."""

    @property
    def steps(self) -> list[str]:
        """The steps that all runs have, in order."""
        first, *others = [run.values for run in self.seeds.values()]
        return [step for step in first if all(step in values for values in others)]

    @property
    def step_s(self) -> float | None:
        """Seconds of a step of the fastest run: other work on the machine only adds to them."""
        return min((run.step_s for run in self.seeds.values() if run.step_s is not None), default=None)

    def estimate(self, step: str) -> MeanEstimate:
        """Mean over the seeds at a step, with its 95% interval."""
        return mean_estimate([run.values[step] for run in self.seeds.values()])


def overrides(name: str, steps: int) -> tuple[str, ...]:
    """Settings of a run besides its spec: the number of steps, or, offline, an evaluation after each step."""
    own = (f"algorithm.name={name}",) if spec_of(name).name != name else ()
    if name in OFFLINE_ALGORITHMS:
        return (*own, "evaluation.every_steps=1", "checkpoint.every_steps=0")
    return (*own, f"schedule.steps={steps}", *SETTINGS.get(name, ()))


def metric_of(name: str) -> str:
    """The metric that shows what a run of an algorithm learns."""
    return OFFLINE_METRIC if name in OFFLINE_ALGORITHMS else METRIC_OF.get(name, METRIC)


def assignments(name: str, steps: int, seed: int, student: Path | None = None) -> list[str]:
    """Everything that a run changes in its spec."""
    models = (f"model.path={student}", f"roles.reference.model.path={ROOT / SMOLLM2}") if name in TAUGHT else ()
    return [*overrides(name, steps), f"seed={seed}", *models]


def measure(name: str, steps: int, seed: int, student: Path | None = None) -> Run:
    """Run the shipped spec of an algorithm with a seed; one that learns from a teacher trains `student`.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been printed.
        subprocess.TimeoutExpired: it took longer than `LONGEST_S`.
    """
    settings = [part for setting in assignments(name, steps, seed, student) for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="troupe-curve-") as folder:
        out = Path(folder) / name
        command = [sys.executable, "-m", "troupe", "run", str(spec_of(name).path), "--out", str(out)]
        subprocess.run([*command, *settings], cwd=ROOT, timeout=LONGEST_S, check=True)
        values = {str(step): round(value, 5) for step, value in curve(out, metric_of(name)).items()}
        seconds = list(curve(out, "seconds/step").values())[1:]  # The first one compiles and fills caches.
    return Run(values, round(median(seconds), 4), where(machine(), versions(), f"{datetime.now(UTC):%Y-%m-%d}"))


def curve(run: Path, metric: str) -> dict[int, float]:
    """The metric by step. Raises ValueError if no finished step of the run has it."""
    found = {line["step"]: line[metric] for line in RunFolder(run).metrics() if line.get(metric) is not None}
    if not found:
        raise ValueError(f"{run}: no finished step has {metric}")
    return found


def noisy_copy(teacher: Path, student: Path) -> Path:
    """Write a copy of a model with `STUDENT_NOISE` in its matrices; returns its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight += STUDENT_NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(student)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(student)
    return student


def recorded(path: Path = RECORDED) -> dict[str, Runs]:
    """The recorded runs by algorithm, in the order of the tables."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    runs = {
        name: Runs(row["metric"], tuple(row["overrides"]), {seed: Run(**run) for seed, run in row["seeds"].items()})
        for name, row in document.items()
    }
    return {name: runs[name] for name in (*ALGORITHMS, *OFFLINE_ALGORITHMS) if name in runs}


def add(runs: Mapping[str, Runs], name: str, given: tuple[str, ...], seed: int, run: Run) -> dict[str, Runs]:
    """The runs with one more. A run with other settings replaces those of all seeds, with which it does not compare."""
    others = runs[name].seeds if name in runs and runs[name].overrides == given else {}
    seeds = {**others, str(seed): run}
    return {**runs, name: Runs(metric_of(name), given, {one: seeds[one] for one in sorted(seeds, key=int)})}


def write(runs: Mapping[str, Runs], path: Path) -> None:
    """Write the runs as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=1) + "\n")


def draw(runs: Mapping[str, Runs], path: Path) -> None:
    """Draw all curves as small multiples in one SVG without a background: the mean of the seeds, within the least and
    the greatest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    look: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "troupe",
        "font.family": "sans-serif",
        "font.size": 8,
    }
    colours = dict[Any, Any].fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT
    )
    rows = math.ceil(len(runs) / COLUMNS)
    with plt.rc_context({**look, **colours, "axes.spines.top": False, "axes.spines.right": False, "grid.color": GRID}):
        figure, axes = plt.subplots(rows, COLUMNS, figsize=(2.1 * COLUMNS, 1.5 * rows), squeeze=False)
        for axis in axes.flat[len(runs) :]:
            axis.set_visible(False)
        for axis, (name, run) in zip(axes.flat, runs.items(), strict=False):
            if len(run.seeds) > 1:
                all_values = [[one.values[step] for one in run.seeds.values()] for step in run.steps]
                bounds = [min(values) for values in all_values], [max(values) for values in all_values]
                axis.fill_between([int(step) for step in run.steps], *bounds, color=LINE, alpha=0.2, linewidth=0)
            means = [round(run.estimate(step).value, 5) for step in run.steps]
            axis.plot([int(step) for step in run.steps], means, color=LINE, linewidth=1.5)
            axis.set_title(name, fontsize=9, color=TEXT)
            axis.set_ylabel(run.metric, fontsize=7)
            axis.grid(True, linewidth=0.5)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def curves(runs: Mapping[str, Runs] | None = None) -> Curves:
    """The recorded runs as the reference of the algorithms shows them."""
    runs = recorded() if runs is None else runs
    lines = [
        "The shipped specs, run with several seeds by `python -m benchmarks.algorithm_curves`: a random two-layer",
        f"model, a reward for the share of vowels, {STEPS} steps (`distill` and `gkd`: SmolLM2 with noise in its",
        "weights, its divergence from SmolLM2, a learning rate of 3e-5 and responses of 16 tokens). Offline",
        "algorithms run as many steps as their specs have; their curve is the loss on held-out examples, each",
        "algorithm's own, so the levels do not compare; their seeds differ in the order of the examples and in a new",
        "score head. Values are means over the seeds, with a 95% interval (Student's t). The band of the figure is",
        "from the least to the greatest seed, the line their mean.",
        "",
        f"![Curves of all algorithms]({IMAGE})",
        "",
        *_ranking(runs),
        "| algorithm | metric | seeds | first step | last step | 95% interval |",
        "|---|---|---:|---:|---:|---:|",
    ]
    texts: dict[str, str] = {}
    for name, run in runs.items():
        first, last = run.steps[0], run.steps[-1]
        before, after = run.estimate(first), run.estimate(last)
        ends = f"{before.value:.3f} (step {first}) | {after.value:.3f} (step {last}) | {_interval(after)}"
        lines.append(f"| [`{name}`](#{name}) | `{run.metric}` | {len(run.seeds)} | {ends} |")
        seeds = f", means of {len(run.seeds)} seeds" if len(run.seeds) > 1 else ", one seed"
        texts[name] = f"`{run.metric}` {before.value:.3f} at step {first}, {after.value:.3f} at step {last}{seeds}"
    if missing := [f"`{name}`" for name in (*ALGORITHMS, *OFFLINE_ALGORITHMS) if name not in runs]:
        lines += ["", f"No run is recorded of {', '.join(missing)}."]
    places = dict.fromkeys(one.machine for run in runs.values() for one in run.seeds.values())
    return Curves("\n".join([*lines, "", *(f"Measured on {place}." for place in places)]), texts)


def _ranking(runs: Mapping[str, Runs]) -> list[str]:
    """The algorithms that learn from a reward, by what they reach with equal samples, as Markdown."""
    seconds = {name: run.step_s for name, run in runs.items() if run.metric == METRIC and run.step_s is not None}
    if not seconds:
        return []
    ranked = sorted(seconds, key=lambda name: -runs[name].estimate(runs[name].steps[-1]).value)
    budget = STEPS * min(seconds.values())
    lines = [
        "Those that learn from a reward sample 32 responses of at most 6 tokens a step, of the same prompts with the",
        "same model, so they compare with each other, at equal samples and at equal seconds of training. What they say",
        "about a model that can do its task already is little: a random policy has to move ten nats per token or so to",
        "speak in vowels, so the specs of algorithms with a KL term or a limit on a step loosen it. All but `trpo`,",
        "which has none, have the same learning rate. Rows that differ in what they do with the ratio only are equal",
        "here: with one update of a batch it is 1. With a model this small, a step takes the seconds of its calls, not",
        "of its products; the fastest run counts, because others ran beside it.",
        "",
        f"| algorithm | after {STEPS} steps | 95% interval | seconds of a step | after {budget:.1f} s | 95% interval |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in ranked:
        run = runs[name]
        within = run.steps[: max(1, int(budget / seconds[name] + 1e-9))][-1]
        last, timed = run.estimate(run.steps[-1]), run.estimate(within)
        shown = f"{last.value:.3f} | {_interval(last)} | {seconds[name]:.2f} | {timed.value:.3f} | {_interval(timed)}"
        lines.append(f"| [`{name}`](#{name}) | {shown} |")
    return [*lines, ""]


def _interval(estimate: MeanEstimate) -> str:
    return "" if estimate.low is None or estimate.high is None else f"{estimate.low:.3f} to {estimate.high:.3f}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("algorithm_curves", __doc__)
    every = [*ALGORITHMS, *OFFLINE_ALGORITHMS]
    parser.add_argument("names", nargs="*", metavar="NAME", help="algorithms to run (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run on rollouts (default: {STEPS})")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of the runs (default: 7 to 11)")
    parser.add_argument("--missing", action="store_true", help="list runs that are not recorded, and leave out others")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--draw", action="store_true", help="draw the recorded curves, without running anything")
    parser.add_argument("--json", type=Path, default=RECORDED, help="results file; curves of other algorithms stay")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the figure, an SVG file")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(every)):
        parser.error(f"no algorithm {', '.join(unknown)}; known: {', '.join(every)}")
    given.names = given.names or every
    return given


def missing(runs: Mapping[str, Runs], names: Sequence[str], seeds: Sequence[int], steps: int) -> dict[str, list[int]]:
    """Seeds whose runs with these settings are not recorded, by algorithm; one that misses none is left out."""
    known = {name: row.seeds for name, row in runs.items() if row.overrides == overrides(name, steps)}
    left = {name: [seed for seed in seeds if str(seed) not in known.get(name, {})] for name in names}
    return {name: found for name, found in left.items() if found}


def main() -> int:
    """Run, record and draw; returns exit code 1 if a run failed."""
    given = parse(sys.argv[1:])
    began, failed, writing = time.monotonic(), list[str](), threading.Lock()
    before = recorded(given.json) if given.missing else {}
    left = missing(before, given.names, given.seeds, given.steps)
    if given.missing:
        print(f"{sum(map(len, left.values()))} runs are not recorded")
        print("".join(f"  {name}: seeds {' '.join(map(str, seeds))}\n" for name, seeds in left.items()), end="")

    def run(name: str, seed: int, student: Path | None) -> None:
        settings = overrides(name, given.steps)
        try:
            one = measure(name, given.steps, seed, student)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            print(f"{name}, seed {seed}: {error}", file=sys.stderr)
            failed.append(name)
            return
        with writing:  # After every run, so that none is lost.
            write(add(recorded(given.json), name, settings, seed, one), given.json)

    with tempfile.TemporaryDirectory(prefix="troupe-student-") as folder, ThreadPoolExecutor(given.at_once) as pool:
        todo = [] if given.draw else [(name, seed) for name, seeds in left.items() for seed in seeds]
        # Before the threads start: no two of them can import transformers at once.
        taught = any(name in TAUGHT for name, _ in todo)
        student = noisy_copy(ROOT / SMOLLM2, Path(folder)) if taught else None
        list(pool.map(lambda one: run(one[0], one[1], student), todo))
    draw(recorded(given.json), given.figure)
    print(f"wrote {given.json} and {given.figure} after {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
