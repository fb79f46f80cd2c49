"""Peak memory of an update: bounded by the size of a micro-batch, not by the number of groups or the response length.

One process runs all updates on a real `PolicyWorker`. Peaks are torch's allocations, measured with its profiler; the
resident memory also depends on how the C allocator splits memory, and differs by tens of MiB between machines.
"""

from __future__ import annotations

import json
import os
import traceback
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.real.models import save_llama
from tests.real.ranks import rank_context
from tests.workers.models.test_token_batch import train_table
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig, Rendezvous, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan, TrainRow, UpdateMetrics
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.units import MIB
from troupe.workers.policy import PolicyWorker

PROMPT, GROUP = 64, 8
RESPONSE = 64
"""Response tokens where the number of groups varies."""
GROUPS = (2, 8)
LAYOUTS = ("padded", "packed", "shared")
BUDGET = 1024
"""Tokens of one micro-batch: a group."""
SHORT, LONG = 192, 768
"""Response tokens where the length varies, by a factor of four."""
SHORT_BUDGET = GROUP * (PROMPT + SHORT)
"""Tokens of one micro-batch: a whole group of short responses, or two long ones."""
ALLOWANCE = 2 * MIB
"""Allowance for metrics and row indices. Keeping the graphs until the end of an update would take 287 MiB more for four
times as many groups, and 22 MiB more for responses four times as long."""
TIMEOUT_S = 600.0


def config(model: str, budget: int) -> PolicyConfig:
    # With this epsilon AdamW's first step is smooth in the gradient: another order of summation changes it only by
    # rounding errors.
    trainer = TrainerConfig(
        zero_stage=1, micro_batch_tokens=budget, learning_rate=1e-2, warmup_updates=0, adam_eps=1e-2, threads=1
    )
    return PolicyConfig(
        share_prompts=False,
        model=ModelConfig(path=model, dtype="float32"),
        trainer=trainer,
        loss=PolicyLossConfig(),
        advantage=AdvantageConfig(estimator="group"),
        sampling=SamplingConfig(max_tokens=LONG),
        run_id="memory",
        reference_model=None,
        total_updates=20,
        seed=1,
        device="cpu",
    )


def batch(groups: int, response: int) -> tuple[pa.Table, list[TrainRow]]:
    """Groups of responses of equal length, and their rows."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 500, (count,), generator=generator).tolist()

    prompts = [ids(PROMPT) for _ in range(groups)]
    rows = groups * GROUP
    table = train_table(
        [(prompts[row // GROUP], ids(response)) for row in range(rows)],
        rollout_logprobs=[[-6.0] * response] * rows,
        advantages=[[1.0 if row % 2 else -0.5] * response for row in range(rows)],
    )
    uids = pa.array([f"p{row // GROUP}" for row in range(rows)], pa.string())
    table = table.set_column(table.column_names.index("prompt_uid"), "prompt_uid", uids)
    tokens = PROMPT + response
    return table, [TrainRow(tokens, response, True, PROMPT, row // GROUP) for row in range(rows)]


def planned(rows: list[TrainRow], budget: int, *, packed: bool = True, share: bool = False) -> RankPlan:
    (plan,) = plan_update(
        rows, range(len(rows)), 1, budget, skip_zero_advantage=False, packed=packed, share_prompts=share
    )
    return plan


def peak_memory(worker: PolicyWorker, plan: RankPlan, table: pa.Table, traces: Path) -> tuple[int, UpdateMetrics]:
    """Peak of torch's allocations during an update, in bytes, and the metrics of the update."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        metrics = worker.update(plan, table)
    trace = traces / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in events)), metrics


def peaks_by_groups(worker: PolicyWorker, traces: Path) -> dict[str, Any]:
    """Peaks by number of groups: `padded`, `packed`, and packed with the prompt once per group (`shared`)."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        packed, share = layout != "padded", layout == "shared"
        peaks, micro_batches = [], []
        for groups in (GROUPS[0], *GROUPS):  # the first is a warm-up
            table, rows = batch(groups, RESPONSE)
            plan = planned(rows, BUDGET, packed=packed, share=share)
            assert (plan.packed, plan.shared) == (packed, share)
            peaks.append(peak_memory(worker, plan, table, traces)[0])
            micro_batches.append(len(plan.micro_batches))
        size = batch(GROUPS[1], RESPONSE)[0].nbytes
        found[layout] = {"peaks": peaks[1:], "arrow": size, "micro_batches": micro_batches[1:]}
    return found


def peaks_by_length(model: str, traces: Path) -> dict[str, Any]:
    """Peaks and results of the first update of a new policy, by response length and micro-batch tokens."""
    found: dict[str, Any] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    cases = {"short": (SHORT, SHORT_BUDGET), "long": (LONG, SHORT_BUDGET), "long at once": (LONG, 4 * SHORT_BUDGET)}
    for name, (response, budget) in cases.items():
        worker = PolicyWorker(config(model, budget), name)
        worker.build()
        table, rows = batch(1, response)
        plan = planned(rows, budget)
        peak, metrics = peak_memory(worker, plan, table, traces)
        weights[name] = {key: tensor.clone() for key, tensor in worker.engine.named_weights()}
        found[name] = {
            "peak": peak,
            "micro_batches": len(plan.micro_batches),
            "loss": metrics.sums["loss"],
            "grad_norm": metrics.values["grad_norm"],
        }
        worker.release()
    split, whole, short = weights["long"], weights["long at once"], weights["short"]
    found["differ"] = max(float((split[key] - whole[key]).abs().max()) for key in split)
    found["differ from short"] = max(float((split[key] - short[key]).abs().max()) for key in split)
    return found


def rank_main(model: str, out: Path) -> None:
    """Entry of the measured process."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "compiled")
    try:
        worker = PolicyWorker(config(model, BUDGET), "policy-0")
        address, port = worker.rendezvous(one_host=True)
        worker.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
        groups = peaks_by_groups(worker, out)
        worker.release()
        lengths = peaks_by_length(model, out)
        worker.close()
        (out / "found.json").write_text(json.dumps({"groups": groups, "lengths": lengths}))
    except BaseException:
        (out / "error.txt").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a small vocabulary, so that the layers dominate time and memory."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_llama(tmp_path_factory.mktemp("model"), vocab_size=512, **sizes)


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("memory")
    process = rank_context().Process(target=rank_main, args=(model, out), daemon=True)
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
    if (out / "error.txt").exists():
        pytest.fail((out / "error.txt").read_text())
    measurements = json.loads((out / "found.json").read_text())
    print(json.dumps(measurements, indent=1))
    return measurements


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peak_does_not_grow_with_the_number_of_groups(found: dict[str, Any], layout: str) -> None:
    few, many = found["groups"][layout]["peaks"]
    first, second = found["groups"][layout]["micro_batches"]
    assert first > 1 and second > 3 * first
    assert many - few <= found["groups"][layout]["arrow"] + ALLOWANCE


def test_packed_rows_take_no_more_memory_than_padded_ones(found: dict[str, Any]) -> None:
    """All sequences are of one length: there is neither padding nor a mask to save."""
    padded, packed = (found["groups"][layout] for layout in ("padded", "packed"))
    assert padded["micro_batches"] == packed["micro_batches"]
    assert packed["peaks"][-1] <= padded["peaks"][-1] + ALLOWANCE


def test_responses_four_times_as_long_fit_in_the_same_memory_with_more_micro_batches(found: dict[str, Any]) -> None:
    short, split, whole = (found["lengths"][name] for name in ("short", "long", "long at once"))
    assert (short["micro_batches"], split["micro_batches"], whole["micro_batches"]) == (1, 4, 1)
    assert split["peak"] <= short["peak"] + ALLOWANCE
    assert split["peak"] < whole["peak"] / 2
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert found["lengths"]["differ"] < 1e-6 < found["lengths"]["differ from short"]
