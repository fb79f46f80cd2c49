"""Disks of a run that fill at random moments, up to a random number of bytes.

    python -m tests.faults.disks --rounds 8 --seed 1

A run has its folder on one small disk and Ray's session on another. In turns one of them fills, and has room
again some seconds later; in half of the turns a worker is killed meanwhile. The run must train on, lose no sample and
no line of its files, and resume.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.injected import left_behind, stop_group
from tests.real.commands import GRPO, Run, ledger_balances, running

OVERRIDES = (
    *("schedule.steps=100000", "checkpoint.every_steps=2", "checkpoint.keep=1", "failures.failed_saves=1000"),
    *(f"failures.{role}_restarts=1000" for role in ("trainer", "engine", "reward")),
)
ROOM = (0, 300, 4096, 20_000, 100_000, 1_000_000)
"""Bytes that are free on a disk that is full."""
FULL_S = 8.0


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of its own at `folder`, in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def full(disk: Path, room: int) -> Iterator[None]:
    """The disk has only this many bytes left when the block begins."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        os.posix_fallocate(stream.fileno(), 0, max(1, shutil.disk_usage(disk).free - room))
    try:
        yield
    finally:
        filler.unlink()


def main(arguments: list[str]) -> int:
    """Fill the disks of a run; print what it said in each round, and what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    rng, wrong = random.Random(given.seed), list[str]()
    folder = Path(tempfile.mkdtemp(prefix="disks-"))
    with small_disk(folder / "run", 256) as own, small_disk(folder / "ray", 256) as ray:
        os.environ["RAY_TMPDIR"] = str(ray)
        with running(Run(folder, GRPO, *OVERRIDES, name="disks", out=own / "run")) as run:
            run.wait_for_step(3)
            for number in range(given.rounds):
                disk, room, dies = (ray, own)[number % 2], rng.choice(ROOM), rng.random() < 0.5
                before, said = run.steps()[-1], len(run.stderr)
                with full(disk, room):
                    time.sleep(rng.uniform(0.0, 2.0))
                    if dies:
                        rng.choice(run.processes("ray::PolicyWorker") or run.processes("ray::")).kill()
                    time.sleep(FULL_S)
                try:
                    run.wait_until(lambda before=before: run.steps()[-1] > before + 4, "more steps", 120)
                except AssertionError as error:
                    wrong.append(str(error))
                    break
                seen = {"disk": disk.name, "room": room, "killed": dies, "said": run.stderr[said:].splitlines()}
                sys.stdout.write(json.dumps({"round": number, **seen}, indent=1) + "\n")
                sys.stdout.flush()
            if not wrong:
                stop_group(run, signal.SIGTERM)
                code, left = run.wait(180), left_behind(run)
                wrong += [f"exit code {code}"] * (code != 130) + [left] * (left != "nothing")
        lines = run.metrics
        wrong += ["steps"] * ([line["step"] for line in lines] != list(range(1, len(lines) + 1)))
        wrong += ["ledger"] * (not all(map(ledger_balances, lines)) or bool(lines[-1]["ledger/dropped"]))
        missing = [
            n for n in range(1, len(lines) + 1) if not (run.out / f"trajectories/step-{n:06d}.parquet").is_file()
        ]
        sys.stdout.write(json.dumps({"steps": len(lines), "without trajectories": missing}) + "\n")
        with running(Run(folder, GRPO, *OVERRIDES, name="disks", out=own / "run", resume=True)) as again:
            again.wait_until(lambda: again.steps()[-1] > len(lines), "a step after the resume")
            stop_group(again, signal.SIGTERM)
            again.wait(180)
    if wrong:
        sys.stdout.write("\n".join([*wrong, run.output[-6000:]]) + "\n")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
