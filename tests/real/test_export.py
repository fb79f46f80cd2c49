"""Exports of a real trainer: of models whose files transformers loads but refuses to write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.real.ranks import rank_context
from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig, Rendezvous, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.policy import PolicyWorker

pytestmark = pytest.mark.real

INVALID = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
"""transformers loads these settings of generation with a warning, and raises ValueError where it writes them."""


def _try_and_export(model: str, out: str) -> None:
    config = PolicyConfig(
        share_prompts=False,
        model=ModelConfig(path=model, dtype="float32"),
        trainer=TrainerConfig(learning_rate=1e-3, micro_batch_tokens=64, threads=1),
        loss=PolicyLossConfig(),
        advantage=AdvantageConfig(estimator="group"),
        sampling=SamplingConfig(max_tokens=8),
        run_id="export-test",
        reference_model=None,
        total_updates=1,
        seed=1,
        device="cpu",
    )
    worker = PolicyWorker(config, "policy-0")
    address, port = worker.rendezvous(one_host=True)
    worker.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
    worker.try_save(f"{out}/trial")
    worker.export(f"{out}/export")
    worker.save(f"{out}/saved")
    worker.engine._engine.config["added"] = Path("/")
    try:
        worker.try_save(f"{out}/unreadable")
    except ValueError as error:
        Path(out, "refused").write_text(str(error))
    worker.close()


def _sizes(folder: Path) -> dict[Path, int]:
    files = (file for file in folder.rglob("*") if file.is_file() and "export" not in file.parts)
    return {file.relative_to(folder): file.stat().st_size for file in files}


@pytest.mark.parametrize("text", [json.dumps(INVALID), "{not json"], ids=["refused", "unreadable"])
def test_generation_settings_are_carried_as_they_are(tmp_path: Path, tiny_model: Path, text: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text(text)
    process = rank_context().Process(target=_try_and_export, args=(str(model), str(tmp_path)))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert names == {file.name for file in (tmp_path / "trial" / "export").iterdir()}
    for folder in (tmp_path / "export", tmp_path / "trial" / "export"):
        assert (folder / "generation_config.json").read_text() == text
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    (trial,) = load_file(tmp_path / "trial" / "export" / "model.safetensors").values()
    assert trial.numel() < 1000
    tried, saved = _sizes(tmp_path / "trial"), _sizes(tmp_path / "saved")
    assert tried.keys() == saved.keys(), "the trial writes DeepSpeed's files as well"
    assert sum(tried.values()) < 60_000 < sum(saved.values()), "without the numbers"
    refusal = (tmp_path / "refused").read_text()
    assert "cannot be read: Unsupported global: GLOBAL pathlib" in refusal
