"""Ctrl-C at random moments of a short run, from its first instruction to its last.

    python -m tests.faults.interrupts --moments 20 --seed 1

A run is interrupted once. It must end with 130, or with 0 if it was over, say so in one line, leave no process and no
file in shared memory, and leave a folder that resumes to the last step, or starts anew if nothing was saved.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.injected import left_behind
from tests.real.commands import GRPO, Run, interrupt, running
from troupe.orchestrator.training.checkpoint import CheckpointStore

STEPS = 6
COLD = {"PYTHONUNBUFFERED": "1"}
"""A command with an environment of its own imports itself what it needs, as a user's does."""
SHORT = (f"schedule.steps={STEPS}", "schedule.prompts_per_step=2", "algorithm.group_size=4", "sampling.max_tokens=8")
LATEST_S, AFTER_STEP_S = 30.0, 1.0


@dataclass(frozen=True)
class Interrupted:
    """What one Ctrl-C led to."""

    step: int
    """The step after which it was, or 0 for the start of the command."""
    after_s: float
    code: int
    saved: int | None
    """Step of the newest checkpoint, or None without one."""
    ended_s: float
    wrong: str
    """What should not have been, or empty."""


def interrupted(folder: Path, step: int, after_s: float) -> Interrupted:
    """Start a run, interrupt it so many seconds after a step, and resume it."""
    with running(Run(folder, GRPO, *SHORT, "checkpoint.every_steps=1", name="interrupted", env=COLD)) as run:
        while step and step not in run.steps() and run.process.poll() is None:
            time.sleep(0.02)
        time.sleep(after_s)
        began = time.monotonic()
        if run.process.poll() is None:
            interrupt(run)
        code = run.wait(120)
        ended_s = round(time.monotonic() - began, 1)
        left = left_behind(run)
    store = CheckpointStore(run.out / "checkpoints", keep=3)
    found = store.latest() if store.directory.is_dir() else None
    wrong = [f"{left} left behind"] if left != "nothing" else []
    wrong += [f"exit code {code}"] if code not in (0, 130) else []
    wrong += ["a traceback"] if "Traceback" in run.output else []
    wrong += [f"0 after step {found and found.step}"] if code == 0 and (found is None or found.step != STEPS) else []
    if not wrong:
        again = ("--resume",) if found is not None else ()
        with running(Run(folder, GRPO, *SHORT, name="interrupted", resume=bool(again))) as rest:
            if (ended := rest.wait()) != 0 or rest.steps() != list(range(1, STEPS + 1)):
                wrong.append(f"resumed: exit code {ended}, steps {rest.steps()}\n{rest.stderr[-1000:]}")
    said = f"{'; '.join(wrong)}\n{run.stderr[-2000:]}" if wrong else ""
    return Interrupted(step, round(after_s, 1), code, None if found is None else found.step, ended_s, said)


def main(arguments: list[str]) -> int:
    """Interrupt runs at random moments; print each as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--latest", type=float, default=LATEST_S, help="seconds at most, without a step before")
    given = parser.parse_args(arguments)
    rng, wrong = random.Random(given.seed), 0
    for _ in range(given.moments):
        with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
            step = rng.choice((0, *range(STEPS + 1)))
            seen = interrupted(Path(folder), step, rng.uniform(0.0, AFTER_STEP_S if step else given.latest))
        wrong += bool(seen.wrong)
        sys.stdout.write(json.dumps(asdict(seen)) + "\n")
        sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
