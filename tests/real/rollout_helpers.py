"""Shared by the tests of the rollout worker: a small configuration, prompts, and log-probs computed by transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from troupe.workers.agents.episodes.turns import TurnLimits
from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.kept_tokens import kept_of
from troupe.workers.contract.messages import PROMPTS, GroupRequest
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm import SamplingParams

MAX_TOKENS = 24


def rollout_config(model: Path, max_tokens: int = MAX_TOKENS) -> RolloutConfig:
    """Float32 and eager execution, because the tests compare log-probs with transformers; a small KV cache."""
    engine = EngineConfig(max_num_seqs=16, max_model_len=1024, enforce_eager=True, kv_cache_gib=0.125, threads=1)
    return RolloutConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        engine=engine,
        sampling=SamplingConfig(temperature=0.7, max_tokens=max_tokens),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )


@contextmanager
def endless(worker: RolloutWorker) -> Iterator[None]:
    """Let every response of a running worker reach its limit within the `with` block.

    The tokens that a request samples after an update depend on the moment of the update, and so would its length."""
    build = worker.generation.sampling_params

    def without_ends(request: GroupRequest, index: int, limits: TurnLimits | None = None) -> SamplingParams:
        params = build(request, index, limits)
        params.ignore_eos, params.stop_token_ids = True, []
        params.all_stop_token_ids.clear()
        return params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.generation, "sampling_params", without_ends)
        yield


async def until_sampling(worker: RolloutWorker, requests: int) -> None:
    """Wait until this many requests of the engine have their first token, and no longer."""
    states = worker.engine.require_live().output_processor.request_states
    async with asyncio.timeout(60):
        while sum(not state.is_prefilling for state in states.values()) < requests:
            await asyncio.sleep(0.005)


def chat(*contents: str) -> str:
    """A chat of user messages, as JSON."""
    return json.dumps([{"role": "user", "content": content} for content in contents])


def prompt_table(*messages: str) -> pa.Table:
    """A `PROMPTS` table with one row per chat."""
    rows = [
        {"row": i, "messages": m, "answer": f"answer {i}", "metadata": "{}", "origin": f"pool.jsonl:{i + 1}"}
        for i, m in enumerate(messages)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


def load_model(model: Path) -> PreTrainedModel:
    """The model as the trainer holds it, in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def save_model(model: PreTrainedModel, tokenizer_of: Path, folder: Path) -> Path:
    """Write a model folder that a new engine can load."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


@torch.no_grad()
def perturb(model: PreTrainedModel, kind: str) -> None:
    """Add noise to every weight whose name contains `kind`: a tenth of its standard deviation, at least 0.05."""
    found = [parameter for name, parameter in model.named_parameters() if kind in name]
    if not found:
        raise ValueError(f"no weight has {kind} in its name")
    for parameter in found:
        parameter += 0.1 * torch.randn_like(parameter) * parameter.std().clamp(min=0.5)


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, row: dict[str, Any], temperature: float) -> torch.Tensor:
    """Log-probabilities of the response tokens by transformers, [response tokens], among those that were left."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]], device=model.device)
    logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float().cpu()
    if row["kept_tokens"] is not None:
        kept = [kept_of(np.frombuffer(words, np.int32), logits.shape[-1]) for words in row["kept_tokens"]]
        logits = logits.masked_fill(~torch.from_numpy(np.stack(kept)), -torch.inf)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once: a tied output head is not repeated."""
    return model.named_parameters()


@contextmanager
def sampling_config(worker: RolloutWorker, **changes: Any) -> Iterator[None]:
    """Change the sampling configuration of a running worker within the `with` block."""
    config = worker.generation.config
    worker.generation.config = config.model_copy(update={"sampling": config.sampling.model_copy(update=changes)})
    try:
        yield
    finally:
        worker.generation.config = config
