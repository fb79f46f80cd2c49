"""Weight updates of a running engine: it samples from exactly the new weights, or it refuses requests."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from tests.real.rollout_helpers import (
    chat,
    endless,
    load_model,
    named_weights,
    perturb,
    prompt_table,
    reference_logprobs,
    rollout_config,
    sampling_config,
    save_model,
    until_sampling,
)
from troupe.workers.contract.messages import GroupRequest, WeightUpdate
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.rollout import RolloutWorker
from troupe.workers.weights.file import WeightDigestMismatch, WeightPublisher, read_payload

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

KINDS = ("self_attn", "mlp", "norm", "embed_tokens")
PROMPTS = prompt_table(*(chat(text) for text in ("Name a colour.", "What is 2 + 3?", "Tell me of the sea.", "Go on.")))
LONG = 256


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tiny_model: Path) -> AsyncIterator[RolloutWorker]:
    """A worker whose responses are long, so that an update arrives while they are generated. Its engine records the
    tokens that its sampler leaves."""
    config = rollout_config(tiny_model, LONG)
    recording = config.model_copy(update={"sampling": config.sampling.model_copy(update={"top_p": 0.9})})
    worker = RolloutWorker(recording, "rollout-3")
    await worker.start()
    worker.generation.config = config
    yield worker
    await worker.close()


class Trainer:
    """A model that publishes its weights, and their latest version."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.model = model
        self.tensors = dict(named_weights(model))
        self.publisher = WeightPublisher(lambda: self.tensors.items(), directory, "test")
        self.version = 0

    def publish(self, base: str = "") -> WeightUpdate:
        self.version += 1
        update = self.publisher.publish(self.version, base)
        assert update is not None
        return update


@pytest.fixture
def trainer(tiny_model: Path, tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(load_model(tiny_model), tmp_path)
    yield trainer
    trainer.publisher.close()


async def sample(worker: RolloutWorker, count: int = 4) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of a greedy and a random sample per prompt.

    The requests run one at a time, because the batch size changes the order of floating-point sums.
    """
    found = []
    with sampling_config(worker, max_tokens=24):
        for row, greedy in itertools.product(range(count), (True, False)):
            request = GroupRequest(f"p{row}", row, 0, samples=1, seed=row, greedy=greedy)
            _, table = await worker.generate(request, PROMPTS)
            found += [(r["response_ids"], r["rollout_logprobs"]) for r in table.to_pylist()]
    return found


async def generate_rows(worker: RolloutWorker, samples: int = 1) -> list[dict[str, Any]]:
    _, table = await worker.generate(GroupRequest("p", 0, 0, samples, seed=4), PROMPTS)
    return table.to_pylist()


async def test_an_updated_engine_equals_a_new_engine(
    worker: RolloutWorker, trainer: Trainer, tiny_model: Path, tmp_path: Path
) -> None:
    """The samples are equal bit by bit after changes in every kind of layer, and each change has an effect.

    The output head is tied to the embedding: a sync that misses it raises no error.
    """
    seen = [await sample(worker, 1)]
    for kind in KINDS:
        perturb(trainer.model, kind)
        update = trainer.publish()
        ack = await worker.update_weights(update)
        assert (ack.engine, ack.version, ack.digest) == ("rollout-3", update.version, update.digest)
        assert (await worker.health()).version == update.version
        seen.append(await sample(worker, 1))
        assert all(seen[-1] != earlier for earlier in seen[:-1]), kind
    updated = await sample(worker)
    new = RolloutWorker(rollout_config(save_model(trainer.model, tiny_model, tmp_path / "model"), LONG), "new")
    await new.start()
    try:
        assert await sample(new) == updated
    finally:
        await new.close()


async def test_an_update_during_generation_records_the_version_of_every_token(
    worker: RolloutWorker, trainer: Trainer
) -> None:
    """All requests finish, and every token was sampled with the weights of its recorded version, from the tokens that
    top-p left of their distribution."""
    old = trainer.publish()
    await worker.update_weights(old)
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    for kind in KINDS:
        perturb(trainer.model, kind)
    new = trainer.publish()
    with sampling_config(worker, top_p=0.9), endless(worker):
        running = [asyncio.create_task(generate_rows(worker, 4)) for _ in range(2)]
        await until_sampling(worker, 8)
        await worker.update_weights(new)
    rows = [row for group in await asyncio.gather(*running) for row in group]
    assert len(rows) == 8
    for row in rows:
        first, second = row["weight_versions"]
        assert (first["version"], second["version"]) == (old.version, new.version)
        assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == LONG
    _, table = await worker.generate(GroupRequest("p", 0, 0, 1, 1), PROMPTS)
    assert table["weight_versions"].to_pylist() == [[{"version": new.version, "start": 0, "end": LONG}]]
    new_logprobs = [reference_logprobs(trainer.model, row, 0.7) for row in rows]
    with torch.no_grad():
        for name, tensor in trainer.tensors.items():
            tensor.copy_(before[name])
    for row, by_new in zip(rows, new_logprobs, strict=True):
        by_old = reference_logprobs(trainer.model, row, 0.7)
        switch = row["weight_versions"][0]["end"]
        sampled = torch.tensor(row["rollout_logprobs"])
        assert torch.allclose(sampled[:switch], by_old[:switch], atol=1e-3)
        assert torch.allclose(sampled[switch:], by_new[switch:], atol=1e-3)
        assert not torch.allclose(sampled[switch:], by_old[switch:], atol=1e-1)
        assert all(row["kept_tokens"])


async def test_the_end_of_sequence_token_is_part_of_the_response(worker: RolloutWorker, trainer: Trainer) -> None:
    """With weights that favour the end-of-sequence token, responses end with it and include its log-prob."""
    with torch.no_grad():
        dict(trainer.model.named_parameters())["model.embed_tokens.weight"][2] *= 30.0
    await worker.update_weights(trainer.publish())
    rows = await generate_rows(worker, 8)
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert stopped
    for row in stopped:
        assert row["response_ids"][-1] == 2
        assert row["response_ids"].count(2) == 1
        assert len(row["rollout_logprobs"]) == len(row["response_ids"]) < LONG
        assert "<|im_end|>" not in row["response"]
        expected = reference_logprobs(trainer.model, row, 0.7)
        assert torch.allclose(torch.tensor(row["rollout_logprobs"]), expected, atol=1e-3)


def flip(update: WeightUpdate) -> None:
    """Flip one bit of the file."""
    with open(update.path, "r+b") as file:
        file.seek(update.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(update.nbytes // 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
async def test_a_damaged_update_closes_the_engine(worker: RolloutWorker, trainer: Trainer, damage: str) -> None:
    """Running and new requests fail with an error that names the update; the next valid update reopens the engine."""
    await worker.update_weights(trainer.publish())
    good = await sample(worker, 1)
    running = asyncio.create_task(generate_rows(worker, 4))
    await until_sampling(worker, 4)
    update = trainer.publish()
    if damage == "flipped":
        flip(update)
    elif damage == "truncated":
        os.truncate(update.path, update.nbytes - 4096)
    else:
        os.unlink(update.path)
    with pytest.raises(WeightDigestMismatch, match="rollout-3") as caught:
        await worker.update_weights(update)
    assert caught.value.expected == update.digest != caught.value.got
    with pytest.raises(EngineClosed, match=f"update to version {update.version} failed"):
        await running
    with pytest.raises(EngineClosed):
        await generate_rows(worker)
    with pytest.raises(EngineClosed):
        await worker.health()
    await worker.update_weights(trainer.publish())
    assert await sample(worker, 1) == good


@pytest.mark.parametrize("absent", ["layers.0.mlp.down_proj", "layers.1.self_attn.k_proj", "embed_tokens", "norm"])
async def test_an_incomplete_update_closes_the_engine(worker: RolloutWorker, trainer: Trainer, absent: str) -> None:
    """vLLM would silently keep the old weights of that layer; the next complete update replaces all weights."""
    await worker.update_weights(trainer.publish())
    good = await sample(worker, 1)
    complete = trainer.tensors
    trainer.tensors = {name: tensor for name, tensor in complete.items() if absent not in name}
    assert len(trainer.tensors) < len(complete)
    with pytest.raises(EngineClosed, match="the update lacks weights of"):
        await worker.update_weights(trainer.publish())
    with pytest.raises(EngineClosed):
        await generate_rows(worker)
    trainer.tensors = complete
    await worker.update_weights(trainer.publish())
    assert await sample(worker, 1) == good


async def test_a_cancelled_update_closes_the_engine(worker: RolloutWorker, trainer: Trainer) -> None:
    """The next update reopens the engine, even if its processes have begun and not finished another one."""
    await worker.update_weights(trainer.publish())
    good = await sample(worker, 1)
    update = asyncio.create_task(worker.update_weights(trainer.publish()))
    await asyncio.sleep(0.01)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    with pytest.raises(EngineClosed):
        await generate_rows(worker)
    engine = worker.engine.require_live()
    await engine.collective_rpc("troupe_forget_unfinished_update")  # the cancelled update may have got this far
    await engine.start_weight_update()
    await worker.update_weights(trainer.publish())
    assert await sample(worker, 1) == good


async def test_weights_are_written_to_another_node(worker: RolloutWorker, trainer: Trainer, tmp_path: Path) -> None:
    """A worker on a node without the publisher's file writes it from the payload, and replaces it with the next one."""
    update = trainer.publish()
    payload = np.array(read_payload(update))
    elsewhere = tmp_path / "node"
    elsewhere.mkdir()
    copy = replace(update, path=str(elsewhere / Path(update.path).name))
    await worker.write_weights(copy, payload)
    ack = await worker.update_weights(copy)
    assert (ack.version, ack.digest) == (update.version, update.digest)
    other = replace(copy, path=copy.path.replace("-test-", "-test2-"))
    await worker.write_weights(other, payload)
    assert os.listdir(elsewhere) == [Path(other.path).name]


async def test_another_node_loads_what_it_made_of_the_version_before(
    worker: RolloutWorker, trainer: Trainer, tmp_path: Path
) -> None:
    """And asks for all weights where it has another version, or none."""
    update = trainer.publish()
    elsewhere = tmp_path / "node"
    elsewhere.mkdir()

    def there(update: WeightUpdate) -> WeightUpdate:
        return replace(update, path=str(elsewhere / Path(update.path).name))

    def small_step() -> WeightUpdate:
        for tensor in trainer.tensors.values():
            tensor.detach().view(-1)[::50] += 0.01
        return trainer.publish(update.digest)

    await worker.write_weights(there(update), np.array(read_payload(update)))
    update = small_step()
    delta = np.array(trainer.publisher.delta(update))
    assert 0 < delta.nbytes < update.nbytes / 4
    assert await worker.change_weights(there(update), delta)
    ack = await worker.update_weights(there(update))
    assert (ack.version, ack.digest) == (update.version, update.digest)
    assert not await worker.change_weights(there(update), delta)  # it starts from the version before
    update = small_step()
    delta = np.array(trainer.publisher.delta(update))
    assert not await worker.change_weights(there(update), delta)  # after a refusal nothing is kept
    await worker.write_weights(there(update), np.array(read_payload(update)))
    update = small_step()
    Path(there(update).path).unlink()
    assert not await worker.change_weights(there(update), np.array(trainer.publisher.delta(update)))
    await worker.write_weights(there(update), np.array(read_payload(update)))
    ack = await worker.update_weights(there(update))
    assert (ack.version, ack.digest) == (update.version, update.digest)
