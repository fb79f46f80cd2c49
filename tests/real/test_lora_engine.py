"""Adapters in a real engine: what it samples from, what it acknowledges, and planted faults, each named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from tests.real.rollout_helpers import chat, endless, prompt_table, reference_logprobs, rollout_config, until_sampling
from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import GroupRequest, WeightUpdate
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.engine import settings
from troupe.workers.engine.errors import EngineClosed, EngineOutOfStep
from troupe.workers.models.adapter_files import DESCRIPTION, Description, as_bytes
from troupe.workers.rollout import RolloutWorker
from troupe.workers.training.adapter import ModelAdapter
from troupe.workers.weights.file import WeightDigestMismatch, WeightPublisher, read_payload
from troupe.workers.weights.store import WeightStore

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

LORA = LoraConfig(rank=3, alpha=4.5)
PROMPTS = prompt_table(chat("Name a colour, and then another one, and so on, until there is none left."))
REQUEST = GroupRequest(prompt_uid="p0", row=0, attempt=0, samples=3, seed=11)
LONG, TEMPERATURE = 600, 0.7


@dataclass
class Policy:
    """The trainer's model with adapters, and its publisher."""

    model: Any
    adapter: ModelAdapter
    publisher: WeightPublisher
    renamed: dict[str, str]
    """Names that are published otherwise."""
    replaced: dict[str, torch.Tensor]
    """Tensors that are published instead."""
    version: int = 0

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in [(DESCRIPTION, self.adapter.description()), *self.adapter.named_parameters()]:
            given = self.replaced[name] if name in self.replaced else tensor.detach()
            for old, new in self.renamed.items():
                name = name.replace(old, new)
            yield name, given

    def publish(self) -> WeightUpdate:
        """The adapters as the next version."""
        self.version += 1
        update = self.publisher.publish(self.version)
        assert update is not None
        return update

    @torch.no_grad()
    def train(self) -> None:
        """Change all adapters, B too."""
        for _, parameter in self.adapter.named_parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))

    def expected(self, row: dict[str, Any]) -> torch.Tensor:
        return reference_logprobs(self.model, row, TEMPERATURE)


@pytest.fixture(scope="module")
def policy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    adapter = ModelAdapter(model, LORA, ModelConfig(path=str(tiny_model), dtype="float32"))
    found = Policy(model, adapter, None, {}, {})  # pyright: ignore[reportArgumentType]
    found.publisher = WeightPublisher(found.published, tmp_path_factory.mktemp("weights"), "lora")
    yield found
    found.publisher.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tiny_model: Path, policy: Policy) -> AsyncIterator[RolloutWorker]:
    """An engine that has loaded the adapters of a policy at its start, after a refusal to sample without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_ADAPTER_EXTENSION", "tests.real.adapter_faults.FaultyAdapterExtension")
        worker = RolloutWorker(adapted(tiny_model), "rollout-0")
        await worker.start()
    with pytest.raises(EngineClosed, match="has not loaded the policy's adapters yet"):
        await rows(worker)
    await worker.sleep()  # as an engine on the policy's GPU, when a resumed run sends the first version
    update = policy.publish()
    ack = await worker.update_weights(update)
    assert (ack.version, ack.digest) == (1, update.digest)
    yield worker
    await worker.close()


def adapted(model: Path) -> RolloutConfig:
    """An engine that samples with adapters from a nucleus, whose tokens it records, and may rest."""
    config = rollout_config(model)
    sampling = config.sampling.model_copy(update={"top_p": 0.95})
    return config.model_copy(update={"lora": LORA, "sleep": "kv_cache", "sampling": sampling})


async def rows(worker: RolloutWorker, request: GroupRequest = REQUEST) -> list[dict[str, Any]]:
    _, table = await worker.generate(request, PROMPTS)
    return table.to_pylist()


def agrees(row: dict[str, Any], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(row["rollout_logprobs"]), expected, atol=1e-4)


@asynccontextmanager
async def planted(worker: RolloutWorker, fault: str, rank: int | None = None) -> AsyncIterator[None]:
    """A fault in the engine's processes, or in that of one rank, until the block ends."""
    engine: Any = worker.engine.vllm
    await engine.collective_rpc("plant", args=(fault, rank))
    try:
        yield
    finally:
        await engine.collective_rpc("cure")


async def recovers(worker: RolloutWorker, policy: Policy) -> None:
    """A closed engine samples nothing until a sound version arrives."""
    with pytest.raises(EngineClosed):
        await rows(worker)
    await worker.update_weights(policy.publish())
    assert all(agrees(row, policy.expected(row)) for row in await rows(worker))


async def test_adapters_that_have_not_trained_change_nothing(worker: RolloutWorker, policy: Policy) -> None:
    found = await rows(worker)
    with policy.adapter.off():
        assert all(agrees(row, policy.expected(row)) for row in found)


async def test_samples_follow_the_adapters_of_each_version(worker: RolloutWorker, policy: Policy) -> None:
    """Also behind a prompt that an earlier version has computed, and with the cache of prompts not emptied."""
    engine: Any = worker.engine.vllm
    pause = engine.engine_core.pause_scheduler_async

    async def keep_cache(mode: str, clear_cache: bool) -> None:
        await pause(mode=mode, clear_cache=False)

    for kept in (False, True):
        before = await rows(worker)
        policy.train()
        with pytest.MonkeyPatch.context() as patch:
            if kept:
                patch.setattr(engine.engine_core, "pause_scheduler_async", keep_cache)
            await worker.update_weights(policy.publish())
        found = await rows(worker)
        assert all(agrees(row, policy.expected(row)) for row in found)
        assert not any(agrees(row, policy.expected(row)) for row in before)
        with policy.adapter.off():
            assert not any(agrees(row, policy.expected(row)) for row in found)
        spans = [row["weight_versions"] for row in found]
        assert all([span["version"] for span in own] == [policy.version] for own in spans)


async def test_a_sample_has_the_same_log_probs_alone_as_among_others(worker: RolloutWorker, policy: Policy) -> None:
    """To the last bit: a repeated run must not depend on the moments at which samples start and end."""
    policy.train()
    await worker.update_weights(policy.publish())
    alone, among = [await rows(worker, replace(REQUEST, samples=samples)) for samples in (1, 9)]
    assert alone[0]["rollout_logprobs"] == among[0]["rollout_logprobs"]


async def test_running_requests_continue_with_the_next_version(worker: RolloutWorker, policy: Policy) -> None:
    """Every token has the log-prob of the version that it is recorded under."""
    request = replace(REQUEST, samples=2, max_tokens=LONG)
    config = worker.generation.config
    longer = config.sampling.model_copy(update={"max_tokens": LONG})
    worker.generation.config = config.model_copy(update={"sampling": longer})
    state = {name: parameter.detach().clone() for name, parameter in policy.adapter.named_parameters()}
    policy.train()
    update = policy.publish()
    try:
        with endless(worker):
            running = asyncio.create_task(rows(worker, request))
            await until_sampling(worker, 2)
        await worker.update_weights(update)
        found = await running
    finally:
        worker.generation.config = config
    new = [policy.expected(row) for row in found]
    with torch.no_grad():
        trained = {name: parameter.clone() for name, parameter in policy.adapter.named_parameters()}
        for name, parameter in policy.adapter.named_parameters():
            parameter.copy_(state[name])
        old = [policy.expected(row) for row in found]
        for name, parameter in policy.adapter.named_parameters():
            parameter.copy_(trained[name])
    for row, before, after in zip(found, old, new, strict=True):
        first, second = row["weight_versions"]
        assert (first["version"], second["version"]) == (policy.version - 1, policy.version)
        switch = first["end"]
        scores = torch.tensor(row["rollout_logprobs"])
        assert torch.allclose(scores[:switch], before[:switch], atol=1e-4)
        assert torch.allclose(scores[switch:], after[switch:], atol=1e-4)
        assert not torch.allclose(scores[switch:], before[switch:], atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("not pushed", "the engine holds no adapter"),
        ("previous version", "the engine holds another adapter of model.layers.0."),
        ("half the tensors", "the engine holds no adapter of model.layers.1."),
        ("wrong scale", "the engine scales the adapter of model.layers.0."),
    ],
)
async def test_faults_of_the_engine_are_named(worker: RolloutWorker, policy: Policy, fault: str, said: str) -> None:
    policy.train()
    async with planted(worker, fault):
        with pytest.raises(WeightDigestMismatch, match=f"rollout-0: .*none: {re.escape(said)}"):
            await worker.update_weights(policy.publish())
    await recovers(worker, policy)


def _wrong_names(policy: Policy) -> None:
    policy.renamed["q_proj"] = "query"


def _half_published(policy: Policy) -> None:
    policy.renamed["layers.0.self_attn.q_proj.lora_A"] = "layers.0.self_attn.other.lora_A"


def _base_changed(policy: Policy) -> None:
    description = Description(base="another", config=policy.adapter.peft_config(""))
    policy.replaced[DESCRIPTION] = as_bytes(description.to_json())


def _other_rank(policy: Policy) -> None:
    config = policy.adapter.peft_config("") | {"r": 4}
    policy.replaced[DESCRIPTION] = as_bytes(Description(base=policy.adapter.base, config=config).to_json())


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_wrong_names, "the engine has no layer for the adapter of model.layers.0.self_attn.query"),
        (_half_published, "the version has only lora_"),
        (_base_changed, "were trained on another base model: its files have digest another"),
        (_other_rank, "has rank 3, not 4"),
    ],
)
async def test_faults_of_the_trainer_are_named(worker: RolloutWorker, policy: Policy, plant: Any, said: str) -> None:
    plant(policy)
    try:
        with pytest.raises((WeightDigestMismatch, EngineClosed), match=re.escape(said)):
            await worker.update_weights(policy.publish())
    finally:
        policy.renamed.clear()
        policy.replaced.clear()
    await recovers(worker, policy)


async def test_an_engine_that_adapters_have_no_effect_on_is_refused(worker: RolloutWorker, policy: Policy) -> None:
    """Its memory holds them, so only a probe shows that it does not multiply with them."""
    worker.weights._adapter = None  # as at the first update
    async with planted(worker, "no effect"):
        with pytest.raises(EngineClosed, match="the same log-probs with adapters and without"):
            await worker.update_weights(policy.publish())
    await recovers(worker, policy)


async def test_an_engine_that_rests_wakes_with_the_next_adapters(worker: RolloutWorker, policy: Policy) -> None:
    """Its requests rest with it, and continue on them."""
    config = worker.generation.config
    longer = config.sampling.model_copy(update={"max_tokens": LONG})
    worker.generation.config = config.model_copy(update={"sampling": longer})
    try:
        running = asyncio.create_task(rows(worker))
        await until_sampling(worker, 3)
        await worker.sleep()
        policy.train()
        async with planted(worker, "not pushed"):
            with pytest.raises(WeightDigestMismatch):
                await worker.update_weights(policy.publish())
        with pytest.raises(EngineClosed):
            await running
        assert not worker.memory.awake  # nothing wakes an engine whose adapters were not verified
        await worker.update_weights(policy.publish())
        with endless(worker):
            running = asyncio.create_task(rows(worker))
            await until_sampling(worker, 3)
        await worker.sleep()
        policy.train()
        await worker.update_weights(policy.publish())
        found = await running
    finally:
        worker.generation.config = config
    for row in found:
        assert row["weight_versions"][-1]["version"] == policy.version
        switch = row["weight_versions"][-1]["start"]
        scores = torch.tensor(row["rollout_logprobs"])[switch:]
        assert torch.allclose(scores, policy.expected(row)[switch:], atol=1e-4)


async def test_another_node_gets_adapters_from_an_object_store(
    worker: RolloutWorker, policy: Policy, tmp_path: Path
) -> None:
    policy.train()
    update, store = policy.publish(), WeightStore(f"file://{tmp_path}/bucket", "run")
    stored = store.put("1.weights", read_payload(update))
    there = replace(update, path=str(tmp_path / Path(update.path).name))
    await worker.write_weights(there, stored)
    ack = await worker.update_weights(there)
    store.close()
    assert ack.digest == update.digest
    assert all(agrees(row, policy.expected(row)) for row in await rows(worker))


@pytest.mark.long
async def test_both_ranks_of_an_engine_hold_their_shares_and_a_fault_in_one_is_named(
    tiny_model: Path, policy: Policy
) -> None:
    config = adapted(tiny_model)
    engine = config.engine.model_copy(update={"tensor_parallel_size": 2, "threads": 1})
    worker = RolloutWorker(config.model_copy(update={"engine": engine}), "rollout-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_ADAPTER_EXTENSION", "tests.real.adapter_faults.FaultyAdapterExtension")
        await worker.start()
    try:
        for _ in range(2):
            policy.train()
            update = policy.publish()
            ack = await worker.update_weights(update)
            assert (ack.version, ack.digest) == (update.version, update.digest)
            assert all(agrees(row, policy.expected(row)) for row in await rows(worker))
        for fault, said in (("not pushed", "no adapter"), ("previous version", "another adapter of model.layers.0.")):
            policy.train()
            async with planted(worker, fault, rank=1):
                with pytest.raises(WeightDigestMismatch, match=f"rollout-1: .*the engine holds {said}"):
                    await worker.update_weights(policy.publish())
            await recovers(worker, policy)
        _base_changed(policy)
        try:
            with pytest.raises(EngineOutOfStep, match="were trained on another base model"):
                await worker.update_weights(policy.publish())
        finally:
            policy.replaced.clear()
    finally:
        await worker.close()


async def test_a_sample_without_the_adapters_is_an_error(worker: RolloutWorker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.generation, "_adapter", lambda: None)
        with pytest.raises(RuntimeError, match="without the policy's adapters"):
            await rows(worker)
