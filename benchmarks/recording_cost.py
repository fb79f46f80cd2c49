"""What recording costs a step: one run, in which everything that is recorded by default is switched on and off.

    python -m benchmarks.recording_cost --dtype float32 --groups 4 --micro-batch-tokens 1024 --turns 15
    python -m benchmarks.recording_cost --model .cache/models/tiny-llama --dtype float32 --turns 200

A turn is a few steps with recording: of every call, event and timeline, of every sample with what was trained on it,
and of the step's batch and digests for `troupe replay`; or as many steps without, where the run writes `metrics.jsonl`
alone. Steps are of one run, because two runs of the same work differ by more than recording costs. The first step of a
turn is not counted: what a step records is written while the next one generates.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.support.harness import NotCorrect, Report, Turn, command_parser, progress, run_benchmark
from benchmarks.support.processes import Meter
from benchmarks.support.workload import Settings, add_settings, grpo_spec, without_eos
from orchestrator.reporting.console import Console

RECORDED, BARE = "troupe", "metrics alone"
STEPS = 3
"""Steps of a turn, the first of which is not counted."""


class MeasuringConsole(Console):
    """A console that measures the steps of every turn."""

    def __init__(self, places: Sequence[str], tokens: int) -> None:
        """`places`: the contender of each turn; `tokens`: those of a step."""
        super().__init__(io.StringIO())
        self._places = places
        self._tokens = tokens
        self._walls: list[float] = []
        self._meter = Meter([os.getpid()])
        self.taken: dict[str, list[Turn]] = {RECORDED: [], BARE: []}

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add a step to its turn."""
        turn, place = divmod(step - 1, STEPS)
        if place == 0:
            self._meter, self._walls = Meter([os.getpid()]), []
            return
        self._walls.append(float(str(metrics["seconds/step"])))
        if place == STEPS - 1:
            name = self._places[turn]
            taken = Turn(sum(self._walls), self._tokens * len(self._walls), *self._meter.read())
            progress(f"turn {turn + 1} of {len(self._places)}, {name}: {taken.wall_s:.2f} s, CPU {taken.cpu_s:.2f} s")
            if turn > 1:  # the first turn of each is a warm-up
                self.taken[name].append(taken)


def order(turns: int) -> list[str]:
    """The contender of each turn: A B, B A, A B, ..., so that a drift affects both alike; two more for the warm-up."""
    pairs = ((RECORDED, BARE), (BARE, RECORDED))
    return [name for number in range(turns + 1) for name in pairs[number % 2]]


def measure(settings: Settings, turns: int) -> Report:
    """Train and measure. Raises NotCorrect, TroupeError."""
    # Imported here because engine processes import this module, and they do not need Ray.
    from benchmarks.support.recording_switch import Switch, SwitchedPolicy
    from benchmarks.support.rollout_setup import CLASSES
    from orchestrator.run import RunRequest, run

    places, name = order(turns), f"recording-{os.getpid()}"
    steps = len(places) * STEPS
    recorded = {step for step in range(1, steps + 1) if places[(step - 1) // STEPS] == RECORDED}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(settings.model, folder / "model")
        spec = grpo_spec(settings, model, steps, settings.groups * 4).model_copy(update={"name": name})
        stack.enter_context(Switch(name, recorded.__contains__).controls())
        console = MeasuringConsole(places, settings.sequences * settings.max_tokens)
        request = RunRequest(spec, folder / "run", False, None)
        run(request, lambda: replace(CLASSES, policy=SwitchedPolicy), console)
        checks = check(request.out, recorded, {0, steps} - recorded)
    return Report("recording_cost", asdict(settings) | {"turns": turns}, console.taken, BARE, checks)


def check(out: Path, recorded: Set[int], unmeasured: Set[int]) -> dict[str, str]:
    """Check that exactly the steps with recording have files, but for start and end. Raises NotCorrect."""
    kept: dict[str, int] = {}
    for folder in ("trajectories", "timeline", "replay"):
        found = {int(path.stem.partition("-")[2]) for path in (out / folder).glob("step-*")} - unmeasured
        newest = set(sorted(recorded)[-len(found) :])  # replay keeps a bounded number of steps
        if not found or found != (newest if folder == "replay" else recorded):
            raise NotCorrect(f"{folder}/ has the steps {sorted(found)}, not {sorted(recorded)}")
        kept[folder] = len(found)
    return {"recorded": ", ".join(f"{number} steps in {folder}/" for folder, number in kept.items())}


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
