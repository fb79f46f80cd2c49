"""Engines and a trainer's model that sends them its weights from device to device, without Ray.

On one GPU, engines and sender share it (ipc); with nccl each has a separate GPU; gloo runs on the CPU.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from benchmarks.support.workload import GPU_SHARE, MAX_GAP
from tests.gpu.isolated import Measurements
from tests.real.loop_link import LoopLink
from tests.real.rollout_helpers import chat, named_weights, prompt_table, reference_logprobs
from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.contract.weight_backends import TransferBackend
from troupe.workers.models.modeling import load_causal
from troupe.workers.rollout import RolloutWorker
from troupe.workers.weights.device_sender import DeviceSender, device_sender

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENGINES = 2
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROMPTS = prompt_table(chat("What is 2 + 3?"))


class TrainerGone(Exception):
    """The failure of the trainer's side that a test injects."""


class Transfers:
    """The trainer's model and the engines."""

    def __init__(self, model: Path, backend: TransferBackend, *, eager: bool) -> None:
        self._backend: TransferBackend = backend
        self._eager = eager
        self._device = torch.device("cpu" if backend == "gloo" else "cuda:0")
        dtype = "float32" if backend == "gloo" else "bfloat16"
        self._config = ModelConfig(path=str(model), dtype=dtype)
        self._model: PreTrainedModel = load_causal(self._config).eval()
        torch.nn.Module.to(self._model, self._device)
        self.engines: list[RolloutWorker] = []
        self._version = 0
        self.measurements: dict[str, float | str] = {"backend": backend}

    def rollout_config(self) -> RolloutConfig:
        """Configuration of an engine."""
        engine = EngineConfig(
            max_num_seqs=8,
            max_model_len=256,
            enforce_eager=self._eager,
            gpu_memory_utilization=GPU_SHARE,
            kv_cache_gib=0.1,
            threads=1,
        )
        return RolloutConfig(
            model=self._config,
            engine=engine,
            sampling=SamplingConfig(max_tokens=16),
            seed=1,
            transfer_backend=self._backend,
            device="cpu" if self._backend == "gloo" else "cuda",
        )

    async def start(self, number: int) -> RolloutWorker:
        """Start an engine; with nccl, on its own GPU."""
        if self._backend == "nccl":
            os.environ[_VISIBLE] = str(number + 1)  # of its process, which begins here
        worker = RolloutWorker(self.rollout_config(), f"rollout-{number}")
        try:
            await worker.start()
        finally:
            os.environ.pop(_VISIBLE, None)
        return worker

    async def run(self) -> None:
        """Send, fail, and send again.

        A transfer fails because the trainer's side raises in the middle of it, then because an engine's process is
        killed in it. After each failure the next transfer reaches both engines, one of them new after the second.
        """
        self.engines = [await self.start(number) for number in range(ENGINES)]
        self._note_graphs()
        await self.send_and_check("first transfer, s")
        await self._fails("trainer", self._raising)
        await self.send_and_check("after the trainer's failure, s")
        await self._fails("engine", self._killing)
        began = time.monotonic()
        lost = self.engines.pop()
        await lost.close()
        self.engines.append(await self.start(ENGINES - 1))
        self.measurements["replacing an engine, s"] = time.monotonic() - began
        await self.send_and_check("after the engine's loss, s")

    async def measure(self) -> Measurements:
        """Run to the end, and end the engines."""
        try:
            await self.run()
        finally:
            for worker in self.engines:
                await worker.close()
        return self.measurements

    def _note_graphs(self) -> None:
        """Record how the engines capture CUDA graphs, which compiled ones do on a GPU."""
        engine: Any = self.engines[0].engine.vllm
        mode = engine.vllm_config.compilation_config.cudagraph_mode.name
        self.measurements["CUDA graphs"] = mode
        needed = self._device.type == "cuda" and not self._eager
        assert mode != "NONE" or not needed, "vLLM captures no CUDA graphs on this GPU"

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, weight.detach()) for name, weight in named_weights(self._model))

    def _raising(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from islice(self._weights(), 3)
        raise TrainerGone

    def _killing(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Kills the last engine's process in the middle."""
        yield from islice(self._weights(), 3)
        engine: Any = self.engines[-1].engine.vllm
        (core,) = engine.engine_core.resources.engine_manager.processes
        psutil.Process(core.pid).kill()
        yield from islice(self._weights(), 3, None)

    @torch.no_grad()
    def _change(self) -> None:
        """Change every weight, so that old ones would be noticed."""
        for weight in self._model.parameters():
            weight += 0.02 * torch.randn_like(weight) * weight.std()

    async def _connect(self) -> DeviceSender:
        shapes = [(name, weight.dtype, tuple(weight.shape)) for name, weight in self._weights()]
        link = LoopLink(self.engines)
        return await asyncio.to_thread(device_sender, self._backend, link, shapes, 0, self._device)

    async def send_and_check(self, label: str) -> None:
        """Change the weights, send them to all engines, and check the log-probs of these engines' samples."""
        self._change()
        self._version += 1
        began = time.monotonic()
        sender = await self._connect()
        sent = await asyncio.to_thread(sender.send, self._version, self._weights())
        self.measurements[label] = time.monotonic() - began
        sender.close()
        assert sent is not None and sent.acks, f"{label}: no engine has acknowledged the weights"
        assert {(ack.version, ack.digest) for ack in sent.acks} == {(self._version, sent.digest)}
        gap = max([await self.gap(worker) for worker in self.engines])
        assert gap <= MAX_GAP, f"{label}: samples differ from the weights that were sent by {gap:.4f} nats per token"
        self.measurements["nats per token"] = gap

    async def _fails(self, who: str, tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """A transfer that must fail."""
        self._version += 1
        sender = await self._connect()
        began = time.monotonic()
        try:
            await asyncio.to_thread(sender.send, self._version, tensors())
        except Exception as error:
            self.measurements[f"failure of the {who} noticed, s"] = time.monotonic() - began
            print(f"{who}: {type(error).__name__}: {error}", flush=True)
        else:
            raise AssertionError(f"a transfer in which the {who} failed was acknowledged")
        finally:
            sender.close()

    async def gap(self, worker: RolloutWorker) -> float:
        """Mean difference between an engine's log-probs of its samples and the model's."""
        request = GroupRequest("p", 0, 0, 4, seed=self._version)
        _, rows = await worker.generate(request, _PROMPTS)
        gaps: list[torch.Tensor] = []
        for row in rows.to_pylist():
            assert {span["version"] for span in row["weight_versions"]} == {self._version}, row["weight_versions"]
            own = reference_logprobs(self._model, row, temperature=1.0)
            gaps.append((own - torch.tensor(row["rollout_logprobs"])).abs())
        return float(torch.cat(gaps).mean())
