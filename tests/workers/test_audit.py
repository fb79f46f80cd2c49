"""The scorer on a small model: its log-probs, its hypotheses, and its comparison of prompts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tests.kept_tokens import words_of
from troupe.orchestrator.insight.audit.attribution import attribute
from troupe.workers.audit import _endless, _load, _tempered, _truncated, _variants, score_tokens
from troupe.workers.contract.audit import DOUBLED, MISSING, STALE, TIED_EMBEDDING, WHOLE_MODEL, ScoreRequest
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import KEPT_TOKENS, ROLLOUTS

TEMPERATURE = 0.8
PROMPTS = ([5, 6, 7], [5, 6, 7], [9, 10, 11, 12, 13])
RESPONSES = ([21, 22, 23, 24], [31, 32], [41, 42, 43])


def save(folder: Path, seed: int, *, tied: bool = True) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models, of which only layer 1 and the tied embedding differ."""
    base = tmp_path_factory.mktemp("models")
    new, old = save(base / "new", 1), base / "old"
    model = load(new)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers.1." in name or "embed" in name:
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(old)
    return new, old


def test_the_place_of_a_token_is_the_probability_of_those_above_it() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0], [1.0, 1.0, 0.0]])
    temperatures = (0.5, 1.0, 2.0)
    logprobs, above = _tempered(logits, torch.tensor([[2], [1], [2]]), temperatures)
    for column, temperature in enumerate(temperatures):
        chances = (logits / temperature).softmax(-1)
        assert torch.allclose(logprobs[:, column].exp(), torch.stack([chances[0, 2], chances[1, 1], chances[2, 2]]))
        expected = torch.stack([chances[0, 0], torch.tensor(0.0), chances[2, 0] + chances[2, 1]])
        assert torch.allclose(above[:, column], expected)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rollouts(messages: str = "[]") -> pa.Table:
    rows = [
        {
            "prompt_uid": f"p{number}",
            "sample_index": 0,
            "attempt": 0,
            "segment": 0,
            "prompt_ids": prompt,
            "response_ids": response,
            "rollout_logprobs": [-1.0] * len(response),
            "loss_mask": [place != 1 for place in range(len(response))],
            "weight_versions": [{"version": 0, "start": 0, "end": len(response)}],
            "turns": [],
            "finish_reason": "length",
            "episode_status": "ok",
            "response": "",
            "messages": messages,
            "conversation": "",
            "turn_rewards": [],
            "answer": "",
            "metadata": "{}",
            "engine": f"rollout-{number % 2}",
            "generate_s": 0.0,
            "first_token_s": 0.0,
        }
        for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def scores() -> pa.Table:
    """The trainer's log-probs, in another order than the rollouts."""
    rows = [
        {"prompt_uid": f"p{number}", "sample_index": 0, "segment": 0, "old_logprobs": [-2.0 - number] * len(response)}
        for number, response in reversed(list(enumerate(RESPONSES)))
    ]
    return pa.Table.from_pylist(rows)


def request(folders: tuple[Path, Path], dtype: Any = "float32", **changes: Any) -> ScoreRequest:
    new, old = folders
    model = ModelConfig(path=str(new), dtype=dtype)
    whole = ScoreRequest(model, str(new), str(old), TEMPERATURE, thorough=True, compare_prompts=False)
    return replace(whole, **changes)


@torch.no_grad()
def expected(model: PreTrainedModel, positions: Any = None, temperature: float = TEMPERATURE) -> np.ndarray:
    """Log-probs of the sampled tokens, written out once more."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        where = None if positions is None else torch.tensor([positions(len(prompt), len(response))])
        logits = model(ids, attention_mask=torch.ones_like(ids), position_ids=where).logits[0]
        logprobs = functional.log_softmax(logits.double() / temperature, -1)
        kept = [place for place in range(len(response)) if place != 1]
        found += [float(logprobs[len(prompt) + place - 1, response[place]]) for place in kept]
    return np.array(found)


def test_the_tokens_of_sampler_trainer_and_scorer_are_the_same(folders: tuple[Path, Path]) -> None:
    found = score_tokens(request(folders), rollouts(), scores())
    assert found.sampler.tolist() == [-1.0] * 6
    assert found.trainer.tolist() == [-2.0, -2.0, -2.0, -3.0, -4.0, -4.0]
    assert found.engine == ("rollout-0",) * 3 + ("rollout-1",) + ("rollout-0",) * 2
    np.testing.assert_allclose(found.scorer, expected(load(folders[0])), atol=1e-5)
    np.testing.assert_allclose(found.rounded, found.scorer, atol=1e-5)


def test_every_score_is_among_the_tokens_that_the_sampler_left(folders: tuple[Path, Path]) -> None:
    """Also those of the scorer's own rounding and of the hypotheses."""
    table = rollouts()
    vocabulary = load(folders[0]).config.vocab_size
    left = np.zeros((len(PROMPTS), vocabulary), np.bool_)
    left[:, 1 : vocabulary // 2] = True
    left[:, list({token for response in RESPONSES for token in response})] = True
    words = [[row.tobytes()] * len(response) for row, response in zip(words_of(left), RESPONSES, strict=True)]
    place = table.column_names.index("kept_tokens")
    table = table.set_column(place, KEPT_TOKENS, pa.array(words, KEPT_TOKENS.type))
    found, whole = (score_tokens(request(folders), rows, scores()) for rows in (table, rollouts()))
    model = load(folders[0])
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(
        lambda _module, _inputs, logits: logits.masked_fill(~torch.from_numpy(left[0]), -torch.inf)
    )
    np.testing.assert_allclose(found.scorer, expected(model), atol=1e-5)
    np.testing.assert_allclose(found.rounded, found.scorer, atol=1e-5)
    assert (found.scorer > whole.scorer + 0.1).all()
    for name, column in found.hypotheses.items():
        assert (column >= whole.hypotheses[name]).all(), name


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCORED: dict[str, PreTrainedConfig] = {
    "gemma2-cap": Gemma2Config(**SMALL, attn_logit_softcapping=0.5, query_pre_attn_scalar=16),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "gemma3": Gemma3TextConfig(**SMALL, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]),
    "neox": GPTNeoXConfig(**{**SMALL, "num_key_value_heads": 2}),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
}


@pytest.mark.parametrize("family", SCORED)
def test_the_scorer_runs_the_models_own_code(family: str, tmp_path: Path) -> None:
    """Caps that other implementations of attention ignore, and experts in float64, which others refuse."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(SCORED[family]).save_pretrained(tmp_path)
    asked = request((tmp_path, tmp_path), previous=None)
    found = score_tokens(asked, rollouts(), scores())
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **implementations).eval()
    np.testing.assert_allclose(found.scorer, expected(plain), atol=1e-5)
    np.testing.assert_allclose(found.rounded, expected(plain), atol=1e-5)


def test_temperatures_are_around_the_own_one(folders: tuple[Path, Path]) -> None:
    found = score_tokens(request(folders), rollouts(), scores())
    middle = len(found.temperatures) // 2
    assert found.temperatures[middle] == pytest.approx(TEMPERATURE)
    np.testing.assert_allclose(found.tempered[:, middle], found.scorer, atol=1e-6)
    hot = float(found.temperatures[-1])
    np.testing.assert_allclose(found.tempered[:, -1], expected(load(folders[0]), temperature=hot), atol=1e-5)


def test_positions(folders: tuple[Path, Path]) -> None:
    """A shift of all tokens changes nothing with rotary embeddings; one of the responses does."""
    found, model = score_tokens(request(folders), rollouts(), scores()).hypotheses, load(folders[0])

    def late(prompt: int, response: int) -> list[int]:
        return [*range(prompt), *range(prompt + 1, prompt + response + 1)]

    np.testing.assert_allclose(found["positions:response+1"], expected(model, late), atol=1e-5)
    np.testing.assert_allclose(found["positions:all+1"], expected(model), atol=1e-4)
    assert np.abs(found["positions:response+1"] - expected(model)).max() > 1e-3


def test_older_weights_by_module(folders: tuple[Path, Path]) -> None:
    """Only modules that differ are hypotheses; a tied head can be older than its embedding."""
    found = score_tokens(request(folders), rollouts(), scores()).hypotheses
    new, old = (load(folder) for folder in folders)
    groups = {key.partition(":")[2] for key in found if key.startswith("weights:")}
    assert groups == {"model.embed_tokens", "lm_head", "model.layers.1", TIED_EMBEDDING, WHOLE_MODEL}
    np.testing.assert_allclose(found[f"weights:{WHOLE_MODEL}"], expected(old), atol=1e-5)
    mixed = load(folders[0])
    mixed.load_state_dict({k: v for k, v in old.state_dict().items() if "layers.1." in k}, strict=False)
    np.testing.assert_allclose(found["weights:model.layers.1"], expected(mixed), atol=1e-5)
    head = load(folders[0])
    output = head.get_output_embeddings()
    assert output is not None
    output.weight = old.get_input_embeddings().weight
    np.testing.assert_allclose(found["weights:lm_head"], expected(head), atol=1e-5)
    np.testing.assert_allclose(score_tokens(request(folders), rollouts(), scores()).scorer, expected(new), atol=1e-5)


def test_an_untied_head_has_no_tied_group(tmp_path: Path) -> None:
    both = save(tmp_path / "new", 1, tied=False), save(tmp_path / "old", 2, tied=False)
    found = score_tokens(request(both), rollouts(), scores()).hypotheses
    assert f"weights:{TIED_EMBEDDING}" not in found
    assert "weights:lm_head" in found


def test_without_previous_weights_there_are_no_older_ones(folders: tuple[Path, Path]) -> None:
    found = score_tokens(request(folders, previous=None), rollouts(), scores()).hypotheses
    assert not [key for key in found if key.startswith("weights:")]


def test_truncated_distributions(folders: tuple[Path, Path]) -> None:
    found = score_tokens(request(folders), rollouts(), scores())
    assert (found.hypotheses["top_p:0.99"] >= found.scorer - 1e-6)[np.isfinite(found.hypotheses["top_p:0.99"])].all()
    inside = np.isfinite(found.hypotheses["top_k:50"])
    assert inside.any()
    assert (found.hypotheses["top_k:50"][inside] > found.scorer[inside]).all()
    assert np.allclose(found.hypotheses["top_k:100"], found.scorer, atol=1e-5)  # more than the vocabulary has


@pytest.mark.parametrize(("border", "inside"), [(1e-4, False), (0.1, True)])
def test_rounding_may_lift_a_token_into_the_sampled_ones(border: float, inside: bool) -> None:
    """Its log-prob is 0.05 below that of the last token of top-p 0.5, as an engine's rounding can hide."""
    logits = torch.tensor([[1.0, 0.95, 0.9, -0.3]])
    assert logits.softmax(-1)[0, 0] < 0.5 < logits.softmax(-1)[0, :2].sum()
    found = {key: column for key, column, _ in _truncated(logits, torch.tensor([[2]]), 1.0, border)}["top_p:0.5"]
    expected = logits.log_softmax(-1)[0, 2] - logits.softmax(-1)[0, :2].sum().log() if inside else -torch.inf
    assert found.item() == pytest.approx(float(expected))


@pytest.mark.parametrize("border", [1e-4, 0.1])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5, 5.0])
def test_the_probabilities_of_a_draw_add_up_to_one(spread: float, border: float) -> None:
    """Over all tokens of a vocabulary, also those that the sampler left out, however many are at the border."""
    logits = spread * torch.randn(60, generator=torch.Generator().manual_seed(0))
    logits[50:] = -torch.inf
    every, targets = logits.expand(60, -1), torch.arange(60)[:, None]
    draws = [*_truncated(every, targets, 0.7, border), *_endless(every, targets, 0.7, (3, 9, 99))]
    for key, _, draw in draws:
        chance, above = draw[:, 0].exp(), draw[:, 1]
        assert chance.sum().item() == pytest.approx(1.0, abs=1e-5), key
        more = torch.stack([chance[logits > own].sum() for own in logits])
        possible = chance > 0
        assert torch.allclose(above[possible], more[possible], atol=1e-5), key


def test_every_variant_of_a_model_is_scored_and_undone(folders: tuple[Path, Path]) -> None:
    """Each changes the log-probs, and the model is the same afterwards."""
    asked = request(folders, previous=None)
    model = _load(asked, str(folders[0]), torch.float32)
    names = {key for key, _ in _variants(asked, model)}
    assert names == {
        *("type:float16", "type:bfloat16", "type:float8", "epsilon:1e-05", "epsilon:1e-08"),
        *("rope:of theta 100000", "rope:of theta 500000", "rope:of theta 1000000"),
        *("rope:times 0.25", "rope:times 0.5", "rope:times 2", "rope:times 4"),
    }
    found = score_tokens(asked, rollouts(), scores())
    for name in names:
        assert np.abs(found.hypotheses[name] - found.scorer).max() > 1e-7, name
        assert not np.array_equal(found.hypotheses[name], found.hypotheses["positions:all+1"])
    np.testing.assert_allclose(found.hypotheses["rope:times 2"], expected(load(folders[0]), stretched), atol=1e-5)
    other = load(folders[0])
    for parameter in other.parameters():
        parameter.data = parameter.data.half().float()
    np.testing.assert_allclose(found.hypotheses["type:float16"], expected(other), atol=1e-5)
    again = score_tokens(asked, rollouts(), scores())
    np.testing.assert_array_equal(again.scorer, found.scorer)


def stretched(prompt: int, response: int) -> list[int]:
    return list(range(0, 2 * (prompt + response), 2))


SCALED = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_model_without_its_scaling_and_with_another_theta(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    for theta, folder in ((20_000.0, "own"), (10_000.0, "default")):
        config = LlamaConfig(**SMALL, max_position_embeddings=256)
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / folder)
    plain = load(tmp_path / "own")
    plain.config.rope_parameters = {"rope_type": kind, "rope_theta": 20_000.0, **SCALED[kind]}
    plain.save_pretrained(tmp_path / "scaled")
    shutil.copy(tmp_path / "own" / "model.safetensors", tmp_path / "default")
    asked = request((tmp_path / "scaled", tmp_path), previous=None)
    found = score_tokens(asked, rollouts(), scores())
    assert np.abs(found.scorer - expected(plain)).max() > 1e-3
    np.testing.assert_allclose(found.hypotheses["rope:without their scaling"], expected(plain), atol=1e-4)
    default = expected(load(tmp_path / "default"))
    np.testing.assert_allclose(found.hypotheses["rope:of theta 10000"], default, atol=1e-4)


def test_rounding_is_that_of_the_runs_type(folders: tuple[Path, Path]) -> None:
    """A bfloat16 head rounds more than a float32 one, and is a hypothesis only where the run has none."""
    full = score_tokens(request(folders, "bfloat16"), rollouts(), scores())
    short_config = ModelConfig(path=str(folders[0]), dtype="bfloat16", float32_head=False)
    short = score_tokens(request(folders, model=short_config), rollouts(), scores())
    exact = score_tokens(request(folders), rollouts(), scores())
    gaps = [np.abs(found.rounded - found.scorer).mean() for found in (exact, full, short)]
    assert 0 < gaps[0] < 1e-5 < gaps[1] < gaps[2]
    assert "head:bfloat16" in full.hypotheses
    assert "head:bfloat16" not in short.hypotheses


def test_a_row_that_the_trainer_did_not_score_is_an_error(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="the trainer scored no tokens of p2"):
        score_tokens(request(folders), rollouts(), scores().slice(1))


def test_prompts_are_compared_with_the_chat_template(folders: tuple[Path, Path], tiny_model: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    table = rollouts(json.dumps(messages))
    column = table.column_names.index("prompt_ids")
    changed = [ids, ids, [*ids[:4], 7, *ids[5:]]]
    table = table.set_column(column, table.schema.field(column), pa.array(changed, pa.list_(pa.int32())))
    model = ModelConfig(path=str(tiny_model), dtype="float32")
    asked = ScoreRequest(model, str(tiny_model), None, TEMPERATURE, thorough=False, compare_prompts=True)
    found = score_tokens(asked, table, scores())
    assert found.prompts == 3
    (difference,) = found.prompt_differences
    assert (difference.prompt_uid, difference.position) == ("p2", 4)
    assert difference.expected == tokenizer.decode(ids[4:12])


def adapter(base: Path, folder: Path, seed: int) -> Path:
    """An adapter of peft for the model."""
    import peft

    torch.manual_seed(seed)
    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    return folder


def merged(base: Path, adapter: Path, factor: float = 1.0, without: int | None = None) -> PreTrainedModel:
    """The model with `factor` times the adapter, in all layers or all but one, written out once more."""
    model, tensors = load(base), load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parts = [f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight" for part in "AB"]
            if parts[0] in tensors and f".layers.{without}." not in name:
                a, b = (tensors[part] for part in parts)
                weight += factor * 1.5 * (b @ a)
    return model


def test_a_missing_doubled_or_stale_adapter_of_the_engine_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, now, before = (
        folders[0],
        adapter(folders[0], tmp_path / "now", 3),
        adapter(folders[0], tmp_path / "before", 4),
    )
    given = request(folders, previous=None, adapter=str(now), previous_adapter=str(before))
    found = score_tokens(given, rollouts(), scores())
    np.testing.assert_allclose(found.scorer, expected(merged(base, now)), atol=1e-4)
    np.testing.assert_allclose(found.rounded, found.scorer, atol=1e-4)
    sound = attribute("trainer", replace(found, trainer=found.scorer + 1e-6))
    assert sound.passed
    faults = {MISSING: load(base), DOUBLED: merged(base, now, 2.0), STALE: merged(base, before)}
    faults |= {f"{MISSING} in model.layers.{layer}": merged(base, now, without=layer) for layer in range(3)}
    for name, model in faults.items():
        numbers = expected(model)
        np.testing.assert_allclose(found.hypotheses[f"adapter:{name}"], numbers, atol=1e-4)
        (cause,) = attribute("sampler", replace(found, sampler=numbers)).causes
        assert (cause.kind, cause.about) == ("adapter", name)


def test_an_adapter_is_scored_in_bfloat16_beside_its_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    given = request(folders, "bfloat16", previous=None, adapter=str(adapter(folders[0], tmp_path / "now", 3)))
    found = score_tokens(given, rollouts(), scores())
    apart = np.abs(found.rounded - found.scorer)
    assert 1e-4 < apart.mean() < 0.2
    assert "adapter:stale" not in found.hypotheses and "adapter:missing" in found.hypotheses
