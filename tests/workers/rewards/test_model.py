"""A trained reward model gives the same scores, at the same tokens, when the reward role loads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
)

from tests.token_batches import batch_of
from tests.workers.test_reward import rollouts
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import REFERENCES
from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.contract.offline_messages import EXAMPLE_TEXTS
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig
from troupe.workers.data.examples import tokenize
from troupe.workers.data.tokenizer import copy_tokenizer, load_tokenizer
from troupe.workers.data.turn_ends import padding_besides
from troupe.workers.models.modeling import CausalLogprobs, RewardScores, load_causal, load_value, share_backbone
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.reward import RewardWorker
from troupe.workers.rewards.model import RewardModel, _score_in_float32


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
        scores, _, logprobs = RewardScores(model)(batch=batch)
        wanted = plain(input_ids=ids, attention_mask=batch.attention_mask).logits[:, 0]
    assert logprobs is None
    assert torch.allclose(scores, wanted, atol=1e-5)


def test_the_score_of_a_token_is_that_of_a_sequence_that_ends_there(tiny_model: Path, batch: TokenBatch) -> None:
    """So that of the last token is the score in use."""
    module = RewardScores(with_head(ModelConfig(path=str(tiny_model), dtype="float32")))
    with torch.no_grad():
        scores, token_scores, _ = module(batch=batch, read_at=batch.positions + 1)
        assert torch.allclose(token_scores[batch.lengths.cumsum(0) - 1], scores, atol=1e-6)
        rows = [[5, 6, 7, 11, 2], [8, 9, 12, 13, 14, 2], [10, 15]]
        wanted = []
        for row, response in zip(rows, batch.lengths.tolist(), strict=True):
            for end in range(len(row) - response + 1, len(row) + 1):
                ids = torch.tensor([row[:end]])
                wanted.append(module(batch=batch_of(ids, ids[0, :0], torch.tensor([end - 1])))[0])
    assert torch.allclose(token_scores, torch.cat(wanted), atol=1e-5)


def test_the_language_head_shares_the_scored_backbone(tiny_model: Path, batch: TokenBatch) -> None:
    config = ModelConfig(path=str(tiny_model), dtype="float32")
    model = with_head(config)
    module = RewardScores(model, share_backbone(model, config, chunks=2))
    scores, _, logprobs = module(batch=batch)
    wanted, _ = CausalLogprobs(load_causal(config), 1.0)(batch=batch)
    assert logprobs is not None
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    # One set of parameters: the likelihood teaches the embeddings that the score is computed from.
    logprobs.sum().backward()
    embeddings = model.get_input_embeddings().weight
    assert embeddings.grad is not None and embeddings.grad.any()
    assert sum(p is embeddings for p in module.parameters()) == 1
    assert scores.shape == (3,)


def base_model(folder: Path, *, tied: bool) -> ModelConfig:
    """A tiny causal language model, written down."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="float32")


def test_an_untied_language_head_is_kept_with_the_score(tmp_path: Path, batch: TokenBatch) -> None:
    """The saved folder has both trained heads."""
    config = base_model(tmp_path / "base", tied=False)
    module = RewardScores(model := with_head(config), share_backbone(model, config, chunks=1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scores, _, logprobs = module(batch=batch)
    assert logprobs is not None
    (scores.sum() + logprobs.sum()).backward()
    optimizer.step()
    trained = ModelConfig(path=str(tmp_path / "trained"), dtype="float32")
    model.save_pretrained(trained.path, state_dict=dict(model.named_parameters()))

    weights, head = module.state_dict(), "lm_head.weight"
    assert torch.equal(load_causal(trained).state_dict()[head], weights[f"language.model.{head}"])
    assert torch.equal(load_value(trained).state_dict()["score.weight"], weights["model.score.weight"])
    assert not torch.equal(load_causal(config).state_dict()[head], weights[f"language.model.{head}"])
    again = RewardScores(model := load_value(trained), share_backbone(model, trained, chunks=1))
    with torch.no_grad():
        assert all(torch.equal(one, two) for one, two in zip(again(batch=batch), module(batch=batch), strict=True))


def test_a_tied_language_head_adds_no_weight(tmp_path: Path) -> None:
    config = base_model(tmp_path / "base", tied=True)
    model = load_value(config)
    share_backbone(model, config, chunks=1)
    model.save_pretrained(tmp_path / "trained", state_dict=dict(model.named_parameters()))
    saved = load_file(tmp_path / "trained" / "model.safetensors")
    assert saved.keys() == load_file(tmp_path / "base" / "model.safetensors").keys() | {"score.weight"}


def test_a_folder_without_its_language_head_is_refused(tmp_path: Path) -> None:
    config = base_model(tmp_path / "base", tied=False)
    load_value(config).save_pretrained(tmp_path / "trained")
    with pytest.raises(ValueError, match=r"not a language model: no weights for lm_head\.weight"):
        load_causal(ModelConfig(path=str(tmp_path / "trained"), dtype="float32"))


@pytest.mark.parametrize("window", [None, 6])
def test_a_frozen_reward_model_caps_its_attention(window: int | None, tiny_model: Path, tmp_path: Path) -> None:
    """transformers' default attention ignores the caps of a Gemma 2; its scores are those of eager attention."""
    config: Any = Gemma2Config(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        sliding_window=window or 4096,
        pad_token_id=0,
    )
    config.num_labels = 1
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    copy_tokenizer(ModelConfig(path=str(tiny_model)), tmp_path)
    eager = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    sequences = [list(range(first, first + 12)) for first in (100, 200, 300)]
    found = RewardModel(ModelConfig(path=str(tmp_path), dtype="float32"), 4096, "cpu")._padded(sequences)
    with torch.no_grad():
        expected = eager(input_ids=torch.tensor(sequences)).logits[:, 0]
    assert torch.allclose(torch.tensor(found), expected, rtol=1e-4)


ROWS = [[5, 6, 7, 11, 2], [8, 9, 12, 13, 14, 2], [10, 15]]
"""The sequences of the fixture `batch`."""


def saved_scorer(config: PreTrainedConfig, folder: Path, tokenizer: Path) -> Any:
    """A classifier with bfloat16 weights whose scores are large, written down."""
    config.num_labels = 1
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    copy_tokenizer(ModelConfig(path=str(tokenizer)), folder)
    return model


def rounded(scores: list[float]) -> list[float]:
    return torch.tensor(scores).bfloat16().tolist()


TINY: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def test_scores_with_bfloat16_weights_are_those_of_training(
    tiny_model: Path, tmp_path: Path, batch: TokenBatch
) -> None:
    saved_scorer(LlamaConfig(**TINY), tmp_path, tiny_model)
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    with torch.no_grad():
        trained, _, _ = RewardScores(load_value(config).eval())(batch=batch)
    model = RewardModel(config, 4096, "cpu")
    assert model.packs
    padded, packed = model._padded(ROWS), model._packed(ROWS)
    assert padded == pytest.approx(trained.tolist(), rel=1e-6)
    # The states differ in bfloat16, and their scores are not rounded to it either.
    assert packed == pytest.approx(padded, rel=0.05, abs=0.1)
    assert all(one != two for one, two in zip(padded + packed, rounded(padded + packed), strict=True))


def test_a_head_of_another_name_scores_in_float32(tiny_model: Path, tmp_path: Path) -> None:
    """An encoder's head is called `classifier`."""
    options: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 128}
    saved_scorer(ModernBertConfig(**TINY, **options), tmp_path, tiny_model)
    model = RewardModel(ModelConfig(path=str(tmp_path), dtype="bfloat16"), 4096, "cpu")
    states: list[torch.Tensor] = []
    head = model.model.classifier
    head.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    found = model._padded(ROWS)
    expected = (states[0].double() @ head.weight.double().T + head.bias.double())[:, 0].tolist()
    assert found == pytest.approx(expected, rel=1e-5)
    assert rounded(found) != pytest.approx(expected, rel=1e-5)


def test_a_head_that_cannot_score_in_float32_is_reported(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved_scorer(LlamaConfig(**TINY), tmp_path, tiny_model)
    _score_in_float32(model)
    assert not caplog.messages
    model.score = torch.nn.Identity()
    _score_in_float32(model)
    assert caplog.messages == [
        "scores are rounded to bfloat16: LlamaForSequenceClassification has no linear head of one output"
    ]


def test_a_model_that_names_no_padding_is_read_at_the_last_token(tiny_model: Path, tmp_path: Path) -> None:
    """As transformers reads a single row. The token that ends a response was padding, and the one before was read."""
    options: dict[str, Any] = TINY | {"pad_token_id": None}
    plain = saved_scorer(LlamaConfig(**options), tmp_path, tiny_model)
    model = RewardModel(ModelConfig(path=str(tmp_path), dtype="float32"), 4096, "cpu")
    rows = [[*row, model.tokenizer.eos_token_id] for row in ROWS]
    with torch.no_grad():
        expected = [float(plain.float()(input_ids=torch.tensor([row])).logits) for row in rows]
    assert model._padded(rows) == pytest.approx(expected, rel=1e-3)
    assert model._packed(rows) == pytest.approx(expected, rel=1e-3)


def test_the_padding_token_ends_no_turn() -> None:
    def chosen(pad: int | None, eos: int | list[int], tokenizer_pad: int | None, unk: int | None) -> int:
        config = SimpleNamespace(pad_token_id=pad, eos_token_id=eos, vocab_size=100)
        tokenizer: Any = SimpleNamespace(pad_token_id=tokenizer_pad, unk_token_id=unk, bos_token_id=None)
        return padding_besides({2}, config, tokenizer)

    assert chosen(7, 2, 2, None) == 7
    assert chosen(2, 2, 2, 9) == 9
    assert chosen(None, [2, 9], 9, None) == 0
    assert chosen(2, [0, 2], 2, None) == 99


STEPS = (["2 + 2 = 4.", "4 + 1 = 5."], ["So: é"], ["One\nline.", "Two.", "Three is the last."])


def in_steps(tokenizer: Any, steps: Sequence[str]) -> dict[str, Any]:
    """An example of a process reward model, in tokens."""
    ends = [*("\n\n" for _ in steps[1:]), ""]
    responses = [json.dumps([{"role": "assistant", "content": a + b}]) for a, b in zip(steps, ends, strict=True)]
    row = {"messages": json.dumps([{"role": "user", "content": "Add."}]), "responses": responses, "origin": "x:1"}
    row |= {"scores": [1.0 for _ in steps], "margin": 0.0, "desirable": True}
    config = ExampleConfig(max_length=96, micro_batch_tokens=96, steps=True)
    return row | tokenize(tokenizer, pa.Table.from_pylist([row], schema=EXAMPLE_TEXTS), config)[1].to_pylist()[0]


@pytest.mark.parametrize("packs", [False, True])
def test_steps_are_scored_at_the_tokens_of_training(tiny_model: Path, tmp_path: Path, packs: bool) -> None:
    """As a classifier scores a response that ends there, also if the response was sampled in other tokens."""
    with_head(ModelConfig(path=str(tiny_model), dtype="float32")).save_pretrained(tmp_path)
    copy_tokenizer(ModelConfig(path=str(tiny_model)), tmp_path)
    model = RewardModel(ModelConfig(path=str(tmp_path), dtype="float32"), 96, "cpu")
    model.packs = packs
    examples = [in_steps(model.tokenizer, steps) for steps in STEPS]
    sampled = [
        {name: row[name] for name in ("messages", "prompt_ids", "response_ids")}
        | {"conversation": "", "response": "\n\n".join(steps)}
        for row, steps in zip(examples, STEPS, strict=True)
    ]
    others = [row | {"prompt_ids": [1, *row["prompt_ids"]], "response_ids": [3]} for row in sampled]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    found = model.score(pa.Table.from_pylist([*sampled, *others]), "step", "\n\n")
    assert len(found) == 6
    for row, outcome, other in zip(examples, found[:3], found[3:], strict=True):
        whole, before = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        places = [before + place for place, is_end in enumerate(row["loss_mask"]) if is_end]
        with torch.no_grad():
            wanted = [float(plain(torch.tensor([whole[: place + 1]])).logits.sigmoid()) for place in places]
        assert [reward for _, reward in outcome.steps] == pytest.approx(wanted, rel=1e-4)
        assert dict(other.steps) == pytest.approx(dict(outcome.steps), rel=1e-4)
        assert outcome.value == pytest.approx(fmean(wanted), rel=1e-4)
        of_row = pa.Table.from_pylist([sampled[examples.index(row)]])
        levels: tuple[tuple[Any, float], ...] = (("min", min(wanted)), ("mean", fmean(wanted)), ("last", wanted[-1]))
        for level, value in levels:
            (one,) = model.score(of_row, level, "\n\n")
            assert (one.value, one.steps) == (pytest.approx(value, rel=1e-4), ())
    assert [[end for end, _ in outcome.steps] for outcome in found[:3]] == [[12, 22], [5], [11, 17, 35]]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("", [0]),
        ("one", [3]),
        ("one\n\n", [5]),
        ("\n\none\n\n\n\ntwo", [7, 12]),
        ("one\n\ntwo\n\n \n", [5, 12]),
    ],
)
def test_white_space_is_no_step(text: str, ends: list[int], tiny_model: Path, tmp_path: Path) -> None:
    with_head(ModelConfig(path=str(tiny_model), dtype="float32")).save_pretrained(tmp_path)
    copy_tokenizer(ModelConfig(path=str(tiny_model)), tmp_path)
    model = RewardModel(ModelConfig(path=str(tmp_path), dtype="float32"), 96, "cpu")
    ids = model.tokenizer(f"Add.{text}")["input_ids"]
    found = model._places(ids, text, "\n\n")
    assert list(found) == ends
    assert list(found.values()) == sorted({*found.values()}) and found[len(text)] == len(ids) - 1
    assert model._places(ids, f"{text} and more", "\n\n") == {}


def test_the_scores_of_steps_are_process_rewards(tiny_model: Path, tmp_path: Path) -> None:
    with_head(ModelConfig(path=str(tiny_model), dtype="float32")).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tiny_model))
    copy_tokenizer(config, tmp_path)
    scorer = RewardModelConfig(path=str(tmp_path), dtype="float32", level="step")
    worker = RewardWorker(RewardConfig(model=scorer, model_weight=2.0), "reward-0", policy=config)
    try:
        worker.start()
        example = in_steps(worker._models["reward_model"].tokenizer, STEPS[0])
        table = rollouts(["\n\n".join(STEPS[0])], ids=[example["response_ids"]])
        summary, rewards = worker.score(table)
        (outcome,) = worker._models["reward_model"].score(table, "step", "\n\n")
    finally:
        worker.close()
    assert summary.rewards == (pytest.approx(2.0 * (outcome.value or 0.0)),)
    (spans,) = rewards["reward_spans"].to_pylist()
    ends = [place + 1 for place, is_end in enumerate(example["loss_mask"]) if is_end]
    assert [span["end"] for span in spans] == ends
    assert [span["reward"] for span in spans] == pytest.approx([2.0 * reward for _, reward in outcome.steps])


def test_two_process_reward_models_reward_their_own_steps(tiny_model: Path, tmp_path: Path) -> None:
    """One scores paragraphs and the other one words: at each token the weighted sum of the steps that end there."""
    with_head(ModelConfig(path=str(tiny_model), dtype="float32")).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tiny_model))
    copy_tokenizer(config, tmp_path)
    lines = RewardModelConfig(path=str(tmp_path), dtype="float32", level="step")
    models = {"lines": lines, "words": lines.model_copy(update={"separator": " "})}
    weights = {"lines": 2.0, "words": -1.0}
    functions = tuple(
        RewardFunctionConfig(name="reward_model", args={"model": name}, weight=weight)
        for name, weight in weights.items()
    )
    worker = RewardWorker(RewardConfig(models=models, functions=functions), "reward-0", policy=config)
    text = "One two\n\nthree"
    try:
        worker.start()
        ids = worker._models["lines"].tokenizer(text, add_special_tokens=False)["input_ids"]
        table = rollouts([text], ids=[ids])
        _, rewards = worker.score(table)
        found = {name: worker._models[name].score(table, "step", models[name].separator)[0] for name in models}
        decode = worker._models["lines"].tokenizer.decode
        at = {end: next(n for n in range(len(ids) + 1) if len(decode(ids[:n])) >= end) for end in (4, 9, 14)}
    finally:
        worker.close()
    assert [[end for end, _ in one.steps] for one in found.values()] == [[9, 14], [4, 14]]
    wanted: dict[int, float] = {}
    for name, one in found.items():
        for end, reward in one.steps:
            wanted[at[end]] = wanted.get(at[end], 0.0) + weights[name] * reward
    (spans,) = rewards["reward_spans"].to_pylist()
    assert {span["end"]: span["reward"] for span in spans} == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("level", ["response", "token_mean"])
def test_references_score_0_on_average_behind_their_measured_offset(
    level: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """The scores are those of plain torch at the tokens of prompt, answer and the end of the turn."""
    plain = with_head(ModelConfig(path=str(tiny_model), dtype="float32"))
    plain.save_pretrained(tmp_path)
    policy = ModelConfig(path=str(tiny_model))
    copy_tokenizer(policy, tmp_path)
    scorer = RewardModelConfig(path=str(tmp_path), dtype="float32", level=level, offset="answer")
    worker = RewardWorker(RewardConfig(model=scorer), "reward-0", policy=policy)
    tokenizer: Any = load_tokenizer(policy)
    answers, expected, sampled = ["Four.", "I think 4", "2 + 2 = 4\n\nSo it is four."], [], []
    said = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for answer in answers:
        ids = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        sampled.append(ids)
        with torch.no_grad():
            hidden = plain.base_model(torch.tensor([[*prompt_ids, *ids]])).last_hidden_state[0]
            scores = plain.score(hidden)[:, 0]
        expected.append(scores[-1].item() if level == "response" else scores[len(prompt_ids) :].mean().item())
    messages = json.dumps(said)
    rows = [{"messages": messages, "response": answer, "origin": f"rows:{n}"} for n, answer in enumerate(answers)]
    references = pa.Table.from_pylist(rows, schema=REFERENCES)
    group = rollouts(answers, ids=sampled, prompt=prompt_ids)
    column = group.column_names.index("messages")
    group = group.set_column(column, group.field(column), pa.array([messages] * 3))
    try:
        worker.start()
        found = worker.score_references("reward_model", references)
        offset = fmean(found.scores)
        summary, _ = worker.score(group, offsets={"reward_model": offset})
        lone = pa.Table.from_pylist([rows[0], {**rows[1], "response": "<|im_end|>" * 9000}], schema=REFERENCES)
        assert worker.score_references("reward_model", lone).problem.startswith("rows:1: error: ")
    finally:
        worker.close()
    assert found.problem == "" and found.scores == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({*map(str, expected)}) == 3 and abs(offset) > 1e-3
    assert sum(value or 0.0 for value in summary.rewards) == pytest.approx(0.0, abs=1e-6)
