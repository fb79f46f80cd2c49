"""SFT and DPO at every ZeRO stage, saved and resumed, without Ray and vLLM.

One rank in this process trains the same batch in each variant. The losses must fall, agree with those of ZeRO 0, and be
the same after a resume. On the CPU: `python -m tests.gpu.isolated tests.gpu.test_training measure FILE cpu`.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu.isolated import Measurements, isolated
from troupe.orchestrator.data.examples import load_examples
from troupe.orchestrator.roles.settings import offline_config
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.training.micro_batches import plan_ranks, plan_units
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.units import GIB

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.workers.contract.messages import RankPlan
    from troupe.workers.offline import ExamplePolicyWorker

EXAMPLES = 16
"""Of the only batch, which every update trains on."""
UPDATES = 4
"""The checkpoint is saved in the middle."""
NEAR = 0.03
"""Largest relative difference of a variant's losses from those of ZeRO 0."""
SAME = 2e-3
"""Largest relative difference of a loss after a resume: kernels of a GPU add in no fixed order."""


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    spec: Literal["tiny-sft", "tiny-dpo"]
    overrides: tuple[str, ...]
    on_cpu: bool


def _variant(name: str, spec: Literal["tiny-sft", "tiny-dpo"], stage: int, *more: str, on_cpu: bool = True) -> Variant:
    return Variant(name, spec, (f"roles.policy.zero_stage={stage}", *more), on_cpu)


_OFFLOADED = "roles.policy.offload_optimizer=true"
VARIANTS = (
    *(_variant(f"SFT, ZeRO {stage}", "tiny-sft", stage) for stage in range(4)),
    _variant("SFT, ZeRO 0, deterministic", "tiny-sft", 0, "deterministic=true"),
    _variant(
        "SFT, ZeRO 3, deterministic", "tiny-sft", 3, "deterministic=true", "roles.policy.gradient_checkpointing=true"
    ),
    _variant("SFT, ZeRO 3, activations recomputed", "tiny-sft", 3, "roles.policy.gradient_checkpointing=true"),
    _variant(
        "SFT, ZeRO 3, all but products recomputed",
        *("tiny-sft", 3, "roles.policy.gradient_checkpointing=true", "roles.policy.recompute_products=false"),
    ),
    _variant("SFT, ZeRO 2, offloaded", "tiny-sft", 2, _OFFLOADED, on_cpu=False),
    _variant("SFT, ZeRO 3, offloaded", "tiny-sft", 3, _OFFLOADED, on_cpu=False),
    _variant("SFT, head in bfloat16", "tiny-sft", 1, "model.float32_head=false"),
    _variant("DPO, ZeRO 0", "tiny-dpo", 0),
    _variant("DPO, ZeRO 3", "tiny-dpo", 3),
    # The last one: Liger replaces functions of the model's module, in every model of the process.
    _variant("SFT, ZeRO 0, Liger's kernels", "tiny-sft", 0, "roles.policy.kernels=liger", on_cpu=False),
)


@dataclass(frozen=True)
class Trained:
    """What one variant did."""

    losses: tuple[float, ...]
    """Of each update."""
    resumed: tuple[float, ...]
    """Of the updates after the checkpoint, by a worker that has loaded it."""
    identical: bool
    """Whether both have the same weights at the end, bit by bit."""
    seconds: float
    gib: float
    """Peak memory of the GPU; 0 on the CPU."""


@pytest.mark.gpu
def test_every_variant_trains_as_zero_0_and_resumes(
    demo_model: Path, tmp_path: Path, measured: Callable[[Measurements], None]
) -> None:
    overrides = f"model.path={demo_model}", "roles.policy.learning_rate=2e-5"
    measured(isolated(tmp_path, measure, "cuda", *overrides))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_a_valid_spec(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = read_spec(variant, "cuda", ())
    assert (spec.device, spec.model.dtype) == ("cuda", "bfloat16")
    assert f"ZeRO {spec.roles.policy.zero_stage}" in variant.name or "head" in variant.name


def _trained(*losses: float, resumed: tuple[float, ...] = (), identical: bool = True) -> Trained:
    return Trained(losses, resumed or losses[-1:], identical, 1.0, 0.0)


@pytest.mark.parametrize(
    ("found", "device", "words"),
    [
        (_trained(2.0, 2.1), "cuda", "did not fall"),
        (_trained(2.0, float("nan")), "cuda", "did not fall"),
        (_trained(2.0, 1.5), "cuda", "differ from those of ZeRO 0"),
        (_trained(2.0, 1.0, resumed=(1.1,)), "cuda", "after a resume"),
        (_trained(2.0, 1.0, identical=False), "cpu", "after a resume"),
    ],
)
def test_wrong_training_is_found(found: Trained, device: str, words: str) -> None:
    plain = _trained(2.0, 1.0)
    check("SFT", plain, plain, exact=True)
    check("SFT", _trained(2.0, 1.0, identical=False), plain, exact=False)
    with pytest.raises(AssertionError, match=words):
        check("SFT", found, plain, exact=device == "cpu")


def read_spec(variant: Variant, device: str, overrides: tuple[str, ...]) -> OfflineSpec:
    """The spec of a variant."""
    chosen = (*overrides, "model.dtype=bfloat16", *variant.overrides)
    chosen += ("roles.policy.gpus=1",) if device == "cuda" else ()
    (planned,) = plan_runs(read_document(Path(f"deploy/specs/{variant.spec}.yaml"), chosen))
    assert isinstance(planned.spec, OfflineSpec)
    return planned.spec


def batch_of(worker: ExamplePolicyWorker, spec: OfflineSpec) -> tuple[RankPlan, pa.Table]:
    """The first examples of a spec as a batch, with the reference's log-probs where the algorithm has them."""
    pool, _ = load_examples(spec)
    _, examples = worker.tokenize(pool.table)
    summary, table = worker.assemble([(str(row), row) for row in range(EXAMPLES)], examples)
    budget, packed = spec.roles.policy.micro_batch_tokens, worker.packs()
    if spec.reference_in_policy:
        lengths = [row.tokens for row in summary.rows]
        (scored,) = plan_ranks(lengths, range(len(lengths)), 1, budget, packed=packed)
        _, scores = worker.reference_logprobs(scored, table)
        _, table = worker.attach(table, scores)
    ends = [sum(summary.members[: place + 1]) for place in range(len(summary.members))]
    units = [range(end - rows, end) for rows, end in zip(summary.members, ends, strict=True)]
    return plan_units(summary.rows, units, 1, budget, packed=packed)[0], table


def losses(worker: ExamplePolicyWorker, batch: tuple[RankPlan, pa.Table], updates: int) -> Iterator[float]:
    """The loss of each update."""
    plan, table = batch
    for _ in range(updates):
        metrics = worker.update(plan, table)
        assert not metrics.skipped, "an update was skipped: its gradient is not finite"
        yield metrics.sums["loss"]


def train(spec: OfflineSpec, folder: Path) -> Trained:
    """Train, save in the middle, and resume from there; the process must have joined its group."""
    from troupe.workers.offline import ExamplePolicyWorker
    from troupe.workers.training.rank import prepare_torch

    if spec.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, half = time.monotonic(), UPDATES // 2
    found: list[list[float]] = []
    digests: list[str] = []
    for resumes in (False, True):
        worker = ExamplePolicyWorker(offline_config(spec), "policy-0")
        prepare_torch(0, deterministic=spec.deterministic)
        torch.manual_seed(spec.seed)
        worker.build()
        batch = batch_of(worker, spec)
        series: list[float] = []
        if resumes:
            worker.load(str(folder))
        else:
            series += losses(worker, batch, half)
            worker.save(str(folder))
        series += losses(worker, batch, UPDATES - half)
        found.append(series)
        digests.append(worker.digest())
        worker.release()
    gib = torch.cuda.max_memory_allocated() / GIB if spec.device == "cuda" else 0.0
    whole, resumed = map(tuple, found)
    return Trained(whole, resumed, digests[0] == digests[1], time.monotonic() - began, gib)


def check(name: str, trained: Trained, plain: Trained, *, exact: bool) -> None:
    """Compare with ZeRO 0; `exact`: whether a resume must be equal bit for bit, on the CPU or deterministic."""
    fell = all(map(math.isfinite, trained.losses)) and trained.losses[-1] < trained.losses[0]
    assert fell, f"{name}: the loss did not fall: {trained.losses}"
    near = _agree(trained.losses, plain.losses, NEAR)
    assert near, f"{name}: losses {trained.losses} differ from those of ZeRO 0, {plain.losses}"
    after = trained.losses[-len(trained.resumed) :]
    same = _agree(trained.resumed, after, SAME) and (trained.identical or not exact)
    assert same, f"{name}: after a resume the losses are {trained.resumed}, not {after}"


def _agree(found: tuple[float, ...], expected: tuple[float, ...], tolerance: float) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(abs(one - other) <= tolerance * max(abs(other), 0.1) for one, other in pairs)


def measure(device: str, *overrides: str) -> Measurements:
    """Train every variant."""
    from troupe.workers.offline import ExamplePolicyWorker

    variants = [variant for variant in VARIANTS if variant.on_cpu or device == "cuda"]
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the deterministic ones; cuBLAS reads it once
    first = ExamplePolicyWorker(offline_config(read_spec(variants[0], device, overrides)), "policy-0")
    address, port = first.rendezvous(one_host=True)
    first.join(Rendezvous(address=address, port=port, rank=0, world_size=1))
    plain: dict[str, Trained] = {}
    found: dict[str, float | str] = {}
    for variant in variants:
        spec = read_spec(variant, device, overrides)
        with tempfile.TemporaryDirectory() as folder:
            trained = train(spec, Path(folder))
        plain.setdefault(variant.spec, trained)
        check(variant.name, trained, plain[variant.spec], exact=spec.deterministic or device == "cpu")
        memory = f", {trained.gib:.2f} GiB" if trained.gib else ""
        resumed = "bit-identical" if trained.identical else "equal"
        found[variant.name] = (
            f"loss {trained.losses[0]:.4f} to {trained.losses[-1]:.4f}, resumed {resumed}, "
            f"{trained.seconds:.1f} s{memory}"
        )
        print(f"{variant.name}: {found[variant.name]}", flush=True)
    first.close()
    return found
