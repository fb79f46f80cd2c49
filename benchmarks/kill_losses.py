"""What a kill of an asynchronous run throws away: finished samples that a resumed run samples again.

    python -m benchmarks.kill_losses                       # eight moments, seed 34: about four minutes on two cores
    python -m benchmarks.kill_losses --moments 12 --seed 5 --saves 2

Runs `deploy/specs/tiny-grpo.yaml` with `max_staleness: 3`, a checkpoint after every step (`--saves N`: every N steps)
and a reward function that leaves a line in a file for each sample. At random moments, which the seed chooses, it reads
what the newest checkpoint on disk holds, which is what SIGKILL would leave. At the last moment it sends SIGKILL,
resumes the run and counts the samples that are scored again. Prints both as a table; without kept samples
(`checkpoint.samples_mib: 0`) a resumed run samples all groups again that were open at the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.harness import NotCorrect, command_parser
from troupe.orchestrator.rollouts.kept_samples import GROUPS
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import SAMPLES, CheckpointStore

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
REWARD = """
from troupe.workers.rewards.functions import letter_share

def counted(response, answer, metadata):
    with open({path!r}, "a") as lines:
        lines.write("x\\n")
    return letter_share(response, answer, metadata, letters="aeiou")
"""
_LINE = 2
"""Bytes of a line."""
_RESUMED_S = 300.0


@dataclass(frozen=True)
class Moment:
    """A run at one moment."""

    scored: int
    """Samples that have been scored."""
    step: int
    """Of the newest checkpoint; 0 without one."""
    trained: int
    """Samples that were trained until then."""
    kept: int
    """Scored samples that it holds besides."""

    @property
    def thrown(self) -> int:
        """Scored samples that a resumed run samples again."""
        return self.scored - self.trained - self.kept

    @property
    def thrown_before(self) -> int:
        """The same without kept samples."""
        return self.scored - self.trained


def moment(out: Path, scored: Path, samples_per_step: int) -> Moment:
    """What a run's folder holds now."""
    while True:
        step = max(CheckpointStore(out / "checkpoints", 1).steps(), default=0)
        folder = out / "checkpoints" / f"step-{step:06d}" / SAMPLES
        try:
            groups = json.loads((folder / GROUPS).read_text())["groups"] if folder.is_dir() else []
        except FileNotFoundError:  # removed after a newer one was written
            continue
        kept = sum(len(group["summary"]["samples"]) for group in groups if group["summary"] is not None)
        return Moment(scored.stat().st_size // _LINE, step, step * samples_per_step, kept)


def table(moments: Sequence[Moment]) -> str:
    """One row per moment."""
    head = ("samples scored", "newest checkpoint", "thrown away without kept samples", "thrown away")
    rows = [
        (str(one.scored), f"step {one.step}", str(one.thrown_before), str(one.thrown))
        for one in sorted(moments, key=lambda one: one.scored)
    ]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---:",) * len(head), *rows)]
    means = [sum(values) / len(moments) for values in zip(*((m.thrown_before, m.thrown) for m in moments), strict=True)]
    return "\n".join([*lines, f"| mean | | {means[0]:.0f} | {means[1]:.0f} |"])


def measure(given: argparse.Namespace, folder: Path) -> tuple[list[Moment], int]:
    """The moments of a run, the last one that of its kill; and the samples that the resumed run scored again."""
    scored, out = folder / "scored", folder / "run"
    (folder / "kill_losses_reward.py").write_text(REWARD.format(path=str(scored)))
    settings = (
        *(f"schedule.steps={given.steps}", "schedule.max_staleness=3", "checkpoint.async_save=true"),
        *(f"checkpoint.every_steps={given.saves}", f"name=kill-losses-{os.getpid()}"),
        "roles.reward.functions=[{name: 'kill_losses_reward:counted'}]",
    )
    spec = load_rollout_spec(SPEC, settings)
    total = given.steps * spec.samples_per_step
    rng = random.Random(given.seed)
    wanted = sorted(rng.sample(range(spec.samples_per_step, total * 3 // 4), given.moments))
    arguments = [part for one in settings for part in ("--set", one)]
    command = [sys.executable, "-m", "troupe", "run", str(SPEC), *arguments, "--out", str(out)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
    moments: list[Moment] = []
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            for count in wanted:
                while not scored.is_file() or scored.stat().st_size < _LINE * count:
                    if process.poll() is not None:
                        raise NotCorrect(f"the run has ended: {(folder / 'log').read_text()[-2000:]}")
                    time.sleep(0.005)
                moments.append(moment(out, scored, spec.samples_per_step))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        moments[-1] = moment(out, scored, spec.samples_per_step)
        subprocess.run(
            [*command, "--resume"], cwd=ROOT, env=env, stdout=log, stderr=log, check=True, timeout=_RESUMED_S
        )
    return moments, scored.stat().st_size // _LINE - total


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("kill_losses", __doc__)
    parser.add_argument("--moments", type=int, default=8, help="random moments (default: 8)")
    parser.add_argument("--seed", type=int, default=34, help="chooses them (default: 34)")
    parser.add_argument("--steps", type=int, default=24, help="steps of the run (default: 24)")
    parser.add_argument("--saves", type=int, default=1, help="steps between checkpoints (default: 1)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and print the table."""
    given = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        moments, again = measure(given, Path(folder))
    killed = max(moments, key=lambda one: one.scored)
    sys.stdout.write(f"{table(moments)}\n\nkilled at {killed.scored} samples: {again} were sampled again\n")


if __name__ == "__main__":
    main()
