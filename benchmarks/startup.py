"""Time from `troupe run` to the first sampled token, by part.

    python -m benchmarks.startup --turns 3
    python -m benchmarks.startup --spec deploy/specs/laptop-grpo.yaml
    python -m benchmarks.startup --running

Every turn is the command as a user types it, in a new process and a new folder, for one step. The parts are the moments
that the run itself records: the command until Ray is up, from there until each kind of worker serves, and from the last
worker to the first token. CPU seconds are those that each kind of process has used until that token. The baseline is a
new process in which a bare `AsyncLLM` starts with the engine's settings and samples a first token: no run starts
sooner than its engine. With `--running` the runs join a Ray head on this machine that is up before the first turn.
A spec's evaluations before and after training are left out: the first one would begin with the first token, but its
samples are written without their times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from benchmarks.support.bare_engines import cold_start
from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter, end
from benchmarks.support.running_head import AUTH, Head, running_head
from benchmarks.support.workload import Group, encode_prompts
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.roles.settings import rollout_config
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.run_folder import RunFolder

BARE, PRODUCT = "bare AsyncLLM", "troupe"
STARTS = Unit("starts", "start", digits=3)
SECONDS = "seconds"
"""Name of the time to the first token among the figures."""
_TIMEOUT_S = 300.0
_SAMPLE_S = 0.25
_LONGEST_PROMPT = 1024
_PROCESSES = {
    "vllm": ("VLLM::", "EngineCore"),
    "server": ("preload.server:serve",),
    "fork server": ("multiprocessing.forkserver",),
    "rollout": ("ray::RolloutWorker",),
    "policy": ("ray::PolicyWorker",),
    "reward": ("ray::RewardWorker",),
    "data check": ("prompt_probe", "isolation.probe"),
    "Ray": ("raylet", "gcs_server", "ray/", "ray::", "setup_worker", "default_worker", "forked_worker"),
    "command": ("troupe",),
}
"""Words of the command lines of each kind of process; the first kind that matches counts."""


@dataclass(frozen=True)
class Moments:
    """When a run reached what, in seconds from its command."""

    ray: float
    served: Mapping[str, float]
    """By worker."""
    token: float

    def phases(self) -> dict[str, float]:
        """Seconds by part; those of the workers run side by side."""
        parts = {"command to Ray": self.ray}
        parts |= {f"Ray to {worker}": moment - self.ray for worker, moment in self.served.items()}
        return parts | {"last worker to token": self.token - max(self.served.values())}


def moments(folder: Path, began: float) -> Moments:
    """What a run that has ended recorded of its start.

    Args:
        folder: Of the run.
        began: When its command was started, on the wall clock.

    Raises:
        NotCorrect: It lacks the start, a worker, or samples.
    """
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    ray = [event["time"] for event in events if event["event"] == "run_started"]
    served = {event["worker"]: event["time"] - began for event in events if event["event"] == "worker_started"}
    run = RunFolder(folder)
    if not ray or not served or not run.steps():
        raise NotCorrect(f"{folder}: the run recorded no start, no worker or no step")
    calls = pq.read_table(folder / "timeline" / "step-000001.parquet").to_pylist()
    sent = min(call["start"] for call in calls if call["method"] == "generate")
    waits = pq.read_table(folder / "trajectories" / "step-000001.parquet", columns=["first_token_s"])
    return Moments(ray[0] - began, served, sent - began + min(waits["first_token_s"].to_pylist()))


@dataclass(frozen=True)
class Sample:
    """What had been used at a moment of a run."""

    time: float
    """Seconds from the command."""
    cpu: Mapping[int, tuple[str, float]]
    """(kind, CPU seconds) of each process of the run that is there, by its id."""
    busy_cores: float
    """Average number of cores that were busy until then, without this benchmark."""


def used_until(samples: Sequence[Sample], moment: float) -> tuple[dict[str, float], float]:
    """(CPU seconds of the run by kind of process, average number of cores busy with other load) until a moment.

    A process that has ended counts with what it was last seen with. Ray leaves the CPU time of its workers to no
    parent: of a run that has ended, it could not be told from other load.

    Raises:
        NotCorrect: No sample was taken until then.
    """
    taken = [sample for sample in samples if sample.time < moment]
    if not taken:
        raise NotCorrect(f"no sample of the processes was taken in {moment:.2f} s")
    used: dict[int, tuple[str, float]] = {}
    for sample in taken:
        used |= sample.cpu
    cpu: defaultdict[str, float] = defaultdict(float)
    for kind, seconds in used.values():
        cpu[kind] += seconds
    own_cores = sum(cpu.values()) / taken[-1].time
    return dict(sorted(cpu.items())), max(0.0, taken[-1].busy_cores - own_cores)


def kind_of(command: str) -> str:
    """Which part of a run a process is, by its command line."""
    return next((kind for kind, words in _PROCESSES.items() if any(word in command for word in words)), "other")


def cpu_by_kind(root: psutil.Process) -> Iterator[tuple[int, str, float]]:
    """(process id, kind, CPU seconds so far) of a process and its descendants."""
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                times, command = process.cpu_times(), " ".join(process.cmdline())
            yield process.pid, kind_of(command), times.user + times.system
        except psutil.NoSuchProcess:
            continue


def start_run(spec: Path, changes: Sequence[str], head: Head | None = None) -> Turn:
    """Run one step of a spec with the command, and take its start apart.

    Args:
        spec: The spec.
        changes: Fields to set.
        head: Ray to join; None: the run starts its own.

    Raises:
        NotCorrect: The command failed, or the run recorded no start.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        overrides = [part for change in ("schedule.steps=1", *changes) for part in ("--set", change)]
        command = [sys.executable, "-m", "troupe", "run", str(spec), *overrides, "--out", str(out)]
        command += [] if head is None else ["--address", head.address]
        with (Path(folder) / "output").open("w+") as output:
            # A head and what it runs already belong to no turn.
            busy, before, began, own_began = Meter([]), set(psutil.pids()), time.time(), time.process_time()
            env = os.environ | ({} if head is None else AUTH)
            process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
            samples: list[Sample] = []
            try:
                while process.poll() is None and time.time() - began < _TIMEOUT_S:
                    roots = (process,) if head is None else (process, head.process)
                    used = {pid: (kind, cpu) for root in roots for pid, kind, cpu in cpu_by_kind(root)}
                    at = time.time() - began
                    busy_cores = busy.read()[1] - (time.process_time() - own_began) / at
                    samples.append(Sample(at, {pid: one for pid, one in used.items() if pid not in before}, busy_cores))
                    time.sleep(_SAMPLE_S)
            finally:
                end([process])
            output.seek(0)
            if process.returncode:
                raise NotCorrect(f"{' '.join(command)} ended with exit code {process.returncode}:\n{output.read()}")
        found = moments(out, began)
        cpu, foreign = used_until(samples, found.token)
        figures = {SECONDS: found.token} | {f"CPU s, {kind}": seconds for kind, seconds in cpu.items()}
        return Turn(found.token, 1, sum(cpu.values()), foreign, found.phases(), figures)


def start_bare(spec: RolloutSpec, group: Group) -> Turn:
    """Start a bare engine in a new process and sample one prompt. Raises NotCorrect, ChildFailed."""
    turn, sampled = cold_start(rollout_config(spec), [group], _TIMEOUT_S)
    if not sampled.response_ids[0]:
        raise NotCorrect("the bare engine sampled nothing")
    return replace(turn, figures={SECONDS: turn.wall_s})


async def measure(given: argparse.Namespace) -> Report:
    """Alternate the starts of the product and of a bare engine. Raises NotCorrect."""
    path: Path = given.spec
    changes: list[str] = given.set
    if load_rollout_spec(path, changes).evaluation is not None:
        changes = [*changes, "evaluation.at_start=false"]
    spec = load_rollout_spec(path, ["schedule.steps=1", *changes])
    pool, _ = load_pools(spec.data)
    (ids,) = encode_prompts(Path(spec.model.path), pool.table, range(1), _LONGEST_PROMPT)
    one_token = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"max_tokens": 1})})
    group = Group("p0", 0, tuple(ids), 1, spec.seed)

    async def product(_: int) -> Turn:
        return await asyncio.to_thread(start_run, path, changes, head)

    async def bare(_: int) -> Turn:
        return await asyncio.to_thread(start_bare, one_token, group)

    with running_head() if given.running else nullcontext() as head:
        taken = await take_turns({BARE: bare, PRODUCT: product}, given.turns)
    workers = sum(name.startswith("Ray to ") for name in taken[PRODUCT][0].phases)
    checks = {"first token": f"every run started {workers} workers, sampled, trained one step and exited with 0"}
    return Report("startup", taken, BARE, checks, STARTS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("startup", __doc__, 3)
    parser.add_argument("--spec", type=Path, default=Path("deploy/specs/tiny-grpo.yaml"), help="(%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="field of the spec")
    parser.add_argument("--running", action="store_true", help="join a running Ray head (--address)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
