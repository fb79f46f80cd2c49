"""What the tests of the rollout engine share: a small configuration, a prompt pool, and a second opinion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from workers.config import EngineConfig, ModelConfig, RolloutConfig, SamplingConfig
from workers.messages import PROMPTS
from workers.rollout import RolloutWorker

MAX_TOKENS = 24


def rollout_config(model: Path, max_tokens: int = MAX_TOKENS) -> RolloutConfig:
    """Float32, eager, small caches: what is compared is compared exactly."""
    engine = EngineConfig(max_num_seqs=16, max_model_len=1024, enforce_eager=True, kv_cache_gib=0.125, threads=2)
    return RolloutConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        engine=engine,
        sampling=SamplingConfig(temperature=0.7, max_tokens=max_tokens),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )


def chat(*contents: str) -> str:
    """Messages of one user turn each."""
    return json.dumps([{"role": "user", "content": content} for content in contents])


def pool(*messages: str) -> pa.Table:
    """A PROMPTS table."""
    rows = [
        {"row": i, "messages": m, "answer": f"answer {i}", "metadata": "{}", "origin": f"pool.jsonl:{i + 1}"}
        for i, m in enumerate(messages)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


def load(model: Path) -> PreTrainedModel:
    """The trainer's side of the weights, in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def save(model: PreTrainedModel, tokenizer_of: Path, folder: Path) -> Path:
    """A folder a fresh engine can start from."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


@torch.no_grad()
def disturb(model: PreTrainedModel, kind: str) -> None:
    """Move every weight whose name contains `kind`, by a tenth of its size or more."""
    found = [parameter for name, parameter in model.named_parameters() if kind in name]
    if not found:
        raise ValueError(f"no weight is named like {kind}")
    for parameter in found:
        parameter += 0.1 * torch.randn_like(parameter) * parameter.std().clamp(min=0.5)


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, row: dict[str, list[int]], temperature: float) -> torch.Tensor:
    """[response tokens] log-probabilities by transformers."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]


def named(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once: a tied head does not come."""
    return model.named_parameters()


@contextmanager
def sampling(worker: RolloutWorker, **changes: Any) -> Iterator[None]:
    """Another sampling configuration for a while, in an engine that runs."""
    config = worker._config
    worker._config = config.model_copy(update={"sampling": config.sampling.model_copy(update=changes)})
    try:
        yield
    finally:
        worker._config = config
