"""Learning curves of every algorithm: its shipped spec, run with `troupe run` on this machine.

    python -m benchmarks.algorithm_curves            # every algorithm: about half an hour on two cores
    python -m benchmarks.algorithm_curves grpo rloo  # some of them; the curves of the others stay as recorded
    python -m benchmarks.algorithm_curves --draw     # no run: the figure from the recorded curves

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.support.harness import command_parser, machine, versions, where
from docs.tooling.algorithm_reference import Curves, spec_of
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS, TAUGHT
from troupe.orchestrator.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
RECORDED = Path(__file__).parent / "recorded" / "algorithm_curves.json"
IMAGE = "images/algorithm-curves.svg"
"""The figure, relative to the page that shows it."""
FIGURE = ROOT / "docs" / "reference" / IMAGE
STEPS = 20
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
    """A run of an algorithm's shipped spec: its metric, by step."""

    metric: str
    overrides: tuple[str, ...]
    values: Mapping[str, float]
    """Value by step, as JSON has it: the steps are strings."""
    machine: str
    """Where and when it ran."""

    @property
    def ends(self) -> tuple[tuple[str, float], tuple[str, float]]:
        """(step, value) of the first and of the last step."""
        points = list(self.values.items())
        return points[0], points[-1]


def overrides(name: str, steps: int) -> tuple[str, ...]:
    """Settings of a run besides its spec: the number of steps, or, offline, an evaluation after each step."""
    own = (f"algorithm.name={name}",) if spec_of(name).name != name else ()
    if name in OFFLINE_ALGORITHMS:
        return (*own, "evaluation.every_steps=1", "checkpoint.every_steps=0")
    return (*own, f"schedule.steps={steps}", *SETTINGS.get(name, ()))


def measure(name: str, steps: int) -> Run:
    """Run the shipped spec of an algorithm.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been printed.
        subprocess.TimeoutExpired: it took longer than `LONGEST_S`.
    """
    metric = OFFLINE_METRIC if name in OFFLINE_ALGORITHMS else METRIC_OF.get(name, METRIC)
    given = overrides(name, steps)
    settings = [part for setting in given for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="troupe-curve-") as folder:
        out = Path(folder) / name
        if name in TAUGHT:
            settings += ["--set", f"model.path={noisy_copy(ROOT / SMOLLM2, Path(folder) / 'student')}"]
            given += (f"model.path=<noisy copy of {SMOLLM2.name}>",)
        command = [sys.executable, "-m", "troupe", "run", str(spec_of(name).path), "--out", str(out)]
        subprocess.run([*command, *settings], cwd=ROOT, timeout=LONGEST_S, check=True)
        values = {str(step): round(value, 5) for step, value in curve(out, metric).items()}
    return Run(metric, given, values, where(machine(), versions(), f"{datetime.now(UTC):%Y-%m-%d}"))


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


def recorded(path: Path = RECORDED) -> dict[str, Run]:
    """The recorded runs by algorithm, in the order of the tables."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    runs = {name: Run(**{**run, "overrides": tuple(run["overrides"])}) for name, run in document.items()}
    return {name: runs[name] for name in (*ALGORITHMS, *OFFLINE_ALGORITHMS) if name in runs}


def write(runs: Mapping[str, Run], path: Path) -> None:
    """Write the runs as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=1) + "\n")


def draw(runs: Mapping[str, Run], path: Path) -> None:
    """Draw all curves as small multiples in one SVG without a background."""
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
            axis.plot([int(step) for step in run.values], list(run.values.values()), color=LINE, linewidth=1.5)
            axis.set_title(name, fontsize=9, color=TEXT)
            axis.set_ylabel(run.metric, fontsize=7)
            axis.grid(True, linewidth=0.5)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def curves(runs: Mapping[str, Run] | None = None) -> Curves:
    """The recorded runs as the reference of the algorithms shows them."""
    runs = recorded() if runs is None else runs
    lines = [
        "The shipped specs, run once each by `python -m benchmarks.algorithm_curves`: a random two-layer",
        f"model, a reward for the share of vowels, {STEPS} steps (`distill` and `gkd`: SmolLM2 with noise in its",
        "weights, its divergence from SmolLM2, a learning rate of 3e-5 and responses of 16 tokens). Offline",
        "algorithms run as many steps as their specs have; their curve is the loss on held-out examples, each",
        "algorithm's own, so the levels do not compare. These runs show that every algorithm learns. They do not rank",
        "algorithms: neither the task nor the settings are fit for that. A random policy has to move some ten nats per",
        "token to speak in vowels, so the specs of algorithms with a KL term or a limit on a step loosen it; the",
        "defaults are for models that can do their task already.",
        "",
        f"![Curves of all algorithms]({IMAGE})",
        "",
        "| algorithm | metric | first step | last step |",
        "|---|---|---:|---:|",
    ]
    texts: dict[str, str] = {}
    for name, run in runs.items():
        (first, before), (last, after) = run.ends
        ends = f"{before:.3f} (step {first}) | {after:.3f} (step {last})"
        lines.append(f"| [`{name}`](#{name}) | `{run.metric}` | {ends} |")
        texts[name] = f"`{run.metric}` {before:.3f} at step {first}, {after:.3f} at step {last}"
    if missing := [f"`{name}`" for name in (*ALGORITHMS, *OFFLINE_ALGORITHMS) if name not in runs]:
        lines += ["", f"No run is recorded of {', '.join(missing)}."]
    places = dict.fromkeys(run.machine for run in runs.values())
    return Curves("\n".join([*lines, "", *(f"Measured on {place}." for place in places)]), texts)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("algorithm_curves", __doc__)
    every = [*ALGORITHMS, *OFFLINE_ALGORITHMS]
    parser.add_argument("names", nargs="*", metavar="NAME", help="algorithms to run (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run on rollouts (default: {STEPS})")
    parser.add_argument("--draw", action="store_true", help="draw the recorded curves, without running anything")
    parser.add_argument("--json", type=Path, default=RECORDED, help="results file; curves of other algorithms stay")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the figure, an SVG file")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(every)):
        parser.error(f"no algorithm {', '.join(unknown)}; known: {', '.join(every)}")
    given.names = given.names or every
    return given


def main() -> int:
    """Run, record and draw; returns exit code 1 if a run failed."""
    given = parse(sys.argv[1:])
    began, failed = time.monotonic(), list[str]()
    for name in [] if given.draw else given.names:
        try:
            run = measure(name, given.steps)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        write({**recorded(given.json), name: run}, given.json)  # after every run, so that none is lost
    draw(recorded(given.json), given.figure)
    print(f"wrote {given.json} and {given.figure} after {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
