"""What `troupe submit` sends, and what it says where nobody answers. A real job: tests/real/test_submit.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from orchestrator.errors import TroupeError
from orchestrator.jobs import absolute_paths, entrypoint, job_environment, submit_spec, token_header
from orchestrator.spec import load_spec
from tests.conftest import ROOT

GRPO = ROOT / "deploy" / "tiny-grpo.yaml"


def test_every_path_is_made_absolute_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    document = load_spec(ROOT / "deploy" / "tiny-ppo.yaml").model_dump(mode="json")
    document["roles"]["reward"]["functions"][0]["args"] = {"path": "a/b", "folder": "c"}
    sent = absolute_paths(document)
    assert sent["model"].pop("path") == str(tmp_path / document["model"].pop("path"))
    assert sent["output"].pop("folder") == str(tmp_path / document["output"].pop("folder"))
    assert sent == document


def test_an_absolute_path_stays() -> None:
    assert absolute_paths({"model": {"path": "/models/m"}, "list": [{"path": "/x"}]}) == {
        "model": {"path": "/models/m"},
        "list": [{"path": "/x"}],
    }


def test_what_is_sent_is_a_spec_again(tmp_path: Path) -> None:
    spec = load_spec(GRPO)
    sent = tmp_path / "sent.yaml"
    sent.write_text(yaml.safe_dump(absolute_paths(spec.model_dump(mode="json")), sort_keys=False))
    assert load_spec(sent).model_dump(exclude={"model", "output"}) == spec.model_dump(exclude={"model", "output"})


def test_the_entry_point_is_a_shell_line_that_finds_the_command(tmp_path: Path) -> None:
    (tmp_path / "a b.yaml").write_text("name: 5")
    line = entrypoint("a b.yaml")
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=tmp_path, env=job_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "a b.yaml:1: name: expected text, got 5" in done.stderr


def test_the_entry_point_takes_the_clusters_python_where_this_one_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    done = subprocess.run(
        ["/bin/sh", "-c", entrypoint("x.yaml")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "-m orchestrator.cli run x.yaml --resume\n"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1", "Failed to connect to Ray at address: http://127.0.0.1:1."),
        ("127.0.0.1:8265", "expected the job server's URL, as in http://HOST:8265"),
        ("ray://127.0.0.1:10001", "expected the job server's URL, as in http://HOST:8265"),
    ],
)
def test_a_job_server_that_does_not_answer_costs_one_line(tmp_path: Path, address: str, said: str) -> None:
    with pytest.raises(TroupeError) as caught:
        submit_spec(load_spec(GRPO), address, follow=False, working_dir=tmp_path, echo=lambda _: None)
    assert str(caught.value) == f"--address {address}: {said}"
    assert list(tmp_path.iterdir()) == []


def test_the_token_comes_from_the_environment_or_its_file_and_changes_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert token_header() == {}
    file.write_text("of-the-file\n")
    assert token_header() == {"Authorization": "Bearer of-the-file"}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    assert token_header() == {"Authorization": "Bearer of-the-environment"}
    assert "RAY_AUTH_MODE" not in os.environ  # Ray reads it once: set now, this process could start no cluster
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_header() == {}
