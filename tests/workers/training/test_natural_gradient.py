"""TRPO's step against a Fisher matrix that is formed and solved in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]: it is documented
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.workers.models.test_token_batch import train_table
from troupe.workers.algorithms.policy_loss import LossOutput
from troupe.workers.contract.algorithm_config import NaturalGradientConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, load_causal
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.training.deepspeed_engine import Forward, StepResult
from troupe.workers.training.natural_gradient import NaturalGradient
from troupe.workers.training.rank import Work

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SIZES, sliding_window=4, tie_word_embeddings=False),
    "gemma2-cap": Gemma2Config(
        **SIZES, head_dim=4, query_pre_attn_scalar=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **dict[str, Any](SIZES, head_dim=4),
        tie_word_embeddings=False,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt2": GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3),
}
TEMPERATURE = 1.3
TOKENS = 8
SAMPLES = [([3, 4, 5], [6, 7, 8, 9]), ([3, 4, 5], [1, 2]), ([10, 11], [12, 3, 3]), ([7], [])]
ADVANTAGES = [[1.0, -0.5, 0.3, 0.8], [-1.0, -0.2], [0.4, 0.9, -0.7], []]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def table() -> TokenTable:
    masks: list[Any] = [[True] * len(response) for _, response in SAMPLES]
    masks[0][2] = False
    return TokenTable(train_table(SAMPLES, advantages=ADVANTAGES, loss_mask=masks))


def module_of(folder: Path, family: str = "llama", chunks: int = 1) -> tuple[CausalLogprobs, bool]:
    """(module, whether it packs)."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder)
    model = load_causal(ModelConfig(path=str(folder), dtype="float32"))
    module = CausalLogprobs(model, TEMPERATURE, chunks)
    return module, adapt(module, model, "cpu", packing=True)


class Dense:
    """The same model by plain torch in float64, at the tokens that the policy sampled."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.model.config._experts_implementation = "eager"  # the products of all experts at once take no float64
        self.parameters = list(self.model.parameters())
        self.rows = [table().batch((row,)) for row in range(3)]  # without padding; the fourth has no response

    def logprobs(self) -> torch.Tensor:
        """[T, vocabulary]."""
        found = []
        for batch in self.rows:
            output: Any = self.model(input_ids=batch.input_ids, use_cache=False)
            found.append((output.logits.flatten(0, 1)[batch.sampled().positions] / TEMPERATURE).log_softmax(-1))
        return torch.cat(found)

    def loss(self) -> torch.Tensor:
        targets, weights = (
            torch.cat([of(batch)[batch.loss_mask] for batch in self.rows]) for of in (_targets, advantages)
        )
        own = self.logprobs().gather(-1, targets[:, None])[:, 0]
        return -(weights.double() * (own - own.detach()).exp()).sum() / TOKENS

    def gradient_of(self, value: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(value, self.parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    def fisher(self) -> torch.Tensor:
        """[P, P]: the mean over tokens of E[s s^T], s the gradient of the log-prob of a token of the vocabulary."""
        logprobs = self.logprobs()
        scores = torch.stack([self.gradient_of(one) for one in logprobs.flatten()])
        return scores.T @ (logprobs.detach().exp().flatten()[:, None] * scores) / len(logprobs)

    def move(self, values: torch.Tensor) -> None:
        torch.nn.utils.vector_to_parameters(values, self.parameters)


def advantages(batch: TokenBatch) -> torch.Tensor:
    found = table().floats("advantages", batch)
    assert found is not None
    return found


def _targets(batch: TokenBatch) -> torch.Tensor:
    return batch.targets


def of_loss(batch: TokenBatch, old: torch.Tensor, forward: Forward) -> tuple[TokenBatch, LossOutput]:
    logprobs, _ = forward(batch=batch)
    terms = advantages(batch) * (logprobs - old).exp() * batch.loss_mask
    return batch, LossOutput(-terms.sum() / TOKENS, {}, {}, {})


def work_of(module: CausalLogprobs, batches: Sequence[TokenBatch]) -> list[Work[LossOutput]]:
    with torch.no_grad():
        return [partial(of_loss, batch, module(batch=batch)[0]) for batch in batches]


def take(natural: NaturalGradient, work: Sequence[Work[LossOutput]]) -> StepResult:
    return natural.step(work, lambda forward, compute: compute(forward)[1].loss)


def flat(module: CausalLogprobs) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_those_of_the_fisher_matrix(tmp_path: Path, family: str) -> None:
    module, packs = module_of(tmp_path, family, chunks=2)
    natural = NaturalGradient(module, NaturalGradientConfig(), "cpu")
    assert packs == (family != "gemma2-cap")
    expected = Dense(tmp_path).fisher()
    vector = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    layouts = [[table().batch(rows) for rows in ((0, 1), (), (3, 2))]]
    if packs:
        layouts += [[table().packed_batch(range(4))], [table().packed_batch(range(4), shared=True)]]
    for batches in layouts:
        found = natural._fisher_product([batch.sampled() for batch in batches], vector, float(TOKENS))
        torch.testing.assert_close(found.double(), expected @ vector.double(), rtol=1e-4, atol=1e-5)


def test_a_step_is_the_scaled_natural_gradient_and_keeps_its_limit(tmp_path: Path) -> None:
    module, _ = module_of(tmp_path)
    config, before, dense = NaturalGradientConfig(max_kl=0.02, cg_iterations=300), flat(module), Dense(tmp_path)
    work = work_of(module, [table().batch((0,)), table().packed_batch((1, 2, 3), shared=True)])
    result = take(NaturalGradient(module, config, "cpu"), work)
    old, loss, fisher = dense.logprobs().detach(), dense.loss(), dense.fisher()
    gradient = dense.gradient_of(loss)
    direction = torch.linalg.solve(fisher + config.damping * torch.eye(len(fisher)), gradient)
    rate = math.sqrt(2.0 * config.max_kl / float(direction @ fisher @ direction))
    assert result.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert result.learning_rate == pytest.approx(rate * result.metrics["step_length"], rel=1e-3)
    moved = before.double() - result.learning_rate * direction
    assert (flat(module) - moved).norm() <= 1e-3 * (before - moved).norm()
    dense.move(moved)
    divergence = float((old.exp() * (old - dense.logprobs())).sum(-1).mean())
    assert divergence <= config.max_kl
    assert result.metrics["kl_step"] == pytest.approx(divergence, rel=1e-3)
    assert result.metrics["surrogate_gain"] > 0.0 == result.metrics["rejected_steps"]


def test_a_step_beyond_the_limit_is_shortened(tmp_path: Path) -> None:
    module, _ = module_of(tmp_path)
    config = NaturalGradientConfig(max_kl=0.1, damping=0.01, backtrack=0.7)
    found = take(NaturalGradient(module, config, "cpu"), work_of(module, [table().batch(range(4))])).metrics
    assert found["kl_proposed"] > config.max_kl >= found["kl_step"] > 0.0
    assert found["step_length"] in [pytest.approx(0.7**attempt) for attempt in range(1, 10)]


@pytest.mark.parametrize("worse", [1.0, math.nan])
def test_a_step_that_does_not_lower_the_loss_is_not_taken(
    tmp_path: Path, worse: float, caplog: pytest.LogCaptureFixture
) -> None:
    module, _ = module_of(tmp_path)
    before, attempts = flat(module), []

    def compute(forward: Forward) -> tuple[TokenBatch, LossOutput]:
        batch, output = work(forward)
        if torch.is_grad_enabled():
            return batch, output
        attempts.append(0)
        return batch, LossOutput(output.loss + worse, {}, {}, {})

    work = work_of(module, [table().batch(range(4))])[0]
    natural = NaturalGradient(module, NaturalGradientConfig(attempts=4), "cpu")
    result = take(natural, [compute])
    assert torch.equal(flat(module), before)
    assert (result.skipped, result.learning_rate, len(attempts)) == (False, 0.0, 4)
    assert (result.metrics["rejected_steps"], result.metrics["step_length"]) == (1.0, 0.0)
    assert "the step is rejected" in caplog.text


def test_a_gradient_that_is_not_finite_skips_the_update(tmp_path: Path) -> None:
    module, _ = module_of(tmp_path)
    before, batch = flat(module), table().batch(range(4))
    work = partial(of_loss, batch, torch.full(batch.targets.shape, math.nan))
    assert take(NaturalGradient(module, NaturalGradientConfig(), "cpu"), [work]).skipped
    assert torch.equal(flat(module), before)
