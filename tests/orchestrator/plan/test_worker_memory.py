"""The arithmetic of memory: by hand on small numbers, and how it moves with every size; plans, messages, remedies."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import yaml
from rich.console import Console

from tests.conftest import ROOT
from tests.orchestrator.model_facts.test_families import REAL, folder
from troupe.orchestrator.commands.plan_table import notes, render_periods, unknown_sizes
from troupe.orchestrator.model_facts.model_size import ModelSize, read_size
from troupe.orchestrator.plan.fit import gib
from troupe.orchestrator.plan.memory import PlacedWorker, Sizes, of_reward
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.plan import Plan, as_json, described_nodes, local_node, plan
from troupe.orchestrator.plan.worker_memory import (
    KV_BLOCK,
    LIVE,
    PERIODS,
    SUBGROUP,
    WIDTHS,
    Part,
    Scoring,
    Training,
    WorkerMemory,
    activations,
    adapter_numbers,
    engine,
    head,
    in_engine,
    kv_bytes,
    layer_bytes,
    save_copy,
    scoring,
    sequence_bytes,
    tiled_head,
    training,
    zero_states,
)
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sizes import batch_bytes
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import CHUNK_LOGITS, REDUCE_BUCKET, EngineConfig
from troupe.workers.contract.config_base import Dtype
from troupe.workers.contract.trainer_config import LoraConfig, TrainerConfig
from troupe.workers.contract.units import GIB, MIB

SMALL = ModelSize(
    backbone=1000,
    head=200,
    largest=300,
    layers=2,
    hidden=8,
    intermediate=12,
    heads=4,
    kv_heads=2,
    head_dim=3,
    vocabulary=25,
    counted=True,
)
SEVEN_B = ModelSize(
    backbone=7_000_000_000,
    head=600_000_000,
    largest=600_000_000,
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152_064,
    counted=True,
)
SEVENTY_TWO_B = replace(
    SEVEN_B,
    backbone=71_460_000_000,
    head=1_245_708_288,
    largest=1_245_708_288,
    layers=80,
    hidden=8192,
    intermediate=29568,
    heads=64,
    kv_heads=8,
)
WHOLE = SMALL.parameters


def states(
    stage: int, width: int, ranks: int = 1, gpu: bool = False, offload: bool = False, dtype: Dtype | None = None
) -> dict[str, int]:
    """Bytes by `where part`. `width`: of float32 or bfloat16, unless `dtype` is another."""
    found: dict[str, int] = {}
    for where, part in zero_states(
        SMALL, dtype or ("bfloat16" if width == 2 else "float32"), ranks, stage, gpu, offload
    ):
        found[f"{where} {part.name}"] = found.get(f"{where} {part.name}", 0) + part.bytes
    return found


def told(size: ModelSize = SEVEN_B, ranks: int = 4, gpu: bool = True, **changes: Any) -> Training:
    trainer = TrainerConfig(
        **({"zero_stage": 3, "gradient_checkpointing": True, "micro_batch_tokens": 16384} | changes)
    )
    return Training(size, "bfloat16", trainer, ranks, gpu, longest=4096)


@pytest.mark.parametrize(
    ("stage", "width", "ranks", "weights", "gradients", "optimizer", "step"),
    [
        # Plain torch: weights, gradients, two moments; where there is another rank the gradients once more, flat, to be
        # reduced.
        (0, 4, 1, 4 * WHOLE, 4 * WHOLE, 8 * WHOLE, 0),
        (0, 4, 2, 4 * WHOLE, 4 * WHOLE, 8 * WHOLE, 4 * WHOLE),
        (0, 2, 1, 2 * WHOLE, 2 * WHOLE, 12 * WHOLE, 4 * WHOLE),
        (1, 4, 1, 4 * WHOLE, 4 * WHOLE, 12 * WHOLE, 4 * 300 + 4 * WHOLE),
        (1, 4, 4, 4 * WHOLE, 4 * WHOLE, 3 * WHOLE, 4 * 300 + 4 * WHOLE),
        (1, 2, 4, 2 * WHOLE, 6 * WHOLE, 3 * WHOLE, 6 * WHOLE),
        (2, 4, 4, 4 * WHOLE, WHOLE, 3 * WHOLE, 8 * WHOLE),
        (2, 2, 4, 2 * WHOLE, WHOLE, 3 * WHOLE, 4 * WHOLE),
        (3, 4, 1, 4 * WHOLE, 4 * WHOLE, 12 * WHOLE, 8 * WHOLE),
        (3, 4, 4, WHOLE, WHOLE, 3 * WHOLE, 12 * WHOLE),
        (3, 2, 4, WHOLE // 2, WHOLE, 3 * WHOLE, 7 * WHOLE),
    ],
)
def test_what_deepspeed_holds_by_hand(
    stage: int, width: int, ranks: int, weights: int, gradients: int, optimizer: int, step: int
) -> None:
    found = states(stage, width, ranks)
    names = ("weights", "gradients", "optimizer", "step")
    assert [found[f"host {name}"] for name in names] == [weights, gradients, optimizer, step]


def test_zero_3_holds_its_share_and_gathers_the_rest_for_a_pass() -> None:
    for ranks in (2, 3, 8, 24):
        found, alone = states(3, 2, ranks), states(3, 2, 1)
        for part in ("weights", "gradients", "optimizer"):
            assert found[f"host {part}"] == alone[f"host {part}"] // ranks
        assert found["host gathered"] == 2 * WHOLE
        assert alone["host gathered"] == 0


@pytest.mark.parametrize(
    ("name", "experts", "gib_of_experts"),
    [
        ("deepseek-v3", 256 * 3 * 7168 * 2048, 21.0),
        ("qwen3-235b-a22b", 128 * 3 * 4096 * 1536, 4.5),
        ("qwen3-30b-a3b", 128 * 3 * 2048 * 768, 1.125),
    ],
)
def test_zero_3_gathers_all_experts_of_a_layer(tmp_path: Path, name: str, experts: int, gib_of_experts: float) -> None:
    """They are one module. Their gradients are larger than the bucket, and whole until the next one is there."""
    size = read_size(folder(tmp_path, REAL[name][0]))
    assert (size.module, 2 * experts / GIB) == (max(experts, size.largest), gib_of_experts)
    found: dict[str, int] = {}
    for where, part in zero_states(size, "bfloat16", 128, 3, gpu=True, offload=False):
        found[f"{where} {part.name}"] = part.bytes
    whole = max(2 * experts, 2 * LIVE)
    assert found["gpu gathered"] == whole
    in_step = whole + 2 * size.module + 4 * size.module // 128
    assert found["gpu step"] == max(in_step, 4 * min(SUBGROUP, -(-size.parameters // 128)))
    offloaded = {part.name: part.bytes for _, part in zero_states(size, "bfloat16", 128, 3, gpu=True, offload=True)}
    assert (offloaded["gathered"], offloaded["buffers"]) == (whole, 2 * (REDUCE_BUCKET + size.module))
    frozen = Scoring(size, "bfloat16", tokens=4096, longest=4096, gpu=True, ranks=16)
    (gpu, _) = scoring("reference-0", frozen)
    assert next(part.bytes for part in gpu.parts if part.name == "gathered") == whole


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "ema", "exported", "copy"),
    [
        # Weights, two moments; the exported weights.
        (0, "float32", 1, 0.0, True, (4 + 8 + 4) * WHOLE),
        (0, "bfloat16", 1, 0.0, True, (2 + 12 + 2) * WHOLE),
        (1, "float32", 4, 0.0, True, (4 + 3 + 4) * WHOLE),
        (2, "bfloat16", 4, 0.0, False, (2 + 3) * WHOLE),
        # The average is whole below ZeRO-3, and is exported as well.
        (1, "bfloat16", 4, 0.9, True, (2 + 3 + 4 + 2 + 2) * WHOLE),
        # ZeRO-3: no weights besides the master weights; the export is whole on rank 0.
        (3, "bfloat16", 4, 0.0, True, (3 + 2) * WHOLE),
        (3, "bfloat16", 4, 0.9, True, (3 + 1 + 2 + 2) * WHOLE),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_the_copy_of_a_save_beside_training_is_in_host_memory(
    stage: Literal[0, 1, 2, 3], dtype: Dtype, ranks: int, ema: float, copy: int, *, exported: bool, gpu: bool
) -> None:
    rank = Training(SMALL, dtype, TrainerConfig(zero_stage=stage, ema_decay=ema), ranks, gpu, longest=64)
    beside = replace(rank, copies_saves=True, exported=exported)
    assert save_copy(SMALL, WIDTHS[dtype], beside, stage) == copy
    host = [
        sum(memory.total for memory in training("policy-0", one) if memory.where == "host") for one in (rank, beside)
    ]
    assert host[1] - host[0] == copy


def test_zero_1_in_float16_has_gradients_in_float32_alone() -> None:
    """Another optimizer of DeepSpeed than in bfloat16, which keeps both; the other stages are the same."""
    found = states(1, 2, 4, dtype="float16")
    assert [found[f"host {part}"] for part in ("weights", "gradients", "optimizer", "step")] == [
        2 * WHOLE, 4 * WHOLE, 3 * WHOLE, 4 * 300 + 2 * WHOLE
    ]  # fmt: skip
    for stage in (0, 2, 3):
        assert states(stage, 2, 4, dtype="float16") == states(stage, 2, 4)


def test_on_a_gpu_the_bucket_is_reserved_whole() -> None:
    assert states(3, 2, 4, gpu=True)["gpu buffers"] == 2 * WHOLE
    assert states(2, 4, 4, gpu=True)["gpu buffers"] == 4 * WHOLE
    assert "gpu buffers" not in states(0, 2, 4, gpu=True)
    assert "gpu buffers" not in states(1, 2, 4, gpu=True), "BF16_Optimizer has none"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("width", [2, 4])
def test_offloading_moves_the_optimizer_to_the_host(stage: int, width: int) -> None:
    found = states(stage, width, 4, gpu=True, offload=True)
    assert "gpu optimizer" not in found
    assert found["host optimizer"] >= 12 * WHOLE // 4
    assert sum(v for k, v in found.items() if k.startswith("gpu") and "buffers" not in k) < sum(
        v for k, v in states(stage, width, 4, gpu=True).items() if "buffers" not in k
    )


PAIRS = """
import torch
from transformers import AutoModelForCausalLM, Gemma2Config
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
ids = torch.randint(0, 64, (2, 40))
for dtype in (torch.float32, torch.bfloat16):
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    kept = {}
    def keep(tensor):
        if tensor.shape[-2:] == (40, 40):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(ids).logits
    print(sum(tensor.untyped_storage().nbytes() for tensor in kept.values() if tensor.numel() == 2 * 4 * 40 * 40))
"""


def test_eager_attention_keeps_the_weights_of_all_pairs_of_tokens() -> None:
    """As many bytes as autograd saves of them in a Gemma 2, in both types."""
    eager = replace(SMALL, eager=True)
    for width in (2, 4):
        assert layer_bytes(eager, width, 5) - layer_bytes(SMALL, width, 5) == 8 * SMALL.heads * 5
        more = activations(eager, width, 10, 5, 2) - activations(SMALL, width, 10, 5, 2)
        assert more == 2 * 10 * 8 * SMALL.heads * 5, "of one layer, and of its backward pass"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PAIRS], capture_output=True, text=True, check=True)
    layers, tokens = 2, 2 * 40
    assert [int(line) for line in done.stdout.split()] == [layers * tokens * 8 * 4 * 40] * 2


def test_activations_by_hand() -> None:
    # float32: norms 2 * 8 * 12, attention 4 * 4 * 12 + 4 * 4 + 4 * 5, feed-forward 4 * 4 * 12.
    assert layer_bytes(SMALL, 4, masked=5) == 192 + 192 + 16 + 20 + 192
    # bfloat16: norms 2 * 8 * 8, the rest half, but for float32 log-sums.
    assert layer_bytes(SMALL, 2, masked=5) == 128 + 96 + 16 + 10 + 96
    at_work = 4 * (3 * 12 + 4 * 8)
    ends = 8 * 16
    assert activations(SMALL, 4, 10, 5, 0) == 10 * (2 * 612 + ends + at_work)
    assert activations(SMALL, 4, 10, 5, 2) == 10 * (2 * 4 * 8 + 612 + ends + at_work)
    assert activations(replace(SMALL, layers=4), 4, 10, 5, 1) == 10 * (4 * 8 + 4 * 612 + ends + at_work)


def test_logits_never_exceed_a_chunk() -> None:
    # One chunk: its logits five times in float32 (in bfloat16 too, where the weights are), larger than the head.
    assert head(SMALL, 4, 10, gpu=False) == 4 * 8 * 10 + 20 * 250
    assert head(SMALL, 2, 10, gpu=False) == 2 * 8 * 10 + 22 * 250
    assert head(SMALL, 4, 1, gpu=False) == 4 * 8 + 4 * 8 * 25, "of one token the gradient of the weight is larger"
    tokens = 100_000
    states, weight = 4 * SEVEN_B.hidden * tokens, 4 * SEVEN_B.hidden * SEVEN_B.vocabulary
    assert head(SEVEN_B, 4, tokens, gpu=False) == states + 3 * weight, "the sum of the chunks' gradients is new memory"
    narrow = replace(SEVEN_B, hidden=8)
    most = 4 * 8 * (tokens + SEVEN_B.vocabulary) + 20 * CHUNK_LOGITS["cpu"]
    assert most * 0.9 < head(narrow, 4, tokens, gpu=False) <= most + 20 * SEVEN_B.vocabulary


def test_a_head_in_tiles_holds_the_gradient_of_its_weight_once() -> None:
    # States and their float32 gradient, the weight's, and 250 logits in float32 twice and in the type of the weights.
    assert tiled_head(SMALL, 4, 10, gpu=False) == 8 * 8 * 10 + 4 * 8 * 25 + 12 * 250
    assert tiled_head(SMALL, 2, 10, gpu=False) == 6 * 8 * 10 + 2 * 8 * 25 + 10 * 250
    assert tiled_head(SEVEN_B, 2, 4096, gpu=False) == (6 * 4096 + 2 * SEVEN_B.vocabulary) * SEVEN_B.hidden + 10 * 2**21


def test_a_head_on_a_gpu_takes_what_was_measured_on_an_h200() -> None:
    """Peak above the states and an earlier gradient of the weight: 0.97 GiB of 16,384 tokens, 0.32 of 4,096."""
    for tokens, measured in ((16384, 0.97), (4096, 0.32)):
        counted = tiled_head(SEVEN_B, 2, tokens, gpu=True)
        others = 2 * SEVEN_B.hidden * (tokens + SEVEN_B.vocabulary)
        assert (counted - others) / GIB == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("truncated", "eager", "tiled"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_a_head_is_tiled_if_it_neither_caps_logits_nor_leaves_tokens_out(
    gpu: bool, truncated: bool, eager: bool, tiled: bool
) -> None:
    rank = replace(told(replace(SMALL, eager=eager), gpu=gpu), truncated=truncated)
    (logits,) = (part.bytes for memory in training("policy-0", rank) for part in memory.parts if part.name == "logits")
    assert (logits == tiled_head(rank.size, 2, rank.trainer.worker_tokens, gpu)) is tiled


def test_each_further_teacher_of_likeliest_tokens_keeps_the_logits_of_a_chunk() -> None:
    """By hand: 4096 tokens of 152,064 are 10 chunks of 410 tokens on a GPU; with teachers chunks are a quarter of that,
    62,346,240 / 4 logits in float32 for each beyond the first."""
    rank = replace(told(SEVEN_B, gpu=True, micro_batch_tokens=4096), truncated=True)
    held = {
        number: next(part.bytes for part in training("policy-0", one)[0].parts if part.name == "logits")
        for number in (0, 1, 2, 4)
        for one in [replace(rank, top_teachers=number)]
    }
    assert SEVEN_B.vocabulary == 152_064 and held[0] == held[1]
    assert held[2] - held[1] == 4 * 15_586_560 and held[4] - held[1] == 3 * 4 * 15_586_560


def test_a_step_takes_over_a_gpus_memory_from_the_pass_but_not_the_hosts() -> None:
    parts = (Part("weights", 10), Part("activations", 5, "pass"), Part("logits", 2, "pass"), Part("step", 6, "step"))
    assert WorkerMemory("policy-0", "gpu", parts).total == 17
    assert WorkerMemory("policy-0", "gpu", (*parts, Part("load", 3, "step"))).total == 19
    assert WorkerMemory("policy-0", "host", parts).total == 23


def test_average_reference_and_kept_distributions() -> None:
    base = told(SMALL, ranks=4, gpu=False, zero_stage=1)
    (plain,) = training("policy-0", base)
    full = replace(
        base,
        trainer=base.trainer.model_copy(update={"ema_decay": 0.9}),
        frozen={"reference": [(SMALL, "bfloat16")]},
        kept_states=10,
    )
    (more,) = training("policy-0", full)
    added = {p.name: p.bytes for p in more.parts if p.name not in {q.name for q in plain.parts}}
    assert added == {"average": 4 * WHOLE, "reference": 2 * WHOLE, "kept": 4 * 25 * 3}
    (sharded,) = training("policy-0", replace(full, trainer=full.trainer.model_copy(update={"zero_stage": 3})))
    parts = {p.name: p.bytes for p in sharded.parts}
    assert (parts["average"], parts["reference"]) == (WHOLE, WHOLE // 2)


def test_adapters_train_in_place_of_the_weights() -> None:
    """The weights count once, and gradients, optimizer and average are the adapters'."""
    lora = LoraConfig(rank=4, targets=("q_proj", "down_proj"))
    queries, hidden, inner = SEVEN_B.heads * SEVEN_B.head_dim, SEVEN_B.hidden, SEVEN_B.intermediate
    numbers = adapter_numbers(SEVEN_B, lora)
    assert numbers == SEVEN_B.layers * 4 * (hidden + queries + inner + hidden)
    assert adapter_numbers(SEVEN_B, LoraConfig(rank=4)) > numbers == adapter_numbers(SEVEN_B, lora, 8) // 2
    packed = {"q_proj", "k_proj", "v_proj"}
    assert set(in_engine(LoraConfig(targets=("q_proj", "o_proj"))).targets) == packed | {"o_proj"}
    assert in_engine(LoraConfig()) == LoraConfig()
    whole = told(zero_stage=2, ema_decay=0.5)
    parts = {part.name: part.bytes for part in training("policy-0", replace(whole, adapters=numbers))[0].parts}
    assert parts["base model"] == 2 * SEVEN_B.parameters
    assert (parts["weights"], parts["optimizer"], parts["average"]) == (2 * numbers, 3 * numbers, 4 * numbers)
    before = {part.name: part.bytes for part in training("policy-0", whole)[0].parts}
    assert parts["activations"] == before["activations"]
    divided = replace(whole, adapters=numbers, trainer=whole.trainer.model_copy(update={"zero_stage": 3}))
    parts = {part.name: part.bytes for part in training("policy-0", divided)[0].parts}
    assert parts["base model"] == -(-2 * SEVEN_B.parameters // divided.ranks)
    assert parts["base layers"] == 2 * min(SEVEN_B.parameters, LIVE)


def test_under_zero_3_a_rank_loads_its_share_and_at_most_two_whole_tensors() -> None:
    def loading(size: ModelSize, stage: int, ranks: int) -> int:
        host = next(m for m in training("policy-0", told(size, ranks, zero_stage=stage)) if m.where == "host")
        return next(part.bytes for part in host.parts if part.name == "loading")

    assert loading(SMALL, 2, 4) == 2 * WHOLE
    assert loading(SMALL, 3, 4) == 2 * 2 * SMALL.largest
    assert loading(SEVEN_B, 3, 4) == 2 * SEVEN_B.parameters // 4
    assert loading(SEVEN_B, 3, 1000) == 2 * 2 * SEVEN_B.largest


def test_a_host_of_a_terabyte_loads_and_trains_its_half_of_72_billion_parameters() -> None:
    """Sixteen ranks with offload, eight to a host. The whole model on each would be 1.1 TB before anything else."""
    gpu, host = training("policy-0", told(SEVENTY_TWO_B, 16, offload_optimizer=True))
    assert (gpu.where, host.where) == ("gpu", "host")
    assert gpu.total < 60 * GIB
    loading = next(part.bytes for part in host.parts if part.name == "loading")
    assert 8 * loading <= SEVENTY_TWO_B.parameters + 8
    assert 8 * host.total < 1000 * GIB


def test_ranks_that_share_their_rows_have_a_part_of_the_activations_and_all_kept_states() -> None:
    """What is sent and received of the queries comes on top, twice."""
    alone = replace(told(SEVEN_B, ranks=8, micro_batch_tokens=131_072), kept_states=16)
    (gpu, _), (quarter, _) = (
        training("policy-0", replace(alone, trainer=t))
        for t in (
            alone.trainer.model_copy(update={"sequence_parallel_size": 4}),
            alone.trainer.model_copy(update={"micro_batch_tokens": 32_768}),
        )
    )
    shared, plain = ({part.name: part.bytes for part in memory.parts} for memory in (gpu, quarter))
    assert shared.pop("activations") - plain.pop("activations") == 2 * 2 * 32_768 * 28 * 128
    assert shared.pop("kept") == 4 * plain.pop("kept")
    assert shared == plain


def test_ranks_that_divide_experts_gather_a_part_of_them_and_exchange_tokens() -> None:
    mixture = replace(
        SEVEN_B, expert_weights=6_000_000_000, largest=4_000_000_000, experts=8, routed=128, sparse=28, counted=True
    )
    (whole, _), (divided, _) = (
        training("policy-0", told(mixture, expert_parallel_size=size, micro_batch_tokens=1000)) for size in (1, 4)
    )
    before, after = ({part.name: part.bytes for part in memory.parts} for memory in (whole, divided))
    assert after.pop("all-to-all") == 4 * 2 * 1000 * 8 * mixture.hidden
    assert before.pop("gathered") == 2 * 6_000_000_000
    assert after.pop("gathered") == 2 * 6_000_000_000 // 4
    assert before.pop("step") > after.pop("step")
    assert before == after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_more_of_anything_never_needs_less(stage: int, checkpointing: bool, gpu: bool) -> None:
    def need(told: Training) -> int:
        return sum(memory.total for memory in training("policy-0", told))

    base = told(SMALL, 2, gpu, zero_stage=stage, gradient_checkpointing=checkpointing, micro_batch_tokens=64)
    for item in fields(SMALL):
        if item.name != "counted":
            larger = replace(SMALL, **{item.name: 3 * vars(SMALL)[item.name]})
            assert need(replace(base, size=larger)) >= need(base), item.name
    longer = base.trainer.model_copy(update={"micro_batch_tokens": 640})
    assert need(replace(base, trainer=longer)) > need(base)
    assert need(replace(base, longest=8192)) == need(base), "packed rows have no mask"
    padded = replace(base, trainer=base.trainer.model_copy(update={"packing": False}))
    assert need(replace(padded, longest=8192)) > need(padded) > need(base)
    assert need(replace(base, dtype="float32")) > need(replace(base, dtype="bfloat16")) or stage == 0
    assert need(replace(base, ranks=4)) <= need(base)


def test_kv_cache_by_hand() -> None:
    assert kv_bytes(SMALL, 2) == 2 * 2 * 3 * 2
    assert kv_bytes(SMALL, 2, ranks=2) == kv_bytes(SMALL, 2, ranks=4) == 2 * 3 * 2, "every rank has a KV head"
    assert kv_bytes(replace(SMALL, latent=7), 2, ranks=4) == 2 * 7, "every rank has the whole vector"
    config = EngineConfig(max_model_len=100, kv_cache_gib=1.0)
    (memory,), cache = engine("rollout-0", SMALL, "bfloat16", config, None, process=7)
    assert cache is not None
    assert cache.sequences == GIB // (48 * 128), "four blocks of 32 tokens on the CPU"
    assert {p.name: p.bytes for p in memory.parts}["kv cache"] == GIB
    assert {p.name: p.bytes for p in memory.parts}["weights"] == 2 * WHOLE
    tied = replace(SMALL, head=0)
    (packed,), _ = engine("rollout-0", tied, "bfloat16", config, None, process=7)
    assert {p.name: p.bytes for p in packed.parts}["weights"] == 2 * (1000 + 25 * 8)


def test_windows_keep_what_two_batches_may_add() -> None:
    size = replace(SMALL, layers=6, window=100, windowed=5)
    # 10 blocks of 16 for the full layer. Each of the others: 99 + 2 * 20 tokens, and a block that begins outside.
    assert sequence_bytes(size, 10, 160, 16, batch=20) == 10 * 16 * (10 + 5 * (9 + 1))
    assert sequence_bytes(size, 10, 160, 16, batch=8192) == 10 * 16 * (10 + 5 * (10 + 1)), (
        "never more than the sequence"
    )
    assert sequence_bytes(replace(size, windowed=6), 10, 160, 16, batch=20) == 10 * 16 * 6 * 10
    assert sequence_bytes(replace(size, windowed=0), 10, 160, 16, batch=20) == 10 * 16 * 6 * 10
    # Two full layers and five others: groups of two, the last of the five is padded.
    padded = replace(size, layers=7, windowed=5)
    assert sequence_bytes(padded, 10, 160, 16, batch=20) == 10 * 16 * 2 * (10 + 3 * 10)
    # Three and four: one group each, as large as the larger.
    alike = replace(size, layers=7, windowed=4)
    assert sequence_bytes(alike, 10, 160, 16, batch=20) == 10 * 16 * 4 * (10 + 10)


def test_the_cpu_engine_is_as_its_settings_say() -> None:
    from troupe.workers.engine import settings

    assert vars(settings)["_CPU_BLOCK_TOKENS"] == KV_BLOCK["host"]


SMOLLM2 = (
    "model.path=.cache/models/smollm2-135m-instruct",
    *("roles.rollout.kv_cache_gib=1.0", "roles.rollout.max_num_seqs=64", "roles.rollout.max_model_len=576"),
)


@pytest.mark.parametrize(("overrides", "measured"), [((), 1.61), (SMOLLM2, 3.67)])
def test_an_engine_on_the_cpu_takes_what_runs_measure(overrides: tuple[str, ...], measured: float) -> None:
    """`memory/rollout` of tiny-grpo and tiny-ppo, and of SmolLM2 after eight steps of 64 samples, in GiB."""
    spec = plan_runs(read_document(ROOT / "deploy" / "specs" / "tiny-grpo.yaml", overrides))[0].spec
    found = plan(spec, [local_node(2, spec)]).memory.workers
    (planned,) = [worker.total / GIB for worker in found if worker.worker == "rollout-0"]
    assert planned == pytest.approx(measured, rel=0.1)


def test_experts_and_further_norms_cost_activations() -> None:
    mixture = replace(SMALL, experts=3, extra_norms=10)
    assert layer_bytes(mixture, 4, 5) - layer_bytes(SMALL, 4, 5) == 10 * 12 + 2 * 3 * 8 * 4


def test_quantized_weights_take_what_they_take_in_the_files() -> None:
    config = EngineConfig(max_model_len=4096, tensor_parallel_size=2)
    (memory, _), _ = engine("judge-0", replace(SEVEN_B, packed=5 * GIB), "bfloat16", config, 80 * GIB, 0)
    assert {part.name: part.bytes for part in memory.parts}["weights"] == 5 * GIB // 2


def test_an_engine_on_a_gpu_takes_its_share_and_no_more() -> None:
    config = EngineConfig(max_model_len=4096, gpu_memory_utilization=0.9)
    (memory, _), cache = engine("rollout-0", SEVEN_B, "bfloat16", config, 80 * GIB, 0)
    assert memory.total == int(0.9 * 80 * GIB)
    assert cache is not None and 300 > cache.sequences > 100
    pair = EngineConfig(max_model_len=4096, gpu_memory_utilization=0.9, tensor_parallel_size=2)
    _, shared = engine("rollout-0", SEVEN_B, "bfloat16", pair, 80 * GIB, 0)
    assert shared is not None and shared.sequences > 2 * cache.sequences
    _, none = engine("rollout-0", SEVEN_B, "bfloat16", config, 16 * GIB, 0)
    assert none is not None and none.sequences == 0
    assert engine("rollout-0", SEVEN_B, "bfloat16", config, 0, 0)[1] is None, "a GPU of unknown size"


def test_scoring_needs_weights_and_one_layer() -> None:
    (memory,) = scoring("reference-0", Scoring(SMALL, "float32", tokens=10, longest=5, gpu=False, process=3))
    parts = {part.name: part.bytes for part in memory.parts}
    # The residual twice; feed-forward 3 * 12, attention 4 * 12.
    assert parts == {"weights": 4 * WHOLE, "activations": 10 * (64 + 4 * 48), "logits": 8 * 250, "process": 3}
    windows = Scoring(replace(SMALL, windowed=1), "float32", tokens=10, longest=5, gpu=False)
    (padded,) = scoring("reference-0", windows)
    assert {part.name: part.bytes for part in padded.parts}["activations"] == 10 * (64 + 4 * (48 + 5))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_divided_model_has_a_share_on_each_gpu_or_every_share_in_one_host(gpu: bool) -> None:
    model = Scoring(SMALL, "bfloat16", tokens=10, longest=5, gpu=gpu, process=3)
    one, shared = (
        {f"{m.where} {part.name}": part.bytes for m in scoring("reference-0", each) for part in m.parts}
        for each in (model, replace(model, ranks=4))
    )
    if gpu:
        assert one["gpu weights"] == 2 * WHOLE and shared["gpu weights"] == 2 * WHOLE // 4
        assert shared["gpu gathered"] == 2 * WHOLE and "gpu gathered" not in one
        assert shared["gpu activations"] == one["gpu activations"]
        assert (one["host loading"], shared["host loading"]) == (2 * WHOLE, 2 * 4 * SMALL.largest)
    else:
        assert shared["host weights"] == one["host weights"] == 2 * WHOLE
        assert shared["host gathered"] == 4 * 2 * WHOLE
        assert shared["host activations"] == 4 * one["host activations"]
    assert (one["host process"], shared["host process"]) == (3, 12)


def test_a_batch_by_hand() -> None:
    tiny = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
    batch = "schedule.prompts_per_step=2", "algorithm.group_size=4", "sampling.max_tokens=16"
    one, three = (
        spec_of(tiny, *batch, "roles.rollout.max_model_len=26", f"schedule.max_staleness={k}") for k in (0, 2)
    )
    assert batch_bytes(one) == 8 * (10 * 12 + 16 * (12.125 + 40.125))
    assert batch_bytes(three) - batch_bytes(one) == 2 * 8 * (10 * 8 + 16 * 12.125)


# Plans


def spec_of(path: Path, *changes: str) -> RunSpec:
    return plan_runs(read_document(path, changes))[0].spec


def planned(size: ModelSize, nodes: list[Node], *changes: str, name: str = "node-8gpu-grpo.yaml") -> Plan:
    spec = spec_of(ROOT / "deploy" / "specs" / name, "model.path=given", *changes)
    return plan(spec, nodes, Sizes({"given": size}), advise=True)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_reward_worker_holds_the_weights_of_its_models_and_runs_one_at_a_time(gpus: int) -> None:
    sizes = Sizes({"a": SMALL, "b": replace(SMALL, backbone=3000, intermediate=1000)})
    tiny = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"

    def parts(*changes: str) -> dict[str, int]:
        spec = spec_of(tiny, f"roles.reward.gpus={gpus}", *changes)
        found, _ = of_reward(cast(RolloutSpec, spec), PlacedWorker("reward-0", 1.0, gpus, "", 0, ""), 0, sizes)
        return {f"{one.where} {part.name}": part.bytes for one in found for part in one.parts}

    a, b = (parts(f"roles.reward.model={{path: {name}}}") for name in "ab")
    named = [f"{{name: reward_model, args: {{model: {name}}}}}" for name in "ab"]
    both = parts("roles.reward.models={a: {path: a}, b: {path: b}}", f"roles.reward.functions=[{', '.join(named)}]")
    where = "gpu" if gpus else "host"
    assert both[f"{where} weights"] == a[f"{where} weights"] + b[f"{where} weights"]
    assert both[f"{where} activations"] == b[f"{where} activations"] > a[f"{where} activations"]
    assert both[f"{where} process"] == a[f"{where} process"]


def test_a_gpu_that_is_too_small_is_reported_with_a_change_that_helps() -> None:
    nodes = described_nodes("1x8xA100-40G", 128)
    result = planned(SEVEN_B, nodes)
    assert result.misfit.startswith("policy-0 needs ") and "GiB of a GPU's 40.0: " in result.misfit
    assert result.remedies, result.misfit
    assert "workers to 8" not in result.misfit, "the cluster has no more GPUs, and another change is enough"
    for remedy in result.remedies:
        assert planned(SEVEN_B, nodes, *(f"{name}={value}" for name, value in remedy.changes.items())).misfit == ""
    assert planned(SEVEN_B, described_nodes("1x8xH100", 128)).misfit == ""
    wider = planned(SEVEN_B, described_nodes("2x8xA100-40G", 128), "roles.policy.workers=8")
    assert wider.misfit == ""


@pytest.mark.parametrize("sleep", ["none", "kv_cache"])
def test_an_engine_on_a_shared_gpu_always_holds_memory_for_adapters(sleep: str) -> None:
    """Of the layers that are computed with the target, at the reserved rank; the file with adapters takes no buffer."""
    lora = ("roles.policy.lora={rank: 12, targets: [q_proj]}", "weight_sync.backend=auto")
    shared = colocated(sleep, 0.5)
    memories = [planned(SEVEN_B, described_nodes("1x8xH100", 128), *shared, *more).memory for more in ((), lora)]
    whole, adapted = (
        next(m for m in memory.workers if (m.worker, m.where) == ("rollout-0", "gpu")) for memory in memories
    )
    numbers = adapter_numbers(SEVEN_B, LoraConfig(rank=16, targets=("q_proj", "k_proj", "v_proj")))
    for period in PERIODS:
        held = {part.name: part.bytes for part in adapted.parts if period in part.periods}
        assert held["adapters"] == 2 * numbers and not held.get("transfer")
    parts = [{part.name: part.bytes for part in memory.parts} for memory in (whole, adapted)]
    assert parts[0]["kv cache"] - parts[1]["kv cache"] == 2 * numbers


def test_an_engine_without_room_for_a_sequence_is_reported() -> None:
    result = planned(SEVEN_B, described_nodes("1x8xT4", 128), "roles.policy.workers=1")
    assert result.misfit.startswith("rollout-0: its KV cache of 0.00 GiB holds no sequence of 4096 tokens (a GPU has")
    assert "tensor_parallel_size" in result.misfit


def test_host_memory_is_added_up_by_node() -> None:
    result = planned(SEVEN_B, described_nodes("1x8xH100", 128, node_gib=24))
    assert result.misfit.startswith("node-0 needs ") and "of host memory and has 24.0 (policy " in result.misfit
    node = result.memory.nodes[0]
    assert [part.name for part in node.parts] == ["policy", "rollout", "reward", "batch", "ray"]
    shm = planned(SEVEN_B, described_nodes("1x8xH100", 128), "weight_sync.backend=shm")
    assert {p.name: p.bytes for p in shm.memory.nodes[0].parts}["weight file"] == 2 * SEVEN_B.parameters
    lora = planned(SEVEN_B, described_nodes("1x8xH100", 128), "roles.policy.lora={rank: 4}", "weight_sync.backend=shm")
    numbers = adapter_numbers(SEVEN_B, LoraConfig(rank=4))
    mixture = replace(SEVEN_B, experts=8, routed=300, sparse=2)
    cluster, replays = described_nodes("1x8xH100", 128), "sampling.router_replay=true"
    batches = [
        {p.name: p.bytes for p in planned(mixture, cluster, *changes).memory.nodes[0].parts}["batch"]
        for changes in ((), (replays,), (replays, "schedule.max_staleness=2"))
    ]
    spec = spec_of(ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml", "model.path=given").rollouts
    assert spec is not None
    routes = spec.samples_per_step * spec.roles.rollout.max_model_len * SEVEN_B.layers * 8 * 2  # two bytes each
    assert batches[1] - batches[0] == (2 + spec.schedule.max_staleness) * routes
    assert {p.name: p.bytes for p in lora.memory.nodes[0].parts}["weight file"] == 2 * numbers


def test_colocated_workers_share_their_gpu() -> None:
    result = planned(SEVEN_B, described_nodes("1x8xH100", 128), *colocated("none"))
    assert result.misfit.startswith("policy-0 and rollout-0 need ")
    assert {"roles.rollout.sleep": "kv_cache"} in [remedy.changes for remedy in result.remedies]
    assert result.memory.shared == ()


def colocated(sleep: str, share: float = 0.85) -> tuple[str, ...]:
    """Changes after which each policy rank has an engine on its GPU."""
    engine = f"workers: 8, gpus: 0.5, max_model_len: 4096, sleep: {sleep}, gpu_memory_utilization: {share}"
    return (
        f"roles.rollout={{colocate_with: policy, {engine}}}",
        "roles.policy.workers=8",
        "roles.policy.gpus=0.5",
        "weight_sync.backend=ipc",
        "schedule.max_staleness=0",
    )


@pytest.mark.parametrize("sleep", ["kv_cache", "weights"])
def test_workers_on_a_shared_gpu_need_the_fullest_period_and_not_the_sum(sleep: str) -> None:
    """By hand: a 7B model under ZeRO-3 on eight GPUs of 79.6 GiB, engines with 0.7 of each."""
    share = 0.7
    result = planned(SEVEN_B, described_nodes("1x8xH100", 128), *colocated(sleep, share))
    assert result.misfit == ""
    (use, *others) = result.memory.shared
    assert use.workers == ("policy-0", "rollout-0") and {other.periods["update"] for other in others} == {
        use.periods["update"]
    }
    numbers, gpu = SEVEN_B.parameters, int(79.6 * GIB)
    kept = 2 * numbers // 8 + 2 * 500_000_000 + 800 * MIB  # weights, DeepSpeed's bucket, CUDA
    bucket = 2 * SEVEN_B.largest
    sampling = int(share * gpu) + kept
    assert use.periods["sampling"] == pytest.approx(sampling, rel=1e-6)
    policy = next(m for m in result.memory.workers if (m.worker, m.where) == ("policy-0", "gpu"))
    parts = {part.name: part.bytes for part in policy.parts}
    assert parts["optimizer"] == pytest.approx(12 * numbers / 8, rel=1e-6)
    states = parts["optimizer"] + 4 * numbers // 8 + parts["kept"]
    passes = parts["gathered"] + parts["activations"] + parts["logits"]
    forward = next(
        p.bytes for m in result.memory.workers if m.worker == "rollout-0" for p in m.parts if p.phase == "pass"
    )
    rests = 800 * MIB + GIB + (2 * numbers + forward if sleep == "kv_cache" else 0)  # CUDA, graphs
    assert use.periods["update"] == pytest.approx(kept + states + max(passes, parts["step"]) + rests, rel=1e-6)
    sent = 2 * 2 * bucket + 2 * numbers + 800 * MIB + GIB + (forward if sleep == "kv_cache" else 0)
    assert use.periods["transfer"] == pytest.approx(kept + sent, rel=1e-6)
    assert use.most == max(use.periods.values()) < use.alone
    host = next(m for m in result.memory.workers if (m.worker, m.where) == ("policy-0", "host"))
    assert {part.name: part.bytes for part in host.parts}["moved"] == parts["optimizer"]
    table = render_periods(result.memory)
    assert [str(column.header) for column in table.columns][1:4] == ["sampling", "update", "transfer"]
    assert table.row_count == 1, "the eight GPUs are alike"
    narrow = Console(file=io.StringIO(), width=44)
    narrow.print(render_periods(result.memory, narrow.width))
    assert isinstance(narrow.file, io.StringIO)
    assert all(gib(needs) in narrow.file.getvalue() for needs in (*use.periods.values(), use.alone)), "no number is cut"
    assert as_json("x", result)["shared_gpus"][0]["most"] == use.most


@pytest.mark.parametrize("sleep", ["none", "kv_cache", "weights"])
def test_a_teacher_on_the_policys_gpu_counts_in_the_periods_in_which_it_is_awake(sleep: str) -> None:
    """By hand: a 7B teacher with 0.3 of each GPU, besides the policy and engines with 0.4."""
    engine = "kind: engine, colocate_with: policy, model: {path: given}, max_model_len: 4097"
    teacher = f"roles.teacher={{big: {{{engine}, sleep: {sleep}, gpu_memory_utilization: 0.3}}}}"
    base = (*colocated("weights", 0.4), "algorithm={name: gkd}", "roles.policy.gpus=0.4", "roles.rollout.gpus=0.3")
    given = planned(SEVEN_B, described_nodes("1x8xH100", 128), *base, teacher)
    (use, *_) = given.memory.shared
    assert use.workers == ("policy-0", "rollout-0", "teacher.big-0")
    memories = {(m.worker, m.where): {p.name: p.bytes for p in m.parts} for m in given.memory.workers}
    parts, host = memories["teacher.big-0", "gpu"], memories["teacher.big-0", "host"]
    weights, gpu = 2 * SEVEN_B.parameters, int(79.6 * GIB)
    assert (parts["weights"], parts["graphs"], parts["process"]) == (weights, GIB, 800 * MIB)
    assert parts["prompt logits"] == 12 * 2048 * SEVEN_B.vocabulary
    awake = sum(parts.values())
    assert awake == int(0.3 * gpu) + parts["prompt logits"]
    kept = GIB + 800 * MIB  # CUDA graphs and context
    asleep = {"none": awake, "kv_cache": awake - parts["kv cache"], "weights": kept}[sleep]
    assert host == {"process": 1600 * MIB} | ({"weights": 2 * weights} if sleep == "weights" else {})
    for period in PERIODS:
        others = sum(
            m.during(period) for m in given.memory.workers if m.where == "gpu" and m.worker in ("policy-0", "rollout-0")
        )
        assert use.periods[period] - others == (asleep if period == "update" else awake)


def test_a_misfit_of_three_on_a_gpu_has_remedies_that_keep_them_in_step() -> None:
    engine = "kind: engine, colocate_with: policy, model: {path: given}, max_model_len: 4097, sleep: none"
    teacher = "roles.teacher={{big: {{{}, gpu_memory_utilization: {}}}}}"
    base = (*colocated("weights", 0.4), "algorithm={name: gkd}", "roles.policy.gpus=0.4", "roles.rollout.gpus=0.3")
    four = ("roles.policy.workers=4", "roles.rollout.workers=4")
    found = planned(SEVEN_B, described_nodes("1x8xH100", 128), *base, teacher.format(engine, 0.4), *four)
    assert (
        found.misfit.startswith("policy-0 and rollout-0 and teacher.big-0 need ") and "during updates" in found.misfit
    )
    assert {"roles.teacher.big.sleep": "kv_cache"} in [remedy.changes for remedy in found.remedies]
    found = planned(SEVEN_B, described_nodes("1x8xH100", 128), *base, teacher.format(engine, 0.5), *four)
    everyone = {f"roles.{role}.workers": 8 for role in ("policy", "rollout", "teacher.big")}
    assert everyone in [remedy.changes for remedy in found.remedies]


def test_a_policy_that_scores_while_engines_sample_needs_its_passes_then() -> None:
    """A colocated reference scores every group; under ZeRO-3 a pass gathers the weights."""
    changes = ("algorithm.kl.coef=0.1", "roles.reference={colocate_with: policy}")
    plain, scoring = (
        planned(SEVEN_B, described_nodes("1x8xH100", 256), *colocated("kv_cache", 0.5), *more) for more in ((), changes)
    )
    policy = next(m for m in scoring.memory.workers if (m.worker, m.where) == ("policy-0", "gpu"))
    parts = {part.name: part for part in policy.parts}
    assert len(parts) == len(policy.parts), "the table adds up parts of one name"
    more = parts["reference"].bytes + parts["gathered"].bytes + parts["scoring"].bytes
    before, after = plain.memory.shared[0].periods, scoring.memory.shared[0].periods
    assert after["sampling"] == before["sampling"] + more
    assert after["update"] == before["update"] + parts["reference"].bytes


def test_teachers_in_the_policys_workers_count_with_their_weights_and_copied_heads() -> None:
    """An average that teaches with all of its logits has a copy of the head in an update, and no other teacher has."""
    frozen = "colocate_with: policy, model: {path: given, dtype: bfloat16}"
    roles = f"roles.teacher={{one: {{{frozen}}}, two: {{{frozen}}}, own: {{colocate_with: policy, average: true}}}}"
    changes = (roles, "roles.policy.ema_decay=0.9", "roles.policy.zero_stage=1")
    logits: dict[str, int] = {}
    for support in ("full", "student_top_k", "teacher_top_k"):
        kind = f"algorithm={{name: gkd, clip_low: null, clip_high: null, distill: {{support: {support}}}}}"
        result = planned(SEVEN_B, described_nodes("1x8xH100", 900), *colocated("weights"), *changes, kind)
        policy = next(m for m in result.memory.workers if (m.worker, m.where) == ("policy-0", "gpu"))
        parts = {part.name: (part.bytes, part.periods) for part in policy.parts}
        assert parts["teachers"] == (2 * 2 * SEVEN_B.parameters, PERIODS)
        logits[support] = parts["logits"][0]
        copied = None if support == "teacher_top_k" else (2 * SEVEN_B.vocabulary * SEVEN_B.hidden, ("update",))
        assert parts.get("copied heads") == copied
    assert logits["teacher_top_k"] > logits["student_top_k"] == logits["full"], "two further teachers"


def test_a_gpu_that_is_too_small_for_one_period_says_which() -> None:
    result = planned(SEVEN_B, described_nodes("1x8xH100", 128), *colocated("weights", 0.98))
    assert "during sampling" in result.misfit


def test_unknown_sizes_leave_the_placement() -> None:
    spec = spec_of(ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml")
    result = plan(spec, described_nodes("1x8xH100", 128))
    assert result.misfit == ""
    assert {memory.worker.partition("-")[0] for memory in result.memory.workers} == {"reward"}
    (line,) = unknown_sizes([result.memory])
    assert line.startswith("model.path: the size of models/policy-7b-instruct is not known: ")
    assert "No such file" in line and "--set model.path=FOLDER" in line
    assert any(line in note for note in notes(result.memory))


def test_every_shipped_spec_adds_up() -> None:
    """Every kind of role and of algorithm, with all models known."""
    for path in sorted((ROOT / "deploy" / "specs").glob("**/*.yaml")):
        if "algorithm" not in (document := yaml.safe_load(path.read_text()) or {}) and "stages" not in document:
            continue
        for run in plan_runs(read_document(path)):
            folders = {model["path"] for model in _models(json.loads(run.spec.model_dump_json()))}
            result = plan(run.spec, [Node("n", 999, 999)], Sizes(dict.fromkeys(folders, SMALL)))
            workers = {memory.worker for memory in result.memory.workers}
            assert workers == {row.worker for row in result.rows}, path
            assert all(memory.total > 0 for memory in result.memory.workers)
            assert result.memory.unknown == ()


def _models(node: Any) -> list[dict[str, Any]]:
    if not isinstance(node, dict):
        return []
    own = [node["model"]] if isinstance(node.get("model"), dict) else []
    return own + [model for value in node.values() for model in _models(value)]


def test_json_gives_all_memory_in_bytes() -> None:
    result = planned(SEVEN_B, described_nodes("1x8xH100", 128))
    told = json.loads(json.dumps(as_json("run", result)))
    policy = next(row for row in told["memory"] if row["worker"] == "policy-0" and row["of"] == "gpu")
    assert policy["parts"]["optimizer"] == 12 * SEVEN_B.parameters // 4
    assert told["kv_caches"]["rollout-0"]["sequences"] > 100
    assert told["misfit"] is None and told["nodes"][0]["capacity"] is None


def test_this_machine_has_memory() -> None:
    assert local_node(2, spec_of(ROOT / "deploy" / "specs" / "tiny-grpo.yaml")).memory > GIB
