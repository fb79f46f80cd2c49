"""An engine whose model must be the expected one: it answers with the digest of what it has loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from troupe.orchestrator.runs.opponents import weights_digest
from troupe.workers.contract.config import EngineConfig, JudgeConfig
from troupe.workers.contract.config_base import VerifiedModel
from troupe.workers.judge import JudgeWorker
from troupe.workers.weights.file import WeightDigestMismatch

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3).bfloat16(), "b": torch.tensor(7), "c": torch.ones(5).half()}


def test_the_digest_of_what_vllm_loads_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from troupe.workers.weights.vllm_verified import VerifiedExtension

    def load(tensors: dict[str, torch.Tensor], most: int = 9) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        monkeypatch.setattr(VerifiedExtension, "troupe_digest", "")
        loader = DefaultModelLoader(LoadConfig(load_format="safetensors", use_tqdm_on_load=False))
        read = loader.get_all_weights(cast("Any", SimpleNamespace(model=str(tmp_path), revision=None)), nn.Module())
        for _, (name, tensor) in zip(range(most), read, strict=False):
            assert torch.equal(tensor, tensors[name])
        return VerifiedExtension.troupe_model_digest(cast("Any", None))

    digest = load(TENSORS)
    assert digest == weights_digest(tmp_path) == load(dict(reversed(TENSORS.items())))
    assert load(TENSORS, most=2) == "", "a model that is not read whole has no digest"
    for name in TENSORS:  # every tensor counts
        assert load({**TENSORS, name: TENSORS[name] + 1}) == weights_digest(tmp_path) != digest


async def test_a_judge_with_other_weights_than_the_opponents_does_not_start() -> None:
    model = VerifiedModel(path="m", weights_digest="expected")
    engine = EngineConfig(max_num_seqs=1, max_model_len=8)
    worker = JudgeWorker(
        JudgeConfig(model=model, engine=engine, device="cpu", max_tokens=1, temperature=0.0, structured=None), "judge-1"
    )
    held = ["expected", "planted"]

    async def answer(method: str) -> list[str]:
        assert method == "troupe_model_digest"
        return held

    async def start() -> str:
        return "health"

    rollout = worker._engine
    rollout.engine.vllm = cast("Any", SimpleNamespace(collective_rpc=answer, errored=False))
    rollout.start = cast("Any", start)
    with pytest.raises(
        WeightDigestMismatch, match="judge-1: weights have digest planted, the published digest is expected"
    ):
        await worker.start()
    held[:] = ["expected", ""]
    with pytest.raises(WeightDigestMismatch, match="none: it has not read all"):
        await worker.start()
