"""`troupe submit` to a Ray head node started with `ray start`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.cluster import answers, free_port
from tests.conftest import ROOT
from tests.real.commands import GRPO, Command, run_troupe, running, troupe_command
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long

SFT = ROOT / "deploy" / "specs" / "tiny-sft.yaml"
HEAD_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the job server of a Ray head node that only these tests use."""
    port, dashboard = free_port(), free_port()
    # Ray creates sockets in its folder, and the path of a socket has a length limit.
    with tempfile.TemporaryDirectory(prefix="head-", ignore_cleanup_errors=True) as scratch:
        arguments = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        arguments += [f"--dashboard-port={dashboard}", "--num-cpus=4", f"--temp-dir={scratch}", "--disable-usage-stats"]
        # The agent that accepts jobs has a fixed default port, which an agent of another head may still hold.
        arguments += [f"--dashboard-agent-listen-port={free_port()}"]
        with running(Command(tmp_path_factory.mktemp("head"), arguments)) as command:
            url = f"http://127.0.0.1:{dashboard}"
            command.wait_until(lambda: answers(url), "an answer of the job server", HEAD_TIMEOUT_S)
            yield url


def test_a_submitted_spec_runs_as_a_job_and_follow_prints_its_log(head: str, tmp_path: Path) -> None:
    sets = [f"name=submitted-{free_port()}", "schedule.steps=2", f"output.folder={tmp_path}/runs"]
    options = [part for override in sets for part in ("--set", override)]
    with running(
        Command(tmp_path, troupe_command("submit", str(SFT), "--address", head, "--follow", *options))
    ) as command:
        assert command.wait() == 0, command.output
    assert "submitted " in command.stdout
    assert "step 2/2" in command.stdout
    assert "32 dispatched, 32 trained, 0 dropped" in command.stdout
    assert command.stdout.rstrip().endswith("SUCCEEDED")
    (run,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]  # step 0 is the evaluation before training


def test_a_job_can_be_followed_and_stopped_and_saves_its_run(head: str, tmp_path: Path) -> None:
    job = f"endless-{free_port()}"
    sets = [f"name={job}", "schedule.steps=1000", f"output.folder={tmp_path}/runs"]
    options = [part for override in sets for part in ("--set", override)]
    answer = run_troupe(tmp_path, "submit", str(GRPO), "--address", head, "--submission-id", job, *options)
    assert f"troupe logs {job} --address {head} --follow" in answer
    assert (
        f"writes to {tmp_path}/runs/{job} on the cluster" in answer and f"troupe stop {job} --address {head}" in answer
    )
    metrics = tmp_path / "runs" / job / "metrics.jsonl"
    with running(Command(tmp_path, troupe_command("logs", job, "--address", head, "--follow"))) as follower:
        follower.wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1, "two steps")
        state, step = run_troupe(tmp_path, "status", job, "--address", head).splitlines()
        assert f"{job} ({job}): RUNNING" in state and step.startswith("step ") and "reward" in step
        told = json.loads(run_troupe(tmp_path, "status", job, "--address", head, "--json"))
        assert (told["job"], told["status"]) == (job, "RUNNING") and told["step"].startswith("step ")
        assert f"{job} ({job}): RUNNING" in run_troupe(tmp_path, "jobs", "--address", head).splitlines()[0]
        assert f"{job} ({job}): STOPPED" in run_troupe(tmp_path, "stop", job, "--address", head)
        assert follower.wait() == 1
    assert "step 1/1000" in follower.stdout and follower.stdout.rstrip().endswith("STOPPED")
    assert "step 1/1000" in run_troupe(tmp_path, "logs", job, "--address", head)
    found = CheckpointStore(tmp_path / "runs" / job / "checkpoints", keep=3).latest()
    assert found is not None and found.step == metrics.read_text().count("\n")
    assert list(Path("/dev/shm").glob(f"troupe-{job}-*")) == []


def test_follow_exits_with_1_for_a_failed_job(head: str, tmp_path: Path) -> None:
    options = ["--set", "model.path=/no/such/model"]
    with running(
        Command(tmp_path, troupe_command("submit", str(GRPO), "--address", head, "--follow", *options))
    ) as command:
        assert command.wait() == 1, command.output
    assert "model.path: no such folder: /no/such/model" in command.stdout
    assert "FAILED" in command.stdout


def test_a_wrong_token_is_a_one_line_error(head: str, tmp_path: Path) -> None:
    wrong = {"RAY_AUTH_TOKEN": "0" * 64}
    with running(Command(tmp_path, troupe_command("jobs", "--address", head), wrong)) as command:
        assert command.wait() == 1, command.output
    assert command.stderr.count("\n") == 1, command.stderr
    line = command.stderr
    assert line.startswith(f"error: --address {head}: ") and "token" in line
