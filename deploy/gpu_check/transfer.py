"""The transfer pieces of the GPU check: weights from device to device, failed transfers, a replaced engine.

Two engines and a sender, without Ray. A transfer fails because the trainer's side raises in the middle of it, then
because an engine's process is killed in it. After each failure the next transfer reaches both engines, one of them new
after the second, and their samples have the log-probs of the weights that were sent.

On one GPU, engines and sender share it (ipc); with nccl each has a separate GPU; gloo runs on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import torch

from deploy.gpu_check.outcome import NotRight, write_measurements
from troupe.workers.contract.config import EngineConfig, ModelConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.messages import PROMPTS, GroupRequest, WeightAck
from troupe.workers.contract.weight_backends import TransferBackend
from troupe.workers.models.modeling import load_causal
from troupe.workers.rollout import RolloutWorker
from troupe.workers.weights.device_sender import DeviceSender, device_sender

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENGINES = 2
GPU_SHARE = 0.2
"""Of a GPU's memory for one engine: on one GPU there are two, and the sender."""
MAX_GAP = 0.1
"""Largest mean difference between the log-probs of an engine and of the weights that were sent, in nats per token."""
_CALL_S = 120.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROMPTS = pa.Table.from_pylist(
    [
        {
            "row": 0,
            "messages": json.dumps([{"role": "user", "content": "What is 2 + 3?"}]),
            "answer": "5",
            "metadata": "{}",
            "origin": "gpu_check:1",
        }
    ],
    schema=PROMPTS,
)


class TrainerGone(Exception):
    """The failure of the trainer's side that this check makes."""


class LocalLink:
    """The sender's link to workers in this process, as `ActorLink` is to actors. The sender runs in a thread."""

    def __init__(self, workers: Sequence[RolloutWorker]) -> None:
        self._workers = workers
        self.processes = len(workers)
        self._loop = asyncio.get_running_loop()

    def join(self, info: dict[str, Any]) -> None:
        """See `EngineLink`."""
        first = info.get("first_rank", 0)
        infos = [info | {"first_rank": first + number} for number in range(len(self._workers))]
        self._all([worker.transfer_init(own) for worker, own in zip(self._workers, infos, strict=True)])

    def start(self) -> None:
        """See `EngineLink`."""
        self._all([worker.transfer_start() for worker in self._workers])

    def receive(self, info: dict[str, Any]) -> None:
        """See `EngineLink`."""
        self._all([worker.transfer_receive(info) for worker in self._workers])

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        """See `EngineLink`."""
        return self._all([worker.transfer_finish(version, digest) for worker in self._workers])

    def _all(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return await asyncio.gather(*calls)

        return asyncio.run_coroutine_threadsafe(gathered(), self._loop).result(_CALL_S)


class TransferCheck:
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
        """Send, fail, and send again. Raises NotRight."""
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

    async def close(self) -> None:
        """End the engines."""
        for worker in self.engines:
            await worker.close()

    def _note_graphs(self) -> None:
        """Record how the engines capture CUDA graphs. Raises NotRight where they should and do not."""
        engine: Any = self.engines[0]._engine
        mode = engine.vllm_config.compilation_config.cudagraph_mode.name
        self.measurements["CUDA graphs"] = mode
        if mode == "NONE" and self._device.type == "cuda" and not self._eager:
            raise NotRight("vLLM captures no CUDA graphs on this GPU")

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, weight.detach()) for name, weight in self._model.named_parameters())

    def _raising(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from islice(self._weights(), 3)
        raise TrainerGone

    def _killing(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Kills the last engine's process in the middle."""
        yield from islice(self._weights(), 3)
        engine: Any = self.engines[-1]._engine
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
        link = LocalLink(self.engines)
        return await asyncio.to_thread(device_sender, self._backend, link, shapes, 0, self._device)

    async def send_and_check(self, label: str) -> None:
        """Change the weights, send them to all engines, and check what these serve. Raises NotRight."""
        self._change()
        self._version += 1
        began = time.monotonic()
        sender = await self._connect()
        sent = await asyncio.to_thread(sender.send, self._version, self._weights())
        self.measurements[label] = time.monotonic() - began
        sender.close()
        if sent is None or {(ack.version, ack.digest) for ack in sent.acks} != {(self._version, sent.digest)}:
            raise NotRight(f"{label}: not every engine has acknowledged the weights")
        gaps = [await self.gap(worker) for worker in self.engines]
        if not max(gaps) <= MAX_GAP:
            raise NotRight(f"{label}: samples differ from the weights that were sent by {max(gaps):.4f} nats per token")
        self.measurements["nats per token"] = max(gaps)

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
            raise NotRight(f"a transfer in which the {who} failed was acknowledged")
        finally:
            sender.close()

    async def gap(self, worker: RolloutWorker) -> float:
        """Mean difference between an engine's log-probs of its samples and the model's."""
        request = GroupRequest("p", 0, 0, 4, seed=self._version)
        _, rows = await worker.generate(request, _PROMPTS)
        gaps: list[torch.Tensor] = []
        for row in rows.to_pylist():
            if {span["version"] for span in row["weight_versions"]} != {self._version}:
                raise NotRight(f"a sample has versions {row['weight_versions']}, not {self._version}")
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]], device=self._device)
            with torch.no_grad():
                logits = self._model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float()
            own = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]
            gaps.append((own.cpu() - torch.tensor(row["rollout_logprobs"])).abs())
        return float(torch.cat(gaps).mean())


async def measure(model: Path, backend: TransferBackend, *, eager: bool) -> dict[str, float | str]:
    """Run the check; returns the measurements. Raises NotRight."""
    check = TransferCheck(model, backend, eager=eager)
    try:
        await check.run()
    finally:
        await check.close()
    return check.measurements


def main() -> None:
    """Run the check and write the measurements; exits with code 1 where it fails."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_check.transfer", description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "ipc", "nccl"), required=True)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--compiled", action="store_true", help="engines that compile, with CUDA graphs on a GPU")
    parser.add_argument("--json", type=Path, required=True, help="file for the measurements")
    given = parser.parse_args()
    write_measurements(given.json, lambda: asyncio.run(measure(given.model, given.backend, eager=not given.compiled)))


if __name__ == "__main__":
    main()
