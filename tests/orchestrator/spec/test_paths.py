"""Which fields of a spec hold paths: they are made absolute where the spec is sent elsewhere, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from tests.conftest import ROOT
from tests.orchestrator.spec.test_field_tree import leaves
from troupe.orchestrator.live.diff import field_changes
from troupe.orchestrator.spec.derived.paths import absolute_paths, in_home, path_fields
from troupe.orchestrator.spec.errors import models_in
from troupe.orchestrator.spec.field_tree import field_tree
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
STORES = ("s3://bucket/runs?region=eu-west-1", "gs://bucket/a", "abfs://box@me.dfs.core.windows.net/a", "file:///mnt/c")

PATHS = {"path", "folder", "adapter", "chat_template", "python"}
URLS = {"url"}
NEITHER = {
    *("name", "revision", "dataset", "subset", "split", "files", "accelerator", "node_labels", "tool_parser", "engine"),
    *(
        "targets",
        "args",
        "env",
        "label",
        "regex",
        "choice",
        "json_schema",
        "grammar",
        "stop",
        "host",
    ),
    *(
        "system",
        "template",
        "prompt",
        "teacher",
        "summary",
        "sources",
        "answer",
        "metadata",
        "candidates",
        "level",
        "text",
        "component",
        "metric",
        "players",
    ),
    *("steps", "step_labels", "separator", "offset", "where", "options", "advantage", "loss"),
    *(
        "response",
        "messages",
        "chosen",
        "rejected",
        "margin",
        "answers",
        "scores",
        "project",
        "environment",
        "eval",
        "models",
    ),
    *("models", "dynamic_sampling_on", "system_column", "ranks", "column", "first", "second", "ties", "tools"),
    *("model", "api_key_variable", "headers"),
}
"""Names of text fields that hold something else, or sections by name."""


def of_text(model: type[BaseModel]) -> Iterator[str]:
    """Names of the fields that hold text, in a model and those below it."""
    for name, field in model.model_fields.items():
        if _has_text(field.annotation):
            yield name
        for below in models_in(field.annotation):
            yield from of_text(below)


def _has_text(annotation: Any) -> bool:
    return annotation is str or (
        get_origin(annotation) is not Literal and any(_has_text(part) for part in get_args(annotation))
    )


def test_every_field_of_text_is_known_to_hold_a_path_or_something_else() -> None:
    found = {name for spec in (RolloutSpec, OfflineSpec) for name in of_text(spec)}
    assert found == PATHS | URLS | NEITHER
    fields = dict(leaves(field_tree(RolloutSpec, OfflineSpec)))
    paths = {field.rpartition(".")[2]: one.path for field, one in fields.items() if one.path is not None}
    assert paths.keys() == PATHS | URLS
    assert {name for name, kind in paths.items() if kind == "store"} >= URLS


def test_a_path_is_made_absolute_where_it_is_a_field_and_nowhere_else() -> None:
    source = {"kind": "jsonl", "path": "a/b"}
    document = {"data": {"eval": {"path": source, "math": source}}, "roles": {"rollout": {"engine": {"path": "a/b"}}}}
    sent = absolute_paths({"stages": {"path": document}}, Path("/root"))["stages"]["path"]
    held = source | {"path": "/root/a/b"}
    assert sent == document | {"data": {"eval": {"path": held, "math": held}}}
    assert dict(path_fields(document)) == {"data.eval.path.path": "a/b", "data.eval.math.path": "a/b"}


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "spec.yaml").write_text(GRPO.read_text("utf-8"), "utf-8")
    changed = ["data.train={kind: jsonl, path: ~/a.jsonl}", "model.path=~/m", "output.folder=~/runs"]
    spec = load_rollout_spec("~/spec.yaml", [*changed, "sampling.stop=[~/stop]"])
    assert dict(path_fields(spec.model_dump(mode="json"))).items() >= {
        ("data.train.path", f"{tmp_path}/a.jsonl"),
        ("model.path", f"{tmp_path}/m"),
        ("output.folder", f"{tmp_path}/runs"),
    }
    assert spec.sampling.stop == ("~/stop",)
    chain = {"stages": {"one": {"model": {"path": "~/m"}, "data": {"train": {"a": {"path": "~/a"}}}}}}
    assert {path for _, path in path_fields(in_home(chain))} == {f"{tmp_path}/m", f"{tmp_path}/a"}


@pytest.mark.parametrize("url", STORES)
def test_the_url_of_a_store_is_sent_as_it_is(url: str, tmp_path: Path) -> None:
    spec = load_rollout_spec(GRPO, [f"checkpoint.path={url}", "weight_sync={backend: store, url: 's3://b/w'}"])
    sent = tmp_path / "sent.yaml"
    sent.write_text(yaml.safe_dump(absolute_paths(spec.model_dump(mode="json"), tmp_path)))
    there = load_rollout_spec(sent)
    assert (there.checkpoint, there.weight_sync) == (spec.checkpoint, spec.weight_sync)


def test_a_store_on_a_disk_is_a_path_that_other_machines_need() -> None:
    document = {"checkpoint": {"path": "file:///mnt/a%20b?x=y"}, "weight_sync": {"url": "file:///w"}}
    assert dict(path_fields(document)) == {"checkpoint.path": "/mnt/a b", "weight_sync.url": "/w"}
    chain = {"stages": {"sft": {"checkpoint": {"path": "file:///mnt"}}, "grpo": {"checkpoint": {"path": "s3://b/c"}}}}
    assert dict(path_fields(chain)) == {"stages.sft.checkpoint.path": "/mnt"}


def test_keys_of_others_are_no_fields() -> None:
    form = {"properties": {"x": {"default": {"path": "a"}}}}
    document = {"sampling": {"structured": {"json_schema": form}}, "roles": {"policy": {"node_labels": {"path": "a"}}}}
    assert absolute_paths(document, Path("/root")) == document
    assert list(path_fields(document)) == []


def test_an_adapter_by_its_absolute_path_is_no_other_adapter() -> None:
    lora = ["roles.policy.lora={rank: 4}"]
    relative, absolute = (
        load_rollout_spec(GRPO, [*lora, f"model.adapter={path}"])
        for path in ("own/adapter", Path("own/adapter").absolute())
    )
    assert field_changes(relative, absolute) == []
