"""Run the `troupe` command as a user does, and inspect its processes, its output and the files of its run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.processes import command_line
from tests.real import warm
from tests.real.warm import MARKER_VARIABLE

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
PPO = ROOT / "deploy" / "specs" / "tiny-ppo.yaml"
SAMPLES_PER_STEP = 64
"""Samples per step of `GRPO` and `PPO`."""
RUN_TIMEOUT_S = 480.0
EXIT_TIMEOUT_S = 30.0
ENDLESS = (
    *("schedule.steps=1000", "schedule.prompts_per_step=2", "algorithm.group_size=8", "sampling.max_tokens=64"),
    *("roles.policy.learning_rate=1e-4", "checkpoint.every_steps=0"),
)
"""Overrides for a run that the test ends: 1000 steps, long responses, a low learning rate and no checkpoints."""
ENDLESS_SAMPLES_PER_STEP = 16
"""Samples per step with the overrides `ENDLESS`."""
RUN_METRICS = (
    *("reward/mean", "reward/std", "reward/letter_share/mean", "groups/mixed", "failed_samples", "truncated"),
    *("response_tokens/mean", "response_tokens/max", "response_tokens_per_s", "tokens", "staleness/max"),
    "rollout/tokens_per_s",
    *("seconds/step", "seconds/generate", "seconds/prepare", "seconds/update", "seconds/sync"),
    *("ledger/dispatched", "ledger/trained", "ledger/dropped", "ledger/in_flight", "ledger/retries"),
)
"""Metrics of every step of every run."""
READ_AFTER_IMPORTS = {
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "TROUPE_DEATHS"),
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
}
"""Environment variables with which a command may be a fork."""
POLICY_METRICS = ("policy/loss", "policy/grad_norm", "policy/learning_rate", "policy/entropy", "policy/skipped_updates")


def _signals_of_a_terminal() -> None:
    """As in a terminal, also where the tests run under `nohup`."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Started(Protocol):
    """A process that was started: what a `Popen` can do."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


class Command:
    """A process in its own session, with its output in files.

    An environment variable marks the process and everything that it starts.
    """

    def __init__(self, folder: Path, arguments: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
        self.mark = uuid.uuid4().hex
        self._stdout, self._stderr = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self._below: set[psutil.Process] = set()
        """Its descendants that were seen: the titles of Ray's agents hide their marks."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= (env or {}) | {MARKER_VARIABLE: self.mark}
        with open(os.devnull, "rb") as nothing, self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            late = set(env or ()) <= READ_AFTER_IMPORTS  # others may change the imports
            if arguments[:3] == troupe_command() and cwd == ROOT and late:
                self.process: Started = warm.start(arguments[3:], environment, (nothing, out, err))
            else:
                self.process = subprocess.Popen(
                    arguments,
                    cwd=cwd,
                    env=environment,
                    stdin=nothing,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=_signals_of_a_terminal,
                )

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._stderr.read_text()

    @property
    def error_lines(self) -> list[str]:
        """Lines of standard error without log lines and notes: the error that the user reads."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return [line for line in lines if not line.startswith(("WARNING ", "ERROR ", "worker logs:"))]

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        """Wait for the process and return its exit code. Fails the test if it does not end in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._look_below()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(min(1.0, timeout_s))
        raise AssertionError(f"still running after {timeout_s:g} s\n{self.output}")

    def _look_below(self) -> set[psutil.Process]:
        """Its descendants so far, orphans included."""
        with contextlib.suppress(psutil.Error):
            self._below.update(psutil.Process(self.process.pid).children(recursive=True))
        return self._below

    @property
    def output(self) -> str:
        """Standard output and standard error, for the message of a failing test."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Running processes of this command, orphans included, whose title contains `name`."""
        found, below = [], self._look_below()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Titles change at run time (`ray::PolicyWorker`); the environment stays as it was at the start.
                own = process in below or process.environ().get(MARKER_VARIABLE) == self.mark
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    title = " ".join(process.cmdline()) or process.name()
                    if name in title:
                        found.append(process)
        return found

    def ports(self) -> dict[str, int]:
        """Largest number of ports beyond loopback at which a process of each kind listens."""
        found: dict[str, int] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, IndexError):
                title = process.cmdline()[0]
                beyond = [
                    one.laddr.port
                    for one in process.net_connections("inet")
                    if one.status == psutil.CONN_LISTEN and one.laddr.ip not in ("127.0.0.1", "::1")
                ]
                name = "troupe" if process.pid == self.process.pid else Path(title).name
                name = re.sub(r"^ray::(?:\w+(?=Worker))?(\w+).*", r"\1", name)  # every worker is a `Worker`
                if beyond:
                    found[name] = max(found.get(name, 0), len(beyond))
        return found

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = RUN_TIMEOUT_S) -> Any:
        """Poll until `condition` returns a true value, and return it. Fails the test if the command ends first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := condition():
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode} before: {what}\n{self.output}")
            time.sleep(0.05)
        raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.output}")

    def leftover_processes(self) -> list[str]:
        """Processes that still run some seconds after the command has ended."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while (running := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"{process.pid} {command_line(process)[:80]}" for process in running]

    def kill(self) -> None:
        """Kill all processes of the command that still run."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


class Run(Command):
    """`troupe run` with a unique name, which identifies its weight files in shared memory."""

    def __init__(
        self,
        folder: Path,
        spec: Path,
        *overrides: str,
        name: str,
        resume: bool = False,
        supervise: bool = False,
        out: Path | None = None,
        env: dict[str, str] | None = None,
        within: tuple[str, ...] = (),
    ) -> None:
        """`within`: a command that starts the one that follows it."""
        self.out = folder / name if out is None else out
        self.name = f"{name}-{os.getpid()}"
        sets = [part for override in (f"name={self.name}", *overrides) for part in ("--set", override)]
        flags = ["--out", str(self.out), *["--resume"] * resume, *["--supervise"] * supervise]
        super().__init__(folder, [*within, *troupe_command("run", str(spec), *sets, *flags)], env)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl so far."""
        return metrics_lines(self.out)

    @property
    def weight_files(self) -> list[str]:
        """The run's weight files in shared memory."""
        return [path.name for path in Path("/dev/shm").glob(f"troupe-*{self.name}-*")]

    def steps(self) -> list[int]:
        """Steps in metrics.jsonl, in file order."""
        return [line["step"] for line in self.metrics]

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl contains the step."""
        self.wait_until(lambda: step in self.steps(), f"step {step} in metrics.jsonl")


def metrics_lines(out: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl so far."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def troupe_command(*arguments: str) -> list[str]:
    """Command line of `troupe` with these arguments."""
    return [sys.executable, "-m", "troupe", *arguments]


@contextlib.contextmanager
def running(command: Command) -> Iterator[Any]:
    """Kill the command at the end, whether or not the test passes."""
    try:
        yield command
    finally:
        command.kill()


def run_troupe(folder: Path, *arguments: str) -> str:
    """Run `troupe`, require exit code 0 and return its standard output."""
    with running(Command(folder, troupe_command(*arguments))) as command:
        assert command.wait() == 0, command.output
        return command.stdout


def interrupt(command: Command) -> None:
    """Press Ctrl-C: send SIGINT to the foreground process group."""
    os.killpg(command.process.pid, signal.SIGINT)


def kill(run: Run, title: str) -> None:
    """Send SIGKILL to the only process of the run whose title contains `title`."""
    found = run.processes(title)
    assert len(found) == 1, [command_line(process) for process in found]
    found[0].kill()


def kill_each(run: Run, *deaths: tuple[int, str]) -> None:
    """Kill workers of a run after these steps, each once the one before is back."""
    for step, worker in deaths:
        run.wait_for_step(step)
        kill(run, worker)
        lost = f"{worker.removesuffix('Worker').lower()}-0 is lost"
        run.wait_until(lambda lost=lost: lost in run.output, lost)
        run.wait_for_step(step + 1)


def replayed(run: Path, step: int, code: int = 0, root: Path = ROOT) -> Command:
    """A replay with the code of a checkout that ends with this exit code."""
    command = Command(run.parent, troupe_command("replay", str(run), "--step", str(step)), cwd=root)
    with running(command):
        assert command.wait() == code, command.output
    return command


def equal_steps(command: Command) -> list[int]:
    """Steps that the replay found equal; fails where one is not."""
    assert "NOT EQUAL" not in command.stdout
    return [int(step) for step in re.findall(r"^step (\d+): equal \(", command.stdout, re.MULTILINE)]


def as_after(out: Path, step: int, copy: Path) -> Path:
    """A copy of a run's folder with only what it had after this step."""
    shutil.copytree(out, copy)
    for path in [*copy.glob("checkpoints/step-*"), *copy.glob("trajectories/step-*"), *copy.glob("timeline/step-*")]:
        if int(path.stem.removeprefix("step-")) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    metrics = copy / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    return copy


def missing_metrics(line: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Names of metrics that a line of metrics.jsonl lacks."""
    return [name for name in names if not isinstance(line.get(name), float)]


def ledger_balances(metrics: dict[str, Any]) -> bool:
    """Whether every dispatched sample is trained, dropped or in flight."""
    accounted = metrics["ledger/trained"] + metrics["ledger/dropped"] + metrics["ledger/in_flight"]
    return metrics["ledger/dispatched"] == accounted


def trajectories(out: Path, step: int) -> pa.Table:
    """Samples that a step trained on."""
    return pq.read_table(out / "trajectories" / f"step-{step:06d}.parquet")


def checkpoint_weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Policy weights of a checkpoint."""
    return load_file(out / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")
