"""A run whose model and data come from a hub, from an empty cache to a resumption without network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import MODELS, ROOT
from tests.hub_server import HubServer, Repository, folder_files
from tests.real.commands import Run, running

pytestmark = pytest.mark.long
TOKEN = "hf_test_token_of_the_run"
SFT = ROOT / "deploy" / "specs" / "tiny-sft.yaml"
OVERRIDES = (
    *("model.path=acme/tiny", "model.revision=stable", "checkpoint.every_steps=1", "schedule.examples_per_step=8"),
    *("data.train={kind: hub, name: acme/words}", "data.eval={kind: hub, name: acme/words, split: test}"),
    "evaluation={at_start: false, at_end: true}",
)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer().start()
    yield server
    server.stop()


def resolved(run: Run) -> dict[str, Any]:
    return yaml.safe_load((run.out / "spec.yaml").read_text())


def tiny_model() -> dict[str, bytes]:
    return {name: content for name, content in folder_files(MODELS / "tiny-llama").items() if name[0] != "."}


def add_repositories(hub: HubServer) -> tuple[Repository, Repository]:
    model = hub.add("acme/tiny", tiny_model() | {"pytorch_model.bin": b"pickle"}, token=TOKEN)
    model.branches["stable"] = model.branches.pop("main")
    rows = "\n".join(json.dumps({"prompt": f"Write {number}", "response": "a"}) for number in range(16))
    files = {"data/train.jsonl": rows.encode(), "data/test.csv": b"prompt,response\nSay hello,a\n"}
    return model, hub.add("acme/words", files, kind="datasets", token=TOKEN)


def test_a_run_downloads_once_and_resumes_at_its_commits_without_network(hub: HubServer, tmp_path: Path) -> None:
    model, data = add_repositories(hub)
    commits = model.branches["stable"], data.branches["main"]
    hub.cuts = {"model.safetensors": 1}
    env = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    with running(Run(tmp_path, SFT, *OVERRIDES, "schedule.steps=1", name="hub", env=env)) as first:
        assert first.wait() == 0, first.output
        assert "downloading acme/tiny at commit" in first.stdout
    assert {request.token for request in hub.requests if "acme" in request.path} == {TOKEN}
    assert (resolved(first)["model"]["path"], resolved(first)["model"]["revision"]) == ("acme/tiny", commits[0])
    assert resolved(first)["data"]["train"]["revision"] == commits[1]
    assert resolved(first)["data"]["train"]["files"] == ["data/train.jsonl"]
    snapshot = tmp_path / "home" / "hub" / "models--acme--tiny" / "snapshots" / commits[0]
    assert folder_files(snapshot) == tiny_model()

    model.commit({"config.json": b"{}"}, branch="stable")
    data.commit({"data/train.jsonl": b"moved"})
    hub.stop()
    with running(Run(tmp_path, SFT, *OVERRIDES, "schedule.steps=2", name="hub", resume=True, env=env)) as second:
        assert second.wait() == 0, second.output
    assert [step for step in second.steps() if step] == [1, 2]
    assert (resolved(second)["model"]["revision"], resolved(second)["data"]["train"]["revision"]) == commits

    holding = [path for path in second.out.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert holding == []
    assert TOKEN not in first.output + second.output
