"""The program on the page of models that writes FP8 weights in bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tests.conftest import ROOT
from troupe.orchestrator.spec.checks.models import quantized
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.models.modeling import load_causal

BLOCK = 128
CONFIG = DeepseekV3Config(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=128,
    q_lora_rank=128,
    qk_rope_head_dim=64,
    qk_nope_head_dim=64,
    v_head_dim=64,
    max_position_embeddings=128,
)
"""Its `kv_a_proj_with_mqa` has 192 rows: a block and a half."""


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in FP8, and the scale of each block, as DeepSeek publishes them."""
    rows, columns = weight.shape
    scale = torch.ones(-(-rows // BLOCK), -(-columns // BLOCK))
    found = weight.float().clone()
    for row in range(0, rows, BLOCK):
        for column in range(0, columns, BLOCK):
            block = found[row : row + BLOCK, column : column + BLOCK]
            scale[row // BLOCK, column // BLOCK] = block.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            block /= scale[row // BLOCK, column // BLOCK]
    return found.to(torch.float8_e4m3fn), scale


def publish(folder: Path) -> dict[str, torch.Tensor]:
    """Write a small DeepSeek-V3 as it is published, scales in another file than their weights; returns the weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    scales = {}
    stored = dict(weights)
    for name, weight in weights.items():
        if re.search(r"proj(_with_mqa)?\.weight$", name):
            stored[name], scales[f"{name}_scale_inv"] = in_blocks(weight)
    save_file(stored, folder / "model-00001-of-00002.safetensors")
    save_file(scales, folder / "model-00002-of-00002.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return weights


def test_the_page_s_program_writes_a_model_that_trains(tmp_path: Path) -> None:
    source, target = tmp_path / "fp8", tmp_path / "bf16"
    weights = publish(source)
    ((field, why),) = quantized({"model": ModelConfig(path=str(source))})
    assert field == "model.path" and why.endswith("convert them to bfloat16 (docs/guides/model.md#fp8-weights)")
    page = (ROOT / "docs" / "guides" / "model.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for name, folder in (("DeepSeek-V3-bf16", target), ("DeepSeek-V3", source)):
        program = program.replace(f'"{name}"', repr(str(folder)))
    exec(compile(program, "model.md", "exec"), {})
    assert not list(quantized({"model": ModelConfig(path=str(target))})) and (target / "tokenizer.json").is_file()
    found = {name: weight for file in target.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        step = weight.abs().max() / 448 * 16  # half a step of FP8 between 256 and 448, and bfloat16's rounding
        assert found[name].dtype == weight.dtype and (found[name].float() - weight.float()).abs().max() <= 1.1 * step
    model = load_causal(ModelConfig(path=str(target), dtype="bfloat16"))
    row = model.state_dict()["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(row, found["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"])
