"""Frozen teachers in the policy's workers, which compare all of their logits: from the weights of each prompt's
teachers to the gradient of the student's weights, against plain loops over samples and teachers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from tests.workers.algorithms.test_train_batch import Key, reward_table, rollout_table, scores
from tests.workers.models.test_distillation import DIVERGENCES, config_of, logits_of, plainly, policy_config
from tests.workers.models.test_modeling import SAMPLES
from troupe.workers.contract.config import TeacherSettings
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import TEACHER_WEIGHTS, PrepareRequest, RankPlan
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.distillation import WholeTeacher, WholeTeachers
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.policy import PolicyWorker
from troupe.workers.training.deepspeed_engine import TrainEngine
from troupe.workers.training.zero3 import FrozenModule

ONE, TWO = NAMES = ("teacher.one", "teacher.two")
MODEL = ModelConfig(path="models/teacher", dtype="float32")
KEYS: list[Key] = [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
WEIGHTS = {
    "weights": {key: {ONE: 0.5, TWO: 0.25} for key in "abcd"},
    "sources": {"a": {TWO: 0.25}, "b": {}, "c": {ONE: 0.5}, "d": {ONE: 2.0}},
}
"""Weights of each prompt's teachers: both teach every sample, or each those of its source, and one has no teacher."""
TAUGHT = {"weights": [*NAMES, *NAMES], "sources": [TWO, ONE]}
"""The teachers that run in the two micro-batches."""
TEMPERATURE = 0.7


def small_model(seed: int, **sizes: Any) -> PreTrainedModel:
    """A model without numbers that are float32 whatever its type."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=50, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@contextmanager
def exactly() -> Iterator[None]:
    """What is computed in float32 is float64 in the block."""
    torch.set_default_dtype(torch.double)
    try:
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class Noted(CausalLogprobs):
    """A teacher that notes when it runs."""

    def __init__(self, model: PreTrainedModel, name: str, ran: list[str]) -> None:
        super().__init__(model, TEMPERATURE)
        self._named, self._ran = name, ran

    def teacher_states(self, batch: TokenBatch) -> torch.Tensor:
        self._ran.append(self._named)
        return super().teacher_states(batch)


def batch_of(worker: PolicyWorker, weights: dict[str, dict[str, float]]) -> pa.Table:
    """The TRAIN table of the samples, whose teachers have scored the sampled tokens."""
    prompts, responses = zip(*SAMPLES, strict=True)
    columns: dict[str, Any] = {"prompt_ids": prompts, "response_ids": responses}
    tables = [rollout_table(KEYS, [len(one) for one in responses], **columns), reward_table(KEYS, [0.0] * len(KEYS))]
    for name in NAMES:
        own = [key for key in KEYS if name in weights[key[0]]]
        tables.append(scores(name, own, [[-1.0] * len(responses[KEYS.index(key)]) for key in own]))
    return worker.prepare(PrepareRequest(tuple(KEYS), teachers=weights), *tables)[1]


def differences(divergence: str, support: str, given: str, *, packed: bool) -> tuple[float, float, list[str]]:
    """(difference of the sum of the divergences, largest one of its gradient), relative to those of plain loops, and
    the teachers that ran."""
    sizes: tuple[dict[str, int], ...] = ({"n_embd": 16}, {"n_embd": 24}, {"n_embd": 8, "n_layer": 1})
    student, *teachers = (small_model(seed, **{"n_layer": 2} | size) for seed, size in enumerate(sizes))
    distill, ran, weights = config_of(support=support, divergence=divergence), list[str](), WEIGHTS[given]
    own: dict[str, Any] = {
        "teachers": {n: TeacherSettings() for n in NAMES},
        "teacher_models": dict.fromkeys(NAMES, MODEL),
    }
    worker = PolicyWorker(policy_config(MODEL, distill, reference_model=None, **own), "policy-0")
    module = CausalLogprobs(student, TEMPERATURE, chunks=3)
    frozen = {name: Noted(one, name, ran) for name, one in zip(NAMES, teachers, strict=True)}
    for one in (module, *frozen.values()):
        assert adapt(one, one.model, "cpu", packed) is packed
        one.double()
    worker._engine = cast(TrainEngine, SimpleNamespace(module=module, device=torch.device("cpu")))
    worker._teachers = {name: FrozenModule(one) for name, one in frozen.items()}
    plan = RankPlan(((0, 1), (2, 3)), total_loss_tokens=8, total_sequences=4, packed=packed)
    table = TokenTable(batch_of(worker, weights))
    with exactly():
        batches = [table.cut(rows, plan) for rows in plan.micro_batches]
        found = torch.cat([module(batch=one, reader=worker._teacher(table, one))[2] for one in batches]).sum()
        mine = flat_gradient(found, student)
    expected: list[torch.Tensor] = []
    for (uid, _), (prompt, response) in zip(KEYS, SAMPLES, strict=True):
        ids, at = torch.tensor([[*prompt, *response]]), slice(len(prompt) - 1, -1)
        s, *its = (one(ids).logits[0, at] / TEMPERATURE for one in (student, *teachers))
        for one, t in zip(NAMES, its, strict=True) if response else ():
            expected.append(weights[uid].get(one, 0.0) * plainly(s, t.detach(), distill).sum())
    total = torch.stack(expected).sum()
    plain = flat_gradient(total, student)
    value, gradient = abs(found.item() / total.item() - 1.0), float((mine - plain).abs().max() / plain.abs().max())
    return value, gradient, ran


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("support", ["full", "student_top_k"])
@pytest.mark.parametrize("given", WEIGHTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_gradient_is_that_of_the_weighted_sum_of_the_divergences(
    packed: bool, given: str, support: str, divergence: str
) -> None:
    """A teacher runs only for the micro-batches that it teaches."""
    value, gradient, ran = differences(divergence, support, given, packed=packed)
    assert max(value, gradient) < 1e-10 and ran == TAUGHT[given]


def flat_gradient(loss: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])


def test_a_batch_without_the_teachers_weights_or_with_those_of_others_is_refused() -> None:
    own: dict[str, Any] = {
        "teachers": {n: TeacherSettings() for n in NAMES},
        "teacher_models": dict.fromkeys(NAMES, MODEL),
    }
    worker = PolicyWorker(policy_config(MODEL, config_of(support="full"), reference_model=None, **own), "p-0")
    table = batch_of(worker, WEIGHTS["sources"])
    assert table[TEACHER_WEIGHTS.name].to_pylist() == [[0.0, 0.25], [0.0, 0.0], [0.5, 0.0], [2.0, 0.0]]
    empty = TokenTable(table)
    assert empty.teacher_weights(empty.batch([]), 2).shape == (0, 2)
    without = TokenTable(table.drop_columns([TEACHER_WEIGHTS.name]))
    with pytest.raises(ValueError, match="the batch lacks teacher_weights"):
        worker._teacher(without, without.batch([0]))
    three = RankPlan(((0,),), total_loss_tokens=1, total_sequences=1)
    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        empty.teacher_weights(empty.cut([0], three), 3)


def test_a_worker_has_the_weights_of_its_tokens_and_computes_only_the_logits_of_teachers_with_one() -> None:
    """Of tokens that are divided over workers, a teacher in this process has the states of those here."""
    config, weights = config_of(support="full"), torch.tensor([[1.0, 0.0], [0.0, 0.0], [4.0, 0.0], [0.0, 8.0]])
    states, student, computed = logits_of(2)[:2], logits_of(1)[:2], list[int]()

    def logits_by(number: int, found: torch.Tensor) -> torch.Tensor:
        computed.append(number)
        return found

    both = [WholeTeacher(states, partial(logits_by, number), 1.0, config) for number in range(2)]
    parts = WholeTeachers(both, weights).of(torch.tensor([2, 1])).split(2)
    found = [part.read(logits)[0] for part, logits in zip(parts, student.split(1), strict=True)]
    assert computed == [0]
    torch.testing.assert_close(torch.cat(found), torch.tensor([4.0, 0.0]) * plainly(student, states, config))
