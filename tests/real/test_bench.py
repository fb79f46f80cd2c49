"""`troupe bench` on the real stack: engines are started once and measured at every point."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SPEC = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"

pytestmark = [pytest.mark.real, pytest.mark.long]


@dataclass(frozen=True)
class Measured:
    """What a benchmark wrote."""

    folder: Path
    overrides: tuple[str, ...]
    stdout: str
    stderr: str

    @property
    def record(self) -> dict[str, Any]:
        """The record on standard output."""
        return json.loads(self.stdout)


@pytest.fixture(scope="module")
def measured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Two points on one engine, beside bare vLLM, and then the trainers and the updates at the fastest of them."""
    folder, overrides = tmp_path_factory.mktemp("bench"), ("--set", f"model.path={tiny_model}")
    command = [sys.executable, "-m", "troupe", "bench", str(SPEC), *overrides, "--prompts", "5", "--batches", "2"]
    command += ["--sweep", "sampling.max_tokens=6,24", "--baseline", "vllm", "--train", "--weights", "--json"]
    command += ["-o", str(folder / "bench.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Measured(folder, overrides, done.stdout, done.stderr)


def test_two_points_are_measured_on_one_engine_beside_bare_vllm(measured: Measured) -> None:
    assert measured.stderr.splitlines().count("starting 1 rollout") == 1, "both points use the same engine"
    record = measured.record
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
    assert '"sampling.max_tokens":24' in (measured.folder / "bench.html").read_text()
    assert record == json.loads((measured.folder / "bench.json").read_text())


def test_trainers_and_updates_are_measured_at_the_fastest_point_and_planned_with(measured: Measured) -> None:
    record = measured.record
    train, (policy,) = record["train"], record["train"]["trainers"]
    assert train["sequences"] == 5 * 16 and train["step_s"] > 0
    assert 0 < policy["tokens_per_s"] * train["step_s"] < 1.2 * train["tokens"], "prompts of a group are shared"
    assert policy["mfu"] is None
    assert 0 <= policy["padding"] < 1 and policy["host_bytes"] > 2**28
    backends = {one["backend"]: one["measures"] for one in record["weights"]}
    assert {"shm", "gloo"} <= backends.keys()
    for measures in backends.values():
        parts = [measures[part] for part in ("publish_s", "transfer_s", "verify_s", "load_s")]
        assert measures["nbytes"] > 1e6 and sum(parts) == pytest.approx(measures["seconds"])
        assert measures["verify_s"] > 0 and measures["load_s"] > 0
    arguments = ["plan", str(SPEC), *measured.overrides, "--set", "schedule.prompts_per_step=5"]
    arguments += ["--set", f"sampling.max_tokens={train['spec']['sampling']['sampling.max_tokens']}"]
    arguments += ["--measured", str(measured.folder)]
    planned = subprocess.run([sys.executable, "-m", "troupe", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert planned.returncode == 0 and "a step takes about" in planned.stdout, planned.stdout + planned.stderr
