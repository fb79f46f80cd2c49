"""A whole run with adapters, on real Ray, vLLM and DeepSpeed: engines follow, it heals, and exports what it trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT
from tests.faults.stalls import deadly_environment
from tests.real.commands import Run, equal_steps, ledger_balances, replayed, run_troupe, running
from troupe.orchestrator.telemetry.run_folder import RunFolder

pytestmark = [pytest.mark.real, pytest.mark.long]

SPEC = ROOT / "deploy" / "specs" / "tiny-lora.yaml"
TENSORS = 1 + 2 * 2 * 7
"""Tensors of a version: the description, and A and B of two layers' seven linear layers."""


def test_engines_follow_the_adapters_of_a_run_which_heals_and_exports(tiny_model: Path, tmp_path: Path) -> None:
    """SIGKILL of the engine's process between the adapters of two versions, and of the policy within a version's file.

    The engine's successor loads the model and the newest adapters, that of the policy the last checkpoint.
    """
    overrides = ("schedule.max_staleness=1", "roles.policy.ema_decay=0.5")
    engine, policy = tmp_path / "engine", tmp_path / "policy"
    deaths = deadly_environment(
        ("troupe.workers.weights.vllm_adapter:AdapterTransferEngine.use", 4, engine),
        ("troupe.workers.weights.file:_host_bytes", 7 * TENSORS - 10, policy),
    )
    with running(Run(tmp_path, SPEC, *overrides, name="lora", env=deaths)) as run:
        assert run.wait() == 0, run.output
        assert engine.exists() and policy.exists()
        assert "rollout-0 is lost" in run.output and "policy-0 is lost" in run.output
        assert run.leftover_processes() == []
        assert run.weight_files == []
    metrics = run.metrics
    assert all(ledger_balances(line) for line in metrics)
    assert metrics[0]["kl_ref"] < 1e-6 and metrics[-1]["kl_ref"] > 0.1
    assert max(line["policy/rollout_logprob_gap_max"] for line in metrics if not line["staleness/max"]) < 1e-3
    published = [event for event in RunFolder(run.out).events() if event["event"] == "weights"]
    assert max(event["bytes"] for event in published) < (tiny_model / "model.safetensors").stat().st_size / 4
    assert len({event["digest"] for event in published}) >= 15
    # The trainer waits for the engine with the last version and after a restart; a new engine may load at any time.
    spans = RunFolder(run.out).timeline().to_pylist()
    waits = [(span["start"], span["end"]) for span in spans if span["phase"] == "sync"]
    loads = [span["start"] for span in spans if span["method"] == "update_weights"]
    assert len(loads) >= 15 and sum(low <= start < high for start in loads for low, high in waits) <= 3
    assert equal_steps(replayed(run.out, 5)) == [1, 2, 3, 4, 5]
    assert run_troupe(tmp_path, "audit", str(run.out)).rstrip().endswith("passed")
    run_troupe(tmp_path, "export", str(run.out), str(tmp_path / "adapter"))
    run_troupe(tmp_path, "export", str(run.out), str(tmp_path / "whole"), "--merge")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 64)
    ids = torch.tensor([[5, 6, 7, 8]])
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits
        for name in ("adapter", "whole")
    ]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(*models, rtol=0, atol=1e-3)
    assert not torch.allclose(models[0], base, atol=1e-2)
    assert load_file(run.out / "checkpoints/step-000015/model-average/adapter_model.safetensors")
