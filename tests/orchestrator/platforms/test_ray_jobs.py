"""`troupe submit` and its errors, with a fake job client. tests/real/test_submit.py runs a real job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ServerDisconnectedError
from ray.job_submission import JobStatus
from typer.testing import CliRunner

from tests.conftest import ROOT
from troupe.orchestrator.cli import app, main
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError
from troupe.orchestrator.platforms.ray_jobs import (
    JobServer,
    JobState,
    Submission,
    entrypoint,
    job_environment,
    said,
    token_header,
)
from troupe.orchestrator.spec.derived.paths import absolute_paths
from troupe.orchestrator.spec.load import load_rollout_spec, plan_runs, read_document

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
CHAIN = GRPO.with_name("tiny-three-stage.yaml")


def test_every_path_is_made_absolute_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    document = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-ppo.yaml").model_dump(mode="json")
    document["roles"]["reward"]["functions"][0]["args"] = {"path": "a/b", "folder": "c"}
    sent = absolute_paths(document)
    assert sent["model"].pop("path") == str(tmp_path / document["model"].pop("path"))
    assert sent["output"].pop("folder") == str(tmp_path / document["output"].pop("folder"))
    assert sent == document


def test_a_chat_template_is_a_path_unless_it_is_none(tmp_path: Path) -> None:
    for given, sent in (("own/chat.jinja", str(tmp_path / "own/chat.jinja")), ("none", "none"), (None, None)):
        assert absolute_paths({"model": {"chat_template": given}}, tmp_path) == {"model": {"chat_template": sent}}


def test_an_absolute_path_is_unchanged() -> None:
    assert absolute_paths({"model": {"path": "/models/m"}, "list": [{"path": "/x"}]}) == {
        "model": {"path": "/models/m"},
        "list": [{"path": "/x"}],
    }


def test_the_submitted_file_is_a_valid_spec(tmp_path: Path) -> None:
    spec = load_rollout_spec(GRPO)
    sent = tmp_path / "sent.yaml"
    sent.write_text(yaml.safe_dump(absolute_paths(spec.model_dump(mode="json")), sort_keys=False))
    assert load_rollout_spec(sent).model_dump(exclude={"model", "output"}) == spec.model_dump(
        exclude={"model", "output"}
    )


def test_the_entry_point_is_a_shell_line_that_finds_the_command(tmp_path: Path) -> None:
    (tmp_path / "a b.yaml").write_text("name: 5")
    line = entrypoint("a b.yaml")
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=tmp_path, env=job_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "a b.yaml:1: name: expected text, got 5" in done.stderr


def test_the_entry_point_falls_back_to_the_clusters_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    done = subprocess.run(
        ["/bin/sh", "-c", entrypoint("x.yaml")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "-m troupe run x.yaml --resume --supervise\n"


@pytest.mark.parametrize("variable", ["", "RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"])
def test_the_job_server_of_the_address_is_asked_whatever_the_environment_says(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Ray's own client, which prefers the variables. Nothing answers, in one line."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "http://127.0.0.1:2") if name == variable else monkeypatch.delenv(name, raising=False)
    with pytest.raises(TroupeError) as caught:
        JobServer("http://127.0.0.1:1")
    said = "Failed to connect to Ray at address: http://127.0.0.1:1."
    assert str(caught.value) == f"--address http://127.0.0.1:1: {said}"
    assert not variable or os.environ[variable] == "http://127.0.0.1:2"


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "ray://127.0.0.1:10001", "auto"])
@pytest.mark.parametrize("name", ["--address", "RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"])
def test_what_is_no_url_of_a_job_server_is_refused_under_its_name(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    typed = ["troupe", "jobs", *(["--address", address] if name == "--address" else [])]
    monkeypatch.setattr(sys, "argv", typed)
    if name != "--address":
        monkeypatch.setenv(name, address)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"error: {name} {address}: expected the job server's URL, as in http://HOST:8265; " in capfd.readouterr().err


@dataclass
class Details:
    """A job as Ray's client describes it."""

    submission_id: str
    status: JobStatus
    start_time: int | None = 1_000
    end_time: int | None = 61_000
    message: str | None = "Driver exited\nsomewhere"
    metadata: dict[str, str] | None = None
    driver_exit_code: int | None = 1


class Client:
    """A fake of Ray's job client that records its arguments."""

    def __init__(self, address: str, headers: dict[str, str]) -> None:
        self.headers = headers
        self.sent: dict[str, Any] = {}
        self.polls = 0

    def submit_job(self, **job: Any) -> str:
        folder = Path(job["runtime_env"]["working_dir"])
        self.sent = job | {"files": [path.read_text() for path in folder.iterdir()]}
        return job["submission_id"] or "raysubmit_1"

    def list_jobs(self) -> list[Details]:
        found = [Details("old", JobStatus.FAILED), Details("new", JobStatus.SUCCEEDED, 70_000, 71_000, None)]
        return [*found, Details("", JobStatus.RUNNING)]  # a driver that no job server started

    def get_job_info(self, job: str) -> Details:
        if job != "mine":
            raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist\nat all")
        return Details(job, JobStatus.STOPPED, metadata={"troupe": "tiny"}, message=None)

    def get_job_status(self, job: str) -> JobStatus:
        self.polls += 1
        return JobStatus.STOPPED if self.polls > 1 else JobStatus.RUNNING

    def stop_job(self, job: str) -> bool:
        return True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> JobServer:
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "canary-4711")
    return JobServer("http://head:8265")


def client(server: JobServer) -> Client:
    return server._client  # pyright: ignore[reportReturnType]  (the one above)


def test_no_secret_is_submitted_with_a_job(server: JobServer, tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("mine==1.0\n")
    assert server.submit(load_rollout_spec(GRPO), Submission("tiny-1", requirements=requirements), print) == "tiny-1"
    sent = client(server).sent
    assert "canary-4711" not in repr(sent)
    assert client(server).headers == {"Authorization": "Bearer canary-4711"}
    assert sent["runtime_env"]["pip"] == str(requirements)
    assert float(sent["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 60
    assert not {"RAY_AUTH_TOKEN", "HOME", "PATH"} & sent["runtime_env"]["env_vars"].keys()
    assert sent["metadata"] == {"troupe": "tiny-grpo"}


@pytest.mark.usefixtures("server")
def test_the_folders_of_a_submitted_chain_are_those_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    answer = CliRunner().invoke(app, ["submit", str(CHAIN), "--json"], catch_exceptions=False)
    planned = [str(run.out.absolute()) for run in plan_runs(read_document(CHAIN))]
    assert json.loads(answer.stdout)["run_folders"] == planned
    assert len(planned) > 1 and len({Path(folder).parent for folder in planned}) == 1


def test_a_copy_of_the_working_directory_is_sent_and_the_folder_is_not_written(
    server: JobServer, tmp_path: Path
) -> None:
    own = f".troupe-{load_rollout_spec(GRPO).name}.yaml"  # the name that the spec has in the copy
    files = {"rewards.py": "mine", ".env": "TOKEN=canary-4712", own: "my own"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    notes: list[str] = []
    assert server.submit(load_rollout_spec(GRPO), Submission(working_dir=tmp_path), notes.append) == "raysubmit_1"
    sent = client(server).sent
    assert len(sent["files"]) == 2 and "mine" in sent["files"]
    assert "canary-4712" not in repr(sent)
    assert notes == ["not sent, may hold a secret: .env"]
    assert sent["runtime_env"]["working_dir"] != str(tmp_path)
    assert not Path(sent["runtime_env"]["working_dir"]).exists()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_requirements_with_a_password_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("mine==1.0\n--index-url https://user:canary-4713@host/simple\n")
    with pytest.raises(UsageError, match=r"requirements\.txt:2: a URL with a password") as caught:
        Submission(requirements=file)
    assert "canary-4713" not in str(caught.value)
    file.write_text("mine @ git+ssh://git@host/mine.git@main\n")
    Submission(requirements=file)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--working-dir: no such folder: "):
        Submission(working_dir=tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--working-dir: no such folder: "):
        Submission(working_dir=tmp_path / "file")
    with pytest.raises(UsageError, match=r"^--requirements: no such file: "):
        Submission(requirements=tmp_path / "none.txt")


def test_jobs_are_listed_one_line_each_newest_first(server: JobServer) -> None:
    lines = [state.line() for state in server.jobs()]
    assert lines == ["new: SUCCEEDED, 1 s", "old: FAILED, 60 s: Driver exited"]
    assert server.state("mine") == JobState("mine", "tiny", "STOPPED", "stopped", 60.0, "")
    assert server.state("mine").line() == "mine (tiny): STOPPED, 60 s"


@pytest.mark.parametrize(
    ("status", "code", "state"),
    [
        (JobStatus.PENDING, None, "not started"),
        (JobStatus.RUNNING, None, "running"),
        (JobStatus.SUCCEEDED, 0, "finished"),
        (JobStatus.STOPPED, None, "stopped"),
        (JobStatus.FAILED, 130, "stopped"),
        (JobStatus.FAILED, 1, "failed"),
        (JobStatus.FAILED, None, "failed"),
        (JobStatus.FAILED, 137, "died"),
        (JobStatus.FAILED, -9, "died"),
    ],
)
def test_a_job_has_the_state_of_its_run(
    status: JobStatus, code: int | None, state: str, server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client(server), "get_job_info", lambda job: Details(job, status, driver_exit_code=code))
    assert server.state("x").state == state


def test_an_unknown_job_gives_a_one_line_error(server: JobServer) -> None:
    with pytest.raises(TroupeError) as caught:
        server.state("other")
    assert str(caught.value) == "--address http://head:8265: Job other does not exist"


def test_of_a_servers_traceback_the_error_is_shown() -> None:
    """Both servers, the head's and its agent's, send tracebacks."""
    lead = "Request failed with status code 500: Traceback (most recent call last):\n  File ...\nRuntimeError: "
    agent = "Request failed with status code 400: Traceback (most recent call last):\n  File ...\nValueError: "
    assert said(RuntimeError(f"{lead}{agent}the job is unknown\n.\n.")) == "the job is unknown"
    assert said(RuntimeError("Request failed with status code 403: Forbidden")) == "Forbidden"


def test_an_id_that_is_taken_or_no_file_name_is_refused(server: JobServer) -> None:
    with pytest.raises(UsageError, match=r"^--submission-id: there is a job with this id \(old: FAILED, 60 s"):
        server.submit(load_rollout_spec(GRPO), Submission("old"), print)
    assert not client(server).sent
    for name in ("a/b", "a b", ""):
        with pytest.raises(UsageError, match=r"^--submission-id: expected letters, digits"):
            Submission(name)


def test_a_job_that_failed_shows_the_last_line_of_its_log(server: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "tiny: 40 steps\nerror: no room\n"
    message = f"Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n{log}"
    monkeypatch.setattr(client(server), "get_job_info", lambda job: Details(job, JobStatus.FAILED, message=message))
    assert server.state("x").message == "Job entrypoint command failed with exit code 1: error: no room"


def test_an_interrupted_follower_says_that_the_job_continues(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tail(job: str) -> AsyncIterator[str]:
        yield "step 1\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(client(server), "tail_job_logs", tail, raising=False)
    lines: list[str] = []
    with pytest.raises(StopRequested, match=r"^mine is no longer followed, and continues; `troupe stop` stops it$"):
        server.follow("mine", lines.append)
    assert lines == ["step 1"]


def test_what_ends_a_follower_gives_a_one_line_error(server: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tail(job: str) -> AsyncIterator[str]:
        raise ServerDisconnectedError
        yield job

    monkeypatch.setattr(client(server), "tail_job_logs", tail, raising=False)
    with pytest.raises(TroupeError, match=r"^--address http://head:8265: Server disconnected$"):
        server.follow("mine", print)
    with pytest.raises(TroupeError, match=r"^--address http://head:8265: Job other does not exist$"):
        server.follow("other", print)


def test_stopping_waits_for_the_end_until_its_timeout(server: JobServer) -> None:
    assert server.stop("mine", 5.0).status == "STOPPED"
    client(server).polls = -1_000_000
    with pytest.raises(TroupeError, match=r"^mine has not ended within 0 s; it may still be saving$"):
        server.stop("mine", 0.0)


def test_the_token_is_read_from_the_environment_or_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert token_header() == {}
    file.write_text("of-the-file\n")
    assert token_header() == {"Authorization": "Bearer of-the-file"}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    assert token_header() == {"Authorization": "Bearer of-the-environment"}
    assert "RAY_AUTH_MODE" not in os.environ  # Ray reads it once, at import
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_header() == {}
