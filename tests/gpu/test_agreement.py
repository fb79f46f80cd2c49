"""Log-probs and gradients of the trainer's model on a device, against float32 on the CPU.

In float32 and bfloat16, with padded and with packed rows, of the model and of a random one whose layers have a sliding
window. It needs no Ray and no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import ROOT
from tests.gpu.isolated import Measurements, isolated
from troupe.workers.contract.config_base import Device, Dtype, ModelConfig
from troupe.workers.contract.messages import TRAIN
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, head_chunks, load_causal
from troupe.workers.models.token_batch import TokenTable

_TEXT = ROOT / "docs" / "explanation" / "faults.md"
_ROWS, _PROMPT, _RESPONSE = 6, 16, 112
_WINDOW = 24
"""Tokens that a layer of the random model attends to; rows are longer."""


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains."""

    logprobs: float
    """Mean difference of the log-probs, in nats per token."""
    gradient: float
    """Least cosine of the gradients."""


TOLERANCES: Mapping[Dtype, Tolerance] = {"float32": Tolerance(1e-3, 0.9999), "bfloat16": Tolerance(0.1, 0.9)}


@dataclass(frozen=True)
class ModelOutputs:
    """What one device and type computes."""

    logprobs: torch.Tensor
    """float64, on the CPU."""
    gradients: dict[str, torch.Tensor]
    """Of a weighted sum of the log-probs, in float32 on the CPU."""


@pytest.mark.long
def test_the_tiny_model_agrees_on_the_cpu(tiny_model: Path, measured: Callable[[Measurements], None]) -> None:
    measured(measure("cpu", str(tiny_model)))


@pytest.mark.gpu
def test_the_model_agrees_with_float32_on_the_cpu(
    demo_model: Path, tmp_path: Path, measured: Callable[[Measurements], None]
) -> None:
    measured(isolated(tmp_path, measure, "cuda", str(demo_model)))


def test_wrong_numerics_are_found() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    exact = ModelOutputs(ones, {"w": torch.tensor([1.0, 0.0])})
    limits = TOLERANCES["float32"]
    assert "cosine 1.0" in check("float32", exact, exact, limits)
    for wrong in (
        ModelOutputs(ones + 0.01, exact.gradients),
        ModelOutputs(ones, {"w": torch.tensor([1.0, 0.1])}),
        ModelOutputs(ones * torch.nan, exact.gradients),
        ModelOutputs(ones, {}),
    ):
        with pytest.raises(AssertionError, match=r"nats per token|\(0, 1\) parameters"):
            check("float32", wrong, exact, limits)


def table(model: Path) -> TokenTable:
    """Rows of several lengths of natural text."""
    from transformers import AutoTokenizer

    ids = iter(AutoTokenizer.from_pretrained(model)(_TEXT.read_text(), add_special_tokens=False)["input_ids"])
    return TokenTable(pa.Table.from_pylist(list(_rows(ids)), schema=TRAIN))


def _rows(ids: Iterator[int]) -> Iterator[dict[str, object]]:
    for number in range(_ROWS):
        length = _RESPONSE - 7 * number
        yield {
            "prompt_uid": str(number),
            "sample_index": 0,
            "attempt": 0,
            "segment": 0,
            "prompt_ids": [next(ids) for _ in range(_PROMPT)],
            "response_ids": [next(ids) for _ in range(length)],
            "loss_mask": [True] * length,
            "rollout_logprobs": [0.0] * length,
            "advantages": [0.0] * length,
            "reward": 0.0,
        }


def windowed(model: Path, folder: Path) -> Path:
    """Write a random model of two layers with sliding windows, and the tokenizer of a model, into a folder."""
    from transformers import AutoConfig, AutoTokenizer, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=AutoConfig.from_pretrained(model).get_text_config().vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=_WINDOW,
    )
    config.save_pretrained(folder)
    save_file(MistralForCausalLM(config).state_dict(), folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def compute(model: Path, rows: TokenTable, device: Device, dtype: Dtype, *, packed: bool) -> ModelOutputs | None:
    """Log-probs and gradients; None: the model does not pack its rows."""
    loaded = load_causal(ModelConfig(path=str(model), dtype=dtype))
    chunks = head_chunks(loaded.config.get_text_config().vocab_size, _ROWS * (_PROMPT + _RESPONSE), device)
    module = CausalLogprobs(loaded, temperature=1.0, chunks=chunks).to(device)
    if adapt(module, loaded, device, packing=packed) != packed:
        return None
    chosen = range(_ROWS)
    batch = (rows.packed_batch(chosen) if packed else rows.batch(chosen)).to(device)
    logprobs, _ = module(batch=batch)
    weights = torch.linspace(-1.0, 2.0, len(logprobs), device=device)
    (logprobs * weights).sum().backward()
    gradients = {name: p.grad.float().cpu() for name, p in module.named_parameters() if p.grad is not None}
    return ModelOutputs(logprobs.detach().double().cpu(), gradients)


def cosine(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The cosine of two gradients."""

    def product(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
        return sum(float(torch.dot(left[name].double().ravel(), right[name].double().ravel())) for name in left)

    return product(one, other) / (product(one, one) * product(other, other)) ** 0.5


def check(name: str, found: ModelOutputs, exact: ModelOutputs, limits: Tolerance) -> str:
    """The differences as text."""
    gap = float((found.logprobs - exact.logprobs).abs().mean())
    parameters = len(found.gradients), len(exact.gradients)
    assert found.gradients.keys() == exact.gradients.keys(), f"{name}: gradients of {parameters} parameters"
    near = cosine(found.gradients, exact.gradients)
    words = f"{gap:.2e} nats per token, cosine {near:.6f}"
    assert gap <= limits.logprobs and near >= limits.gradient, f"{name}: {words}; expected: {limits}"
    return words


def measure(device: Device, model: str) -> Measurements:
    """Compare the model, and one with sliding windows."""
    with TemporaryDirectory() as folder:
        return _measure("", Path(model), device) | _measure("windows, ", windowed(Path(model), Path(folder)), device)


def _measure(prefix: str, model: Path, device: Device) -> dict[str, float | str]:
    rows = table(model)
    exact = compute(model, rows, "cpu", "float32", packed=False)
    assert exact is not None, "the model packs rows that were padded"
    found: dict[str, float | str] = {f"{prefix}tokens": float(len(exact.logprobs))}
    for dtype, limits in TOLERANCES.items():
        for packed in (False, True):
            name = f"{prefix}{dtype}, {'packed' if packed else 'padded'}"
            computed = compute(model, rows, device, dtype, packed=packed)
            found[name] = "does not pack" if computed is None else check(name, computed, exact, limits)
            print(f"{name}: {found[name]}", flush=True)
    return found
