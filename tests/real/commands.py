"""The `troupe` command as a user starts it, and what a run leaves, on disk and in the process table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import ROOT

MARK = "TROUPE_TEST_RUN"
GRPO = ROOT / "deploy" / "tiny-grpo.yaml"
PPO = ROOT / "deploy" / "tiny-ppo.yaml"
SAMPLES = 64
"""Samples of a step in both."""
RUN_TIMEOUT_S = 480.0
LEFT_BY_S = 10.0
SLOW = (
    *("schedule.steps=1000", "schedule.prompts_per_step=2", "algorithm.group_size=8", "sampling.max_tokens=64"),
    *("roles.policy.learning_rate=1e-4", "checkpoint.every_steps=0"),
)
"""Endless, with long responses, and a policy that stays as it is."""
SLOW_SAMPLES = 16
"""Samples of a step of these."""
EXPECTED = (
    *("reward/mean", "reward/std", "reward/letter_share/mean", "groups/mixed", "failed_samples", "truncated"),
    *("response_tokens/mean", "response_tokens/max", "response_tokens_per_s", "tokens", "staleness/max"),
    *("seconds/step", "seconds/generate", "seconds/prepare", "seconds/update", "seconds/sync"),
    *("ledger/dispatched", "ledger/trained", "ledger/dropped", "ledger/in_flight", "ledger/retries"),
)
"""Figures that every step of every run has."""
POLICY = ("policy/loss", "policy/grad_norm", "policy/learning_rate", "policy/entropy", "policy/skipped_updates")


def save_llama(folder: Path, **sizes: Any) -> str:
    """Write a two-layer Llama of these sizes, always the same one; returns its folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2, pad_token_id=2, **sizes)).save_pretrained(folder)
    return str(folder)


class Command:
    """One process of its own session, with its output in files; all it starts carries a mark in the environment."""

    def __init__(self, folder: Path, arguments: list[str], env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self._stdout, self._stderr = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                env=environment | (env or {}) | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
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
    def complaint(self) -> list[str]:
        """Lines of standard error that are no log lines and no notes: what the user reads as the error."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return [line for line in lines if not line.startswith(("WARNING ", "ERROR ", "the workers' own logs:"))]

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        """The exit code. Fails the test where the process does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout_s:g} s\n{self.told}") from None

    @property
    def told(self) -> str:
        """All output, for a failing test."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Living processes of this command, orphans too, whose title contains `name`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Titles are changed at run time (`ray::PolicyWorker`); the environment stays what it was at the start.
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    title = " ".join(process.cmdline()) or process.name()
                    if name in title:
                        found.append(process)
        return found

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = RUN_TIMEOUT_S) -> Any:
        """Poll until `condition` gives something true, and return that. Fails where the command ends before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := condition():
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"ended ({self.process.returncode}) before {what}\n{self.told}")
            time.sleep(0.05)
        raise AssertionError(f"not {what} after {timeout_s:g} s\n{self.told}")

    def left_over(self) -> list[str]:
        """Processes still there some seconds after the end."""
        deadline = time.monotonic() + LEFT_BY_S
        while (there := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in there]

    def end(self) -> None:
        """Kill whatever is left of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


class Run(Command):
    """`troupe run`, with a name of its own, so that its weight files are told apart from others'."""

    def __init__(
        self,
        folder: Path,
        spec: Path,
        *overrides: str,
        name: str,
        resume: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        self.out = folder / name
        self.name = f"{name}-{os.getpid()}"
        sets = [part for override in (f"name={self.name}", *overrides) for part in ("--set", override)]
        super().__init__(
            folder, [*troupe("run", str(spec), *sets), "--out", str(self.out), *(["--resume"] if resume else [])], env
        )

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl so far."""
        path = self.out / "metrics.jsonl"
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def weight_files(self) -> list[str]:
        """Files of the run in shared memory."""
        return [path.name for path in Path("/dev/shm").glob(f"troupe-{self.name}-*")]

    def steps(self) -> list[int]:
        """Steps in metrics.jsonl, as written."""
        return [line["step"] for line in self.metrics]

    def until_step(self, step: int) -> None:
        """Wait until the step is in the metrics."""
        self.until(lambda: step in self.steps(), f"step {step} done")


def troupe(*arguments: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "orchestrator.cli", *arguments]


@contextlib.contextmanager
def running(command: Command) -> Iterator[Any]:
    """End the command whatever the test does."""
    try:
        yield command
    finally:
        command.end()


def ask(folder: Path, *arguments: str) -> str:
    """What a command that succeeds prints."""
    with running(Command(folder, troupe(*arguments))) as command:
        assert command.wait() == 0, command.told
        return command.stdout


def interrupt(command: Command) -> None:
    """Ctrl-C in the terminal: SIGINT to the whole foreground process group."""
    os.killpg(command.process.pid, signal.SIGINT)


def absent(line: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Names of figures that a line of the metrics has not."""
    return [name for name in names if not isinstance(line.get(name), float)]


def balanced(metrics: dict[str, Any]) -> bool:
    """Whether every dispatched sample is accounted for."""
    settled = metrics["ledger/trained"] + metrics["ledger/dropped"] + metrics["ledger/in_flight"]
    return metrics["ledger/dispatched"] == settled


def trajectories(out: Path, step: int) -> pa.Table:
    """Samples of a step."""
    return pq.read_table(out / "trajectories" / f"step-{step:06d}.parquet")


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    """The policy of a checkpoint."""
    return load_file(out / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


def spec_section(path: Path, name: str) -> Any:
    """A section of a spec file, as written."""
    return yaml.safe_load(path.read_text())[name]
