"""`troupe submit` to a real Ray head, as `ray start` makes one."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cluster_demo import answers, free_port
from orchestrator.checkpoint import CheckpointStore
from tests.conftest import ROOT
from tests.real.helpers import GRPO, Command, ask, running, troupe

SFT = ROOT / "deploy" / "tiny-sft.yaml"
HEAD_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the job server of a head of our own."""
    port, dashboard = free_port(), free_port()
    # Sockets live below Ray's folder, and the path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="head-", ignore_cleanup_errors=True) as scratch:
        arguments = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        arguments += [f"--dashboard-port={dashboard}", "--num-cpus=4", f"--temp-dir={scratch}", "--disable-usage-stats"]
        # The agent that takes jobs listens on a fixed port unless told; another head's agent may linger there.
        arguments += [f"--dashboard-agent-listen-port={free_port()}"]
        with running(Command(tmp_path_factory.mktemp("head"), arguments)) as command:
            url = f"http://127.0.0.1:{dashboard}"
            command.until(lambda: answers(url), "answering", HEAD_TIMEOUT_S)
            yield url


def test_a_submitted_spec_runs_as_a_job_and_its_log_is_shown(head: str, tmp_path: Path) -> None:
    sets = [f"name=submitted-{free_port()}", "schedule.steps=2", f"output.folder={tmp_path}/runs"]
    options = [part for override in sets for part in ("--set", override)]
    with running(Command(tmp_path, troupe("submit", str(SFT), "--address", head, "--follow", *options))) as command:
        assert command.wait() == 0, command.told
    assert "submitted " in command.stdout
    assert "step 2/2" in command.stdout
    assert "32 dispatched, 32 trained, 0 dropped" in command.stdout
    assert command.stdout.rstrip().endswith("SUCCEEDED")
    (run,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]  # the first line is the evaluation before it


@pytest.mark.long
def test_a_job_is_watched_and_stopped_and_its_run_is_saved(head: str, tmp_path: Path) -> None:
    job = f"endless-{free_port()}"
    sets = [f"name={job}", "schedule.steps=1000", f"output.folder={tmp_path}/runs"]
    options = [part for override in sets for part in ("--set", override)]
    answer = ask(tmp_path, "submit", str(GRPO), "--address", head, "--submission-id", job, *options)
    assert f"troupe logs {job} --address {head} --follow" in answer
    metrics = tmp_path / "runs" / job / "metrics.jsonl"
    with running(Command(tmp_path, troupe("logs", job, "--address", head, "--follow"))) as follower:
        follower.until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1, "training")
        assert f"{job} ({job}): RUNNING" in ask(tmp_path, "status", job, "--address", head)
        assert f"{job} ({job}): RUNNING" in ask(tmp_path, "jobs", "--address", head).splitlines()[0]
        assert f"{job} ({job}): STOPPED" in ask(tmp_path, "stop", job, "--address", head)
        assert follower.wait() == 1
    assert "step 1/1000" in follower.stdout and follower.stdout.rstrip().endswith("STOPPED")
    assert "step 1/1000" in ask(tmp_path, "logs", job, "--address", head)
    found = CheckpointStore(tmp_path / "runs" / job / "checkpoints", keep=3).latest()
    assert found is not None and found.step == metrics.read_text().count("\n")
    assert list(Path("/dev/shm").glob(f"troupe-{job}-*")) == []


def test_a_job_that_fails_is_told_by_the_exit_code(head: str, tmp_path: Path) -> None:
    options = ["--set", "model.path=/no/such/model"]
    with running(Command(tmp_path, troupe("submit", str(GRPO), "--address", head, "--follow", *options))) as command:
        assert command.wait() == 1, command.told
    assert "model.path: no such folder: /no/such/model" in command.stdout
    assert "FAILED" in command.stdout


def test_a_wrong_token_is_told_in_one_line(head: str, tmp_path: Path) -> None:
    wrong = {"RAY_AUTH_TOKEN": "0" * 64}
    with running(Command(tmp_path, troupe("jobs", "--address", head), wrong)) as command:
        assert command.wait() == 1, command.told
    assert command.stderr.count("\n") == 1, command.stderr
    line = command.stderr
    assert line.startswith(f"error: --address {head}: ") and "token" in line
