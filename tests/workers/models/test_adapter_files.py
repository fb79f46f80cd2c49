"""Adapters that training starts from, and that are added to a model when it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.models.adapter_files import read_adapter
from troupe.workers.models.modeling import load_causal, load_value
from troupe.workers.rewards.model import RewardModel
from troupe.workers.training.adapter import Adapter, ModelAdapter

LORA = LoraConfig(rank=3, alpha=5, targets=("q_proj", "down_proj"))
IDS = torch.tensor([[3, 5, 7, 11, 2, 9]])
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    folder = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that peft itself has written, without a digest of the model below."""
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(str(folder))
    return folder


def source(base: Path, adapter: Path | None, dtype: str = "float32") -> ModelConfig:
    return ModelConfig(path=str(base), adapter=None if adapter is None else str(adapter), dtype=dtype)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS).logits


def by_peft(base: Path, adapter: Path) -> torch.Tensor:
    """What peft computes."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(peft.PeftModel.from_pretrained(model, adapter).eval())


def started(base: Path, adapter: Path, lora: LoraConfig = LORA) -> tuple[torch.nn.Module, ModelAdapter]:
    """A model whose adapters start from those in a folder."""
    model = load_causal(source(base, None))
    return model, ModelAdapter(model, lora, source(base, adapter))


def test_training_starts_from_what_peft_has_written_and_the_reference_stays_there(base: Path, trained: Path) -> None:
    model, adapter = started(base, trained)
    expected, below = by_peft(base, trained), logits(load_causal(source(base, None)))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, below, atol=1e-2)
    start = logits(model)
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter += 0.1
    moved = logits(model)
    assert not torch.allclose(moved, start, atol=1e-2)
    with adapter.as_started():
        assert torch.equal(logits(model), start)
    assert torch.equal(logits(model), moved)
    with adapter.off():
        torch.testing.assert_close(logits(model), below, rtol=0, atol=1e-5)


def test_new_adapters_start_as_the_model_below(base: Path) -> None:
    model = load_causal(source(base, None))
    before, adapter = logits(model), ModelAdapter(model, LORA, source(base, None))
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter += 0.1
    with adapter.as_started():
        torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


def test_a_frozen_model_has_its_adapter_added_once_in_float32(base: Path, trained: Path) -> None:
    torch.testing.assert_close(logits(load_causal(source(base, trained))), by_peft(base, trained), rtol=0, atol=1e-5)
    adapter = load_file(trained / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{WEIGHT.replace('.weight', '')}.lora_{part}.weight"].double() for part in "AB")
    weight = load_file(base / "model.safetensors")[WEIGHT].bfloat16().double()
    found = dict(load_causal(source(base, trained, "bfloat16")).named_parameters())[WEIGHT]
    # In float64 a sum halfway between two values may round to the other one.
    differs = found.detach() != (weight + LORA.scaling * (b @ a)).float().bfloat16()
    assert found.dtype == torch.bfloat16 and differs.float().mean() < 0.01
    backbone = dict(load_value(source(base, trained)).named_parameters())[WEIGHT]
    assert torch.equal(backbone, dict(load_causal(source(base, trained)).named_parameters())[WEIGHT])


def changed(trained: Path, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of the adapter with other tensors."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text((trained / "adapter_config.json").read_text())
    tensors = load_file(trained / "adapter_model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "adapter_model.safetensors"
    )
    return folder


def test_an_adapter_that_does_not_fit_is_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    half = changed(trained, tmp_path / "half", **{name: None})
    with pytest.raises(
        ValueError, match=r"half does not fit .*layers\.0\.self_attn\.q_proj\.lora_B\.weight is not there"
    ):
        started(base, half)
    with pytest.raises(ValueError, match=r"half has only lora_A of model\.layers\.0\.self_attn\.q_proj"):
        load_causal(source(base, half))
    renamed = changed(trained, tmp_path / "renamed", **{name: None, name.replace("q_proj", "query"): torch.ones(32, 3)})
    with pytest.raises(ValueError, match=r"renamed (has only|has tensors)"):
        load_causal(source(base, renamed))
    with pytest.raises(ValueError, match=r"does not fit the adapters of the spec: .* is \(3, 48\), expected \(4, 48\)"):
        started(base, trained, LORA.model_copy(update={"rank": 4}))
    with pytest.raises(ValueError, match=r"does not fit .*k_proj\.lora_A\.weight is not there"):
        started(base, trained, LORA.model_copy(update={"targets": ("q_proj", "k_proj", "down_proj")}))


def test_an_adapter_of_another_model_below_is_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    model, adapter = started(base, trained)
    own = tmp_path / "own"
    adapter.write(own, str(base), {name: tensor.detach().clone() for name, tensor in adapter.named_parameters()})
    assert read_adapter(own).base == adapter.base
    torch.testing.assert_close(logits(load_causal(source(base, own))), logits(model), rtol=0, atol=1e-5)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"bos_token_id": 7}))
    for load in (lambda: load_causal(source(other, own)), lambda: started(other, own)):
        with pytest.raises(ValueError, match=r"other is not the model that the adapter .*own was trained on: digest "):
            load()


def test_settings_of_peft_that_are_more_than_b_a_are_refused(trained: Path, tmp_path: Path) -> None:
    folder = changed(trained, tmp_path / "dora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="dora: it has use_dora, which is not supported"):
        read_adapter(folder)


def test_layers_beside_experts_have_no_adapters() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 50}
    shared: dict[str, Any] = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts": 4}
    config = Qwen2MoeConfig(**sizes, **shared, num_attention_heads=4, num_key_value_heads=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="Qwen2MoeForCausalLM has up_proj beside its experts"):
        Adapter(model, LoraConfig(rank=2, targets=("q_proj", "up_proj")))
    adapter = Adapter(model, LoraConfig(rank=2))
    assert adapter.targets == ("k_proj", "o_proj", "q_proj", "v_proj")
    assert len(list(adapter.named_parameters())) == 8


@pytest.mark.parametrize("load", [load_causal, load_value, lambda config: RewardModel(config, 64, "cpu")])
def test_an_adapter_left_in_the_folder_of_a_model_is_never_added(
    base: Path, trained: Path, tmp_path: Path, load: Callable[[ModelConfig], object]
) -> None:
    folder = tmp_path / "both"
    shutil.copytree(base, folder)
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="holds an adapter beside the model"):
        load(source(folder, None))
