"""Families on the real stack that transformers and vLLM compute in different ways.

transformers holds the experts of a layer in two tensors, which vLLM splits and packs. vLLM caps attention logits, and
transformers only in eager attention. The output head of one of them is not tied to its embedding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, PreTrainedConfig, Qwen3MoeConfig

from tests.real.audit_faults import EXTENSION, Stack, audit_spec
from tests.real.loop_link import LoopLink
from tests.real.rollout_helpers import rollout_config
from tests.real.test_lora_engine import Policy, agrees, rows
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.engine import settings
from troupe.workers.rollout import RolloutWorker
from troupe.workers.training.adapter import Adapter, ModelAdapter
from troupe.workers.weights.device_sender import device_sender
from troupe.workers.weights.file import WeightPublisher

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

CPU = torch.device("cpu")
BUCKET = 64 * 1024
"""An expert's matrices are in several buckets."""
TIGHT = 1e-4
"""Nats between sampler, trainer and scorer in float32; an expert or cap that is missing gives a hundred times that."""


@pytest.fixture(scope="module", autouse=True)
def faulty_extension() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_EXTENSION", EXTENSION)
        yield


@pytest.fixture(scope="module")
def scorer() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2
    ),
    "gemma2-cap": Gemma2Config(
        **SIZES, tie_word_embeddings=True, head_dim=32, query_pre_attn_scalar=32, attn_logit_softcapping=0.5
    ),
}


def save_model(config: PreTrainedConfig, folder: Path, tokenizer: Path) -> Path:
    """Write a model of two layers with the vocabulary of another one."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


async def _send(stack: Stack, version: int) -> None:
    """Send the weights from device to device: experts come in buckets, each in the order of the trainer."""
    trainer, link = stack.policy.engine, LoopLink([stack.engine])
    sender = await asyncio.to_thread(device_sender, "gloo", link, trainer.weight_shapes(), 0, CPU, BUCKET)
    await asyncio.to_thread(sender.send, version, trainer.named_weights())
    sender.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def stack(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, scorer: Executor
) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("families")
    model = save_model(FAMILIES[request.param], folder / "model", tiny_model)
    backend = "gloo" if request.param == "qwen3-moe" else "shm"
    stack = Stack(audit_spec(folder, model, "float32", f"weight_sync.backend={backend}"), folder, scorer)
    if backend == "gloo":
        stack.push_version = lambda version: _send(stack, version)
    await stack.start()
    yield stack
    await stack.close()


async def test_log_probs_are_the_same_on_both_sides_after_every_update(stack: Stack) -> None:
    for number in range(3):
        if number:
            await stack.update(number)
        report = await stack.audit()
        assert report.passed, "\n".join(report.lines())
        assert report.between < TIGHT
        assert all(gap.mean < TIGHT for gap in report.gaps)


async def test_adapters_beside_experts_are_what_the_engine_samples_from(tiny_model: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=3, alpha=4.5, targets=("q_proj", "v_proj", "o_proj"))
    folder = save_model(FAMILIES["qwen3-moe"], tmp_path / "model", tiny_model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapter = ModelAdapter(model, lora, ModelConfig(path=str(folder), dtype="float32"))
    policy = Policy(model, adapter, None, {}, {})  # pyright: ignore[reportArgumentType]
    policy.publisher = WeightPublisher(policy.published, tmp_path, "experts")
    worker = RolloutWorker(rollout_config(folder).model_copy(update={"lora": lora}), "rollout-0")
    await worker.start()
    try:
        for _ in range(2):
            policy.train()
            await worker.update_weights(policy.publish())
            found = await rows(worker)
            assert all(agrees(row, policy.expected(row)) for row in found)
            with adapter.off():
                assert not any(agrees(row, policy.expected(row)) for row in found)
    finally:
        await worker.close()
        policy.publisher.close()
    with pytest.raises(ValueError, match="has no linear layer gate_proj"):  # those of experts are in one tensor
        Adapter(model, lora.model_copy(update={"targets": ("gate_proj",)}))


async def test_an_update_that_is_not_loaded_is_named(stack: Stack) -> None:
    """So the comparison sees experts and attention at all."""
    await stack.engine.plant("no update")
    await stack.update(7)
    try:
        report = await stack.audit()
    finally:
        await stack.push()
    assert "older weights in the whole model" in report.findings()[0]
