"""What a reward model is while it is trained is what the reward role will read: the same token, the same score."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from workers.config import ModelConfig
from workers.modeling import CausalLogprobs, RewardScores, load_causal, load_value, share_backbone
from workers.offline import _keep_last_token
from workers.tensors import TokenBatch, TokenTable


@pytest.fixture
def batch() -> TokenBatch:
    """Three sequences of different length, right-padded."""
    prompts = [[5, 6, 7], [8, 9], [10]]
    responses = [[11, 2], [12, 13, 14, 2], [15]]
    columns = {"prompt_ids": prompts, "response_ids": responses, "loss_mask": [[True] * len(r) for r in responses]}
    return TokenTable(pa.table(columns)).batch(range(3))


def with_head(config: ModelConfig) -> Any:
    """A reward model whose head is not zero."""
    model = load_value(config)
    torch.nn.init.normal_(model.get_submodule("score").state_dict()["weight"], std=0.5)
    return model.eval()


def test_scores_are_those_of_the_plain_classifier(tiny_model: Path, tmp_path: Path, batch: TokenBatch) -> None:
    model = with_head(ModelConfig(path=str(tiny_model), dtype="float32"))
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = batch.input_ids.masked_fill(batch.attention_mask == 0, plain.config.pad_token_id)
    with torch.no_grad():
        scores, logprobs = RewardScores(model)(batch.input_ids, batch.attention_mask, batch.positions, batch.targets)
        wanted = plain(input_ids=ids, attention_mask=batch.attention_mask).logits[:, 0]
    assert logprobs is None
    assert torch.allclose(scores, wanted, atol=1e-5)


def test_the_language_head_stands_on_the_very_backbone_that_is_scored(tiny_model: Path, batch: TokenBatch) -> None:
    config = ModelConfig(path=str(tiny_model), dtype="float32")
    model = with_head(config)
    module = RewardScores(model, share_backbone(model, config, chunks=2))
    inputs = (batch.input_ids, batch.attention_mask, batch.positions, batch.targets)
    scores, logprobs = module(*inputs)
    wanted, _ = CausalLogprobs(load_causal(config), 1.0)(*inputs)
    assert logprobs is not None
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    # One set of parameters: the likelihood teaches the embeddings that the score is computed from.
    logprobs.sum().backward()
    embeddings = model.get_input_embeddings().weight
    assert embeddings.grad is not None and embeddings.grad.any()
    assert sum(p is embeddings for p in module.parameters()) == 1
    assert scores.shape == (3,)


def test_no_token_that_ends_a_turn_is_taken_for_padding() -> None:
    def chosen(pad: int | None, eos: int | list[int], tokenizer_pad: int | None, unk: int | None) -> int:
        config = SimpleNamespace(pad_token_id=pad, eos_token_id=eos, vocab_size=100)
        tokenizer: Any = SimpleNamespace(
            eos_token_id=2, pad_token_id=tokenizer_pad, unk_token_id=unk, bos_token_id=None
        )
        _keep_last_token(config, tokenizer)
        return config.pad_token_id

    assert chosen(7, 2, 2, None) == 7
    assert chosen(2, 2, 2, 9) == 9
    assert chosen(None, [2, 9], 9, None) == 0
    assert chosen(2, [0, 2], 2, None) == 99
