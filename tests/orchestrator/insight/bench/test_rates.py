"""What `troupe bench` measured is what `troupe plan --rates` computes the sampling from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.tooling.layouts import folder
from docs.tooling.layouts import size as size_of
from tests.conftest import ROOT
from tests.forked_commands import run_command
from tests.orchestrator.insight.bench.measured import BUSY, SEQUENCE, point
from tests.orchestrator.plan.test_remedies import NODE
from troupe.orchestrator.commands.plan_table import predictions
from troupe.orchestrator.insight.bench.bounds import record_of
from troupe.orchestrator.insight.bench.results import MeasuredBatch, Result, measures_of
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.plan import Plan, as_json, described_nodes, plan
from troupe.orchestrator.plan.speed import Rates
from troupe.orchestrator.spec.load import load_rollout_spec

NAME = "bench.json"
RATES = Rates(tokens_per_s=5000.0, drain=1.5, prompt_tokens=200.0, response_tokens=800.0, group_s=20.0)
Measured = Callable[..., list[str]]


def planned(rates: Rates | None, *changes: str) -> Plan:
    spec = load_rollout_spec(NODE, ["model.path=given", *changes])
    return plan(spec, described_nodes("1x8xH100", 128), Sizes({"given": size_of("7B")}), advise=True, rates=rates)


@pytest.mark.parametrize("staleness", [0, 1])
def test_measured_engines_take_what_they_took(staleness: int) -> None:
    """By hand: 64 prompts with 16 samples of 800 tokens on 4 engines; the trainers' tokens are those sampled."""
    found = planned(RATES, f"schedule.max_staleness={staleness}")
    speed, whole = found.predicted, planned(None, f"schedule.max_staleness={staleness}").predicted
    assert speed is not None and whole is not None
    batch_s = 64 * 16 * 800 / (4 * 5000.0)
    assert speed.sampling_s == pytest.approx(batch_s / 1.5 if staleness else batch_s)
    assert speed.training_s < whole.training_s / 4.2  # 4.1 times fewer tokens, which attend to fewer others
    assert speed.tokens_per_gpu == pytest.approx(64 * 16 * 1000 / speed.step_s / 8)
    assert (speed.transfer_s, as_json("x", found)["predicted"]["sampling_measured"]) == (whole.transfer_s, True)
    text = next(iter(predictions(found)))
    assert text.startswith(
        "predicted (measured: 5,000 tokens/s an engine, sequences of 200 + 800 tokens; the rest by a"
    )
    if staleness == 0:
        assert speed.step_s == pytest.approx(batch_s + speed.training_s + speed.transfer_s)


def test_slow_engines_get_more_gpus_than_a_roofline_gives_them() -> None:
    """The division follows the measured rate, and engines without a tail are not made faster by one."""
    slow, fast = (planned(replace(RATES, tokens_per_s=rate)) for rate in (500.0, 50_000.0))
    assert slow.balance is not None and fast.balance is not None
    assert slow.balance.sampling > 4 > fast.balance.sampling
    even = planned(replace(RATES, drain=1.0)).predicted
    long = planned(replace(RATES, drain=9.0)).predicted
    assert even is not None and long is not None
    assert long.sampling_s == pytest.approx(even.sampling_s / 1.7)  # at most what others publish


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """Writes the results of points on H100s, and gives the arguments of the plan with them."""
    common = {"model.path": str(folder("7B"))}

    def write(*settings: dict[str, Any], gpu: str = "H100") -> list[str]:
        results = []
        for rate, one in enumerate(settings, 1):
            own = point(common | one, NODE)
            engines = tuple(replace(BUSY, engine=f"rollout-{n}", running=16.0) for n in range(own.workers))
            batch = MeasuredBatch(1.0, 100 * rate * own.workers, engines)
            results.append(Result(own, measures_of(own, [batch]), gpu_type=gpu))
        (tmp_path / NAME).write_text(json.dumps(record_of(results, None)))
        return ["plan", str(NODE), "--set", f"model.path={common['model.path']}", "--rates", str(tmp_path / NAME)]

    return write


def test_the_point_of_the_spec_is_read(measured: Measured) -> None:
    """Of two with its engines the one with as many of them; another one's engines are others."""
    command = measured({"roles.rollout.workers": 1}, {"roles.rollout.workers": 4}, {"roles.rollout.max_num_seqs": 8})
    done = run_command(*command, "--cluster", "1x8xH100", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)[0]["predicted"]
    drain, sampled = 32 / 16, SEQUENCE.response_tokens
    assert found["sampling_measured"] is True
    assert found["sampling_s"] == pytest.approx(64 * 16 * sampled / (4 * 200) / min(1.7, drain))


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({}, ("sampling.max_tokens=100",), "(sampling.max_tokens: 3072, not 100)"),
        ({"roles.rollout.max_num_seqs": 8}, (), "(roles.rollout.max_num_seqs: 8, not 256)"),
        ({}, ("model.dtype=float32",), "(model.dtype: bfloat16, not float32)"),
    ],
)
def test_other_engines_are_refused_with_the_field(
    measured: Measured, settings: dict[str, Any], changes: tuple[str, ...], said: str
) -> None:
    command = [*measured(settings), *(part for change in changes for part in ("--set", change))]
    done = run_command(*command, "--cluster", "1x8xH100")
    assert done.returncode == 2 and f"bench.json: other engines were measured {said}" in done.stderr


@pytest.mark.parametrize(
    ("gpu", "cluster", "said"),
    [
        ("H200", ("--cluster", "1x8xH100"), "bench.json: measured on H200, and the cluster has H100"),
        ("", ("--cluster", "1x8xH100"), "bench.json: measured on GPUs of unknown type, and the cluster has H100"),
        ("H100", ("--cluster", "1x8"), "name the cluster, as in --cluster 1x8xH100"),
        ("H100", (), "name the cluster, as in --cluster 1x8xH100"),
    ],
)
def test_rates_are_of_the_clusters_gpus(measured: Measured, gpu: str, cluster: tuple[str, ...], said: str) -> None:
    done = run_command(*measured({}, gpu=gpu), *cluster)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tiny-sft", "--rates: tiny-sft has no engines"),
        ("tiny-environment", "--rates: an episode is several of the sequences"),
        ("tiny-three-stage", "--rates: a file with stages is several runs"),
    ],
)
def test_what_no_benchmark_measures_is_refused(measured: Measured, spec: str, said: str) -> None:
    *_, file = measured({})
    command = ["plan", str(ROOT / "deploy" / "specs" / f"{spec}.yaml"), "--rates", file]
    done = run_command(*command, "--cluster", "1x8xH100")
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "bench.json: No such file"),
        ("{", "no results of this version's troupe bench"),
        ('{"device": "cuda", "gpu": "H100", "points": [{"workers": 1}]}', "(points.0.measured_with: Field required)"),
        ('{"device": "cuda", "gpu": "H100", "points": []}', "other engines were measured (none at all)"),
    ],
)
def test_a_file_that_bench_has_not_written_is_named(measured: Measured, text: str | None, said: str) -> None:
    *command, file = measured({})
    Path(file).unlink()
    if text is not None:
        Path(file).write_text(text)
    done = run_command(*command, file, "--cluster", "1x8xH100")
    assert done.returncode == 2 and said in done.stderr
