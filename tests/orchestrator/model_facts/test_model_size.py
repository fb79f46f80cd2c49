"""Sizes of models from their folders: counted in headers, computed from configurations, refused where broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from troupe.orchestrator.model_facts.model_size import SizeUnknown, read_size, tensors_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}
EMBEDDING = 10 * 8
LAYER = 8 * 12 + 12 * 8 + 2 * 8 * 6 + 3 * 8 * 12 + 2 * 8
"""q and o of 4 * 3, k and v of 2 * 3, gate, up and down, two norms."""
BACKBONE = EMBEDDING + 2 * LAYER + 8


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    return tmp_path


def write(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file without its tensors: nothing but the header is read."""
    header = json.dumps({name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_llama_by_hand(tmp_path: Path) -> None:
    size = read_size(folder(tmp_path))
    assert (size.backbone, size.head, size.parameters) == (BACKBONE, 0, BACKBONE)
    assert size.largest == 8 * 12
    assert not size.counted
    assert size.with_score().parameters == BACKBONE + 8


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"tie_word_embeddings": False}, EMBEDDING),
        ({"attention_bias": True}, 2 * (12 + 6 + 6 + 8)),
        ({"mlp_bias": True}, 2 * (12 + 12 + 8)),
        ({"model_type": "qwen2"}, 2 * (12 + 6 + 6)),
        ({"model_type": "qwen3"}, 2 * (3 + 3)),
        ({"num_hidden_layers": 3}, LAYER),
    ],
)
def test_what_a_configuration_adds(tmp_path: Path, changes: dict[str, Any], more: int) -> None:
    assert read_size(folder(tmp_path, **changes)).parameters == BACKBONE + more


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "tiny-llama"])
def test_formula_and_headers_agree_on_real_models(demo_model: Path, tmp_path: Path, name: str) -> None:
    real = demo_model.parent / name
    (tmp_path / "config.json").write_bytes((real / "config.json").read_bytes())
    counted, computed = read_size(real), read_size(tmp_path)
    assert counted.counted and not computed.counted
    assert counted == replace(computed, counted=True)


def test_headers_are_preferred_and_know_every_architecture(tmp_path: Path) -> None:
    write(folder(tmp_path, model_type="strange") / "model.safetensors", {"a": [8, 100], "b": [7], "c": []})
    size = read_size(tmp_path)
    assert (size.parameters, size.largest, size.counted) == (808, 800, True)


def test_a_tied_head_that_is_stored_twice_counts_once_and_buffers_not_at_all(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": [10, 8], "lm_head.weight": [10, 8], "model.rotary_emb.inv_freq": [3]}
    write(folder(tmp_path) / "model.safetensors", tensors)
    assert read_size(tmp_path).parameters == 80
    assert read_size(folder(tmp_path, tie_word_embeddings=False)).parameters == 160


def test_a_reward_model_has_a_backbone_and_no_head_of_its_own(tmp_path: Path) -> None:
    write(
        folder(tmp_path, tie_word_embeddings=False) / "model.safetensors",
        {"model.embed_tokens.weight": [10, 8], "score.weight": [1, 8]},
    )
    size = read_size(tmp_path)
    assert size.with_score().parameters == 80 + 8
    assert size.head == 80, "as a language model it would get one"


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    """Some folders hold the same weights twice, for other programs."""
    folder(tmp_path)
    write(tmp_path / "model-1.safetensors", {"a": [5]})
    write(tmp_path / "model-2.safetensors", {"b": [6]})
    write(tmp_path / "consolidated.safetensors", {"a": [5], "b": [6], "c": [7]})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_size(tmp_path).parameters == 11


@pytest.mark.parametrize("named", ["../model.safetensors", "/etc/passwd", 3, None, "model.bin"])
def test_an_index_reaches_no_other_folder(tmp_path: Path, named: Any) -> None:
    index = folder(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": named}}))
    with pytest.raises(SizeUnknown, match="names no files of this folder"):
        read_size(tmp_path)


def test_text_models_inside_others_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whole", "text_config": CONFIG}))
    assert read_size(tmp_path).layers == 2


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "a header of 0 bytes in 0"),
        (b"\xff" * 8 + b"{}", "is not a safetensors file: a header of 18446744073709551615 bytes in 2"),
        ((3).to_bytes(8, "little") + b"{}", "a header of 3 bytes in 2"),
        ((2).to_bytes(8, "little") + b"no", "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not a JSON object"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "gives 'a' no shape"),
        ((20).to_bytes(8, "little") + b'{"a":{"shape":[-1]}}', "gives 'a' no shape"),
        ((22).to_bytes(8, "little") + b'{"a":{"shape":[true]}}', "gives 'a' no shape"),
        ((34).to_bytes(8, "little") + b'{"a":{"shape":[99999999,99999999]}', "its header is not JSON"),
        ((35).to_bytes(8, "little") + b'{"a":{"shape":[99999999,99999999]}}', "an impossible shape"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "its header is not JSON"),
    ],
)
def test_a_broken_file_is_a_clear_error(tmp_path: Path, content: bytes, error: str) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SizeUnknown) as caught:
        list(tensors_of(path))
    assert error in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"model_type": "gpt_neox"},
            "has no .*safetensors, and the config of a gpt_neox does not tell its size",
        ),
        ({"hidden_size": "wide"}, "hidden_size is wide, not a whole number above 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 2**60}, "hidden_size is"),
    ],
)
def test_a_configuration_that_does_not_say_the_size(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(SizeUnknown, match=error):
        read_size(folder(tmp_path, **changes))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SizeUnknown, match="No such file"):
        read_size(tmp_path / "none")
