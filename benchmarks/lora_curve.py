"""Learning curves of adapters (LoRA) beside training of all weights: the same task, prompts, samples and steps.

    python -m benchmarks.lora_curve                              # both, seed 1: about 10 minutes on two cores
    python -m benchmarks.lora_curve adapters --seeds 1 2 3
    python -m benchmarks.lora_curve --minutes 7                  # stops with a checkpoint; the next call resumes

Runs `deploy/specs/laptop-grpo.yaml` (SmolLM2-135M on sums of two digits) with `troupe run`, twice: as it is, and with
adapters on all linear layers at ten times the learning rate. Runs are in `runs/lora-curve/`; one that is finished is
not repeated. Prints rewards by step, and bytes of an update, peak memory of the policy beside what `troupe plan`
says, and seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reward_curves import METRIC, curve, table
from benchmarks.support.harness import command_parser
from troupe.orchestrator.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "deploy" / "specs" / "laptop-grpo.yaml"
ARMS: Mapping[str, tuple[str, ...]] = {
    "all": (),
    "adapters": ("roles.policy.lora={rank: 16, alpha: 32}", "roles.policy.learning_rate=5e-4"),
}
"""What each way to train changes in the spec."""
STEPS = 10
EVALUATED = "eval/reward"
_SAVE_S = 120.0
"""Longest time that a run takes to save and exit."""
_INTERRUPTED = 130


@dataclass(frozen=True)
class Figures:
    """What a run cost."""

    update_bytes: int
    """Bytes of one update of the engines."""
    step_s: float
    """Median seconds of a step."""
    update_s: float
    """Median seconds of the policy's update in a step."""
    peak_gib: float
    """Peak resident memory of the policy."""
    planned_gib: float
    """What `troupe plan` says of it."""
    evaluated: tuple[float, float]
    """Reward of greedy held-out samples, before and after."""


def settings(arm: str, seed: int, steps: int) -> list[str]:
    """Arguments of `troupe` that set what the arm changes."""
    changes = (*ARMS[arm], f"seed={seed}", f"schedule.steps={steps}", f"name=lora-curve-{arm}-{seed}")
    return [part for change in changes for part in ("--set", change)]


def finished(out: Path, steps: int) -> bool:
    """Whether a run's folder has all its steps."""
    return (out / "metrics.jsonl").is_file() and RunFolder(out).steps()[-1:] == [steps]


def train(arm: str, seed: int, steps: int, out: Path, until: float) -> bool:
    """Run an arm, or resume it, until `until` (of `time.monotonic`). Returns whether it is done.

    Raises:
        subprocess.CalledProcessError: The run failed; its output has been printed.
    """
    flags = ["--resume"] if (out / "checkpoints").is_dir() else []
    command = [sys.executable, "-m", "troupe", "run", str(SPEC), "--out", str(out), *settings(arm, seed, steps), *flags]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        code = process.wait(_SAVE_S)
    if code not in (0, _INTERRUPTED):
        raise subprocess.CalledProcessError(code, command)
    return code == 0


def figures(arm: str, seed: int, steps: int, out: Path) -> Figures:
    """What a finished run cost, and what `troupe plan` says of its memory."""
    command = [sys.executable, "-m", "troupe", "plan", str(SPEC), *settings(arm, seed, steps), "--json"]
    planned = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    (policy,) = [part["total"] for part in planned[0]["memory"] if part["worker"] == "policy-0"]
    lines = [line for line in RunFolder(out).metrics() if line["step"]]
    rewards = list(curve(out, EVALUATED).values())
    return Figures(
        update_bytes=max(event["bytes"] for event in RunFolder(out).events("weights")),
        step_s=median(line["seconds/step"] for line in lines),
        update_s=median(line["seconds/update"] for line in lines),
        peak_gib=max(line["memory/policy"] for line in lines),
        planned_gib=policy / 2**30,
        evaluated=(rewards[0], rewards[-1]),
    )


def costs(found: Mapping[str, Figures]) -> str:
    """A table with one row per run."""
    rows: list[Sequence[str]] = [
        ("run", "MB of an update", "s of a step", "s of its update", "policy, GiB", "planned, GiB", "held-out reward"),
        ("---", *["---:"] * 6),
    ]
    for name, one in found.items():
        rows.append(
            (
                name,
                f"{one.update_bytes / 1e6:.1f}",
                f"{one.step_s:.1f}",
                f"{one.update_s:.1f}",
                f"{one.peak_gib:.2f}",
                f"{one.planned_gib:.2f}",
                f"{one.evaluated[0]:.2f} -> {one.evaluated[1]:.2f}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("lora_curve", __doc__)
    parser.add_argument("arms", nargs="*", metavar="ARM", help=f"{' or '.join(ARMS)} (default: both)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds (default: 1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run (default: {STEPS})")
    parser.add_argument("--minutes", type=float, default=1e4, help="save and stop after so many minutes")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lora-curve", help="folder of the runs")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.arms) - set(ARMS)):
        parser.error(f"no {', '.join(unknown)}; known: {', '.join(ARMS)}")
    given.arms = given.arms or list(ARMS)
    return given


def main() -> None:
    """Run what is not finished, and print the tables of what is."""
    given = parse(sys.argv[1:])
    until, done = time.monotonic() + 60.0 * given.minutes, dict[str, tuple[str, int, Path]]()
    for seed in given.seeds:
        for arm in given.arms:
            out: Path = given.runs / f"{arm}-{seed}"
            left = until - time.monotonic()
            if finished(out, given.steps) or (left > 0 and train(arm, seed, given.steps, out, until)):
                done[f"{arm} {seed}"] = arm, seed, out
    report: dict[str, Any] = {name: curve(out, METRIC) for name, (_, _, out) in done.items()}
    found = {name: figures(arm, seed, given.steps, out) for name, (arm, seed, out) in done.items()}
    sys.stdout.write(f"{table(report)}\n\n{costs(found)}\n" if done else "no run is finished yet: call again\n")


if __name__ == "__main__":
    main()
