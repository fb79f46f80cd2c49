"""Log-probs and values of tiny models of several families against their own full logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from tests.token_batches import batch_of
from tests.workers.models.test_token_batch import train_table
from troupe.workers.contract.config import CHUNK_LOGITS
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import KEPT_TOKENS, RankPlan, ScoreSummary, identities, token_scores
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.distillation import top_tokens
from troupe.workers.models.modeling import (
    CausalLogprobs,
    TokenValues,
    head_chunks,
    load_causal,
    load_value,
    score,
    score_plan,
)
from troupe.workers.models.ragged import ragged
from troupe.workers.models.token_batch import TokenBatch, TokenTable

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma2-softcap": Gemma2Config(**SIZES, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "cohere-scale": CohereConfig(**SIZES, logit_scale=0.25),
    "granite-scale": GraniteConfig(**SIZES, logits_scaling=4.0),
    "gpt2-dropout": GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5),
}
SAMPLES = [([5, 6, 7], [8, 9]), ([11], [12, 13, 14, 15, 16]), ([17, 18], []), ([19, 20], [21])]


def save_model(config: PreTrainedConfig, folder: Path) -> ModelConfig:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # The usual initialisation is so small that every distribution is nearly uniform.
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return save_model(FAMILIES["llama-tied"], tmp_path_factory.mktemp("llama"))


def run(module: torch.nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return module(batch=batch)


def one_by_one(model: torch.nn.Module, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of every sample alone, unpadded, from the model's own logits."""
    logprobs, entropies = [], []
    for prompt, response in SAMPLES:
        logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        for t, token in enumerate(response):
            logprobs.append(distribution.logits[len(prompt) - 1 + t, token])
            entropies.append(distribution.entropy()[len(prompt) - 1 + t])
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_padded_batch(family: str, tmp_path: Path) -> None:
    model = load_causal(save_model(FAMILIES[family], tmp_path))
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    for chunks in (1, 3, 20):
        module = CausalLogprobs(model, temperature=0.7, chunks=chunks)
        assert module.split_head
        # In training mode on purpose: dropout must be off, or the ratio of new to old policy is noise.
        logprobs, entropies = run(module.train(), batch)
        expected_logprobs, expected_entropies = one_by_one(model.eval(), 0.7)
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entropies, expected_entropies, rtol=1e-4, atol=1e-5)
        assert not entropies.requires_grad


GROUPS = [
    *(("a", [5, 6, 7], response) for response in ([8, 9], [10, 11, 12, 13], [], [14])),
    ("b", [17, 18], [19, 20, 21]),
    *(("c", [22], response) for response in ([23, 24], [25])),
]
"""(prompt_uid, prompt, response)"""


def grouped() -> TokenTable:
    table = train_table([(prompt, response) for _, prompt, response in GROUPS])
    uids = pa.array([uid for uid, _, _ in GROUPS], pa.string())
    return TokenTable(table.set_column(table.column_names.index("prompt_uid"), "prompt_uid", uids))


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_behind_one_prompt_equal_single_samples(family: str, tmp_path: Path) -> None:
    model = load_causal(save_model(FAMILIES[family], tmp_path))
    module = CausalLogprobs(model, temperature=0.7, chunks=3, entropy_grad=True)
    packs = adapt(module, model, "cpu", packing=True)
    assert packs == (not family.startswith("gemma2"))  # which has windows of attention
    if not packs:
        return
    table, rows = grouped(), [0, 1, 2, 3, 4, 6, 5]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for batch in (table.batch(rows), table.packed_batch(rows), table.packed_batch(rows, shared=True)):
        logprobs, entropies = module(batch=batch)
        scale = torch.arange(1.0, len(logprobs) + 1)
        gradients = torch.autograd.grad(
            (logprobs * scale).sum() + (entropies * scale).sum(), parameters, allow_unused=True
        )
        found.append((batch, logprobs, entropies, gradients))
    (alone, *expected), (packed, *_), (together, *_) = found
    assert alone.input_ids.shape == (7, 7) and packed.input_ids.shape == (1, 29) and together.input_ids.shape == (1, 19)
    for batch, *actual in found[1:]:
        assert batch.padding == 0
        assert torch.equal(batch.targets, alone.targets) and torch.equal(batch.sequence, alone.sequence)
        for ours, theirs in zip(actual[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(actual[2], expected[2], strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("restricted", [False, True])
def test_the_head_runs_as_often_for_a_rank_without_rows(llama: ModelConfig, restricted: bool) -> None:
    """Under ZeRO-3 the ranks gather its weight together each time."""
    table = train_table(SAMPLES)
    if restricted:
        kept = [[np.int32(token).tobytes() for token in ids] for ids in table["response_ids"].to_pylist()]
        column = pa.array(kept, KEPT_TOKENS.type)
        table = table.set_column(table.column_names.index(KEPT_TOKENS.name), KEPT_TOKENS.name, column)
    model, tokens, runs = load_causal(llama), TokenTable(table), list[int]()
    module = CausalLogprobs(model, temperature=0.7, chunks=3)
    adapt(module, model, "cpu", packing=True)
    head = model.get_output_embeddings()
    assert head is not None
    for batch in (tokens.packed_batch(range(len(SAMPLES))), tokens.packed_batch([]), tokens.batch([])):
        runs.append(0)

        def count(*_: object) -> None:
            runs[-1] += 1

        with head.register_forward_hook(count):
            score(module, batch)
    assert set(runs) == ({3} if restricted else {1})


def test_a_model_that_mixes_responses_in_a_row_does_not_share_prompts(tmp_path: Path) -> None:
    """A state-space layer carries one response into the next."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = FalconH1Config(**sizes, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4)
    model = load_causal(save_model(config, tmp_path))
    assert not adapt(CausalLogprobs(model, temperature=1.0), model, "cpu", packing=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_the_models_own(family: str, tmp_path: Path) -> None:
    model = load_causal(save_model(FAMILIES[family], tmp_path))
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    module = CausalLogprobs(model, temperature=0.7, chunks=3)
    found = module.distributions(batch)
    assert found.shape == (len(batch.targets), 50) and not found.requires_grad
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(found)))
    logprobs, entropies = one_by_one(model.eval(), 0.7)
    torch.testing.assert_close(found.gather(-1, batch.targets[:, None])[:, 0], logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(-(found.exp() * found).sum(-1), entropies, rtol=1e-4, atol=1e-5)


def test_distributions_behind_one_prompt_equal_single_samples(llama: ModelConfig) -> None:
    model = load_causal(llama)
    module = CausalLogprobs(model, temperature=0.7)
    assert adapt(module, model, "cpu", packing=True)
    table, rows = grouped(), [0, 1, 2, 3, 4, 6, 5]
    alone, together = (
        module.distributions(batch) for batch in (table.batch(rows), table.packed_batch(rows, shared=True))
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_another_temperature_for_one_pass(llama: ModelConfig) -> None:
    model = load_causal(llama)
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    module = CausalLogprobs(model, temperature=0.7, chunks=3)
    logprobs, _ = module(batch=batch, temperature=1.0)
    torch.testing.assert_close(logprobs, one_by_one(model.eval(), 1.0)[0], rtol=1e-4, atol=1e-5)


def test_gradients_do_not_depend_on_chunks(llama: ModelConfig) -> None:
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    model = load_causal(llama)
    parameters = list(model.parameters())

    def gradients(logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = torch.arange(1.0, len(logprobs) + 1)
        return torch.autograd.grad((logprobs * scale).sum() + (entropies * scale).sum(), parameters)

    expected = gradients(*one_by_one(model, 1.3))
    for chunks in (1, 4):
        actual = gradients(*run(CausalLogprobs(model, 1.3, chunks, entropy_grad=True), batch))
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_nonstandard_head_falls_back_to_full_logits(tmp_path: Path) -> None:
    """Falcon-H1 multiplies its logits by a factor under a separate name."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = FalconH1Config(
        **sizes, lm_head_multiplier=0.3, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4
    )
    model = load_causal(save_model(config, tmp_path)).eval()
    module = CausalLogprobs(model, temperature=1.0, chunks=3)
    assert not module.split_head
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = batch_of(ids, torch.tensor([1, 2]))
    logprobs, _ = module(batch=batch)
    expected = model(ids).logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, torch.stack([expected[0, 1, 7], expected[0, 2, 8]]), rtol=1e-4, atol=1e-5)
    whole = module.distributions(batch)
    torch.testing.assert_close(whole, expected[0, 1:3], rtol=1e-4, atol=1e-5)


def test_head_chunks_follow_from_the_configuration() -> None:
    assert head_chunks(50, 8, "cpu") == 1
    vocabulary = 2**16
    for device, logits in CHUNK_LOGITS.items():
        assert head_chunks(vocabulary, logits // vocabulary, device) == 1
        assert head_chunks(vocabulary, logits // vocabulary + 1, device) == 2
        assert head_chunks(vocabulary, 5 * logits // vocabulary, device) == 5


def test_values(llama: ModelConfig, tmp_path: Path) -> None:
    model = load_value(llama)
    batch = TokenTable(train_table(SAMPLES)).batch(range(len(SAMPLES)))
    fresh = score(TokenValues(model), batch)
    assert fresh.shape == (8,) and fresh.dtype == torch.float32 and fresh.tolist() == [0.0] * 8
    with torch.no_grad():
        model.get_parameter("score.weight").normal_()
    model.save_pretrained(tmp_path)
    saved = load_value(ModelConfig(path=str(tmp_path), dtype="float32"))
    values = score(TokenValues(saved), batch)
    torch.testing.assert_close(values, score(TokenValues(model), batch))
    # A value model is an ordinary sequence classifier: its score at the last token is the value there.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    prompt, response = SAMPLES[0]
    expected = plain(torch.tensor([(prompt + response)[:-1]])).logits[0, 0]
    torch.testing.assert_close(values[1], expected, rtol=1e-4, atol=1e-5)


def test_values_in_bfloat16_keep_float32_precision(llama: ModelConfig) -> None:
    model = load_value(ModelConfig(path=llama.path, dtype="bfloat16"))
    with torch.no_grad():
        model.get_parameter("score.weight").fill_(1.0)
    values = score(TokenValues(model), TokenTable(train_table(SAMPLES)).batch([0, 1]))
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())


def test_score_plan(llama: ModelConfig) -> None:
    module = CausalLogprobs(load_causal(llama), 1.0)
    tables = [train_table(SAMPLES[:1]), train_table(SAMPLES[1:])]
    plan = RankPlan(micro_batches=((3, 0), (), (1,)), total_loss_tokens=8, total_sequences=4)
    summary, table = score_plan(module, plan, tables, "ref_logprobs", "cpu")
    assert summary == ScoreSummary(3) and table.schema.equals(token_scores("ref_logprobs"), check_metadata=True)
    assert table.column("prompt_uid").to_pylist() == ["p2", "p0", "p0"]
    flat = ragged(table.column("ref_logprobs")).values
    expected, _ = one_by_one(module.model.eval(), 1.0)
    torch.testing.assert_close(flat, expected[[7, 0, 1, 2, 3, 4, 5, 6]].detach(), rtol=1e-4, atol=1e-5)
    nothing = score_plan(module, RankPlan(((),), 0, 0), tables, "ref_logprobs", "cpu")
    assert nothing[0] == ScoreSummary(0) and nothing[1].num_rows == 0
    assert isinstance(nothing[1], pa.Table)


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_sample_whose_score_is_not_finite_is_named(llama: ModelConfig, top_k: int) -> None:
    module = CausalLogprobs(load_causal(llama), 1.0)
    tables = [train_table(SAMPLES)]
    plan = RankPlan(micro_batches=((3, 0), (1, 2)), total_loss_tokens=8, total_sequences=4)
    token = SAMPLES[1][0][0]
    rows = [row for row, (prompt, response) in enumerate(SAMPLES) if token in [*prompt, *response[:-1]] and response]
    assert 0 < len(rows) < len(SAMPLES)
    head, embedding = module.model.get_output_embeddings(), module.model.get_input_embeddings()
    assert head is not None and embedding is not None
    head.weight = torch.nn.Parameter(head.get_parameter("weight").detach().clone())
    with torch.no_grad():
        embedding.get_parameter("weight")[token] = torch.nan
    summary, _ = score_plan(module, plan, tables, "ref_logprobs", "cpu", top_tokens(top_k))
    keys = identities(tables[0])
    assert sorted(summary.failed) == sorted(keys[row][:2] for row in rows)


def test_only_local_safetensors_are_loaded(llama: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_causal(ModelConfig(path=str(tmp_path / "nowhere")))
    model = AutoModelForCausalLM.from_pretrained(llama.path)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_causal(ModelConfig(path=str(tmp_path)))
