"""Predicted speed: a roofline that agrees with arithmetic by hand, and proposals that nothing improves on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.tooling.layouts import size as size_of
from tests.conftest import ROOT
from tests.orchestrator.plan.test_remedies import NODE
from troupe.orchestrator.commands.plan_table import predictions
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.placement import GPU_GIB
from troupe.orchestrator.plan.plan import (
    FASTER_BFLOAT16,
    Plan,
    as_json,
    described_nodes,
    has_fast_bfloat16,
    local_node,
    plan,
)
from troupe.orchestrator.plan.speed import DRAIN, Prediction, decode_seconds, token_seconds
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.workers.contract.gpus import GpuPeaks, gpu_peaks
from troupe.workers.contract.trainer_config import TrainerConfig

H100 = GpuPeaks(989e12, 3350e9, 450e9)


def planned(name: str, cluster: str, *changes: str, **more: Any) -> Plan:
    spec = plan_runs(read_document(NODE, ["model.path=given", *changes]))[0].spec
    sizes = Sizes({"given": size_of(name)})
    return plan(spec, described_nodes(cluster, 128, 0), sizes, **more)


@pytest.mark.parametrize(("name", "billions"), [("30B-A3B", 3.3), ("235B-A22B", 22.0), ("671B-A37B", 37.0)])
def test_a_token_is_multiplied_with_the_published_active_parameters(name: str, billions: float) -> None:
    """Published numbers count the embedding that is looked up, too."""
    size = size_of(name)
    looked_up = size.vocabulary * size.hidden
    assert size.multiplied() + looked_up == pytest.approx(billions * 1e9, rel=0.03)
    assert size.multiplied(10_000) + looked_up == pytest.approx(size.parameters)  # every expert has some token


@pytest.mark.parametrize(
    ("name", "recomputed", "kernels", "length", "microseconds"),
    [
        # An independent sum of products, attention, elementwise traffic and head for each token, on an H100.
        ("1.5B", None, "torch", 2048, 11.7 + 1.9 + 7.2 + 2.8),
        ("7B", "all", "torch", 4096, 77.6 + 11.2 + 21.6 + 7.0),
        ("7B", "rest", "torch", 4096, 77.6 * 3 / 4 + 11.2 * 3.5 / 4.5 + 21.6 + 7.0),
        ("7B", "all", "liger", 4096, 77.6 + 11.2 + 8.7 + 7.0),
        ("7B", "all", "torch", 16384, 77.6 + 44.7 + 21.6 + 7.0),
        ("32B", "all", "torch", 4096, 371 + 36.5 + 71.6 + 10.0),
    ],
)
def test_the_time_of_a_token_is_that_of_a_sum_by_hand(
    name: str, recomputed: str | None, kernels: Any, length: int, microseconds: float
) -> None:
    size = size_of(name)
    checkpointing: Any = {"gradient_checkpointing": recomputed is not None, "recompute_products": recomputed != "rest"}
    trainer = TrainerConfig(learning_rate=1e-6, kernels=kernels, **checkpointing)
    found = 1e6 * token_seconds(size, trainer, length, H100)
    assert found == pytest.approx(microseconds, rel=0.06)


def test_a_decoding_step_reads_weights_and_caches() -> None:
    """By hand, for 7B in bfloat16: 7.07e9 weights, and 2 * 4 * 128 numbers in each of 28 layers for a token."""
    size = size_of("7B")
    read = 2 * 7_070_619_136 + 64 * 1000 * 28 * 2 * 4 * 128 * 2
    assert decode_seconds(size, 2, 1, 64, 1000, H100) == pytest.approx(read / (0.78 * 3.35e12) + 1.5e-3 + 28 * 30e-6)
    two = decode_seconds(size, 2, 2, 64, 1000, H100)
    sums = 2 * 28 * (10e-6 + 2 * 2 * 64 * 3584 / 450e9)
    assert two == pytest.approx(read / 2 / (0.78 * 3.35e12) + sums + 1.5e-3 + 28 * 30e-6)


@pytest.mark.parametrize("name", ["1.5B", "7B", "32B", "30B-A3B"])
@pytest.mark.parametrize("cluster", ["1x8xH100", "4x8xH200"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_following_the_balance_ends(name: str, cluster: str, staleness: int) -> None:
    """Each division that is proposed fits, makes a step shorter, and leads to one that nothing improves on."""
    half = int(cluster[0]) * 4
    offload = ("roles.policy.offload_optimizer=true", f"schedule.max_staleness={staleness}")
    changes = [f"roles.rollout.workers={half}", f"roles.policy.workers={half}", *offload]
    found, seen = planned(name, cluster, *changes, advise=True), 0
    while found.balance is not None:
        one = found.balance
        text = [*predictions(found)][-1]
        assert text.endswith(f"; {one.sampling} and {one.training} would take {one.step_s:.1f} s a step")
        changes = [f"roles.rollout.workers={one.sampling}", f"roles.policy.workers={one.training}", *offload]
        before, found, seen = found.predicted, planned(name, cluster, *changes, advise=True), seen + 1
        assert before is not None and found.predicted is not None and found.misfit == ""
        assert found.predicted.step_s == one.step_s < before.step_s and seen < 5
    assert found.predicted is None or [*predictions(found)][-1].endswith("no other division that fits is faster")
    assert found.predicted is not None or found.misfit


def test_the_plan_says_how_fast_a_run_is_and_who_waits() -> None:
    found = planned("7B", "1x8xH100", "schedule.max_staleness=2", advise=True)
    speed = found.predicted
    assert speed is not None and found.balance is not None
    tokens = 64 * 16 * 4096
    assert speed.step_s == pytest.approx(max(speed.sampling_s, speed.training_s) + speed.transfer_s)
    assert speed.tokens_per_gpu == pytest.approx(tokens / speed.step_s / 8)
    assert speed.mfu == pytest.approx(6 * 7_070_619_136 * tokens / 4 / speed.training_s / 989e12)
    assert 0.30 < speed.mfu < 0.40
    waits = [1 - (seconds + speed.transfer_s) / speed.step_s for seconds in (speed.sampling_s, speed.training_s)]
    assert speed.idle == pytest.approx(waits)
    first, second = predictions(found)
    assert first.startswith(
        f"predicted (a roofline; sequences as long as allowed): {speed.tokens_per_gpu:,.0f} tokens/s"
    )
    assert second.startswith(
        f"balance: 4 GPUs sample and wait {waits[0]:.0%} of a step, 4 train and wait 0%; samples are 2.0 "
    )
    data = as_json("x", found)
    assert (data["balance"]["sampling"], data["predicted"]["step_s"]) == (found.balance.sampling, speed.step_s)
    assert data["predicted"]["sampling_idle"] == waits[0] and "shorter" not in data["predicted"]


@pytest.mark.parametrize(("cluster", "changes"), [("1x8", ()), ("1x8xT4", ())])
def test_without_a_type_of_gpu_or_room_nothing_is_predicted(cluster: str, changes: tuple[str, ...]) -> None:
    found = planned("7B", cluster, *changes, advise=True)
    assert found.predicted is None and [*predictions(found)] == []


def test_the_peaks_of_every_type_of_gpu_are_known() -> None:
    assert gpu_peaks("NVIDIA H100 80GB HBM3") == H100
    assert all(gpu_peaks(kind) for kind in GPU_GIB)
    assert gpu_peaks("NVIDIA A100-SXM4-80GB") == gpu_peaks("A100-80G") != gpu_peaks("NVIDIA A10G")
    assert gpu_peaks("NVIDIA L40S") != gpu_peaks("NVIDIA L4") and gpu_peaks("NVIDIA GeForce RTX 9999") is None


SMALL = (
    "roles.policy.zero_stage=2",
    "roles.policy.gradient_checkpointing=false",
    "roles.policy.micro_batch_tokens=4096",
)
NUMBERS = 1_543_714_304
"""Parameters of the smallest model, which is started layer by layer: 28 x 4 ms are longer than 4,096 tokens take."""


def predicted(name: str, cluster: str, *changes: str) -> Prediction:
    found = planned(name, cluster, *changes)
    assert found.predicted is not None, found.misfit
    return found.predicted


@pytest.mark.parametrize(("cluster", "link", "sent"), [("1x8xH100", 450e9, 225e9), ("4x2xH100", 100e9, 50e9)])
def test_a_step_of_small_batches_adds_up_by_hand(cluster: str, link: float, sent: float) -> None:
    """256 micro-batches on each of 4 ranks: starts, half of the sums of gradients, the optimizer and new weights."""
    speed = predicted("1.5B", cluster, *SMALL)
    optimizer = 28 * NUMBERS / 4 / (0.78 * 3.35e12)
    expected = 256 * (28 * 4e-3 + 0.5 * 2 * NUMBERS / link) + 2 * NUMBERS / link + optimizer
    assert speed.training_s == pytest.approx(expected)
    assert speed.transfer_s == pytest.approx(2 * NUMBERS / sent)
    offloaded = predicted("1.5B", cluster, *SMALL, "roles.policy.offload_optimizer=true")
    on_host = 28 * NUMBERS / 4 / (12e9 * 8) + 6 * NUMBERS / 4 / 25e9
    assert offloaded.training_s == pytest.approx(expected - optimizer + on_host)
    whole = predicted("1.5B", cluster, *SMALL, "roles.policy.zero_stage=3")
    gathered = 256 * 0.35 * 2 * 2 * NUMBERS / link - 2 * NUMBERS / link
    assert whole.training_s == pytest.approx(expected + gathered)
    doubled = predicted("1.5B", cluster, *SMALL, "schedule.epochs=2")
    scored = 256 * 4096 * 2 * NUMBERS / (0.68 * 989e12)  # two updates need the log-probs from before them
    assert doubled.training_s == pytest.approx(2 * expected + scored)


def test_a_frozen_teacher_in_the_policys_workers_counts_with_its_size_and_again_where_its_logits_are_compared() -> None:
    """A step of 1024 samples of 4096 tokens on 4 ranks."""
    sizes, found = Sizes({"given": size_of("1.5B"), "large": size_of("7B")}), list[float]()
    for names, support in (((), "full"), (("one",), "teacher_top_k"), (("one",), "full"), (("one", "two"), "full")):
        teachers = ", ".join(f"{name}: {{colocate_with: policy, model: {{path: large}}}}" for name in names)
        algorithm = f"{{name: gkd, group_size: 16, clip_low: null, clip_high: null, distill: {{support: {support}}}}}"
        roles = (f"roles.teacher={{{teachers}}}", f"algorithm={algorithm}") if names else ()
        spec = plan_runs(read_document(NODE, ["model.path=given", *SMALL, *roles]))[0].spec
        speed = plan(spec, described_nodes("1x8xH100", 128, 0), sizes).predicted
        assert speed is not None
        found.append(speed.training_s)
    once = 256 * 4096 * 2 * size_of("7B").multiplied() / (0.68 * 989e12)
    assert [(one - found[0]) / once for one in found] == pytest.approx([0, 1, 2, 4])


def test_adapters_need_no_gradients_of_the_weights_below() -> None:
    size, trainer = size_of("7B"), TrainerConfig(learning_rate=1e-6)
    saved = token_seconds(size, trainer, 4096, H100) - token_seconds(size, trainer, 4096, H100, adapters=True)
    assert saved == pytest.approx(2 * (7_070_619_136 - 152_064 * 3584) / (0.68 * 989e12))


def test_a_step_waits_for_the_slowest_trainer() -> None:
    """A critic on one GPU has four times the work of each of the policy's four."""
    critic = "roles.critic={gpus: 1, zero_stage: 2, micro_batch_tokens: 4096, learning_rate: 1e-6, workers: "
    ppo = (*SMALL, "algorithm={name: ppo, kl: {coef: 0}}")
    one, four = (predicted("1.5B", "2x8xH100", *ppo, f"{critic}{workers}}}") for workers in (1, 4))
    assert one.training_s > 3 * four.training_s
    assert one.step_s == pytest.approx((DRAIN * one.sampling_s + one.training_s + one.transfer_s) / 2)


def test_a_division_that_does_not_fit_is_not_proposed() -> None:
    """Slow engines: six of them and two trainers would be best, but two hold no 7B model with its optimizer."""
    found = planned("7B", "1x8xH100", "roles.rollout.max_num_seqs=16", advise=True)
    assert found.predicted is not None and found.balance is not None
    best = found.predicted.shorter[0]
    fields = [f"roles.rollout.workers={best.sampling}", f"roles.policy.workers={best.training}"]
    assert planned("7B", "1x8xH100", "roles.rollout.max_num_seqs=16", *fields).misfit
    assert found.balance.sampling < best.sampling


def test_in_turn_sampling_waits_for_the_longest_response() -> None:
    """Half of the sequences are under way at once, and each of the two reasons makes a step longer."""
    together = predicted("1.5B", "1x8xH100", *SMALL, "schedule.max_staleness=1", "roles.rollout.max_num_seqs=64")
    in_turn = predicted("1.5B", "1x8xH100", *SMALL, "schedule.max_staleness=0", "roles.rollout.max_num_seqs=64")
    assert in_turn.sampling_s == pytest.approx(1.7 * together.sampling_s)
    assert in_turn.step_s == pytest.approx(in_turn.sampling_s + in_turn.training_s + in_turn.transfer_s)


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("amx_bf16 amx_tile", True), ("avx512f avx512_bf16", True), ("avx512f amx_tile amx_bf16x", False)],
)
def test_a_processor_with_products_of_bfloat16_is_known_by_its_flags(flags: str, fast: bool, tmp_path: Path) -> None:
    (info := tmp_path / "cpuinfo").write_text(f"model name\t: amx_bf16\nflags\t\t: fpu {flags}\n")
    assert has_fast_bfloat16(info) is fast
    assert not has_fast_bfloat16(tmp_path / "none")


@pytest.mark.parametrize(
    ("fast", "changes", "faster"),
    [
        (True, (), "bfloat16"),
        (False, (), ""),
        (True, ("grpo", "model.dtype=bfloat16"), ""),
        # Conjugate gradients are refused in 16 bits.
        (True, ("trpo",), ""),
    ],
)
def test_a_processor_is_told_its_faster_dtype(fast: bool, changes: tuple[str, ...], faster: str) -> None:
    name, *settings = changes or ("grpo",)
    spec = plan_runs(read_document(ROOT / f"deploy/specs/algorithms/{name}.yaml", settings))[0].spec
    found = plan(spec, [replace(local_node(2, spec), fast_bfloat16=fast)])
    assert as_json("run", found)["faster_dtype"] == (faster or None)
    lines = list(predictions(found))
    assert lines == ([f"model.dtype: {FASTER_BFLOAT16} (--set model.dtype=bfloat16)"] if faster else [])
