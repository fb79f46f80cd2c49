"""Runs in which pairs of faults hit random workers at random moments, 0 to 10 s apart.

    python -m tests.faults.chaos --minutes 60 --seed 1
    python -m tests.faults.chaos --minutes 30 --kinds adapters store --pairs 20 --comparable

The runs of `KINDS` take turns. A pair is two signals, SIGKILL or SIGSTOP, to two processes; one that starts, loads or
saves is hit as well as one that computes, and so is a fork that Ray does not know yet. After a pair the run must
train on. A run ends after some pairs by SIGTERM, or its driver is killed and it resumes. No run may end by itself, no
sample may be lost, every step must be there once, and nothing may be left behind. If only trainers, reference and
reward workers were hit, the first steps must be those of a run without faults, bit for bit: their metrics, and, as the
run kept them for `troupe replay`, every column of their samples and all weights after them. The folder of a run in
which something was wrong is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from tests.conftest import ROOT
from tests.faults.injected import ENGINE, WORKERS, seconds_until, stop_group
from tests.processes import command_line
from tests.real.commands import Run, ledger_balances, metrics_lines, running, troupe_command
from tests.real.warm import FAR_VARIABLE
from troupe.orchestrator.training.step_record import REPLAY, kept_steps, read_step

TITLES = (*WORKERS.values(), ENGINE)
REPEATABLE = tuple(WORKERS[role] for role in ("policy", "critic", "reference", "reward"))
"""Workers whose loss changes no number. Groups that are sampled again are in other batches of the engine, which round
differently, and training amplifies that."""
LONGEST_PAUSE_S = 10.0
UNDISTURBED_STEPS = 30
"""Steps that are compared with those of a run without faults."""
COMPARED = ("reward/mean", "response_tokens/mean", "policy/loss", "policy/grad_norm", "policy/entropy")
"""Metrics that are compared."""
TRIES = ("attempt",)
"""Columns of samples that count what was repeated."""
FORK = "a fork that starts"
"""Stands for the process that becomes the next worker."""
FORK_SHARE, FORK_APPEARS_S, FORK_STARTS_S = 0.4, 8.0, 0.5
ENDLESS = (
    *("schedule.steps=100000", "checkpoint.every_steps=5"),
    *(
        f"failures.{role}_restarts=1000"
        for role in ("trainer", "engine", "reward", "reference", "environment", "judge")
    ),
)
FOLDER = "FOLDER"
"""Stands for the scene's folder in overrides."""
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("tiny-ppo", ()),
    "environment": (
        "tiny-environment",
        # A random model solves no task, and without a second component nothing would be trained.
        ("roles.reward.functions=[{name: environment}, {name: letter_share, args: {letters: aeiou}}]",),
    ),
    "judge": ("tiny-judge", ("roles.judge.model.path=.cache/models/tiny-llama", "roles.judge.max_tokens=16")),
    "adapters": ("tiny-lora", ()),
    "store": (
        "tiny-grpo",
        (f"weight_sync={{backend: store, url: 'file://{FOLDER}/weights'}}", f"checkpoint.path=file://{FOLDER}/copies"),
    ),
    "delta": ("tiny-grpo", ("model.dtype=bfloat16", "roles.policy.learning_rate=1e-6")),
    "kept samples": ("tiny-grpo", ("schedule.max_staleness=2", "checkpoint.every_steps=2")),
    "evaluation beside": (
        "tiny-evaluation",
        (
            *("evaluation={every_steps: 1, beside: true, at_start: false}", "checkpoint.patience=null"),
            "roles.rollout.workers=2",
        ),
    ),
    "scaling": (
        "tiny-grpo",
        (
            *("schedule.max_staleness=1", "roles.rollout.workers=2", "roles.rollout.max_workers=3"),
            *("roles.reward.max_workers=3", "roles.reference.max_workers=2"),
        ),
    ),
}
"""Runs, by name: a shipped spec and overrides."""
SCALED = {"scaling": {"rollout": 3, "reward": 3, "reference": 2}}
"""Most workers of the roles that `troupe scale` changes before and between the faults of a pair, by kind of run."""
FAR = ("delta",)
"""Kinds whose engines get weights as those of other nodes."""
UNREPEATABLE = ("kept samples", "evaluation beside", "scaling")
"""Kinds whose numbers depend on when a group starts, and on which engine."""


@dataclass(frozen=True)
class Hit:
    """A signal to a process; its title says what it was doing."""

    signal: str
    title: str
    after_s: float


@dataclass(frozen=True)
class Ended:
    """The steps of a run."""

    lines: list[dict[str, Any]]
    """Metrics of its steps, without evaluations beside them."""
    digests: Mapping[int, Mapping[str, str]]
    """Digest of each column of the samples of a step, and of the weights of each role after it, of the steps that were
    kept: none is while a worker that was asked for its part died."""

    @classmethod
    def of(cls, out: Path) -> Ended:
        """The steps in the folder of a run."""
        lines = [line for line in metrics_lines(out) if "ledger/dispatched" in line]
        return cls(lines, {step: _digests(out / REPLAY, step) for step in kept_steps(out / REPLAY)})


def _digests(folder: Path, step: int) -> dict[str, str]:
    kept = read_step(folder, step)
    samples = kept.tables().batch.drop_columns(list(TRIES))
    columns = {name: repr(samples.column(name).to_pylist()) for name in samples.column_names}  # nan is nan
    return {name: xxhash.xxh3_128_hexdigest(values.encode()) for name, values in columns.items()} | {
        f"weights of the {role}": digest for role, digest in kept.kept.after.items()
    }


NOTHING = Ended([], {})
"""What an incomparable run is compared with."""


class Broken(Exception):
    """What must not happen has happened."""


def hit(run: Run, rng: random.Random, targets: Sequence[str], after_s: float) -> Hit:
    """Signal a random worker, or engine, of those that live now."""
    process, title = _forking(run, rng) if FORK in targets else None, FORK
    if process is None:
        kinds = run.wait_until(lambda: _living(run, targets), "a worker that lives")
        process, title = rng.choice(kinds[rng.choice(list(kinds))])
    number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
    return Hit(number.name, title.strip()[:60], round(after_s, 1))


def _forking(run: Run, rng: random.Random) -> psutil.Process | None:
    """The next fork of the server of workers, at a random moment before Ray gives it a title; None if there is none."""
    deadline = time.monotonic() + FORK_APPEARS_S
    while time.monotonic() < deadline:
        titled = {process.pid: (process, command_line(process)) for process in run.processes("serve")}
        for process, title in titled.values():
            with suppress(psutil.NoSuchProcess):
                if titled.get(process.ppid(), (process, ""))[1] == title:
                    time.sleep(rng.uniform(0.0, FORK_STARTS_S))
                    return process if process.is_running() and command_line(process) == title else None
    return None


def _living(run: Run, targets: Sequence[str]) -> dict[str, list[tuple[psutil.Process, str]]]:
    """(process, title) of the workers of each kind that there are."""
    titled = [(process, command_line(process).replace("ray::Far", "ray::")) for process in run.processes()]
    kinds = {kind: [(process, title) for process, title in titled if title.startswith(kind)] for kind in targets}
    return {kind: found for kind, found in kinds.items() if found}


def scale(run: Run, rng: random.Random, most: Mapping[str, int]) -> None:
    """Ask the run for another number of workers of each of these roles."""
    wanted = [f"{role}={rng.randint(1, workers)}" for role, workers in most.items()]
    if wanted:
        asked = troupe_command("scale", str(run.out), *wanted)
        answer = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        if answer.returncode:
            raise Broken(f"scale {wanted}: {answer.stdout}{answer.stderr}")


def pair(run: Run, rng: random.Random, targets: Sequence[str], most: Mapping[str, int]) -> tuple[list[Hit], float]:
    """Two faults, and the seconds until the run has trained two more steps. `most`: see `SCALED`."""
    time.sleep(rng.uniform(0.0, 4.0))
    began, forks = time.monotonic(), rng.random() < FORK_SHARE
    pause = 0.0 if forks else rng.uniform(0.0, LONGEST_PAUSE_S)
    scale(run, rng, most)
    hits = [hit(run, rng, targets, 0.0)]
    time.sleep(pause)
    scale(run, rng, most)
    hits.append(hit(run, rng, (*targets, FORK) if forks else targets, pause))
    step = run.metrics[-1]["step"]
    seconds = seconds_until(run, lambda: run.metrics[-1]["step"] > step + 1, time.monotonic())
    if seconds is None:
        ended = run.process.poll()
        if ended is None:
            why = troupe_command("why", str(run.out))
            answer = subprocess.run(why, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False).stdout
            raise Broken(f"stalled after {hits}\n{answer}")
        raise Broken(f"ended with {ended} after {hits}")
    return hits, time.monotonic() - began


def scene(
    folder: Path,
    name: str,
    pairs: int,
    rng: random.Random,
    healthy: Ended,
    *,
    all_comparable: bool = False,
) -> Mapping[str, Any]:
    """A run with `pairs` pairs of faults, to its end; what was seen."""
    spec, overrides = _spec(name, folder)
    targets = REPEATABLE if rng.random() < 0.5 or all_comparable else TITLES
    compared = targets is REPEATABLE and name not in UNREPEATABLE
    seen: list[tuple[list[Hit], float]] = []
    with running(Run(folder, spec, *overrides, name=spec.stem)) as run:
        try:
            run.wait_for_step(2)
            seen += [pair(run, rng, targets, SCALED.get(name, {})) for _ in range(pairs)]
            resumed = rng.random() < 0.5
            if resumed:
                run.process.kill()
                run.wait(30)
            else:
                _stop(run)
            _refuse_remains(run)
            if resumed:
                with running(Run(folder, spec, *overrides, name=spec.stem, resume=True)) as again:
                    last = run.steps()[-1]
                    again.wait_until(lambda: again.steps()[-1] > last, "a step after the resume")
                    _stop(again)
                    _refuse_remains(again)
        except (Broken, AssertionError) as error:
            (folder / "output.txt").write_text(run.output)
            raise Broken(f"{name}: {error}\n{seen}\n{run.stderr[-3000:]}") from None
    ended = Ended.of(run.out)
    _check(name, ended, healthy if compared else NOTHING)
    return {
        "kind": name,
        "compared": min(len(healthy.lines), len(ended.lines)) if compared else 0,
        "digests": len(healthy.digests.keys() & ended.digests.keys()) if compared else 0,
        "steps": len(ended.lines),
        "ended": "driver killed, resumed" if resumed else "SIGTERM",
        "recovered_s": [round(seconds, 1) for _, seconds in seen],
        "faults": [[vars(one) for one in hits] for hits, _ in seen],
    }


def _stop(run: Run) -> None:
    stop_group(run, signal.SIGTERM)
    if (code := run.wait(180)) != 130:
        raise Broken(f"exit code {code} after SIGTERM")


def _refuse_remains(run: Run) -> None:
    if remains := [*run.leftover_processes(), *map(str, run.weight_files)]:
        raise Broken(f"left behind: {remains}")


def _check(name: str, ended: Ended, healthy: Ended) -> None:
    """Refuse lost samples, steps that are missing or twice there, and steps of another policy."""
    steps = [line["step"] for line in ended.lines]
    if steps != list(range(1, len(steps) + 1)):
        raise Broken(f"{name}: steps {steps}")
    if not all(map(ledger_balances, ended.lines)) or ended.lines[-1]["ledger/dropped"]:
        raise Broken(f"{name}: the ledger of the last step is {ended.lines[-1]}")
    for line, expected in zip(ended.lines, healthy.lines, strict=False):
        step = line["step"]
        found = {metric: (line.get(metric), expected.get(metric)) for metric in COMPARED}
        if step in ended.digests.keys() & healthy.digests.keys():
            ours, theirs = ended.digests[step], healthy.digests[step]
            found |= {part: (ours.get(part), theirs.get(part)) for part in ours.keys() | theirs.keys()}
        differing = {part: values for part, values in found.items() if values[0] != values[1]}
        if differing:
            raise Broken(f"{name}: step {step} differs from a run without faults: {differing}")


def undisturbed(folder: Path, name: str) -> Ended:
    """A run without faults."""
    spec, overrides = _spec(name, folder)
    steps = f"schedule.steps={UNDISTURBED_STEPS}"
    with running(Run(folder, spec, *overrides, steps, name=f"healthy-{spec.stem}")) as run:
        if run.wait() != 0:
            raise Broken(run.output)
    return Ended.of(run.out)


def _spec(name: str, folder: Path) -> tuple[Path, list[str]]:
    """The spec and the overrides of a kind."""
    stem, own = KINDS[name]
    overrides = [override.replace(FOLDER, str(folder)) for override in (*ENDLESS, *own)]
    return ROOT / "deploy" / "specs" / f"{stem}.yaml", overrides


def scenes(seed: int, kinds: Sequence[str]) -> Iterator[tuple[str, int, random.Random]]:
    """The endless sequence of scenes of a seed."""
    for number, name in zip(itertools.count(), itertools.cycle(kinds), strict=False):
        rng = random.Random(f"{seed}-{number}")
        yield name, rng.randint(2, 6), rng


def main(arguments: list[str]) -> int:
    """Run scenes for the minutes given; print each as a line of JSON, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of runs (default: all)")
    parser.add_argument(
        "--pairs", type=int, default=sys.maxsize, help="pairs at most (default: as many as there is time for)"
    )
    parser.add_argument("--comparable", action="store_true", help="hit only what leaves the numbers as they are")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60.0 * given.minutes
    total: Counter[str] = Counter()
    healthy: dict[str, Ended] = {}
    for name, pairs, rng in scenes(given.seed, given.kinds):
        if time.monotonic() > deadline or total["pairs"] >= given.pairs:
            break
        os.environ[FAR_VARIABLE] = "1" * (name in FAR)
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        try:
            if name not in healthy and name not in UNREPEATABLE:
                healthy[name] = undisturbed(folder, name)
            seen = scene(folder, name, pairs, rng, healthy.get(name, NOTHING), all_comparable=given.comparable)
        except Broken as error:
            total["broken"] += 1
            sys.stdout.write(json.dumps({"broken": str(error), "folder": str(folder)}) + "\n")
            sys.stdout.flush()
            continue
        shutil.rmtree(folder)
        total += Counter(scenes=1, steps=seen["steps"], compared=seen["compared"], digests=seen["digests"], pairs=pairs)
        sys.stdout.write(json.dumps(seen) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(total) + "\n")
    return 1 if total["broken"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
