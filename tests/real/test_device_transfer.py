"""Weights from device to device over gloo, into two real engines: what NCCL does on GPUs, but for the wire.

Sender, receivers, checksums and the order of calls are those of nccl. A fault in each phase leaves both engines closed
and able to join the next transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from tests.real.audit_faults import EXTENSION
from tests.real.loop_link import LoopLink
from tests.real.rollout_helpers import (
    chat,
    load_model,
    named_weights,
    perturb,
    prompt_table,
    reference_logprobs,
    rollout_config,
    sampling_config,
    until_sampling,
)
from troupe.workers.contract.messages import GroupRequest, WorkerGone
from troupe.workers.engine import settings
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.engine.serving import Serving
from troupe.workers.engine.sleep import GONE, StaleWake
from troupe.workers.rollout import RolloutWorker
from troupe.workers.weights import device_sender as sending
from troupe.workers.weights.buckets import Shape
from troupe.workers.weights.device_sender import DeviceSender, device_sender
from troupe.workers.weights.file import WeightDigestMismatch
from troupe.workers.weights.transfer_group import TransferFailed, TransferGroup

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = prompt_table(*(chat(text) for text in ("Name a colour.", "What is 2 + 3?")))
BUCKET = 64 * 1024
"""Many buckets, and tensors above the limit."""
CPU = torch.device("cpu")
versions = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tiny_model: Path) -> AsyncIterator[list[RolloutWorker]]:
    """Two engines that receive over gloo. They may rest: the CPU build takes part and releases nothing."""
    config = rollout_config(tiny_model).model_copy(update={"transfer_backend": "gloo", "sleep": "weights"})
    started = [RolloutWorker(config, f"rollout-{number}") for number in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_EXTENSION", EXTENSION)
        for worker in started:
            await worker.start()
            await worker.engine.require_live().collective_rpc("plant", args=("sleep of GPUs", ""))
    yield started
    for worker in started:
        await worker.close()


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    """The trainer's model."""
    return load_model(tiny_model)


def shapes(model: PreTrainedModel) -> list[Shape]:
    """The description of its weights."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_weights(model)]


async def connect(workers: Sequence[RolloutWorker], described: Sequence[Shape]) -> DeviceSender:
    """A new sender to these workers."""
    return await asyncio.to_thread(device_sender, "gloo", LoopLink(workers), described, 0, CPU, BUCKET)


async def send(sender: DeviceSender, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Send the next version; returns it."""
    version = next(versions)
    detached = ((name, tensor.detach()) for name, tensor in tensors)
    sent = await asyncio.to_thread(sender.send, version, detached)
    assert sent is not None
    assert {(ack.version, ack.digest) for ack in sent.acks} == {(version, sent.digest)}
    return version


async def rows(worker: RolloutWorker) -> list[dict[str, Any]]:
    """Two samples."""
    _, table = await worker.generate(GroupRequest("p", 0, 0, 2, seed=4), PROMPTS)
    return table.to_pylist()


def versions_of(rows: Sequence[dict[str, Any]]) -> set[int]:
    """Versions that the tokens of these rows were sampled from."""
    return {span["version"] for row in rows for span in row["weight_versions"]}


async def assert_serves(workers: Sequence[RolloutWorker], model: PreTrainedModel, version: int) -> None:
    """Every worker samples from the model, under this version."""
    for worker in workers:
        assert (await worker.health()).version == version
        for row in await rows(worker):
            assert versions_of([row]) == {version}
            got = torch.tensor(row["rollout_logprobs"])
            assert torch.allclose(got, reference_logprobs(model, row, 0.7), atol=1e-4)


async def test_two_engines_serve_what_was_sent_and_one_alone_receives_while_the_other_serves(
    workers: list[RolloutWorker], model: PreTrainedModel
) -> None:
    sender = await connect(workers, shapes(model))
    for kind in ("self_attn", "embed_tokens"):
        perturb(model, kind)
        version = await send(sender, named_weights(model))
        await assert_serves(workers, model, version)
    sender.close()
    running = asyncio.create_task(rows(workers[0]))
    late = await connect(workers[1:], shapes(model))
    newest = await send(late, named_weights(model))
    late.close()
    assert versions_of(await running) == {version}
    await assert_serves(workers[1:], model, newest)


async def until(reached: Callable[[], bool]) -> None:
    """Wait for it, 20 s at most."""
    async with asyncio.timeout(20):
        while not reached():
            await asyncio.sleep(0.05)


def _dies(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from itertools.islice(named_weights(model), 3)
    raise ConnectionError("the trainer's other rank is gone")


def _corrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of one bucket changes on the wire: as bad as a communicator that delivers nothing."""
    broadcast, count = TransferGroup.broadcast, itertools.count()

    def flipped(self: TransferGroup, tensor: torch.Tensor) -> Callable[[], None]:
        if tensor.dtype == torch.uint8 and next(count) == 2:
            tensor = tensor.clone()
            tensor[tensor.numel() // 2] ^= 1
        return broadcast(self, tensor)

    monkeypatch.setattr(TransferGroup, "broadcast", flipped)


def _stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender is there and sends nothing, until it gives up."""

    def nothing(*_: object) -> str:
        time.sleep(0.5)
        raise TransferFailed("stalled")

    monkeypatch.setattr(sending.GroupSender, "_broadcast", nothing)


@pytest.mark.parametrize(
    ("phase", "rests"),
    [("started", True), ("middle", True), ("corrupted", True), ("stalled", False), ("incomplete", False)],
)
async def test_after_a_fault_in_any_phase_both_engines_refuse_requests_and_join_the_next_transfer(
    workers: list[RolloutWorker], model: PreTrainedModel, phase: str, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rests:
        await asyncio.gather(*(worker.sleep() for worker in workers))
    described, tensors = shapes(model), named_weights(model)
    if phase == "incomplete":
        described = [shape for shape in described if "layers.1.mlp.down_proj" not in shape[0]]
        tensors = ((n, t) for n, t in named_weights(model) if "layers.1.mlp.down_proj" not in n)
    sender = await connect(workers, described)
    match phase:
        case "started":
            await asyncio.to_thread(LoopLink(workers).start)
            # The trainers are restarted, for which engines on their GPUs rest.
            await asyncio.gather(*(worker.sleep() for worker in workers))
        case "middle":
            with pytest.raises(ConnectionError):
                await send(sender, _dies(model))
        case "corrupted":
            with monkeypatch.context() as changed:
                _corrupted(changed)
                with pytest.raises(Exception, match=r"rollout-\d: weights have digest"):
                    await send(sender, tensors)
        case "stalled":
            with monkeypatch.context() as changed:
                _stalls(changed)
                with pytest.raises(TransferFailed, match="stalled"):
                    await send(sender, tensors)
        case "incomplete":
            with pytest.raises(Exception, match=r"the update lacks weights of .*down_proj"):
                await send(sender, tensors)
    sender.close()
    if phase != "started":
        await until(lambda: all(worker.engine.state is Serving.CLOSED for worker in workers))
        for worker in workers:
            with pytest.raises(EngineClosed):
                await rows(worker)
    perturb(model, "mlp")
    again = await connect(workers, shapes(model))
    version = await send(again, named_weights(model))
    again.close()
    await assert_serves(workers, model, version)


async def test_resting_engines_are_healthy_and_wake_with_what_was_sent(
    workers: list[RolloutWorker], model: PreTrainedModel
) -> None:
    """Requests under way rest with the engine, and those that arrive wait."""
    sender = await connect(workers, shapes(model))
    before = await send(sender, named_weights(model))
    with sampling_config(workers[0], max_tokens=256):
        running = asyncio.create_task(rows(workers[0]))
        await until_sampling(workers[0], 2)
        await asyncio.gather(*(worker.sleep() for worker in workers))
        arriving = asyncio.create_task(rows(workers[1]))
        assert [(await worker.health()).version for worker in workers] == [GONE, GONE]
        for worker in workers:
            with pytest.raises(StaleWake):
                await worker.wake()
        done, _ = await asyncio.wait({running, arriving}, timeout=0.5)
        assert not done
        perturb(model, "mlp")
        after = await send(sender, named_weights(model))
        sender.close()
        assert versions_of(await arriving) == {after}
        assert versions_of(await running) == {before, after}
    await assert_serves(workers, model, after)


async def test_weights_that_vllm_woke_behind_the_workers_back_have_no_digest_and_do_not_serve(
    workers: list[RolloutWorker], model: PreTrainedModel
) -> None:
    """vLLM resumes by itself, over whatever is in memory."""
    sender = await connect(workers[:1], shapes(model))
    version = await send(sender, named_weights(model))
    engine = workers[0].engine.vllm
    assert engine is not None
    (held,) = await engine.collective_rpc("troupe_loaded_weights")
    assert held["version"] == version
    await workers[0].sleep()
    assert await engine.wake_up() is True
    with pytest.raises(WeightDigestMismatch, match="rollout-0: weights have digest"):
        await workers[0].weights.confirm(version, held["digest"])
    with pytest.raises(StaleWake):
        await workers[0].wake()
    version = await send(sender, named_weights(model))
    sender.close()
    await assert_serves(workers[:1], model, version)


@pytest.mark.long
async def test_both_ranks_of_an_engine_receive_verify_and_wake_and_a_fault_in_one_ends_the_engine(
    tiny_model: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rollout_config(tiny_model)
    engine = config.engine.model_copy(update={"tensor_parallel_size": 2, "threads": 1})
    worker = RolloutWorker(
        config.model_copy(update={"transfer_backend": "gloo", "sleep": "weights", "engine": engine}), "rollout-0"
    )
    with monkeypatch.context() as patch:
        patch.setattr(settings, "_EXTENSION", EXTENSION)
        await worker.start()
    live = worker.engine.require_live()
    try:
        await live.collective_rpc("plant", args=("sleep of GPUs", ""))
        for fault in ("", "corrupted", "started", "", "one rank"):
            await worker.sleep()
            perturb(model, "mlp")
            sender = await connect([worker], shapes(model))
            match fault:
                case "":
                    await assert_serves([worker], model, await send(sender, named_weights(model)))
                case "corrupted":
                    with monkeypatch.context() as changed:
                        _corrupted(changed)
                        with pytest.raises(Exception, match="rollout-0: weights have digest"):
                            await send(sender, named_weights(model))
                case "started":
                    await asyncio.to_thread(LoopLink([worker]).start)
                case "one rank":
                    await live.collective_rpc("plant", args=("refused by a rank", "1"))
                    with pytest.raises(Exception, match=r"broadcast|refused|has left"):
                        await send(sender, named_weights(model))
            sender.close()
        with pytest.raises(WorkerGone, match="rollout-0 must be replaced"):
            async with asyncio.timeout(30):  # the sender may know of the failure before the engine has answered
                while True:
                    await worker.health()
                    await asyncio.sleep(0.1)
    finally:
        await worker.close()


async def test_requests_under_way_continue_on_the_new_weights(
    workers: list[RolloutWorker], model: PreTrainedModel
) -> None:
    sender = await connect(workers, shapes(model))
    before = await send(sender, named_weights(model))
    perturb(model, "mlp")
    with sampling_config(workers[0], max_tokens=900):
        running = asyncio.create_task(rows(workers[0]))
        await until_sampling(workers[0], 2)
        after = await send(sender, named_weights(model))
        sender.close()
        found = versions_of(await running)
    assert found == {before, after}


async def test_a_dead_engine_ends_the_transfer_and_the_other_one_goes_on(
    workers: list[RolloutWorker], model: PreTrainedModel
) -> None:
    """Last: it costs an engine."""
    import psutil

    sender = await connect(workers, shapes(model))
    engine = workers[1].engine.vllm
    assert engine is not None
    await send(sender, named_weights(model))
    (core,) = cast("Any", engine.engine_core).resources.engine_manager.processes
    psutil.Process(core.pid).kill()
    with pytest.raises(Exception, match=r"rollout-1|broadcast"):
        await send(sender, named_weights(model))
    sender.close()
    alone = await connect(workers[:1], shapes(model))
    await assert_serves(workers[:1], model, await send(alone, named_weights(model)))
    alone.close()
