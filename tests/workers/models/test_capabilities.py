"""What models can do: training without noise, several sequences in one row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.workers.models.test_modeling import SIZES, save_model
from tests.workers.models.test_token_batch import train_table
from troupe.workers.models.capabilities import check_deterministic, packs, shares_prompts
from troupe.workers.models.modeling import CausalLogprobs, TokenValues, load_causal, load_value, score
from troupe.workers.models.token_batch import TokenTable

NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
ALL_HEADS = {name: value for name, value in NO_HEAD_DIM.items() if name != "num_key_value_heads"}
GPT: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "bos_token_id": 1, "eos_token_id": 2}
FALCON: dict[str, Any] = {
    **GPT,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "alibi": False,
    "hidden_dropout": 0.3,
    "attention_dropout": 0.2,
}
NOISY: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_dropout=0.3),
    "qwen2": Qwen2Config(**NO_HEAD_DIM, attention_dropout=0.3),
    "qwen3": Qwen3Config(**SIZES, attention_dropout=0.3),
    "gemma3": Gemma3TextConfig(**SIZES, attention_dropout=0.3),
    "gpt2": GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5),
    "opt": OPTConfig(
        **GPT, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16, dropout=0.3
    ),
    "persimmon": PersimmonConfig(**ALL_HEADS, hidden_dropout=0.3, attention_dropout=0.3),
    "mixtral-jitter": MixtralConfig(**NO_HEAD_DIM, num_local_experts=4, router_jitter_noise=0.3),
    "minimax-jitter": MiniMaxConfig(**NO_HEAD_DIM, num_local_experts=4, router_jitter_noise=0.3),
    "phimoe-jitter": PhimoeConfig(**NO_HEAD_DIM, num_local_experts=4, router_jitter_noise=0.01, input_jitter_noise=0.3),
    "phimoe-sampled-experts": PhimoeConfig(**NO_HEAD_DIM, num_local_experts=4, router_jitter_noise=0.3),
    "falcon": FalconConfig(**FALCON),
    "falcon-sequential": FalconConfig(**FALCON, parallel_attn=False),
}
READ_FROM_THE_CONFIGURATION = {"falcon": "hidden_dropout", "falcon-sequential": "hidden_dropout and attention_dropout"}
"""Fields that the layers of a family read in every pass, so that the modules cannot be changed."""
STEP = 1e-4
"""Of finite differences; transformers computes the weights of experts in float32."""
IDS = torch.tensor([[5, 9, 12, 31, 7, 44, 8, 21, 3, 40]])


def logprobs(module: torch.nn.Module) -> torch.Tensor:
    """float32 [9], of all tokens but the first."""
    return module(IDS, torch.ones_like(IDS), torch.arange(IDS.shape[1] - 1), IDS[0, 1:])[0]


def loaded(config: PreTrainedConfig, folder: Path) -> CausalLogprobs:
    return CausalLogprobs(load_causal(save_model(config, folder)), temperature=1.0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", NOISY)
def test_models_compute_in_training_as_in_evaluation(family: str, checkpointing: bool, tmp_path: Path) -> None:
    module = loaded(NOISY[family], tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert not torch.equal(plain(IDS).logits, plain(IDS).logits)
    if checkpointing:
        module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = logprobs(module.eval())
    trained = logprobs(module.train())
    if family in READ_FROM_THE_CONFIGURATION and checkpointing:
        fields = READ_FROM_THE_CONFIGURATION[family]
        with pytest.raises(ValueError, match=f"FalconForCausalLM is not deterministic.* set {fields} to 0"):
            check_deterministic(module, module.model)
        assert (module.model.config.hidden_dropout, module.model.config.attention_dropout) == (0.3, 0.2)
        return
    assert torch.equal(trained, expected) and torch.equal(logprobs(module), expected)
    check_deterministic(module, module.model)
    assert module.model.config.to_dict() == AutoModelForCausalLM.from_pretrained(tmp_path).config.to_dict()


def test_a_critic_in_training_has_no_noise(tmp_path: Path) -> None:
    module = TokenValues(load_value(save_model(NOISY["mixtral-jitter"], tmp_path))).train()
    check_deterministic(module, module.model)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).train()
    assert not torch.equal(plain.base_model(IDS)[0], plain.base_model(IDS)[0])


def test_layers_with_gradient_checkpointing_still_recompute(tmp_path: Path) -> None:
    module = loaded(NOISY["llama"], tmp_path).train()
    passes: list[None] = []
    module.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda *call: passes.append(None))
    logprobs(module).sum().backward()
    assert len(passes) == 1
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logprobs(module.train()).sum().backward()
    assert len(passes) == 3


@pytest.mark.parametrize("family", ["phimoe-sampled-experts", "mixtral-jitter", "persimmon"])
def test_the_gradient_is_that_of_the_log_probs_by_finite_differences(family: str, tmp_path: Path) -> None:
    """In float64, along one random direction of all weights; the chosen experts stay the same within the step."""
    path = save_model(NOISY[family], tmp_path).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    module = CausalLogprobs(model, temperature=1.0).train()
    parameters = list(module.parameters())

    def value() -> torch.Tensor:
        # Not the module's own measure, which is in float32.
        logits = model(IDS).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, IDS[0, 1:, None]).sum()

    directions = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).double() for p in parameters]
    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    values = []
    with torch.no_grad():
        for step in (STEP, -STEP):
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=step)
            values.append(float(value()))
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(direction, alpha=step)
    assert slope == pytest.approx((values[0] - values[1]) / (2 * STEP), rel=1e-3)


def test_a_model_that_is_always_random_is_refused_whatever_its_configuration(tmp_path: Path) -> None:
    module = loaded(NOISY["llama"], tmp_path).train()

    def disturb(layer: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return output + 0.1 * torch.rand(())

    module.model.get_submodule("model.layers.1.mlp").register_forward_hook(disturb)
    with pytest.raises(ValueError, match=r"no field of its config\.json explains it"):
        check_deterministic(module, module.model)


def test_a_model_that_computes_otherwise_in_training_is_refused(tmp_path: Path) -> None:
    module = loaded(NOISY["llama"], tmp_path).train()

    def scale(layer: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return output * (1.5 if module.training else 1.0)

    module.model.get_submodule("model.layers.1.mlp").register_forward_hook(scale)
    with pytest.raises(ValueError, match="not deterministic in training mode"):
        check_deterministic(module, module.model)


PROMPT = [(3 * number) % 47 + 3 for number in range(21)]
RESPONSES = ([11, 13, 5, 4], [17, 19, 23, 8, 9])
"""Longer together with the prompt than every window and chunk below."""
LLAMA4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 24,
    "num_local_experts": 2,
    "attention_chunk_size": 8,
}
ROWS: dict[str, tuple[PreTrainedConfig, bool, bool]] = {
    "llama": (LlamaConfig(**SIZES), True, True),
    "gpt2": (GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2), True, True),
    "mixtral": (MixtralConfig(**NO_HEAD_DIM, num_local_experts=4), True, True),
    "llama4-chunks": (Llama4TextConfig(**LLAMA4), False, False),
    "llama4-full": (Llama4TextConfig(**LLAMA4, layer_types=["full_attention"] * 4), True, True),
    "gpt-neo-window": (
        GPTNeoConfig(**GPT, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=6),
        False,
        True,
    ),
    "gemma2-window": (Gemma2Config(**SIZES, sliding_window=6), False, True),
    "gemma3-window": (Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, sliding_window=6), False, True),
    "mistral-window": (MistralConfig(**SIZES, sliding_window=6), False, True),
    "mistral": (MistralConfig(**SIZES, sliding_window=None), True, True),
    "qwen2-window-off": (Qwen2Config(**NO_HEAD_DIM, sliding_window=6), True, True),
    "qwen2-window-in-one-layer": (
        Qwen2Config(**NO_HEAD_DIM, sliding_window=6, use_sliding_window=True, max_window_layers=1),
        False,
        True,
    ),
    "qwen2-window-in-no-layer": (
        Qwen2Config(**NO_HEAD_DIM, sliding_window=6, use_sliding_window=True, max_window_layers=2),
        True,
        True,
    ),
    "phi3-window": (Phi3Config(**NO_HEAD_DIM, sliding_window=6), False, True),
    "phi3-window-beyond-all-positions": (Phi3Config(**NO_HEAD_DIM, sliding_window=262144), True, True),
    "falcon-h1-states": (
        FalconH1Config(**NO_HEAD_DIM, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4),
        False,
        False,
    ),
}
"""(configuration, shares prompts, packs)"""


def truth(one: torch.Tensor, other: Callable[[], torch.Tensor]) -> bool:
    return torch.allclose(one, other(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ROWS)
def test_rows_of_several_sequences_are_used_where_they_change_nothing(family: str, tmp_path: Path) -> None:
    config, shares, packed = ROWS[family]
    module = loaded(config, tmp_path)
    table = TokenTable(train_table([(PROMPT, response) for response in RESPONSES]))
    uids = table.table.column("prompt_uid")
    table = TokenTable(
        table.table.set_column(table.table.column_names.index("prompt_uid"), "prompt_uid", [[uids[0]] * 2])
    )
    alone = score(module, table.batch((0, 1)))
    assert shares_prompts(module) == shares == truth(alone, lambda: score(module, table.shared_batch((0, 1))))
    assert packs(module) == packed == truth(alone, lambda: in_one_row(module))


@torch.no_grad()
def in_one_row(module: CausalLogprobs) -> torch.Tensor:
    """Log-probs of the responses, of both sequences concatenated, written out token by token."""
    sequences = [PROMPT + response for response in RESPONSES]
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    places = torch.tensor([place for sequence in sequences for place in range(len(sequence))])
    own = [
        start + place
        for start, sequence in zip((0, len(sequences[0])), sequences, strict=True)
        for place in range(len(PROMPT), len(sequence))
    ]
    targets = torch.tensor(own)
    return module(ids[None], None, targets - 1, ids[targets], places[None])[0]


@pytest.mark.parametrize("error", [KeyError, AssertionError, ZeroDivisionError, RuntimeError])
def test_a_model_that_raises_anything_takes_one_sequence_to_a_row(error: type[Exception], tmp_path: Path) -> None:
    module = loaded(NOISY["llama"], tmp_path)

    def refuse(layer: torch.nn.Module, args: Any, arguments: dict[str, Any]) -> None:
        if arguments.get("position_ids") is not None and arguments["position_ids"].diff().min() < 0:
            raise error("positions must rise")

    module.model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert not packs(module) and not shares_prompts(module)
