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
