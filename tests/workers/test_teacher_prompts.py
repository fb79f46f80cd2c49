"""A teacher scores the policy's response behind another prompt: positions, micro-batches and samples without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import peft
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.workers.algorithms.test_train_batch import reward_table, rollout_table
from troupe.workers.contract.algorithm_config import AdvantageConfig, DistillConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig, ReferenceConfig, SamplingConfig, TeacherSettings
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.contract.trainer_config import LoraConfig, TrainerConfig
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.teacher_prompts import TeacherPrompts, told_in, within
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.models.modeling import CausalLogprobs, load_causal
from troupe.workers.policy import PolicyWorker
from troupe.workers.reference import ReferenceWorker
from troupe.workers.training.adapter import ModelAdapter
from troupe.workers.training.deepspeed_engine import TrainEngine

KEYS = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
RESPONSES = [[11, 12, 13], [14], [15, 16], [17, 18, 19, 20]]
QUESTIONS = {"a": "2 + 3?", "b": "What is the capital of France, {x}?", "c": "1 + 1?"}
ANSWERS = {"a": "5", "b": "Paris", "c": "2"}
TEMPLATE = "{prompt}\nThe answer is {answer}, because {why}."


def conversation(uid: str, text: str) -> str:
    return json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}])


def samples(tokenizer: Any, **why: str) -> pa.Table:
    """Samples of three prompts as the policy reads them, with a column `why`."""
    messages = {uid: conversation(uid, text) for uid, text in QUESTIONS.items()}
    return rollout_table(
        KEYS,
        [len(response) for response in RESPONSES],
        prompt_ids=[encode_prompt(tokenizer, messages[uid], 512) for uid, _ in KEYS],
        response_ids=list(RESPONSES),
        messages=[messages[uid] for uid, _ in KEYS],
        answer=[ANSWERS[uid] for uid, _ in KEYS],
        metadata=[json.dumps({"why": why[uid]} if uid in why else {}) for uid, _ in KEYS],
    )


def scored(model: ModelConfig, table: pa.Table, budget: int = 256, **config: Any) -> Any:
    """(log-probs, failed) of samples, in one micro-batch as the policy's prompts fit one."""
    settings = {"temperature": 0.7, "threads": 1, "device": "cpu", "column": "teacher.math", "top_k": 3} | config
    worker = ReferenceWorker(ReferenceConfig(model=model, micro_batch_tokens=budget, **settings), "teacher.math-0")
    worker.start()
    plan = RankPlan(((2, 0, 1, 3),), total_loss_tokens=10, total_sequences=4, packed=worker.packs())
    summary, scores = worker.score(plan, table.slice(0, 1), table.slice(1))
    rows = {(row["prompt_uid"], row["sample_index"]): row for row in scores.to_pylist()}
    worker.close()
    return rows, summary.failed


@pytest.fixture(scope="module")
def model(tiny_model: str) -> ModelConfig:
    return ModelConfig(path=str(tiny_model), dtype="float32")


def test_the_responses_scores_are_those_behind_the_teachers_prompt(model: ModelConfig) -> None:
    """Against the plain model on prompt and response alone, in float64; and `{prompt}` is the policy's own prompt."""
    tokenizer, why = load_chat_tokenizer(model), {"a": "it is", "b": "of {braces}", "c": "one and one make it"}
    table = samples(tokenizer, **why)
    plain = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64).eval()
    rows, failed = scored(model, table, prompt=TEMPLATE)
    assert failed == {}
    for (uid, index), response in zip(KEYS, RESPONSES, strict=True):
        text = f"{QUESTIONS[uid]}\nThe answer is {ANSWERS[uid]}, because {why[uid]}."
        prompt = encode_prompt(tokenizer, conversation(uid, text), 512)
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        expected = logits.log_softmax(-1)
        own = expected.gather(1, torch.tensor(response)[:, None])[:, 0]
        found = torch.tensor(rows[uid, index]["teacher.math"], dtype=torch.double)
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        ids = torch.tensor(rows[uid, index]["teacher_ids"]).view(-1, 3)
        likeliest = torch.tensor(rows[uid, index]["teacher_logprobs"], dtype=torch.double).view(-1, 4)[:, :3]
        torch.testing.assert_close(likeliest, expected.gather(1, ids), rtol=1e-4, atol=1e-4)
    same, others = scored(model, table, prompt="{prompt}")[0], scored(model, table)[0]
    assert all(same[key]["teacher.math"] == pytest.approx(others[key]["teacher.math"], abs=1e-5) for key in KEYS)
    assert any(rows[key]["teacher.math"] != pytest.approx(others[key]["teacher.math"], abs=1e-2) for key in KEYS)


def test_a_teacher_with_an_adapter_scores_with_the_sum_of_both(model: ModelConfig, tmp_path: Path) -> None:
    """Against the plain weights plus the product of the adapter's, in float64."""
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64).eval()
    below = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    adapted: Any = peft.get_peft_model(
        below, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path)
    factors = load_file(tmp_path / "adapter_model.safetensors")
    for name in [name for name in factors if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = factors[name.replace("lora_A", "lora_B")].double() @ factors[name].double()
        plain.get_parameter(f"{layer}.weight").data += 6 / 2 * product
    table = samples(load_chat_tokenizer(model))
    rows, failed = scored(model.model_copy(update={"adapter": str(tmp_path)}), table)
    bare = scored(model, table)[0]
    assert failed == {}
    for row in table.to_pylist():
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        key = (row["prompt_uid"], row["sample_index"])
        assert rows[key]["teacher.math"] == pytest.approx(expected, abs=1e-4)
        assert bare[key]["teacher.math"] != pytest.approx(expected, abs=1e-2)


def policy_of(
    model: ModelConfig, module: CausalLogprobs, teacher: TeacherSettings, averaged: object = None
) -> PolicyWorker:
    """The policy as teacher, whose engine is replaced by the model alone."""
    config = PolicyConfig(
        model=model,
        trainer=TrainerConfig(micro_batch_tokens=256),
        loss=PolicyLossConfig(distill=DistillConfig(coef=1.0, k=3)),
        advantage=AdvantageConfig(estimator="none"),
        sampling=SamplingConfig(temperature=0.7, max_tokens=8),
        run_id="teacher",
        reference_model=None,
        teachers={"teacher.math": teacher},
        total_updates=1,
        seed=1,
        device="cpu",
    )
    policy = PolicyWorker(config, "policy-0")
    policy._engine = cast(TrainEngine, SimpleNamespace(module=module, device="cpu", averaged=averaged))
    return policy


@pytest.mark.parametrize("average", [False, True])
def test_the_policy_as_teacher_scores_behind_the_prompt_as_a_separate_worker_does(
    model: ModelConfig, average: bool
) -> None:
    """With its weights, or within `TrainEngine.averaged`."""
    module = CausalLogprobs(load_causal(model), 0.7)
    weight, entered = module.model.get_parameter("model.norm.weight"), list[bool]()

    @contextmanager
    def averaged() -> Iterator[None]:
        entered.append(True)
        weight.data *= 2.0
        yield
        weight.data /= 2.0

    policy = policy_of(model, module, TeacherSettings(prompt=TEMPLATE, average=average), averaged)
    table = samples(load_chat_tokenizer(model), a="it is", c="it is so")
    plan = RankPlan(((2, 0, 1, 3),), total_loss_tokens=10, total_sequences=4)
    summary, found = policy.teacher_logprobs(plan, "teacher.math", table.slice(0, 1), table.slice(1))
    rows, failed = scored(model, table, prompt=TEMPLATE)
    assert summary.failed == failed == {("b", 0): "its prompt: the row has no column why"}
    own = {(row["prompt_uid"], row["sample_index"]): row for row in found.to_pylist()}
    same = all(own[key]["teacher.math"] == pytest.approx(rows[key]["teacher.math"], abs=1e-4) for key in KEYS)
    assert same is not average and entered == [True] * average
    assert all(len(own[key]["teacher_ids"]) == 3 * len(own[key]["teacher.math"]) for key in KEYS)


@pytest.mark.parametrize("prompt", [None, TEMPLATE])
def test_a_teacher_on_the_policys_base_scores_as_a_separate_worker_with_its_adapter_does(
    model: ModelConfig, tmp_path: Path, prompt: str | None
) -> None:
    """Although the policy's own adapters, of other layers, have trained; they and the base stay bit for bit."""
    taught = CausalLogprobs(load_causal(model), 0.7)
    folder = tmp_path / "adapter"
    other = ModelAdapter(taught.model, LoraConfig(rank=2, alpha=6, targets=("q_proj", "up_proj")), model)
    moved(other)
    other.write(folder, model.path, {name: tensor.detach() for name, tensor in other.named_parameters()})
    module = CausalLogprobs(load_causal(model), 0.7)
    own = ModelAdapter(module.model, LoraConfig(rank=3, alpha=5, rslora=True, targets=("q_proj", "down_proj")), model)
    moved(own)
    policy = policy_of(model, module, TeacherSettings(prompt=prompt))
    policy._shared = {"teacher.math": policy._teacher_in(own, "teacher.math", str(folder))}
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    table = samples(load_chat_tokenizer(model), a="it is", b="of {braces}", c="it is so")
    plan = RankPlan(((2, 0, 1, 3),), total_loss_tokens=10, total_sequences=4)
    as_policy = policy.compute_logprobs(plan, table)[1]
    summary, found = policy.teacher_logprobs(plan, "teacher.math", table)
    rows, failed = scored(model.model_copy(update={"adapter": str(folder)}), table, prompt=prompt)
    assert summary.failed == failed == {}
    for row, bare in zip(found.to_pylist(), as_policy.to_pylist(), strict=True):
        expected = rows[row["prompt_uid"], row["sample_index"]]["teacher.math"]
        assert row["teacher.math"] == pytest.approx(expected, abs=1e-5)
        assert row["teacher.math"] != pytest.approx(bare["old_logprobs"], abs=1e-2)
    after = module.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
    assert policy.compute_logprobs(plan, table)[1].equals(as_policy)


def test_a_teachers_adapter_that_does_not_fit_the_policy_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    module = CausalLogprobs(load_causal(model), 0.7)
    adapter = ModelAdapter(module.model, LoraConfig(targets=("q_proj",)), model)
    policy = policy_of(model, module, TeacherSettings())
    tensors = {name: tensor.detach() for name, tensor in adapter.named_parameters()}
    with pytest.raises(ValueError, match=r"roles\.teacher\.math\.model\.adapter needs roles\.policy\.lora"):
        policy._teacher_in(None, "teacher.math", str(tmp_path))
    adapter.write(tmp_path / "moved", model.path, {name.replace(".0.", ".77."): one for name, one in tensors.items()})
    with pytest.raises(ValueError, match=r"layers\.77\.self_attn\.q_proj is not linear, \d+ to \d+"):
        policy._teacher_in(adapter, "teacher.math", str(tmp_path / "moved"))
    adapter.base = "another"
    adapter.write(tmp_path / "other", model.path, tensors)
    with pytest.raises(ValueError, match="is not the model that the adapter"):
        policy._teacher_in(adapter, "teacher.math", str(tmp_path / "other"))


def test_a_teacher_reads_the_feedback_of_each_sample(model: ModelConfig) -> None:
    """Against the plain model in float64. A sample without feedback has no score, and is named."""
    tokenizer, table = load_chat_tokenizer(model), samples(load_chat_tokenizer(model))
    said = {("a", 0): "{right}", ("a", 1): "expected 5", ("c", 0): "two tests\nfailed"}
    keys = [*reversed(KEYS), ("d", 0)]
    spoken = reward_table(keys, [1.0] * len(keys))
    at = spoken.schema.get_field_index("feedback")
    texts = [said.get(key, "" if key == ("b", 0) else None) for key in keys]
    rewards = spoken.set_column(at, spoken.schema.field(at), pa.array(texts, pa.string()))
    policy = policy_of(model, CausalLogprobs(load_causal(model), 0.7), TeacherSettings(prompt="{prompt} {feedback}!"))
    plan = RankPlan(((2, 0), (1, 3), (2,), ()), total_loss_tokens=10, total_sequences=4)
    parts = table.slice(0, 1), rewards.slice(0, 2), table.slice(1), rewards.slice(2)
    summary, found = policy.teacher_logprobs(plan, "teacher.math", *parts)
    assert (summary.untaught, summary.failed, summary.rows) == ((("b", 0),), {}, 3)
    rows = {(row["prompt_uid"], row["sample_index"]): row["teacher.math"] for row in found.to_pylist()}
    assert rows.keys() == said.keys()
    plain = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64).eval()
    for key, response in zip(KEYS, RESPONSES, strict=True):
        if key in said:
            text = conversation(key[0], f"{QUESTIONS[key[0]]} {said[key]}!")
            prompt = encode_prompt(tokenizer, text, 512)
            with torch.no_grad():
                logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double() / 0.7
            own = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            assert rows[key] == pytest.approx(own.tolist(), abs=1e-4)
    nothing = policy.teacher_logprobs(plan, "teacher.math", table, spoken)
    assert len(nothing[0].untaught) == 4 and nothing[1].num_rows == 0 and "teacher_ids" in nothing[1].column_names


def test_a_demonstration_is_the_best_other_response_of_the_group() -> None:
    """Of equal ones the first; below the threshold none; feedback alone is enough, with an empty demonstration."""
    keys = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]
    rollouts = rollout_table(keys, [1] * 8, response=[f"{uid}{index}" for uid, index in keys])
    rewards = reward_table(keys, [0.5, 0.9, 0.9, 0.2, 0.6, 0.2, 0.3, None])
    assert rollouts.num_rows == rewards.num_rows == 8
    parts = (rewards.slice(5), rollouts.slice(0, 3), rewards.slice(0, 5), rollouts.slice(3))
    shown = told_in("{prompt} {demonstration}", 0.5, parts)
    best = {("a", 0): "a1", ("a", 1): "a2", ("a", 2): "a1", ("a", 3): "a1", ("b", 1): "b0"}
    assert shown == {key: (("demonstration", text),) for key, text in best.items()}
    assert told_in("{demonstration}", 0.95, parts) == {}
    at = rewards.schema.get_field_index("feedback")
    texts = pa.array([None, "", "slow", *[None] * 4, "bad"], pa.string())
    said = rewards.set_column(at, rewards.schema.field(at), texts)
    both = told_in("{feedback}{demonstration}", 0.5, (rollouts, said))
    assert both.keys() == {*best, ("c", 1)} and both["c", 1] == (("feedback", "bad"), ("demonstration", ""))
    assert both["a", 2] == (("feedback", "slow"), ("demonstration", "a1"))


def test_a_teacher_reads_the_prompt_that_an_episode_began_with(model: ModelConfig) -> None:
    """Examples in the prompt are no turns of the policy. Prompts that the messages do not make fail with the reason."""
    tokenizer = load_chat_tokenizer(model)
    shown = [
        *({"role": "user", "content": "Guess 1 to 3."}, {"role": "assistant", "content": "2"}),
        {"role": "user", "content": "Guess 1 to 9."},
    ]
    played = [*shown, {"role": "assistant", "content": "4"}, {"role": "user", "content": "higher"}]
    later = [*played, {"role": "assistant", "content": "5"}]
    first, second = (encode_prompt(tokenizer, json.dumps(turns), 512) for turns in (shown, played))
    keys = [("a", index) for index in range(5)]
    table = rollout_table(
        keys,
        [1, 1, 1, 1, 0],
        prompt_ids=[first, second, [*first, 5], first, [0]],
        messages=[conversation("a", "Play.")] * 5,
        conversation=[json.dumps(later)] * 3 + [json.dumps(shown[:1]), "[]"],
        metadata=["{}"] * 5,
    )
    prompts = TeacherPrompts("{prompt} {feedback}", model, 512, 512)
    told = {key: (("feedback", f"It is {key[1]}."),) for key in keys}
    found, failed = prompts.apply(table, range(5), told)
    rows = found.column("prompt_ids").to_pylist()
    hinted = [*shown[:2], {"role": "user", "content": "Guess 1 to 9. It is 0."}]
    assert rows[0] == encode_prompt(tokenizer, json.dumps(hinted), 512)
    hinted = [*played[:-1], {"role": "user", "content": "higher It is 1."}]
    assert rows[1] == encode_prompt(tokenizer, json.dumps(hinted), 512)
    why = "its prompt: it is not made of the episode's messages alone: it has tools, or no chat template"
    assert failed == {("a", 2): why, ("a", 3): why} and rows[4] == [0], "a player without a turn"


def moved(adapter: ModelAdapter) -> None:
    """Move the adapters as training does."""
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def test_a_sample_without_a_teachers_prompt_fails_with_the_reason(model: ModelConfig) -> None:
    table = samples(load_chat_tokenizer(model), a="it is", c="it is so " * 60)
    rows, failed = scored(model, table, budget=128, prompt=TEMPLATE)
    assert len(rows) == 4
    assert failed["b", 0] == "its prompt: the row has no column why"
    assert "tokens" in failed["c", 0] and set(failed) == {("b", 0), ("c", 0)}


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=4), st.integers(1, 20), st.booleans())
def test_longer_prompts_divide_micro_batches(parts: list[list[int]], most: int, packed: bool) -> None:
    """Every row once and in order; none of the micro-batches could take the first row of the next one."""
    tokens, micro_batches, start = [n for part in parts for n in part], [], 0
    for part in parts:
        micro_batches.append(tuple(range(start, start := start + len(part))))
    plan = within(RankPlan(tuple(micro_batches), 1, 1, packed=packed), tokens, most)

    def size(rows: tuple[int, ...]) -> int:
        own = [tokens[row] for row in rows]
        return sum(own) if packed else max(own) * len(own)

    assert [row for part in plan.micro_batches for row in part] == list(range(len(tokens)))
    assert all(len(part) <= 1 or size(part) <= most for part in plan.micro_batches)
    ends = {part[-1] for part in micro_batches if part}
    for part, following in zip(plan.micro_batches, plan.micro_batches[1:], strict=False):
        assert not part or not following or part[-1] in ends or size((*part, following[0])) > most
