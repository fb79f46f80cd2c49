"""`troupe bench` on the real stack: engines are started once and measured at every point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SPEC = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"


@pytest.mark.real
def test_two_points_are_measured_on_one_engine_beside_bare_vllm(tiny_model: Path, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    command = [sys.executable, "-m", "troupe", "bench", str(SPEC), "--set", f"model.path={tiny_model}"]
    command += ["--sweep", "sampling.max_tokens=6,24", "--prompts", "5", "--batches", "2", "--baseline", "vllm"]
    done = subprocess.run([*command, "--json", "-o", str(page)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting 1 rollout") == 1, "both points use the same engine"
    record = json.loads(done.stdout)
    for point, longest in zip(record["points"], (6, 24), strict=True):
        measures = point["measures"]
        assert point["settings"] == {"sampling.max_tokens": longest} and not point["problem"]
        assert measures["sequences"] == 5 * 16 and 1 <= measures["response_tokens"] <= longest
        assert measures["most_running"] == 32 and measures["waiting"] > 0, "max_num_seqs is 32"
        assert measures["cached"] > 0.5, "the samples of a group share their prompt"
        assert 0 < measures["most_kv_use"] <= 1 and 0.5 < measures["busy"] <= 1
        assert 0 < measures["first_token_s"]["p50"] <= measures["latency_s"]["p50"] <= measures["latency_s"]["p99"]
        assert measures["prefill_per_s"] > 0 and measures["decode_per_s"] > 0
        assert measures["bare_tokens_per_s"] > 0 and 0.3 < measures["against_bare"] < 3
        assert point["bound"]["why"]
    assert record["points"][1]["measures"]["response_tokens"] > record["points"][0]["measures"]["response_tokens"]
    assert '"sampling.max_tokens":24' in page.read_text()


@pytest.mark.real
@pytest.mark.long
def test_trainers_and_updates_are_measured_at_the_fastest_point_and_planned_with(
    tiny_model: Path, tmp_path: Path
) -> None:
    page, overrides = tmp_path / "bench.html", ["--set", f"model.path={tiny_model}"]
    command = [sys.executable, "-m", "troupe", "bench", str(SPEC), *overrides, "--prompts", "4", "--batches", "1"]
    command += ["--train", "--weights", "--json", "-o", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "bench.json").read_text())
    train, (policy,) = record["train"], record["train"]["trainers"]
    assert train["sequences"] == 4 * 16 and train["step_s"] > 0
    assert 0 < policy["tokens_per_s"] * train["step_s"] < 1.2 * train["tokens"], "prompts of a group are shared"
    assert policy["mfu"] is None
    assert 0 <= policy["padding"] < 1 and policy["host_bytes"] > 2**28
    backends = {one["backend"]: one["measures"] for one in record["weights"]}
    assert {"shm", "gloo"} <= backends.keys()
    for measures in backends.values():
        parts = [measures[part] for part in ("publish_s", "transfer_s", "verify_s", "load_s")]
        assert measures["nbytes"] > 1e6 and sum(parts) == pytest.approx(measures["seconds"])
        assert measures["verify_s"] > 0 and measures["load_s"] > 0
    arguments = ["plan", str(SPEC), *overrides, "--set", "schedule.prompts_per_step=4", "--measured", str(tmp_path)]
    planned = subprocess.run([sys.executable, "-m", "troupe", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert planned.returncode == 0 and "a step takes about" in planned.stdout, planned.stdout + planned.stderr
