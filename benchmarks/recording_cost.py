"""What recording costs a step: CPU time of all that a run records by default, and that of the whole step.

    python -m benchmarks.recording_cost --dtype float32 --groups 4 --samples 8 --micro-batch-tokens 1024 --turns 10
    python -m benchmarks.recording_cost --model .cache/models/tiny-llama --dtype float32

Recorded are every call, event and timeline, every sample with what was trained on it, and the batch and the digests of
each step for `troupe replay`. Both times are taken in the same steps of one run: the speed of a shared machine changes
by far more than recording costs. The time of Ray's own threads for four calls a step is not included.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.support.harness import NotCorrect, Report, Turn, command_parser, run_benchmark
from benchmarks.support.processes import Meter
from benchmarks.support.workload import Settings, add_settings, grpo_spec, without_eos
from troupe.orchestrator.telemetry.console import Console

PRODUCT, SHARE = "troupe", "recording, % of the step's CPU time"
WARM_UP = 2
"""Steps that are not measured."""
_RECORDED = ("trajectories", "timeline", "replay")


class MeasuringConsole(Console):
    """A console that measures every step and what it records."""

    def __init__(self, tokens: int, recording: Callable[[], Mapping[str, float]]) -> None:
        """`tokens`: those of a step; `recording`: CPU seconds so far by part."""
        super().__init__(io.StringIO())
        self._tokens = tokens
        self._recording = recording
        self._before: Mapping[str, float] = {}
        self._meter = Meter()
        self.taken: list[Turn] = []

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add a step: from the report of the one before to its own."""
        now = dict(self._recording())
        parts = {part: seconds - self._before.get(part, 0.0) for part, seconds in now.items()}
        cpu_s, foreign = self._meter.read()
        self._before, self._meter = now, Meter()
        if step > WARM_UP:
            figures = {SHARE: 100 * sum(parts.values()) / cpu_s, "all recording, ms": 1000 * sum(parts.values())}
            figures |= {f"{part}, ms": 1000 * seconds for part, seconds in sorted(parts.items())}
            self.taken.append(Turn(float(str(metrics["seconds/step"])), self._tokens, cpu_s, foreign, figures=figures))


def measure(given: argparse.Namespace) -> Report:
    """Train as many steps as turns, after the warm-up. Raises NotCorrect, TroupeError."""
    # Imported here because engine processes import this module, and they do not need Ray.
    from benchmarks.support.recording_timers import TimedPolicy, TimedReward, folder_of, of_workers, time_driver
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.runs.training import train

    settings = Settings.of(given, lengths="fixed", engines=1)
    steps, name = given.turns + WARM_UP, f"recording-{os.getpid()}"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder_of(name), ignore_errors=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(settings.model, folder / "model")
        spec = grpo_spec(settings, model, steps, settings.groups * steps).model_copy(update={"name": name})
        driver = time_driver()
        console = MeasuringConsole(
            settings.sequences * settings.max_tokens, lambda: {**driver.so_far, **of_workers(name)}
        )
        classes = {"policy": TimedPolicy, "reward": TimedReward}
        request = RunRequest(spec, folder / name, False, None, classes)
        train(request, console)
        checks = {"recorded": check(request.out, steps)}
    return Report("recording_cost", {PRODUCT: console.taken}, PRODUCT, checks)


def check(out: Path, steps: int) -> str:
    """What was recorded, as text. Raises NotCorrect where a step is missing."""
    counts: dict[str, int] = {}
    for folder in _RECORDED:
        found = {int(path.stem.partition("-")[2]) for path in (out / folder).glob("step-*")} - {0}
        if not found or found != set(range(steps - len(found) + 1, steps + 1)):
            raise NotCorrect(f"{folder}/ has the steps {sorted(found)} of {steps}")
        counts[folder] = len(found)
    events = len((out / "events.jsonl").read_text().splitlines())
    return ", ".join([*(f"{number} steps in {folder}/" for folder, number in counts.items()), f"{events} events"])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("recording_cost", __doc__, 20)
    defaults = {"groups": 8, "samples": 8, "max_tokens": 32, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, micro_batch_tokens=4096, seed=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
