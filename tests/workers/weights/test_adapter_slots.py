"""What an engine's memory holds against the adapters of a version: every fault has its own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.workers.models.adapter_files import Description, as_bytes
from troupe.workers.models.digests import base_digest
from troupe.workers.weights.adapter_slots import LayerAdapter, missing_parts, slot_problem

RANK, RESERVED, SCALING = 3, 8, 1.5
QKV, DOWN = "layers.0.qkv", "layers.0.down"
PACKED = {QKV: ["layers.0.q", "layers.0.k"]}


@dataclass
class Layer:
    """Memory of a layer of vLLM for two adapters."""

    lora_a_stacked: Any
    lora_b_stacked: Any
    tp_size: int = 1
    tp_rank: int = 0

    def slice_lora_b(self, b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The rows of this rank, as a layer that divides its outputs has them."""
        return [one if one is None else one.chunk(self.tp_size)[self.tp_rank] for one in b]

    def slice_lora_a(self, a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """All of it."""
        return a


class DividedInputs(Layer):
    """Memory of a layer that divides its inputs, and has one adapter."""

    def slice_lora_a(self, a: Any) -> Any:
        return a.chunk(self.tp_size, dim=1)[self.tp_rank]

    def slice_lora_b(self, b: Any) -> Any:
        return b


def adapter(seed: int, inputs: int = 5, outputs: int = 4, rank: int = RANK) -> LayerAdapter:
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.bfloat16}
    return LayerAdapter(torch.randn(rank, inputs, **draw), torch.randn(outputs, rank, **draw))


def version(seed: int = 0) -> dict[str, LayerAdapter]:
    return {"layers.0.q": adapter(seed), "layers.0.k": adapter(seed + 1), DOWN: adapter(seed + 2)}


def engine(adapters: dict[str, LayerAdapter], scaling: float = SCALING, slot: int = 1) -> dict[str, Layer]:
    """Memory that holds these adapters in a slot."""
    layers = {}
    for name, parts in {QKV: PACKED[QKV], DOWN: [DOWN]}.items():
        empty = [(torch.zeros(2, 1, RESERVED, 5), torch.zeros(2, 1, 4, RESERVED)) for _ in parts]
        layer = Layer(tuple(a.to(torch.bfloat16) for a, _ in empty), tuple(b.to(torch.bfloat16) for _, b in empty))
        for number, part in enumerate(parts):
            if (one := adapters.get(part)) is not None:
                rank = one.a.shape[0]
                layer.lora_a_stacked[number][slot, 0, :rank] = one.a
                layer.lora_b_stacked[number][slot, 0, :, :rank] = one.b * scaling
        layers[name] = layer
    return layers


def problem(layers: dict[str, Layer], adapters: dict[str, LayerAdapter], slot: int = 1) -> str:
    return slot_problem(layers, PACKED, adapters, slot, SCALING)


def test_memory_that_holds_the_version_has_no_problem() -> None:
    assert problem(engine(version()), version()) == ""


def test_layers_without_an_adapter_hold_zeros() -> None:
    chosen = {DOWN: version()[DOWN]}
    assert problem(engine(chosen), chosen) == ""
    assert problem(engine(version()), chosen) == "the engine has an adapter of layers.0.q, and the version has none"


def _half(adapters: dict[str, LayerAdapter]) -> dict[str, Layer]:
    return engine({name: one for name, one in adapters.items() if name != "layers.0.k"})


def _one_number(adapters: dict[str, LayerAdapter]) -> dict[str, Layer]:
    layers = engine(adapters)
    layers[DOWN].lora_a_stacked[0][1, 0, 2, 4] += 1.0
    return layers


def _beyond_the_rank(adapters: dict[str, LayerAdapter]) -> dict[str, Layer]:
    layers = engine(adapters)
    layers[DOWN].lora_b_stacked[0][1, 0, 0, RANK] = 1.0
    return layers


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda _: engine({}), "the engine holds no adapter of layers.0.q"),
        (lambda found: engine(found, slot=0), "the engine holds no adapter of layers.0.q"),
        (lambda _: engine(version(10)), "the engine holds another adapter of layers.0.q"),
        (_half, "the engine holds no adapter of layers.0.k"),
        (lambda found: engine(found, scaling=1.0), "the engine scales the adapter of layers.0.q otherwise"),
        (lambda found: engine({**found, "layers.0.q": adapter(0, rank=2)}), "holds another adapter of layers.0.q"),
        (_one_number, "the engine holds another adapter of layers.0.down"),
        (_beyond_the_rank, "the engine holds another adapter of layers.0.down"),
    ],
)
def test_every_difference_is_named(fault: Callable[[dict[str, LayerAdapter]], dict[str, Layer]], said: str) -> None:
    assert said in problem(fault(version()), version())


def ranks_of(adapters: dict[str, LayerAdapter], ranks: int = 2) -> list[dict[str, Layer]]:
    """Memory of each rank of an engine: `qkv` divides its outputs, `down` its inputs."""
    found: list[dict[str, Layer]] = []
    for rank in range(ranks):
        parts = {
            **{name: LayerAdapter(one.a, one.b.chunk(ranks)[rank]) for name, one in adapters.items() if name != DOWN},
            DOWN: LayerAdapter(adapters[DOWN].a.chunk(ranks, dim=1)[rank], adapters[DOWN].b),
        }
        whole = engine({})
        layers: dict[str, Layer] = {}
        for name, kind, members in ((QKV, Layer, PACKED[QKV]), (DOWN, DividedInputs, [DOWN])):
            layers[name] = kind(whole[name].lora_a_stacked, whole[name].lora_b_stacked, ranks, rank)
            for number, part in enumerate(members):
                if (one := parts.get(part)) is not None:
                    layers[name].lora_a_stacked[number][1, 0, :RANK, : one.a.shape[1]] = one.a
                    layers[name].lora_b_stacked[number][1, 0, : one.b.shape[0], :RANK] = one.b * SCALING
        found.append(layers)
    return found


def test_each_rank_of_an_engine_holds_its_share() -> None:
    first, second = ranks_of(version())
    assert problem(first, version()) == problem(second, version()) == ""
    chosen = {name: one for name, one in version().items() if name != "layers.0.k"}
    assert [problem(layers, chosen) for layers in ranks_of(chosen)] == ["", ""]


@pytest.mark.parametrize(("name", "part"), [(QKV, "layers.0.q"), (DOWN, DOWN)])
def test_a_rank_with_the_share_of_another_is_named(name: str, part: str) -> None:
    first, second = ranks_of(version())
    second[name].lora_a_stacked, second[name].lora_b_stacked = first[name].lora_a_stacked, first[name].lora_b_stacked
    assert problem(first, version()) == ""
    assert problem(second, version()) == f"the engine holds another adapter of {part}"


def test_an_adapter_of_a_layer_that_the_engine_does_not_have_is_named() -> None:
    strange = {**version(), "layers.0.query": adapter(5)}
    assert problem(engine(version()), strange) == "the engine has no layer for the adapter of layers.0.query"


def test_an_embedding_has_other_memory_and_no_adapter() -> None:
    layers: dict[str, Any] = dict(engine(version()))
    layers["embed"] = Layer(torch.zeros(2, 9, RESERVED), torch.zeros(2, 1, 5, RESERVED))
    assert problem(layers, version()) == ""
    layers["embed"].lora_b_stacked[1, 0, 4, 1] = 1.0
    assert problem(layers, version()) == "the engine has an adapter of embed, and the version has none"


def test_a_version_with_parts_missing_or_of_another_rank_is_named() -> None:
    whole = {"q": {"a": torch.zeros(3, 5), "b": torch.zeros(4, 3)}}
    assert missing_parts(whole, 3) == ""
    assert missing_parts({}, 3) == "the version has no adapter"
    assert missing_parts({"q": {"a": torch.zeros(3, 5)}}, 3) == "the version has only lora_A of q"
    assert missing_parts(whole, 4) == "the adapter of q has rank 3, not 4"


def test_a_description_survives_its_tensor() -> None:
    description = Description(base="12ab", config={"r": 3, "target_modules": ["q"], "lora_alpha": 1.5})
    assert Description.of(as_bytes(description.to_json())) == description


def test_the_digest_of_a_base_covers_names_and_contents(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        base_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    (tmp_path / "tokenizer.json").write_text("one")
    digests = [base_digest(tmp_path)]
    (tmp_path / "tokenizer.json").write_text("other")
    assert base_digest(tmp_path) == digests[0]
    (tmp_path / "model.safetensors").write_bytes(b"two")
    digests.append(base_digest(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    digests.append(base_digest(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    digests.append(base_digest(tmp_path))
    assert len(set(digests)) == len(digests)
