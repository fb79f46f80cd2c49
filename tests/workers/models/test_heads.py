"""Output heads with float32 logits, of weights in every type."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, FalconH1Config

from tests.workers.models.test_modeling import FAMILIES, SAMPLES, SIZES, save_model
from tests.workers.models.test_token_batch import train_table
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.models import heads
from troupe.workers.models.heads import Float32Head, Float32Logits, share_gradient, token_logprobs
from troupe.workers.models.modeling import CausalLogprobs, load_causal, score
from troupe.workers.models.token_batch import TokenTable


def head(bias: bool = False) -> Float32Logits:
    torch.manual_seed(4)
    layer = nn.Linear(12, 37, bias=bias).bfloat16()
    layer.__class__ = Float32Logits
    assert isinstance(layer, Float32Logits)
    return layer


def value_head(width: int, dtype: torch.dtype, bias: bool = False) -> Float32Head:
    layer = nn.Linear(width, 1, bias=bias).to(dtype)
    layer.__class__ = Float32Head
    assert isinstance(layer, Float32Head)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [1, 60, 10_000])
def test_logits_and_gradients_are_those_of_a_float64_product(
    block: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_BLOCK_NUMBERS", block)
    layer, states = head(bias), torch.randn(2, 5, 12).bfloat16().requires_grad_()
    logits = layer(states)
    exact = [tensor.detach().double().requires_grad_() for tensor in (states, layer.weight)]
    expected = torch.einsum("bth,vh->btv", *exact) + (layer.bias.detach().double() if bias else 0.0)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6)
    scale = torch.randn(2, 5, 37)
    (logits * scale).sum().backward()
    (expected * scale).sum().backward()
    for ours, theirs in zip((states, layer.weight), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-2, atol=2e-2)
    if bias:
        torch.testing.assert_close(layer.bias.grad, scale.sum((0, 1)).bfloat16(), rtol=2e-2, atol=2e-2)


def test_no_states_give_no_logits_and_a_gradient_of_zero() -> None:
    layer, states = head(), torch.zeros(0, 12, dtype=torch.bfloat16, requires_grad=True)
    layer(states).sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1 / 0.7])
@pytest.mark.parametrize("tile", [1, 2**21])
def test_log_probs_and_entropies_are_those_of_a_float64_softmax(
    tile: int, factor: float, entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 64 columns, the last one of 8, and all columns at once."""
    monkeypatch.setattr(heads, "_TILE_NUMBERS", tile)
    check_token_logprobs(factor, entropy_grad)


def check_token_logprobs(
    factor: float, entropy_grad: bool, rounding: float = 5e-3, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Compare with a float64 softmax. `rounding`: the largest relative error of a gradient."""
    torch.manual_seed(7)
    states, weight = (torch.randn(rows, 12).to(dtype) for rows in (9, 200))
    targets = torch.tensor([0, 63, 64, 127, 128, 191, 192, 199, 5])
    of_logprobs, of_entropies = torch.randn(2, 9).unbind()
    exact = [x.double().requires_grad_() for x in (states, weight)]
    ours = states.requires_grad_(), weight.requires_grad_()
    logprobs, entropies = token_logprobs(ours[0], ours[1], targets, factor, entropy_grad)
    expected = (factor * exact[0] @ exact[1].T).log_softmax(-1)
    expected_logprobs = expected.gather(-1, targets[:, None])[:, 0]
    expected_entropies = -(expected.exp() * expected).sum(-1)
    assert logprobs.dtype == entropies.dtype == torch.float32 and entropies.requires_grad == entropy_grad
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-6, atol=2e-6)
    (logprobs * of_logprobs).sum().add((entropies * of_entropies).sum() if entropy_grad else 0.0).backward()
    (expected_logprobs * of_logprobs).sum().add(entropy_grad * (expected_entropies * of_entropies).sum()).backward()
    for found, reference in zip(ours, exact, strict=True):
        assert found.grad is not None and reference.grad is not None and found.grad.dtype == dtype
        assert (found.grad.double() - reference.grad).norm() < rounding * reference.grad.norm()
        torch.testing.assert_close(found.grad.double(), reference.grad, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1 / 0.7])
def test_those_of_whole_logits_are_as_exact_and_the_logits_stay(factor: float, entropy_grad: bool) -> None:
    """With tokens that a sampler left out, whose logit is finite and whose probability is 0."""
    torch.manual_seed(7)
    given = (4 * torch.randn(9, 200)).masked_fill(torch.rand(9, 200) < 0.3, -1e9)
    targets, (of_logprobs, of_entropies) = given.argmax(-1), torch.randn(2, 9).unbind()
    logits, exact = given.clone().requires_grad_(), given.double().requires_grad_()
    logprobs, entropies = token_logprobs(logits, None, targets, factor, entropy_grad)
    expected = (factor * exact).log_softmax(-1)
    expected_logprobs = expected.gather(-1, targets[:, None])[:, 0]
    expected_entropies = -(expected.exp() * expected).sum(-1)
    assert entropies.requires_grad == entropy_grad
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-6, atol=1e-6)
    (logprobs * of_logprobs).sum().add((entropies * of_entropies).sum() if entropy_grad else 0.0).backward()
    (expected_logprobs * of_logprobs).sum().add(entropy_grad * (expected_entropies * of_entropies).sum()).backward()
    assert logits.grad is not None and exact.grad is not None and torch.equal(logits.detach(), given)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2e-6, atol=5e-6)
    none = token_logprobs(logits[:0], None, targets[:0], factor, entropy_grad)
    assert [len(values) for values in none] == [0, 0]
    none[0].sum().backward()


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_float16_factors_keep_all_of_their_digits(entropy_grad: bool) -> None:
    """They have more than bfloat16, to which oneDNN may round the factors of that type."""
    check_token_logprobs(1.0, entropy_grad, 1e-3, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_log_prob_among_any_others(dtype: torch.dtype) -> None:
    """Otherwise a policy that has not trained would differ from its reference, which scores other micro-batches.

    Products of whole numbers are exact, whatever the library makes of the number of rows.
    """
    torch.manual_seed(9)
    states, weight = torch.randint(-2, 3, (700, 16)).to(dtype), torch.randint(-2, 3, (5000, 16)).to(dtype)
    targets = torch.randint(0, 5000, (700,))
    whole = token_logprobs(states, weight, targets, 1 / 0.7)
    for part in (slice(0, 40), slice(40, 700), slice(300, 316)):
        for found, expected in zip(token_logprobs(states[part], weight, targets[part], 1 / 0.7), whole, strict=True):
            assert torch.equal(found, expected[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 576, 4096])
def test_a_token_has_the_same_value_among_any_others(width: int, dtype: torch.dtype) -> None:
    """Otherwise the values of a run would differ with the moments at which its groups end."""
    torch.manual_seed(9)
    layer, states = value_head(width, dtype), torch.randn(70, width).to(dtype)
    alone = torch.cat([layer(state[None]) for state in states])
    for tokens in range(1, 71):
        assert torch.equal(layer(states[:tokens]), alone[:tokens])


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_their_gradients_are_those_of_a_float64_product(bias: bool) -> None:
    torch.manual_seed(9)
    layer, states = value_head(48, torch.bfloat16, bias), torch.randn(3, 5, 48).bfloat16().requires_grad_()
    exact = [found.detach().double().requires_grad_() for found in (states, *layer.parameters())]
    expected = nn.functional.linear(*exact)
    values, weights = layer(states), torch.randn(3, 5, 1)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    (values * weights).sum().backward()
    (expected * weights).sum().backward()
    for found, reference in zip((states, *layer.parameters()), exact, strict=True):
        assert found.grad is not None and reference.grad is not None
        torch.testing.assert_close(found.grad, reference.grad.bfloat16())


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("tile", [64, 512])
def test_a_float32_head_is_exact_with_either_library(
    tile: int, entropy_grad: bool, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 64 columns, the last one of 8, and all columns at once, against float64."""
    monkeypatch.setattr(heads, "_FLOAT32_TILE_COLUMNS", tile)
    monkeypatch.setattr(heads, "onednn_is_faster", lambda: onednn)
    torch.manual_seed(8)
    states, weight = torch.randn(9, 12), torch.randn(200, 12)
    targets, (of_logprobs, of_entropies) = torch.randint(0, 200, (9,)), torch.randn(2, 9).unbind()
    layer = nn.Linear(12, 200, bias=False)
    layer.weight.data.copy_(weight)
    layer.__class__ = Float32Logits
    assert isinstance(layer, Float32Logits)
    ours, theirs = (x.requires_grad_() for x in (states, weight.double()))
    logprobs, entropies = layer(ours, targets, 1 / 0.7, entropy_grad)
    exact = states.detach().double().requires_grad_()
    expected = (exact @ theirs.T / 0.7).log_softmax(-1)
    own = expected.gather(-1, targets[:, None])[:, 0], -(expected.exp() * expected).sum(-1)
    for found, reference in zip((logprobs, entropies), own, strict=True):
        torch.testing.assert_close(found.double(), reference, rtol=1e-6, atol=2e-6)
    (logprobs * of_logprobs).sum().add((entropies * of_entropies).sum() if entropy_grad else 0.0).backward()
    (own[0] * of_logprobs).sum().add(entropy_grad * (own[1] * of_entropies).sum()).backward()
    for found, reference in ((ours.grad, exact.grad), (layer.weight.grad, theirs.grad)):
        assert found is not None and reference is not None
        torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(states), states @ weight.T, rtol=1e-5, atol=1e-5)


def test_logits_far_apart_and_infinite_ones() -> None:
    """The largest logit of a later tile makes the sums before it vanish; a weight that is not finite shows."""
    weight = torch.zeros(130, 2, dtype=torch.bfloat16)
    weight[129, 0], weight[3, 1] = 400.0, -400.0
    states, targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16(), torch.tensor([129, 3])
    logprobs, entropies = token_logprobs(states, weight, targets)
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -400.0 - math.log(129)]))
    torch.testing.assert_close(entropies, torch.tensor([0.0, math.log(129)]))
    weight[0, 0] = torch.inf
    assert not token_logprobs(states, weight, targets)[0].isfinite().any()


def test_a_frozen_head_gets_no_gradient_and_no_states_one_of_zero() -> None:
    layer = head()
    layer.weight.requires_grad_(False)
    states, targets = torch.randn(3, 12).bfloat16().requires_grad_(), torch.tensor([1, 2, 36])
    layer(states, targets)[0].sum().backward()
    assert layer.weight.grad is None and states.grad is not None and states.grad.any()
    layer.weight.requires_grad_(True)
    none = torch.zeros(0, 12, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropies = layer(none, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropies.sum()).backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2-softcap"])
def test_a_tied_weight_gets_the_same_gradient_in_one_tensor(
    family: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    """Tokens occur several times, and one is padding. An embedding of its own keeps its gradient."""
    save_model(FAMILIES[family], tmp_path)
    batch = TokenTable(train_table([*SAMPLES, ([5, 6, 5], [5, 0])])).batch(range(len(SAMPLES) + 1))
    found: list[dict[str, torch.Tensor]] = []
    for shared in (False, True):
        model = load_causal(ModelConfig(path=str(tmp_path), dtype=dtype))
        if shared:
            share_gradient(model)
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding) and embedding.sparse == (shared and family != "llama")
        module = CausalLogprobs(model, temperature=0.7, chunks=2).eval()
        for _ in range(2):  # the second is added to the first
            module(batch=batch)[0].sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys()
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, gradient in found[0].items():
        assert not found[1][name].is_sparse
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "cohere-scale", "gemma2-softcap"])
def test_gradients_of_a_float32_model_are_those_of_its_whole_logits(family: str, tmp_path: Path) -> None:
    """Of all weights, a tied one too. A model that caps its logits computes them in chunks."""
    save_model(FAMILIES[family], tmp_path)
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    model = load_causal(ModelConfig(path=str(tmp_path), dtype="float32"))
    assert isinstance(model.get_output_embeddings(), Float32Logits)
    module = CausalLogprobs(model, temperature=0.7, chunks=3, entropy_grad=True).eval()
    logprobs, entropies = module(batch=batch)
    (logprobs.sum() + 0.3 * entropies.sum()).backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    logits = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.flatten(0, 1)
    whole = (logits[batch.positions] / 0.7).log_softmax(-1)
    chosen = whole.gather(-1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen, rtol=1e-4, atol=1e-5)
    (chosen.sum() - 0.3 * (whole.exp() * whole).sum()).backward()
    expected = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_exact_for_the_states_of_a_bfloat16_model(family: str, tmp_path: Path) -> None:
    """Against a float64 head, with the scale and the cap of the family written out."""
    save_model(FAMILIES[family], tmp_path)
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    errors = {}
    for float32_head in (True, False):
        model = load_causal(ModelConfig(path=str(tmp_path), float32_head=float32_head))
        module = CausalLogprobs(model, temperature=0.7, chunks=3).eval()
        assert module.split_head
        with torch.no_grad():
            states = module.states(batch)[1][batch.positions].double()
        output = model.get_output_embeddings()
        assert isinstance(output, nn.Linear) and output.weight.dtype == torch.bfloat16
        logits = states @ output.weight.detach().double().T
        if family == "gemma2-softcap":
            logits = 2.0 * torch.tanh(logits / 2.0)
        logits *= 0.25 if family in ("cohere-scale", "granite-scale") else 1.0
        expected = (logits / 0.7).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
        errors[float32_head] = float((score(module, batch).double() - expected).abs().max())
    assert errors[True] < 1e-5 and errors[False] > 1e-4


def test_a_head_in_float32_keeps_its_name_and_its_tie(tmp_path: Path) -> None:
    save_model(FAMILIES["llama-tied"], tmp_path / "model")
    model = load_causal(ModelConfig(path=str(tmp_path / "model")))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert list(again.state_dict()) == list(model.state_dict())
    assert type(again.get_output_embeddings()) is nn.Linear and again.dtype == torch.bfloat16


def test_a_model_with_full_logits_has_them_in_float32(tmp_path: Path) -> None:
    """Falcon-H1 multiplies its logits by a factor under a separate name."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = FalconH1Config(
        **sizes, lm_head_multiplier=0.3, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4
    )
    save_model(config, tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    for float32_head, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = load_causal(ModelConfig(path=str(tmp_path), float32_head=float32_head)).eval()
        assert not CausalLogprobs(model, temperature=1.0).split_head
        assert model(ids).logits.dtype == dtype
