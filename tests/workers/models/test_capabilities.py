"""What models can do: training without noise, several sequences in one row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
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

from tests.token_batches import batch_of
from tests.workers.models.test_modeling import SIZES, save_model
from tests.workers.models.test_token_batch import train_table
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.plan.worker_memory import products
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.models.capabilities import adapt, check_deterministic
from troupe.workers.models.modeling import CausalLogprobs, ModelModule, TokenValues, load_causal, load_value, score
from troupe.workers.models.packed_attention import install
from troupe.workers.models.proxy import randomize
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.training import deepspeed_engine
from troupe.workers.training.deepspeed_engine import recompute

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
    return module(batch=batch_of(IDS, torch.arange(IDS.shape[1] - 1)))[0]


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
            check_deterministic(module, module.model, "cpu")
        assert (module.model.config.hidden_dropout, module.model.config.attention_dropout) == (0.3, 0.2)
        return
    assert torch.equal(trained, expected) and torch.equal(logprobs(module), expected)
    check_deterministic(module, module.model, "cpu")
    assert module.model.config.to_dict() == AutoModelForCausalLM.from_pretrained(tmp_path).config.to_dict()


def test_a_critic_in_training_has_no_noise(tmp_path: Path) -> None:
    module = TokenValues(load_value(save_model(NOISY["mixtral-jitter"], tmp_path))).train()
    check_deterministic(module, module.model, "cpu")
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


@pytest.mark.parametrize("stage", [1, 3])
def test_every_other_layer_is_recomputed_with_the_same_gradients_and_half_of_the_memory(
    stage: int, tmp_path: Path
) -> None:
    config = LlamaConfig(**SIZES)
    config.num_hidden_layers = 4
    path = save_model(config, tmp_path)
    kept: dict[int, int] = {}
    gradients: dict[int, list[torch.Tensor]] = {}
    for every in (0, 1, 2):
        module = CausalLogprobs(load_causal(path), temperature=1.0)
        if every:
            recompute(module.model, TrainerConfig(learning_rate=1.0, recompute_every=every), stage)
        own = {parameter.data_ptr() for parameter in module.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> torch.Tensor:
            if tensor.data_ptr() not in own:
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = logprobs(module.train()).sum()
        value.backward()
        kept[every] = sum(saved.values())
        gradients[every] = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(gradients[0]) > 30
    for every in (1, 2):
        assert all(map(torch.equal, gradients[every], gradients[0])) and len(gradients[every]) == len(gradients[0])
    assert kept[0] > 8 * kept[1] and kept[0] - kept[2] == pytest.approx(kept[2] - kept[1], rel=0.05), kept


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation.name().removeprefix("aten::")] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [LlamaConfig(**SIZES), MixtralConfig(**NO_HEAD_DIM, num_local_experts=4)])
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_keep_their_products_compute_only_the_rest_again(
    stage: int, family: PreTrainedConfig, tmp_path: Path
) -> None:
    multiplied = (
        "mm",
        "addmm",
        "bmm",
        "mkldnn::_linear_pointwise",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    gradients, counts = [], []
    for kept_products in (None, True, False):
        module = loaded(family, tmp_path)
        if kept_products is not None:
            recompute(module.model, TrainerConfig(learning_rate=1.0, recompute_products=not kept_products), stage)
        value = logprobs(module.train()).sum()
        with Calls() as calls:
            value.backward()
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
        counts.append([sum(calls.counts[name] for name in multiplied), calls.counts["silu"]])
    (none, _), (kept, silu), (again, all_silu) = counts
    assert kept == none < again and silu == all_silu > 0, counts
    assert all(map(torch.equal, gradients[0], gradients[1]))


def test_the_plan_counts_the_products_that_layers_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(**SIZES)
    module = CausalLogprobs(load_causal(save_model(config, tmp_path)), temperature=1.0)
    modes: list[Any] = []

    def contexts(*args: Any) -> Any:
        modes.append(create_selective_checkpoint_contexts(*args))
        return modes[-1]

    monkeypatch.setattr(deepspeed_engine, "create_selective_checkpoint_contexts", contexts)
    recompute(module.model, TrainerConfig(learning_rate=1.0, recompute_products=False), 1)
    value = logprobs(module.train())
    kept = [
        x.val for mode, _ in modes for entry in mode.storage.values() for x in tree_leaves(entry) if hasattr(x, "val")
    ]
    total = sum({x.data_ptr(): x.untyped_storage().nbytes() for x in kept if isinstance(x, torch.Tensor)}.values())
    assert len(modes) == 2 and value.requires_grad
    assert total == pytest.approx(IDS.shape[1] * 2 * products(read_size(tmp_path), 4), rel=0.02)


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
        check_deterministic(module, module.model, "cpu")


def test_a_model_that_computes_otherwise_in_training_is_refused(tmp_path: Path) -> None:
    module = loaded(NOISY["llama"], tmp_path).train()

    def scale(layer: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return output * (1.5 if module.training else 1.0)

    module.model.get_submodule("model.layers.1.mlp").register_forward_hook(scale)
    with pytest.raises(ValueError, match="not deterministic in training mode"):
        check_deterministic(module, module.model, "cpu")


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
PACKS: dict[str, tuple[PreTrainedConfig, bool]] = {
    "llama": (LlamaConfig(**SIZES), True),
    "gpt2": (GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2), True),
    "mixtral": (MixtralConfig(**NO_HEAD_DIM, num_local_experts=4), True),
    "llama4-chunks": (Llama4TextConfig(**LLAMA4), False),
    "llama4-full": (Llama4TextConfig(**LLAMA4, layer_types=["full_attention"] * 4), True),
    "gpt-neo-window": (
        GPTNeoConfig(**GPT, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=6),
        False,
    ),
    "gemma2-window": (Gemma2Config(**SIZES, sliding_window=6), False),
    "gemma2-softcap": (Gemma2Config(**SIZES, layer_types=["full_attention"] * 2), False),
    "gemma3-window": (Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, sliding_window=6), True),
    "gpt-oss-sinks": (
        GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2, rope_parameters=None),
        False,
    ),
    "mistral-window": (MistralConfig(**SIZES, sliding_window=6), True),
    "mistral": (MistralConfig(**SIZES, sliding_window=None), True),
    "qwen2-window-off": (Qwen2Config(**NO_HEAD_DIM, sliding_window=6), True),
    "qwen2-window-in-one-layer": (
        Qwen2Config(**NO_HEAD_DIM, sliding_window=6, use_sliding_window=True, max_window_layers=1),
        True,
    ),
    "qwen2-window-in-no-layer": (
        Qwen2Config(**NO_HEAD_DIM, sliding_window=6, use_sliding_window=True, max_window_layers=2),
        True,
    ),
    "phi3-window": (Phi3Config(**NO_HEAD_DIM, sliding_window=6), True),
    "phi3-window-beyond-all-positions": (Phi3Config(**NO_HEAD_DIM, sliding_window=262144), True),
    "falcon-rotary": (FalconConfig(**FALCON), False),
    "opt-learned-positions": (
        OPTConfig(**GPT, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16),
        True,
    ),
    "falcon-h1-states": (
        FalconH1Config(**NO_HEAD_DIM, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4),
        False,
    ),
}
"""(configuration, packs)"""


def samples_of_one_prompt() -> TokenTable:
    table = train_table([(PROMPT, response) for response in (*RESPONSES, [31])])
    uids = [["p", "p", "q"]]
    return TokenTable(table.set_column(table.column_names.index("prompt_uid"), "prompt_uid", uids))


@pytest.mark.parametrize("family", PACKS)
def test_models_pack_where_it_changes_nothing(family: str, tmp_path: Path) -> None:
    config, packs = PACKS[family]
    module = loaded(config, tmp_path)
    fields = module.model.config.to_dict()
    table, rows = samples_of_one_prompt(), (0, 1, 2)
    alone = torch.cat([score(module, table.batch([row])) for row in rows])
    assert adapt(module, module.model, "cpu", packing=True) == packs
    assert module.model.config.to_dict() == fields
    assert near(score(module, table.batch(rows)), alone)
    if packs:
        for shared in (False, True):
            batch = table.packed_batch(rows, shared)
            assert batch.input_ids.shape == (1, 3 * len(PROMPT) + 10 - shared * len(PROMPT))
            assert near(score(module, batch), alone)
    else:  # it would change something, or fail
        assert module.model.config._attn_implementation in ("sdpa", "eager")
        assert not install(module.model) or not packing_is_exact(module, table, alone)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def packing_is_exact(module: CausalLogprobs, table: TokenTable, alone: torch.Tensor) -> bool:
    try:
        return near(score(module, table.packed_batch((0, 1, 2))), alone)
    except ValueError:
        return False


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3-window", "falcon-h1-states"])
def test_a_causal_model_gets_no_mask_of_the_padding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probs are the same, and layers with full attention run torch's causal kernel, with grouped heads."""
    module = loaded(PACKS[family][0], tmp_path)
    table, rows = samples_of_one_prompt(), (0, 1, 2)
    masked = score(module, table.batch(rows))
    assert not adapt(module, module.model, "cpu", packing=False)
    assert not module.masks_padding
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **arguments: Any) -> torch.Tensor:
        calls.append((arguments["attn_mask"] is None, arguments["is_causal"], arguments.get("enable_gqa")))
        return attend(*args, **arguments)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    torch.testing.assert_close(score(module, table.batch(rows)), masked, rtol=1e-5, atol=1e-6)
    windows = family == "mistral-window"
    assert ((True, True, True) in calls) == (not windows)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_model_is_tried_out_on_the_device_where_it_will_run(family: str) -> None:
    """As a small copy: the model's own tensors here have no memory, and nothing runs on them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(PACKS[family][0])
    module = ModelModule()
    module.model = model
    check_deterministic(module.train(), model, "cpu")
    assert not adapt(module, model, "cpu", packing=False) and not module.masks_padding
    assert adapt(module, model, "cpu", packing=True)
    assert model.device.type == "meta"


def test_a_model_that_looks_ahead_keeps_the_mask(tmp_path: Path) -> None:
    module = loaded(PACKS["llama"][0], tmp_path)
    for layer in module.model.base_model.get_submodule("layers").children():
        layer.get_submodule("self_attn").is_causal = False  # type: ignore[assignment]
    assert not adapt(module, module.model, "cpu", packing=True)
    assert module.masks_padding


@pytest.mark.parametrize("error", [KeyError, AssertionError, ZeroDivisionError, RuntimeError])
def test_a_model_that_raises_anything_takes_one_sequence_to_a_row(error: type[Exception], tmp_path: Path) -> None:
    module = loaded(NOISY["llama"], tmp_path)

    def refuse(layer: torch.nn.Module, args: Any, arguments: dict[str, Any]) -> None:
        if arguments.get("position_ids") is not None and arguments["position_ids"].diff().min() < 0:
            raise error("positions must rise")

    module.model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert not adapt(module, module.model, "cpu", packing=True)


def test_a_model_that_amplifies_rounding_packs() -> None:
    """In bfloat16 its states can differ by more than their length: it is tried out as a small copy."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**{**SIZES, "num_hidden_layers": 24}), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        randomize(model)
    module = CausalLogprobs(model, temperature=1.0)
    table, rows = samples_of_one_prompt(), (0, 1, 2)
    alone = torch.cat([score(module, table.batch([row])) for row in rows])
    assert adapt(module, model, "cpu", packing=True)
    assert not near(score(module, table.packed_batch(rows)), alone)
