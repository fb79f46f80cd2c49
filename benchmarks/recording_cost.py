"""What recording costs: steps of a run with everything that is recorded by default, and of one that records metrics.

    python -m benchmarks.recording_cost --groups 8 --samples 8 --max-tokens 32 --turns 20

Both are runs of the product on the same prompts and seeds, each on a Ray of its own, and take turns by the step: the
processes of the other one are suspended. The default records every call, event and timeline, every sample with what was
trained on it, and the batches of the last steps; the baseline writes `metrics.jsonl` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.support.harness import NotCorrect, Report, Turn, command_parser, progress, rotated, run_benchmark
from benchmarks.support.processes import Meter, end, stopped
from benchmarks.support.workload import Settings, add_settings, grpo_spec, without_eos

RECORDED, BARE = "troupe", "metrics alone"
_MODULES = {RECORDED: "orchestrator.cli", BARE: "benchmarks.support.unrecorded"}
_OFF = ("output.trajectories=false", "output.replay_steps=0")
_STEP_TIMEOUT_S = 300.0
_POLL_S = 0.01
_EQUAL = ("reward/mean", "policy/loss", "policy/grad_norm", "ledger/trained")
"""Metrics that recording must not change."""


class PacedRun:
    """A run of the product that is suspended between its turns."""

    def __init__(self, name: str, folder: Path, spec: Path) -> None:
        """Start it and wait for its first step."""
        self.out = folder / "run"
        overrides = [word for one in _OFF * (name == BARE) for word in ("--set", one)]
        command = [sys.executable, "-m", _MODULES[name], "run", str(spec), "--out", str(self.out), *overrides]
        self._log = (folder / "log").open("wb")
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        self._steps = 0
        self.take()
        self._suspension = ExitStack()
        self._suspend()

    def _suspend(self) -> None:
        self._suspension.enter_context(stopped([self._process.pid]))

    def take(self) -> None:
        """Wait for the next step. Raises NotCorrect where it does not come."""
        deadline = time.monotonic() + _STEP_TIMEOUT_S
        path = self.out / "metrics.jsonl"
        while not path.is_file() or path.read_bytes().count(b"\n") <= self._steps:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NotCorrect(f"no step after step {self._steps}: {(self.out.parent / 'log').read_text()[-2000:]}")
            time.sleep(_POLL_S)
        self._steps += 1

    def turn(self, tokens: int) -> Turn:
        """One step, from the moment when the run goes on."""
        meter = Meter([self._process.pid])
        self._suspension.close()
        began = time.perf_counter()
        self.take()
        wall_s = time.perf_counter() - began
        cpu_s, foreign = meter.read()
        self._suspend()
        return Turn(wall_s, tokens, cpu_s, foreign, figures={"step, s": self.metrics()[-1]["seconds/step"]})

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of every step so far."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def close(self) -> None:
        """End the run."""
        self._suspension.close()
        end([psutil.Process(self._process.pid)])
        self._process.wait()
        self._log.close()


def measure(settings: Settings, turns: int) -> Report:
    """Alternate the steps of both runs. Raises NotCorrect."""
    tokens = settings.sequences * settings.max_tokens
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec = grpo_spec(settings, without_eos(settings.model, folder / "model"), turns + 4, settings.groups * 4)
        path = folder / "spec.yaml"
        path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
        runs: dict[str, PacedRun] = {}
        for name in (RECORDED, BARE):
            (folder / name).mkdir()
            runs[name] = PacedRun(name, folder / name, path)
            stack.callback(runs[name].close)
            progress(f"{name}: started")
        taken: dict[str, list[Turn]] = {name: [] for name in runs}
        for turn in range(turns + 1):
            for name in rotated(list(runs), turn):
                one = runs[name].turn(tokens)
                progress(f"turn {turn} of {turns}, {name}: {one.wall_s:.2f} s, CPU {one.cpu_s:.2f} s")
                if turn:
                    taken[name].append(one)
        checks = check(runs, settings)
    return Report("recording_cost", asdict(settings) | {"turns": turns}, taken, BARE, checks)


def check(runs: dict[str, PacedRun], settings: Settings) -> dict[str, str]:
    """Check that both trained the same, and what each of them has written. Raises NotCorrect."""
    lines = {name: run.metrics() for name, run in runs.items()}
    steps = min(map(len, lines.values()))
    for step in range(steps):
        values = [[lines[name][step].get(metric) for metric in _EQUAL] for name in runs]
        if values[0] != values[1]:
            raise NotCorrect(f"step {step + 1}: {dict(zip(runs, values, strict=True))} differ")
    folders = ("trajectories", "timeline", "replay")
    files = {name: [len(list((run.out / one).glob("step-*"))) for one in folders] for name, run in runs.items()}
    if any(files[BARE]) or not all(files[RECORDED]):
        raise NotCorrect(f"files in {', '.join(folders)}: {files}")
    return {
        "same training": f"{', '.join(_EQUAL)} equal in {steps} steps of {settings.sequences} samples",
        "recorded": ", ".join(f"{count} in {one}/" for count, one in zip(files[RECORDED], folders, strict=True)),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("recording_cost", __doc__)
    defaults = {"groups": 8, "samples": 8, "max_tokens": 32, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, micro_batch_tokens=4096, turns=20, seed=17)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print the table, write the results file."""
    given = vars(parse(sys.argv[1:]))
    turns, path = given.pop("turns"), given.pop("json")
    run_benchmark(lambda: measure(Settings(**given, lengths="fixed", engines=1), turns), path)


if __name__ == "__main__":
    main()
