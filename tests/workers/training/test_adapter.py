"""Adapters in a model of their own, and `troupe export --merge` of their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from tests.token_batches import batch_of
from troupe.orchestrator.training.checkpoint import CheckpointError
from troupe.orchestrator.training.export import has_adapters, write_merged
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.models.cpu import use_onednn
from troupe.workers.models.modeling import CausalLogprobs, RewardScores, load_causal, load_value, share_backbone
from troupe.workers.training.adapter import Adapter, ModelAdapter, merge

LORA = LoraConfig(rank=3, alpha=5, rslora=True, targets=("q_proj", "down_proj"))
IDS = torch.tensor([[3, 5, 7, 11, 2, 9]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama in float32, with the files of a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"made_for": "this test"}')
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def written(base: Path, folder: Path, dtype: str) -> Any:
    """The model with trained adapters in it, whose folder is written."""
    torch.manual_seed(1)
    model = loaded(base, torch.float32 if dtype == "float32" else torch.bfloat16)
    adapter = ModelAdapter(model, LORA, ModelConfig(path=str(base)))
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    adapter.write(folder, str(base), {name: tensor.detach().clone() for name, tensor in adapter.named_parameters()})
    (folder / "tokenizer_config.json").write_text('{"made_for": "this test"}')
    return model


def test_new_adapters_change_nothing_and_can_be_turned_off(base: Path) -> None:
    plain = loaded(base)
    use_onednn(plain)
    expected, model = logits(plain), loaded(base)
    adapter = Adapter(model, LORA)
    assert torch.equal(logits(model), expected)
    again = dict(Adapter(loaded(base), LORA).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in adapter.named_parameters())
    names = [name for name, _ in adapter.named_parameters()]
    assert len(names) == 2 * 2 * 2
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter += 0.1
    assert not torch.equal(logits(model), expected)
    with adapter.off():
        assert torch.equal(logits(model), expected)
    assert all(parameter.requires_grad for _, parameter in adapter.named_parameters())


def test_the_output_head_never_has_an_adapter(base: Path) -> None:
    assert "lm_head" not in Adapter(loaded(base), LoraConfig()).targets
    with pytest.raises(
        ValueError, match=r"targets: LlamaForCausalLM has no linear layer lm_head; there are: down_proj"
    ):
        Adapter(loaded(base), LoraConfig(targets=("lm_head",)))


def test_a_merged_model_computes_what_the_adapters_did(base: Path, tmp_path: Path) -> None:
    model = written(base, tmp_path / "adapter", "float32")
    assert has_adapters(tmp_path / "adapter") and not has_adapters(base)
    (done,) = merge({"adapter": str(tmp_path / "adapter"), "target": str(tmp_path / "whole")})
    assert done == {"layers": 4}
    torch.testing.assert_close(logits(loaded(tmp_path / "whole")), logits(model), rtol=0, atol=1e-4)
    assert (tmp_path / "whole" / "tokenizer_config.json").is_file()
    with pytest.raises(CheckpointError, match="exists"):
        write_merged(tmp_path / "adapter", tmp_path / "whole")


def test_a_model_below_may_be_given(base: Path, tmp_path: Path) -> None:
    """As `troupe eval` gives it: the spec's model and its tokenizer, whatever the adapter's folder says or has."""
    model, adapter = written(base, tmp_path / "adapter", "float32"), tmp_path / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "/elsewhere"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "tokenizer_config.json").write_text("{}")
    next(merge({"adapter": str(adapter), "target": str(tmp_path / "whole"), "base": str(base)}))
    torch.testing.assert_close(logits(loaded(tmp_path / "whole")), logits(model), rtol=0, atol=1e-4)
    assert "this test" in (tmp_path / "whole" / "tokenizer_config.json").read_text()


def test_weights_are_added_in_float32_and_rounded_once(base: Path, tmp_path: Path) -> None:
    written(base, tmp_path / "adapter", "bfloat16")
    (done,) = merge({"adapter": str(tmp_path / "adapter"), "target": str(tmp_path / "whole")})
    assert done == {"layers": 4}
    adapter, whole = (
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
        load_file(tmp_path / "whole/model.safetensors"),
    )
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    weight = load_file(base / "model.safetensors")[f"{name}.weight"].bfloat16().double()
    expected = weight + LORA.scaling * (b @ a)
    found = whole[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.float().bfloat16())
    untouched = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(whole[untouched], load_file(base / "model.safetensors")[untouched].bfloat16())


def test_a_base_that_has_changed_is_refused(base: Path, tmp_path: Path) -> None:
    written(base, tmp_path / "adapter", "float32")
    config = tmp_path / "adapter" / "adapter_config.json"
    other = loaded(base)
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{}")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "other")}))
    with pytest.raises(ValueError, match=r"is not the model that the adapter .* was trained on: "):
        next(merge({"adapter": str(tmp_path / "adapter"), "target": str(tmp_path / "whole")}))
    assert not (tmp_path / "whole").exists()


def test_the_gradient_of_an_adapter_is_that_of_all_weights_projected(base: Path) -> None:
    """W + s B A: where B is 0, dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW = 0, with dL/dW of training all weights."""
    source = ModelConfig(path=str(base), dtype="float32")
    whole, adapted = load_causal(source), load_causal(source)
    adapter = ModelAdapter(adapted, LORA, source)
    for model in (whole, adapted):
        logprobs, _ = CausalLogprobs(model, temperature=1.0)(batch=batch_of(IDS, torch.arange(5)))
        (-logprobs.mean()).backward()
    full = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found = dict(adapter.named_parameters())
    for layer in (
        f"model.layers.{number}.{name}" for number in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    ):
        a, b = (found[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
        gradient = full[f"{layer}.weight"]
        assert gradient is not None and a.grad is not None and b.grad is not None
        assert gradient.abs().max() > 1e-4 and not a.grad.any()
        torch.testing.assert_close(b.grad, LORA.scaling * gradient @ a.detach().T, rtol=1e-4, atol=1e-7)


def scored(base: Path) -> tuple[RewardScores, ModelAdapter]:
    """A reward model that keeps its language model, with adapters."""
    source = ModelConfig(path=str(base), dtype="float32")
    model = load_value(source)
    language = share_backbone(model, source, chunks=1)
    return RewardScores(model, language), ModelAdapter(model, LORA, source)


def test_the_head_of_a_reward_model_trains_whole_and_its_language_model_does_not(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    module, adapter = scored(base)
    names = [name for name, _ in adapter.named_parameters()]
    assert [name for name in names if ".lora_" not in name] == ["base_model.model.score.weight"]
    assert adapter.targets == ("down_proj", "q_proj") and len(names) == 1 + 2 * 2 * 2
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == {
        f"model.{name.removeprefix('base_model.model.').replace('.weight', '.default.weight')}"
        if ".lora_" in name
        else "model.score.weight"
        for name in names
    }
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    expected = module(batch=batch_of(IDS, torch.arange(5), torch.tensor([5])))[0].detach()
    folder, target = tmp_path / "adapter", tmp_path / "whole"
    adapter.write(folder, str(base), {name: tensor.detach().clone() for name, tensor in adapter.named_parameters()})
    (folder / "tokenizer_config.json").write_text('{"made_for": "this test"}')
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(plain, folder).eval()(IDS).logits[:, 0]
    torch.testing.assert_close(by_peft, expected, rtol=0, atol=1e-4)
    assert list(merge({"adapter": str(folder), "target": str(target)})) == [{"layers": 4}]
    merged = RewardScores(load_value(ModelConfig(path=str(target), dtype="float32")))
    found = merged(batch=batch_of(IDS, torch.arange(5), torch.tensor([5])))[0].detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert expected.abs() > 1e-3
