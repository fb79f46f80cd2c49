"""Sequence parallelism on two gloo ranks: what two ranks compute of divided rows equals what one computes of whole ones.

All scenarios run in one process group. Without sequence parallelism rank 0 has all rows and rank 1 has none, so that
both cases differ in nothing else.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from transformers import (
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.real.models import save_llama
from tests.real.test_trainer import grouped, policy_config, trainer
from tests.workers.models.test_modeling import SIZES, save_model
from troupe.workers.contract.config import CriticConfig, CriticLossConfig, ModelConfig, Rendezvous, TrainerConfig
from troupe.workers.contract.messages import RankPlan, UpdateMetrics
from troupe.workers.contract.offline_config import ExampleConfig, OfflineConfig, SftLossConfig
from troupe.workers.critic import CriticWorker
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, RewardScores, load_causal, load_value, score
from troupe.workers.models.sequence_parallel import SequenceGroup
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.offline import ExamplePolicyWorker
from troupe.workers.policy import PolicyWorker
from troupe.workers.training.group import join_group, leave_group, rendezvous_store, sequence_group

pytestmark = pytest.mark.real

HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "head_dim": 4}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**{**HEADS, "num_key_value_heads": 4}),
    "one KV head": LlamaConfig(**HEADS),
    "three KV heads": LlamaConfig(**{**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "softcap of the logits": Gemma2Config(
        **HEADS, layer_types=["full_attention"] * 2, attn_logit_softcapping=None, final_logit_softcapping=2.0
    ),
    "learned positions": GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2),
    "offset positions": OPTConfig(
        vocab_size=50, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    ),
    "experts": MixtralConfig(**{**HEADS, "head_dim": None}, num_local_experts=4),
    "experts with norms": Qwen3MoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "odd heads": (
        LlamaConfig(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4}),
        "sequence_parallel_size 2 does not divide the model's 3 attention heads",
    ),
    "window": (MistralConfig(**SIZES, sliding_window=6), "takes no packed rows"),
    "softcap of attention": (Gemma2Config(**SIZES, layer_types=["full_attention"] * 2), "takes no packed rows"),
    "states": (
        FalconH1Config(
            **{**SIZES, "head_dim": None}, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4
        ),
        "takes no packed rows",
    ),
}
STAGES = (0, 1, 2, 3)
TIMEOUT_S = 300.0


def rows_of(table: pa.Table) -> list[int]:
    return list(range(table.num_rows))


def small() -> TokenTable:
    """Two groups with one prompt each, in the vocabulary of the families."""
    table = grouped()
    for name in ("prompt_ids", "response_ids"):
        ids = [[token % 47 + 3 for token in row] for row in table.column(name).to_pylist()]
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(ids, table.schema.field(place).type))
    return TokenTable(table)


class Scenarios:
    """Runs everything on one rank and records what its tests compare, by test."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.found: dict[str, Any] = {}

    def families(self) -> None:
        """Log-probs, entropies and gradients of tiny models, with prompts once for each group and with copies."""
        for name, config in FAMILIES.items():
            path = save_model(config, self.folder / f"{name}-{self.rank}")
            for shared in (False, True):
                model = load_causal(path)
                whole = CausalLogprobs(model, temperature=0.7, chunks=3, entropy_grad=True)
                assert adapt(whole, model, "cpu", packing=True)
                expected = self.passes(whole, shared)
                divided = CausalLogprobs(model, temperature=0.7, chunks=2, entropy_grad=True)
                assert adapt(divided, model, "cpu", packing=True, sequence=sequence_group(2))
                found = self.passes(divided, shared)
                for gradient in found[2:]:
                    dist.all_reduce(gradient)
                self.found[f"{name}-{shared}"] = [found, expected]

    @staticmethod
    def passes(module: CausalLogprobs, shared: bool) -> list[torch.Tensor]:
        """Log-probs, entropies, and the gradient of every parameter."""
        table = small()
        batch = table.packed_batch(range(6), shared)
        module.zero_grad()
        logprobs, entropies = module(
            batch.input_ids, batch.attention_mask, batch.positions, batch.targets, batch.position_ids
        )
        weights = torch.linspace(-1.0, 2.0, len(logprobs))
        ((logprobs * weights).sum() + (entropies * weights.flip(0)).sum()).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
        return [logprobs.detach(), entropies.detach(), *gradients]


def rank_main(rank: int, world: int, port: int, model: str, out: Path) -> None:
    """Entry of the process of one rank."""
    try:
        torch.set_num_threads(1)
        join_group(Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=world), "cpu")
        scenarios = Scenarios(rank, out)
        scenarios.families()
        leave_group()
        torch.save(scenarios.found, out / f"found-{rank}.pt")
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tied two-layer Llama whose matrices are large enough for ZeRO-3 to partition them."""
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
    return save_llama(tmp_path_factory.mktemp("model"), vocab_size=4096, **sizes, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has recorded."""
    out = tmp_path_factory.mktemp("ranks")
    store = rendezvous_store("127.0.0.1", 0, serve=True)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, 2, store.port, model, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    errors = "\n".join(file.read_text() for file in sorted(out.glob("error-*.txt")))
    if errors or any(process.exitcode for process in ranks):
        pytest.fail(f"exit codes {[process.exitcode for process in ranks]}\n{errors}")
    return [torch.load(out / f"found-{rank}.pt") for rank in range(2)]


def close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_divided_rows_give_the_logprobs_and_gradients_of_whole_rows(
    family: str, shared: bool, found: list[dict[str, Any]]
) -> None:
    for rank in found:
        close(*rank[f"{family}-{shared}"])
