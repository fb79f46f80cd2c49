"""Memory that a worker needs, part by part: pure arithmetic from its model's size and its configuration.

Everything is in bytes. What DeepSpeed holds is read from its source (0.19: `runtime/engine.py`, `bf16_optimizer.py`,
`fp16/unfused_optimizer.py`, `zero/stage_1_and_2.py`, `zero/stage3.py`) under the settings of
`workers/training/deepspeed_engine.py`; `benchmarks/plan_memory.py` compares the sums with real processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from troupe.orchestrator.model_facts.model_size import ModelSize
from troupe.workers.contract.config import CHUNK_LOGITS, DISTILL_CHUNKS, GPU_TILE_COLUMNS, REDUCE_BUCKET, EngineConfig
from troupe.workers.contract.config_base import Dtype
from troupe.workers.contract.trainer_config import ALL_LINEAR, LoraConfig, TrainerConfig
from troupe.workers.contract.units import GIB, MIB

Where = Literal["gpu", "host"]
Phase = Literal["always", "pass", "step"]
Period = Literal["sampling", "update", "transfer"]
"""Periods of a step on a shared GPU: engines sample and models score; trainers update; weights are
sent."""
PERIODS: tuple[Period, ...] = ("sampling", "update", "transfer")

WIDTHS: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per number."""

LIVE = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: parameters that stay gathered between modules."""
SUBGROUP = 1_000_000_000
"""DeepSpeed's `sub_group_size`: numbers whose gradients ZeRO-3 flattens at a time."""
CUDA_CONTEXT = 800 * MIB
"""Memory that CUDA, cuBLAS and NCCL take of a GPU for one process, by reports of nvidia-smi. Not measured here."""
BUCKET = 256 * MIB
"""Limit of a bucket of weights (`workers/weights/buckets.py`); a transfer has two on each side."""
FRAGMENTS = 0.4
"""Share of its activations that a rank on the CPU holds besides, as freed blocks between blocks in use: the C library
keeps those below 8 MiB (`troupe.workers.models.cpu.return_large`). Measured: 0.1 to 0.5, and 0.8 under ZeRO-3."""
TILE_LOGITS = 2**21
"""Logits that the output head holds at a time on the CPU (`troupe.workers.models.heads`); on a GPU the logits of
`GPU_TILE_COLUMNS` columns."""
NATURAL_VECTORS = 9
"""Numbers that a rank holds for each parameter while it solves for TRPO's step (`NaturalGradient`)."""
KV_BLOCK = {"gpu": 16, "host": 32}
"""Tokens in a block of vLLM's KV cache (on the CPU set by `workers/engine/settings.py`)."""


@dataclass(frozen=True)
class Part:
    """One thing that takes memory."""

    name: str
    bytes: int
    phase: Phase = "always"
    """When it is held: `always`; in the `pass` through the model; in the optimizer `step` and its preparation."""
    periods: tuple[Period, ...] = PERIODS
    """The periods of a shared GPU in which it is held."""


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of one kind that one worker needs; for a worker with several GPUs, of each."""

    worker: str
    where: Where
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """The most that is held at once, in bytes."""
        return max(map(self.during, PERIODS))

    def during(self, period: Period) -> int:
        """The most that is held at once in a period, in bytes. A pass and a step reuse each other's memory on a GPU;
        in host memory both count: buckets fill during the backward pass, and freed blocks below 1 MiB stay."""
        phases = dict.fromkeys(_PHASES, 0)
        for part in self.parts:
            if period in part.periods:
                phases[part.phase] += part.bytes
        either = max if self.where == "gpu" else sum
        return phases["always"] + either((phases["pass"], phases["step"]))


_PHASES: tuple[Phase, ...] = ("always", "pass", "step")


@dataclass(frozen=True)
class Training:
    """The settings that determine the memory of one rank of a training group."""

    size: ModelSize
    dtype: Dtype
    trainer: TrainerConfig
    ranks: int
    gpu: bool
    longest: int
    """Tokens of the longest sequence."""
    values: bool = False
    """Whether the head returns one value instead of log-probs (critic, reward model)."""
    scaled: bool = False
    """Whether logits are divided by a temperature other than 1."""
    truncated: bool = False
    """Whether log-probs are among the tokens that the sampler left."""
    entropy_grad: bool = False
    kept_states: int = 0
    """States whose whole distribution is kept over a step, over all ranks (`algorithm.kl_states`)."""
    natural_gradient: bool = False
    """Whether the step is TRPO's."""
    frozen: Mapping[str, Sequence[tuple[ModelSize, Dtype]]] = field(default_factory=dict)
    """Frozen models in the same process, by the name of their part."""
    copied_heads: int = 0
    """Copies of the output head that are held in a pass."""
    top_teachers: int = 0
    """Teachers whose likeliest tokens are compared at one token. Each keeps the logits of a chunk without its tokens
    until the backward pass."""
    process: int = 0
    """Host memory of the process with its libraries and no model."""
    transfer: int = 0
    """Buffers for sending weights from device to device."""
    adapters: int = 0
    """Numbers of the adapters, which alone train; 0: all weights do."""
    frozen_adapters: int = 0
    """Numbers of the adapters of teachers that have the policy's model."""
    copies_saves: bool = False
    """Whether checkpoints are written from a copy of the state."""
    exported: bool = True
    """Whether this rank exports the model into checkpoints: rank 0 of the policy."""


def training(worker: str, rank: Training) -> tuple[WorkerMemory, ...]:
    """Memory of one rank: host memory, and its GPU's if it has one."""
    size, trainer, width = rank.size, rank.trainer, WIDTHS[rank.dtype]
    device: Where = "gpu" if rank.gpu else "host"
    parts: dict[Where, list[Part]] = {"gpu": [], "host": []}
    stage = trainer.stage_for(rank.ranks, rank.dtype == "float32")
    trained = size.divided_experts(trainer.expert_parallel_size) if trainer.expert_parallel_size > 1 else size
    if rank.adapters:
        layer = math.ceil(rank.adapters / size.layers)
        trained = replace(size, backbone=rank.adapters, head=0, largest=layer, expert_weights=0)
        below = math.ceil(size.parameters / rank.ranks) if stage == 3 else size.parameters
        parts[device].append(Part("base model", width * below))
        if stage == 3 and rank.ranks > 1:
            parts[device].append(Part("base layers", width * gathered(size), "pass"))
    for where, part in zero_states(trained, rank.dtype, rank.ranks, stage, rank.gpu, trainer.offload_optimizer):
        parts[where].append(part)
    if trainer.ema_decay:
        held = math.ceil(trained.parameters / rank.ranks) if stage == 3 else trained.parameters
        parts[device].append(Part("average", 4 * held))
    if rank.copies_saves:
        parts["host"].append(Part("save copy", save_copy(trained, width, rank, stage)))
    for name, models in rank.frozen.items():
        divided = rank.ranks if stage == 3 else 1
        held = sum(WIDTHS[dtype] * math.ceil(frozen.parameters / divided) for frozen, dtype in models)
        parts[device].append(Part(name, held))
    parts[device].append(Part("copied heads", rank.copied_heads * width * size.vocabulary * size.hidden, "pass"))
    if rank.frozen_adapters:
        parts[device].append(Part("teacher adapters", width * rank.frozen_adapters))
    if rank.natural_gradient:
        parts[device].append(Part("natural gradient", 4 * NATURAL_VECTORS * size.parameters, "pass"))
    if rank.kept_states:
        # Ranks that share their rows keep the same states.
        shares = rank.ranks // trainer.sequence_parallel_size
        parts[device].append(Part("kept", 4 * size.vocabulary * math.ceil(rank.kept_states / shares)))
    tokens = trainer.worker_tokens
    masked = _mask_row(size, rank.longest, trainer.packing)
    recomputed = trainer.recomputed(size.layers)
    layers = activations(size, width, tokens, masked, recomputed)
    if not trainer.recompute_products:
        layers += tokens * recomputed * products(size, width)
    if trainer.sequence_parallel_size > 1:
        # What a rank sends and receives of the queries; the ones that attention keeps are counted as activations.
        layers += 2 * width * tokens * size.heads * size.head_dim
    parts[device].append(Part("activations", layers, "pass"))
    if trainer.expert_parallel_size > 1:
        # What a rank sends and receives of its tokens in a layer, to the experts and back, if they are used equally.
        parts[device].append(Part("all-to-all", 4 * width * tokens * size.experts * size.hidden, "pass"))
    if rank.values:
        parts[device].append(Part("head", tokens * size.hidden * (width + 4), "pass"))
    else:
        extra = (1 if rank.scaled else 0) + (2 if rank.entropy_grad else 0)
        # The tokens that were not left: a copy of the logits without them, a mask, and the bits that it was made of.
        own = 4 * extra + (4 + 1 + 1 if rank.truncated else 0)
        if _tiled(size, rank.truncated):
            logits = tiled_head(size, width, tokens, rank.gpu)
        else:
            chunk = _chunk(size, tokens, rank.gpu)
            # Of the first teacher, chunks that are smaller by `DISTILL_CHUNKS` make up for all that it keeps.
            further = 4 * max(0, rank.top_teachers - 1) * math.ceil(chunk / DISTILL_CHUNKS)
            logits = head(size, width, tokens, rank.gpu) + own * chunk + further
        parts[device].append(Part("logits", logits, "pass"))
    if not rank.gpu:
        parts["host"].append(Part("fragments", int(FRAGMENTS * layers), "pass"))
    parts[device].append(Part("transfer", rank.transfer))
    if rank.gpu:
        parts["gpu"].append(Part("process", CUDA_CONTEXT))
        parts["host"].append(Part("loading", _loading(size, width, rank.ranks, stage), "step"))
    parts["host"].append(Part("process", rank.process))
    return _workers(worker, parts)


def save_copy(trained: ModelSize, width: int, rank: Training, stage: int) -> int:
    """Bytes of the copy from which a rank writes its part of a checkpoint: what DeepSpeed saves (optimizer, and
    below ZeRO-3 rank 0's weights), the moving average, and the whole weights of each export."""
    whole = trained.parameters
    share = math.ceil(whole / rank.ranks) if stage else whole
    weights = 0 if stage == 3 else width * whole
    optimizer = (8 if stage == 0 and width == 4 else 12) * share
    average = 4 * (share if stage == 3 else whole) if rank.trainer.ema_decay else 0
    exports = (1 + (rank.trainer.ema_decay > 0)) * width * whole if rank.exported else 0
    return weights + optimizer + average + exports


def _loading(size: ModelSize, width: int, ranks: int, stage: int) -> int:
    """Host memory of a rank with a GPU until its weights are there. Below ZeRO-3 a rank builds the whole model; else
    it reads its share tensor by tensor (two can be whole at once), which DeepSpeed copies once through host
    memory."""
    if stage < 3:
        return width * size.parameters
    return width * max(math.ceil(size.parameters / ranks), 2 * size.largest)


def gathered(size: ModelSize) -> int:
    """Numbers that a rank holds whole under ZeRO-3: DeepSpeed limits prefetches to `LIVE`, but gathers the current
    module whole (`partitioned_param_coordinator.py`, `fetch_sub_module`)."""
    return min(size.parameters, max(LIVE, size.module))


def zero_states(
    size: ModelSize, dtype: Dtype, ranks: int, stage: int, gpu: bool, offload: bool
) -> Iterator[tuple[Where, Part]]:
    """Weights, gradients, optimizer states and DeepSpeed's buffers of one rank. The optimizer's 12 bytes per number
    are AdamW's two moments and a float32 copy (none in stage 0 with float32 weights). ZeRO-3 means to have none
    of float32 weights, but compares a device with the name of one, and copies them."""
    device: Where = "gpu" if gpu else "host"
    whole, share, largest, width = size.parameters, math.ceil(size.parameters / ranks), size.largest, WIDTHS[dtype]
    in_bucket = min(whole, REDUCE_BUCKET)
    staged = 0 if gpu else width * in_bucket  # on the CPU a page of the bucket counts when it is written
    accumulated = 4 if width < 4 else width

    def states(weights: int, gradients: int, optimizer: int, step: int) -> Iterator[tuple[Where, Part]]:
        yield device, Part("weights", weights)
        yield device, Part("gradients", gradients)
        yield device, Part("optimizer", optimizer)
        yield device, Part("step", step, "step")

    if stage == 0:
        flattened = width * min(whole, REDUCE_BUCKET + largest) if ranks > 1 else 0
        if width == 4:
            # Plain torch AdamW.
            yield from states(4 * whole, 4 * whole, 8 * whole, flattened)
        else:
            yield from states(width * whole, width * whole, 12 * whole, max(flattened, 4 * whole))
        return
    if offload:
        yield from _offloaded(size, width, ranks, stage)
        return
    if stage == 1 and dtype == "bfloat16":
        # BF16_Optimizer: gradients in both types; those to reduce are copied together and sent in bfloat16.
        yield from states(2 * whole, 6 * whole, 12 * share, (4 * whole if whole <= REDUCE_BUCKET else 0) + 2 * whole)
        return
    if gpu:
        yield device, Part("buffers", width * in_bucket)
    if stage == 1:
        # Gradients are reduced in the bucket; this rank's part of them is copied out of it.
        reduced = max(width * in_bucket if ranks > 1 else 0, 4 * share)
        yield from states(width * whole, 4 * whole, 12 * share, 4 * largest + reduced)
    elif stage == 2:
        copied = width * in_bucket if ranks > 1 or width < 4 else 0
        new = 0 if width < 4 else 4 * share
        yield from states(width * whole, accumulated * share, 12 * share, staged + max(copied, new))
    else:
        at_once = width * gathered(size) if ranks > 1 else 0
        yield device, Part("gathered", at_once, "pass")
        # One bucket for the whole run: on the CPU its pages stay once they are written. gloo has no
        # reduce-scatter and copies what it reduces. A gradient larger than the bucket waits whole for the next one.
        yield device, Part("buffers", staged)
        gradients = max(in_bucket, min(whole, size.module))
        converted = 4 * math.ceil(gradients / ranks) if width < 4 else 0
        copies = 1 if gpu else 2
        reduced = at_once + copies * width * gradients + converted
        yield from states(width * share, 4 * share, 12 * share, max(reduced, 4 * min(share, SUBGROUP)))


def _offloaded(size: ModelSize, width: int, ranks: int, stage: int) -> Iterator[tuple[Where, Part]]:
    """ZeRO with the optimizer in host memory; pinned memory is rounded up to a power of two."""
    whole, share = size.parameters, math.ceil(size.parameters / ranks)
    pinned = _power_of_two(4 * share)
    yield "gpu", Part("weights", width * (share if stage == 3 else whole))
    in_bucket = min(whole, REDUCE_BUCKET)
    yield "gpu", Part("buffers", width * (in_bucket + (size.largest if stage < 3 else min(whole, size.module))))
    if stage == 3:
        at_once = width * gathered(size) if ranks > 1 else 0
        yield "gpu", Part("gathered", at_once, "pass")
        yield "gpu", Part("step", at_once + width * in_bucket, "step")
        yield "host", Part("gradients", 2 * pinned)
        yield "host", Part("optimizer", 12 * share)
        return
    accumulated = 4 * share if width < 4 else 0
    yield "gpu", Part("gradients", 4 * whole + accumulated if stage == 1 else accumulated)
    yield "gpu", Part("step", width * in_bucket, "step")
    yield "host", Part("gradients", pinned + (0 if width < 4 else 4 * share))
    yield "host", Part("optimizer", pinned + 8 * share + _power_of_two(width * share))


def _mask_row(size: ModelSize, longest: int, packing: bool) -> int:
    """Length of a row of the attention mask, 0 if packed: padded with eager attention, each sequence's for windows."""
    return 0 if packing and not (size.windowed or size.eager) else longest


def layer_bytes(size: ModelSize, width: int, masked: int) -> int:
    """Bytes that one layer keeps of one token for the backward pass; `masked`: length of a row of the mask. Norms:
    float32 input, normed, output. Attention: query, key, value of all heads, output, log-sum, mask row; eager,
    the weights of all pairs. Feed-forward: gate, activation, up, product; each expert's copy of the token and its
    output."""
    queries = size.heads * size.head_dim
    norms = (2 * size.hidden + size.extra_norms) * (4 + 2 * width)
    attention = width * 4 * queries + 4 * size.heads + width * masked + _pairs(size, masked)
    return norms + attention + width * (4 * size.intermediate + 2 * size.experts * size.hidden)


def _pairs(size: ModelSize, masked: int) -> int:
    """Bytes that eager attention keeps of one token's pairs: capped logits and probabilities, also in float32."""
    return 8 * size.heads * masked if size.eager else 0


def products(size: ModelSize, width: int) -> int:
    """Bytes of the results of one layer's matrix products and attention, of one token: query, key, value, output of
    attention and its log-sum, gate and up, outputs of the two halves and of each expert's copy."""
    attention = width * (2 * size.heads + 2 * size.kv_heads) * size.head_dim + 4 * size.heads
    return attention + width * (2 * size.hidden + 2 * size.intermediate + size.experts * size.hidden)


def activations(size: ModelSize, width: int, tokens: int, masked: int, recomputed: int) -> int:
    """Bytes that layers keep of `tokens` tokens, and one layer's backward pass adds; of `recomputed` ones inputs."""
    kept = recomputed * width * size.hidden + (size.layers - recomputed + (recomputed > 0)) * layer_bytes(
        size, width, masked
    )
    ends = size.hidden * (4 + 3 * width)
    at_work = width * (3 * size.intermediate + 4 * size.hidden) + _pairs(size, masked)
    return tokens * (kept + ends + at_work)


def head(size: ModelSize, width: int, tokens: int, gpu: bool) -> int:
    """Bytes of the output head in a pass: hidden states of `tokens` tokens, and the larger of two moments. In the
    backward pass of a chunk exist its float32 logits (and in the weights' type), the gradient of the chosen ones,
    difference, exponential and product of the log-sum, and the head's gradient so far; then autograd adds the
    chunk's in new memory."""
    weight, logits = width * size.vocabulary * size.hidden, _chunk(size, tokens, gpu)
    made = 20 + (width if width < 4 else 0)
    moments = (weight + made * logits, 3 * weight) if _chunks(size, tokens, gpu) > 1 else (made * logits, weight)
    return width * size.hidden * tokens + max(moments)


def tiled_head(size: ModelSize, width: int, tokens: int, gpu: bool) -> int:
    """Bytes of the output head with log-probs tile by tile: hidden states of `tokens` tokens and their float32
    gradient; the head's gradient; a tile's logits, exponentials (not in a GPU's kernel), and gradient."""
    made = width + (4 if gpu else 8)
    return (width + 4) * size.hidden * tokens + width * size.vocabulary * size.hidden + made * _tile(size, tokens, gpu)


def _tile(size: ModelSize, tokens: int, gpu: bool) -> int:
    return min(GPU_TILE_COLUMNS * tokens if gpu else TILE_LOGITS, size.vocabulary * tokens)


def _tiled(size: ModelSize, truncated: bool) -> bool:
    """Whether the output head never holds a chunk of logits. Families with eager attention also cap their logits."""
    return not (truncated or size.eager)


def _chunks(size: ModelSize, tokens: int, gpu: bool) -> int:
    """Chunks of the output head (`troupe.workers.models.modeling.head_chunks`)."""
    return max(1, math.ceil(size.vocabulary * tokens / CHUNK_LOGITS["cuda" if gpu else "cpu"]))


def _chunk(size: ModelSize, tokens: int, gpu: bool) -> int:
    """Logits that are held at once."""
    return math.ceil(tokens / _chunks(size, tokens, gpu)) * size.vocabulary


@dataclass(frozen=True)
class Scoring:
    """The settings that determine the memory of a frozen model that scores (reference, reward model)."""

    size: ModelSize
    dtype: Dtype
    tokens: int
    """Tokens of a micro-batch."""
    longest: int
    """Tokens of the longest sequence."""
    gpu: bool
    values: bool = False
    """Whether the head returns one value instead of log-probs (reward model)."""
    process: int = 0
    """Host memory of the process with its libraries and no model."""
    whole_logits: bool = False
    """Whether a chunk of logits exists as a whole, from which the likeliest tokens are read."""
    ranks: int = 1
    """Processes over which the model is divided."""


def scoring(worker: str, model: Scoring) -> tuple[WorkerMemory, ...]:
    """Memory of a frozen model that scores: weights, activations of a layer; a divided one gathers what it runs."""
    size, width, tokens, ranks = model.size, WIDTHS[model.dtype], model.tokens, model.ranks
    if _tiled(size, truncated=model.whole_logits):
        held = (4 if model.gpu else 8) * _tile(size, tokens, model.gpu)
    else:
        held = (16 + (width if width < 4 else 0)) * _chunk(size, tokens, model.gpu)
    logits = 0 if model.values else held
    parts: dict[Where, list[Part]] = {"gpu": [], "host": []}
    on_host = 1 if model.gpu else ranks  # ranks whose parts are in one memory
    parts["gpu" if model.gpu else "host"] += [
        Part("weights", on_host * width * math.ceil(size.parameters / ranks)),
        Part("gathered", on_host * width * gathered(size) if ranks > 1 else 0, "pass"),
        Part(
            "activations", on_host * forward(size, width, tokens, _mask_row(size, model.longest, packing=True)), "pass"
        ),
        Part("logits", on_host * logits, "pass"),
    ]
    if model.gpu:
        parts["gpu"].append(Part("process", CUDA_CONTEXT))
        # Ranks copy their parts out of the mapped file, one tensor at a time.
        loading = width * (size.parameters if ranks == 1 else ranks * size.largest)
        parts["host"].append(Part("loading", loading, "step"))
    parts["host"].append(Part("process", ranks * model.process))
    return _workers(worker, parts)


def forward(size: ModelSize, width: int, tokens: int, masked: int) -> int:
    """Bytes of one layer on `tokens` tokens without gradients: the residual, plus attention or feed-forward."""
    attention = width * (4 * size.heads * size.head_dim + masked) + _pairs(size, masked)
    return tokens * (2 * width * size.hidden + max(8 * size.hidden, attention, 3 * width * size.intermediate))


@dataclass(frozen=True)
class Cache:
    """The KV cache of one engine."""

    bytes: int
    """Over all of the engine's GPUs."""
    sequences: int
    """Sequences of `max_model_len` tokens that it holds."""
    longest: int


def kv_bytes(size: ModelSize, width: int, ranks: int = 1) -> int:
    """Bytes that one layer caches of one token on each rank: vLLM divides KV heads, but no compressed cache."""
    return width * (size.latent or 2 * max(1, size.kv_heads // ranks) * size.head_dim)


def sequence_bytes(size: ModelSize, per_token: int, tokens: int, block: int, batch: int) -> int:
    """Bytes that vLLM reserves in the cache for one sequence, in whole blocks of tokens of `per_token` bytes in a
    layer. A layer with a sliding window keeps the window and what two batches (of `batch` tokens) in flight may
    add (`SlidingWindowSpec`). Layers of both kinds form groups of one size, the last padded
    (`_get_kv_cache_groups_uniform_page_size`)."""
    whole = math.ceil(tokens / block)
    full = size.layers - size.windowed
    if not size.windowed:
        return per_token * block * full * whole
    kept = math.ceil(min(size.window - 1 + 2 * batch, tokens) / block) + 1
    if not full:
        return per_token * block * size.windowed * kept
    few, many = sorted((full, size.windowed))
    group = many if many < 1.5 * few else few
    return per_token * block * group * (math.ceil(full / group) * whole + math.ceil(size.windowed / group) * kept)


def engine(
    worker: str,
    size: ModelSize,
    dtype: Dtype,
    config: EngineConfig,
    gpu: int | None,
    process: int,
    transfer: int = 0,
    adapters: int = 0,
    graphs: int = 0,
) -> tuple[tuple[WorkerMemory, ...], Cache | None]:
    """Memory of one vLLM engine, and its cache (None if its size is unknown).

    On a GPU vLLM takes the share `gpu_memory_utilization` and uses what the model leaves of it as the cache; without
    room for any sequence the cache holds 0 sequences.

    Args:
        gpu: Memory of one GPU in bytes, 0 if unknown, or None if the engine runs on the CPU.
        process: Host memory of the engine's processes without the model, in bytes.
        transfer: Memory of the buffers for new weights, in bytes.
        adapters: Memory that the layers have for adapters, in bytes; each rank of an engine counts with all of it.
        graphs: Memory of the CUDA graphs, in bytes, if the cache has to leave it free.
    """
    width, ranks = WIDTHS[dtype], config.tensor_parallel_size
    # vLLM's CPU build packs the output head; of a tied one it keeps the embedding as well.
    packed = width * size.vocabulary * size.hidden if gpu is None and size.head == 0 else 0
    weights = math.ceil((size.packed or width * size.parameters) / ranks) + packed
    block = KV_BLOCK["host" if gpu is None else "gpu"]
    batch = config.cpu_batch_tokens if gpu is None else config.gpu_batch_tokens
    needed = sequence_bytes(size, kv_bytes(size, width, ranks), config.max_model_len, block, batch)
    if gpu is None:
        cache = int(config.kv_cache_gib * GIB)
        at_work = forward(size, width, batch, config.max_model_len)
        parts = [Part("weights", weights), Part("kv cache", cache), Part("activations", at_work, "pass")]
        # What is freed between passes stays with the C library: copies of the logits to sample from, and, of a weight
        # update, the largest tensor as it was received and as it is packed anew.
        logits = Part("logits", 12 * config.max_num_seqs * size.vocabulary, "pass")
        loading = Part("loading", 2 * width * size.largest, "step")
        buffers = Part("transfer", transfer), Part("adapters", adapters)
        held = (*parts, logits, loading, *buffers, Part("process", process))
        memory = WorkerMemory(worker, "host", tuple(part for part in held if part.bytes))
        return (memory,), Cache(cache, cache // needed, config.max_model_len)
    host = WorkerMemory(worker, "host", (Part("process", process),))
    at_work = forward(size, width, batch, 0) // ranks + config.max_num_seqs * size.vocabulary * 12
    fixed = [Part("weights", weights), Part("activations", at_work, "pass"), Part("process", CUDA_CONTEXT)]
    fixed += [part for part in (Part("adapters", adapters), Part("graphs", graphs)) if part.bytes]
    sent = Part("transfer", transfer)
    if not gpu:
        return (WorkerMemory(worker, "gpu", (*fixed, sent)), host), None
    cache = max(0, int(config.gpu_share * gpu) - sum(part.bytes for part in fixed))
    memory = WorkerMemory(worker, "gpu", (*fixed, Part("kv cache", cache), sent))
    return (memory, host), Cache(cache * ranks, cache // needed, config.max_model_len)


_LAYERS: Mapping[str, Callable[[ModelSize], tuple[int, int]]] = {
    "q_proj": lambda size: (size.hidden, size.heads * size.head_dim),
    "k_proj": lambda size: (size.hidden, size.kv_heads * size.head_dim),
    "v_proj": lambda size: (size.hidden, size.kv_heads * size.head_dim),
    "o_proj": lambda size: (size.heads * size.head_dim, size.hidden),
    "gate_proj": lambda size: (size.hidden, size.intermediate),
    "up_proj": lambda size: (size.hidden, size.intermediate),
    "down_proj": lambda size: (size.intermediate, size.hidden),
}
"""Inputs and outputs of the linear layers by their most frequent names."""
_AT_ONCE = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


def adapter_numbers(size: ModelSize, lora: LoraConfig, rank: int | None = None) -> int:
    """Numbers of a model's adapters (of `rank`); a layer of another name counts as one from states to feed-forward."""
    names = tuple(_LAYERS) if lora.targets == ALL_LINEAR else lora.targets
    sides = (_LAYERS[name](size) if name in _LAYERS else (size.hidden, size.intermediate) for name in names)
    return size.layers * (rank or lora.rank) * sum(map(sum, sides))


def in_engine(lora: LoraConfig) -> LoraConfig:
    """The adapters that an engine has memory for: of layers that it computes at once, all or none have some."""
    if lora.targets == ALL_LINEAR:
        return lora
    together = (layers for layers in _AT_ONCE if not layers.isdisjoint(lora.targets))
    return lora.model_copy(update={"targets": tuple(frozenset(lora.targets).union(*together))})


def bucket_bytes(size: ModelSize, dtype: Dtype) -> int:
    """Bytes of the largest bucket of weights sent from device to device."""
    return max(BUCKET, WIDTHS[dtype] * size.largest)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _workers(worker: str, parts: dict[Where, list[Part]]) -> tuple[WorkerMemory, ...]:
    return tuple(
        WorkerMemory(worker, where, tuple(part for part in held if part.bytes)) for where, held in parts.items() if held
    )
