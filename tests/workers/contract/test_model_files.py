"""All readers of a model's folder load the same weight files, and a folder with others is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from troupe.orchestrator.spec.checks.models import model_folder
from troupe.workers.contract.model_files import check_model_files, weight_files
from troupe.workers.models.digests import base_digest

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(folder: Path, *names: str, index: tuple[str, ...] = ()) -> None:
    for name in (*names, "config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps(name))
    if index:
        weight_map = {f"layer.{number}": name for number, name in enumerate(index)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("names", "index", "read"),
    [
        (("model.safetensors",), (), ("model.safetensors",)),
        (SHARDS, SHARDS, SHARDS),
        ((*SHARDS, "consolidated.safetensors"), SHARDS, SHARDS),
        (("gptq_model-4bit.safetensors",), (), ("gptq_model-4bit.safetensors",)),
    ],
)
def test_the_files_of_a_model_are_read_by_all(
    tmp_path: Path, names: tuple[str, ...], index: tuple[str, ...], read: tuple[str, ...]
) -> None:
    write(tmp_path, *names, index=index)
    assert [path.name for path in weight_files(tmp_path)] == list(read)
    assert model_folder(tmp_path) == ""
    before = base_digest(tmp_path)
    for name in set(names) - set(read):
        (tmp_path / name).unlink()
    assert base_digest(tmp_path) == before


@pytest.mark.parametrize(
    ("names", "index", "why"),
    [
        (("model.safetensors", "adapter_config.json"), (), "holds an adapter beside the model"),
        (("model.safetensors", "adapter_model.safetensors"), (), "adapter_model.safetensors: vLLM and transformers"),
        (("model.safetensors", "old.safetensors"), (), "old.safetensors: vLLM and transformers do not both load them"),
        (("model.safetensors", *SHARDS), SHARDS, "model-00001-of-00002.safetensors, model-00002-of-00002.safeten"),
    ],
)
def test_a_folder_of_which_readers_load_different_files_is_refused(
    tmp_path: Path, names: tuple[str, ...], index: tuple[str, ...], why: str
) -> None:
    write(tmp_path, *names, index=index)
    with pytest.raises(ValueError, match=why):
        check_model_files(tmp_path)
    assert why in model_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": []}}'])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, *SHARDS, index=SHARDS)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in model_folder(tmp_path)


@pytest.mark.parametrize("reader", [weight_files, check_model_files])
def test_a_folder_that_is_missing_has_no_files(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    assert not reader(tmp_path / "none")
