"""Predicts the speed of a run on GPUs.

A roofline of both sides, in seconds: each kind of work at the share of a GPU's peak that it reaches on an H100.
Sequences are as long as the spec allows. The numbers rank layouts. `troupe bench` measures the sampling: with its
rates the engines' seconds and the lengths are measured, and the trainers' are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from troupe.orchestrator.model_facts.model_size import ModelSize
from troupe.orchestrator.plan.balance import Division, Stages, divisions
from troupe.orchestrator.plan.memory import PlacedWorker, Sizes
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.worker_memory import BUCKET, WIDTHS, Cache, adapter_numbers, kv_bytes
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.roles.table import settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sizes import longest_sequence
from troupe.orchestrator.spec.derived.training import needs_old_logprobs, resolved_backend
from troupe.orchestrator.spec.roles import TrainerRole
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import PolicyConfig
from troupe.workers.contract.gpus import GpuPeaks, gpu_peaks
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.weight_backends import BACKENDS

PRODUCTS, ATTENTION, TRAFFIC = 0.68, 0.35, 0.78
"""Shares of the peak that matrix products, FlashAttention 2 and memory traffic reach."""
EXPOSED_GATHERS, EXPOSED_SUMS = 0.35, 0.5
"""Shares of ZeRO's communication in a micro-batch that no computation hides."""
NETWORK = 50e9
"""Bytes per second of a GPU's part of the network between nodes: 400 Gb/s."""
PCIE = 25e9
"""Bytes per second between a GPU and pinned host memory."""
HOST_CORE = 12e9
"""Bytes per second of optimizer states that one core updates in host memory."""
LAYER_START_S = 4e-3
"""Host time in which a layer's kernels of a forward and a backward pass are started."""
DECODE_S, DECODE_LAYER_S, REDUCE_S = 1.5e-3, 30e-6, 10e-6
"""Time of a decoding step without its work: scheduling and sampling; each layer; each sum over an engine's GPUs."""
IPC_BUCKET_S, FILE = 10e-3, 5e9
"""Time of a bucket of weights on a shared GPU; bytes per second through a file in memory."""
DRAIN = 1.7
"""How many times longer sampling takes if nothing follows: until the longest response ends. NeMo-RL publishes 1,102
tokens/s/GPU with steps in turn and 1,910 with steps that overlap (Qwen3-30B-A3B)."""


@dataclass(frozen=True)
class Rates:
    """What `troupe bench` measured of the engines of a spec."""

    tokens_per_s: float
    """Tokens that an engine samples per second of a batch that nothing follows."""
    drain: float
    """How many times more sequences an engine decodes together at most than on average over the batch."""
    prompt_tokens: float
    """Mean per sequence."""
    response_tokens: float
    group_s: float
    """From a late sequence's first token to its last (the 99th percentiles)."""

    def stages(self, spec: RolloutSpec, training_s: float, transfer_s: float, others_s: float) -> Stages:
        """The stages of a step whose sampling was measured. Engines that always have more to sample are at most as
        much faster as they then decode more sequences together, and no faster than others publish."""
        drain = min(DRAIN, self.drain)
        batch_s = spec.samples_per_step * self.response_tokens / (self.tokens_per_s * spec.roles.rollout.workers)
        return Stages(batch_s / drain, training_s, transfer_s, self.group_s, drain, others_s)


@dataclass(frozen=True)
class Prediction:
    """The seconds of one step, and what follows from them."""

    sampling_s: float
    """In which engines sample its batch; 0 in a run without engines."""
    training_s: float
    """In which trainers score and train on its batch."""
    transfer_s: float
    """In which weights are sent, and GPUs that are shared change hands: nobody works."""
    step_s: float
    tokens_per_gpu: float
    """Tokens of sequences per second and GPU of engines and trainers."""
    mfu: float
    """Share of their peak that the policy's GPUs reach in updates; recomputation and attention do not count."""
    sampling_gpus: int
    training_gpus: int
    idle: tuple[float, float] = (1.0, 0.0)
    """Shares of a step in which engines, and trainers, wait for the others."""
    staleness: float = 0.0
    """Mean of the samples, in versions."""
    divided: bool = False
    """Whether each of these GPUs either samples or trains."""
    shorter: tuple[Division, ...] = ()
    """Divisions of these GPUs with which a step is shorter, the shortest first."""
    rates: Rates | None = None
    """What the sampling was computed from, or None if it is predicted, too."""

    def as_json(self) -> dict[str, float]:
        """The numbers of the prediction, the shares of a step in which each side waits, and which side was measured."""
        apart = ("idle", "divided", "shorter", "rates")
        numbers = {name: value for name, value in vars(self).items() if name not in apart}
        waits = dict(zip(("sampling_idle", "training_idle"), self.idle, strict=True))
        return numbers | waits | {"sampling_measured": self.rates is not None}


def predict(
    spec: RunSpec,
    rows: Sequence[PlacedWorker],
    nodes: Sequence[Node],
    sizes: Sizes,
    caches: Mapping[str, Cache],
    rates: Rates | None = None,
) -> Prediction | None:
    """The speed of a spec whose workers are placed, or None without a known type of GPU and size of the model.
    `rates`: measured rates of its engines, or None if they are predicted."""
    known = [gpu_peaks(node.gpu_type) for node in nodes if node.gpus]
    peaks = [each for each in known if each is not None]
    size = sizes.of(spec.model)
    if spec.device != "cuda" or size is None or not peaks or len(peaks) < len(known):
        return None
    cluster = _Cluster(min(peaks, key=lambda each: each.flops), rows, nodes)
    (tokens, length), trainers = _step_tokens(spec, rates), spec.roles.trainers()
    trained = {name: _training(spec, name, role, (tokens, length), sizes, cluster) for name, role in trainers.items()}
    policies, (training_s, mfu) = trainers["policy"].workers, trained["policy"]
    others_s = max((seconds for name, (seconds, _) in trained.items() if name != "policy"), default=0.0)
    if spec.rollouts is None:
        return Prediction(0.0, training_s, 0.0, training_s, tokens / training_s / policies, mfu, 0, policies)
    rollouts: RolloutSpec = spec.rollouts
    engine, limit = rollouts.roles.rollout, rollouts.schedule.max_staleness
    transfer_s = _transfer(rollouts, size, cluster)
    if rates is None:
        sampling_s, group_s = _sampling(rollouts, size, caches, cluster.peaks)
        stages = Stages(sampling_s, training_s, transfer_s, group_s, DRAIN, others_s)
    else:
        stages = rates.stages(rollouts, training_s, transfer_s, others_s)
    engines, step_s = engine.workers * engine.tensor_parallel_size, stages.step_s(limit)
    gpus = sum(role.workers for role in trainers.values())
    shorter, divided = (), engine.colocate_with != "policy"
    if divided:
        gpus += engines
        groups = engine.tensor_parallel_size, trainers["policy"].sequence_parallel_size
        found = divisions(stages, (engines, policies), groups, limit)
        shorter = tuple(one for one in found if one.step_s < step_s)
    return Prediction(
        sampling_s=stages.sampling_s * (1.0 if limit else stages.drain),
        training_s=max(training_s, others_s),
        transfer_s=transfer_s,
        step_s=step_s,
        tokens_per_gpu=tokens / step_s / gpus,
        mfu=mfu,
        sampling_gpus=engines,
        training_gpus=policies,
        idle=stages.waits(limit),
        staleness=stages.mean_staleness(limit),
        divided=divided,
        shorter=shorter,
        rates=rates,
    )


class _Cluster:
    """The GPUs of a run and what connects them."""

    def __init__(self, peaks: GpuPeaks, rows: Sequence[PlacedWorker], nodes: Sequence[Node]) -> None:
        self.peaks = peaks
        self._rows = rows
        self._gpus = {node.name: node.gpus for node in nodes}

    def nodes(self, *roles: str) -> set[str]:
        return {row.node for row in self._rows if row.role in roles}

    def link(self, role: str) -> float:
        """Bytes per second between the GPUs of a role. A ring over nodes uses the network of every GPU."""
        there = self.nodes(role)
        across = NETWORK * max((self._gpus.get(node, 1.0) for node in there), default=1.0)
        return self.peaks.link if len(there) < 2 else min(self.peaks.link, across)


def _step_tokens(spec: RunSpec, rates: Rates | None) -> tuple[float, float]:
    """Tokens of the sequences that a step trains on, and of one of them."""
    length = longest_sequence(spec)
    if spec.offline is not None:
        return spec.offline.schedule.examples_per_step * length, length
    rollouts: RolloutSpec = spec.rollouts
    if rates is None:
        return rollouts.sequences_per_step * rollouts.roles.rollout.max_model_len, length
    measured = rates.prompt_tokens + rates.response_tokens
    return rollouts.sequences_per_step * measured, measured


def _training(
    spec: RunSpec, name: str, role: TrainerRole, batch: tuple[float, float], sizes: Sizes, cluster: _Cluster
) -> tuple[float, float]:
    """(seconds, MFU) of a trainer's work on a batch of so many tokens, in sequences of so many."""
    config, ranks = settings_of(spec, name).config, role.workers
    tokens, length = batch
    size, trainer, peaks = sizes.of(config.model), config.trainer, cluster.peaks
    if size is None:
        return 0.0, 0.0
    width, adapters = WIDTHS[config.model.dtype], config.lora is not None
    stage = trainer.stage_for(ranks, width == 4)
    own = spec.schedule.epochs * tokens / ranks
    micro = min(trainer.worker_tokens, own)
    batch_s = micro * token_seconds(size, trainer, length, peaks, adapters=adapters)
    batch_s = max(batch_s, size.layers * LAYER_START_S * _passes(trainer, size) / 3)
    trained = adapter_numbers(size, config.lora) if adapters else size.parameters
    link = cluster.link(name)
    if ranks > 1 and stage == 3:
        batch_s += EXPOSED_GATHERS * (_passes(trainer, size) - 1) * width * size.parameters / link
    if ranks > 1 and stage >= 2:
        batch_s += EXPOSED_SUMS * width * trained / link
    optimizer_s = _optimizer(trainer, role.cpus, trained, width, ranks, stage, link, peaks)
    updates_s = own / micro * batch_s + spec.schedule.updates_per_step * optimizer_s
    mfu = (4 if adapters else 6) * size.multiplied() * own / (updates_s * peaks.flops)
    scored = _scored(spec.rollouts, config, sizes) if isinstance(config, PolicyConfig) else 0
    return updates_s + scored * tokens / ranks * 2 / (PRODUCTS * peaks.flops), mfu


def _scored(spec: RolloutSpec, config: PolicyConfig, sizes: Sizes) -> int:
    """Weights that a token is multiplied with in the policy's workers, in passes without a gradient: each model scores
    it once, and teachers that compare all of their logits run again in every epoch."""
    reference = [] if config.reference_model is None else [config.reference_model]
    teachers = [config.teacher_models.get(name, config.model) for name in config.teachers]
    passes = [*reference, *teachers, *[config.model] * needs_old_logprobs(spec)]
    if config.loss.distill.in_process:
        passes += (teachers or reference) * spec.schedule.epochs
    return sum(size.multiplied() for model in passes if (size := sizes.of(model)) is not None)


def _passes(trainer: TrainerConfig, size: ModelSize) -> float:
    """Forward passes with the traffic of an update: a backward pass is two, and repeats the recomputed layers."""
    return 3 + trainer.recomputed(size.layers) / size.layers


def token_seconds(
    size: ModelSize, trainer: TrainerConfig, length: float, peaks: GpuPeaks, *, adapters: bool = False
) -> float:
    """Seconds in which one GPU computes the update of one token, without communication. Traffic, in bytes of
    bfloat16, is of norms, residuals, rotary positions and the gated feed-forward. The head computes its logits
    twice, in float32."""
    passes = _passes(trainer, size)
    products, traffic = PRODUCTS * peaks.flops, TRAFFIC * peaks.bandwidth
    head = size.vocabulary * size.hidden
    multiplied = passes if trainer.recompute_products else 3
    body = 2 * (size.multiplied() - head) * (multiplied - adapters) / products
    spans = (size.layers - size.windowed) * length / 2 + size.windowed * min(size.window, length / 2)
    attention = (multiplied - 2 + 2.5) * 4 * size.heads * size.head_dim * spans / (ATTENTION * peaks.flops)
    projected = (size.heads + size.kv_heads) * size.head_dim
    layer = 64 * size.hidden + 20 * projected + 10 * size.intermediate
    if trainer.kernels == "liger":
        layer = 16 * size.hidden + 4 * projected + 6 * size.intermediate
    layer += 8 * size.experts * size.hidden
    logits = 8 * head / products + 8 * size.vocabulary / traffic
    return body + attention + passes * size.layers * layer / traffic + logits


def _optimizer(
    trainer: TrainerConfig, cpus: float, trained: int, width: int, ranks: int, stage: int, link: float, peaks: GpuPeaks
) -> float:
    """Seconds of an optimizer step: 28 bytes for each number read or written, and below ZeRO-3 weights are gathered."""
    share = trained / ranks if stage else trained
    apart = ranks > 1 and stage < 3
    exchanged = (2 if stage < 2 else 1) * width * trained / link if apart else 0.0
    if trainer.offload_optimizer:
        return exchanged + 28 * share / (HOST_CORE * max(1.0, cpus)) + (4 + width) * share / PCIE
    return exchanged + 28 * share / (TRAFFIC * peaks.bandwidth)


def _sampling(spec: RolloutSpec, size: ModelSize, caches: Mapping[str, Cache], peaks: GpuPeaks) -> tuple[float, float]:
    """Seconds in which engines that always have more to sample do so for a batch, and of one of its groups."""
    role, width = spec.roles.rollout, WIDTHS[spec.model.dtype]
    ranks, response = role.tensor_parallel_size, min(spec.sampling.max_tokens, role.max_model_len - 1)
    prompt = role.max_model_len - response
    samples, context = spec.samples_per_step / role.workers, prompt + response / 2
    own = [cache for name, cache in caches.items() if role_of(name) == "rollout"]
    kept = min((cache.sequences * cache.longest for cache in own), default=0)
    at_once = min(role.max_num_seqs, samples * (1 + spec.schedule.max_staleness), max(1.0, kept / context))
    decoding = response * decode_seconds(size, width, ranks, at_once, context, peaks) * samples / at_once
    prefill = 2 * size.multiplied() * prompt / (ranks * PRODUCTS * peaks.flops) * samples / max(spec.group_sizes)
    return decoding + prefill, (decoding + prefill) * at_once / samples


def decode_seconds(size: ModelSize, width: int, ranks: int, sequences: float, context: float, peaks: GpuPeaks) -> float:
    """Seconds in which an engine of `ranks` GPUs samples one token of each sequence: weights and caches are read, or
    the products take longer."""
    cached = (size.layers - size.windowed) * context + size.windowed * min(size.window, context)
    read = width * size.multiplied(sequences) / ranks + sequences * kv_bytes(size, width, ranks) * cached
    products = 2 * size.multiplied() * sequences / ranks
    work = max(read / (TRAFFIC * peaks.bandwidth), products / (PRODUCTS * peaks.flops))
    sums = 0.0
    if ranks > 1:
        sums = 2 * size.layers * (REDUCE_S + 2 * width * sequences * size.hidden / peaks.link)
    return DECODE_S + DECODE_LAYER_S * size.layers + work + sums


def _transfer(spec: RolloutSpec, size: ModelSize, cluster: _Cluster) -> float:
    """Seconds in which new weights reach the engines, and shared GPUs change hands."""
    policy, width = spec.roles.policy, WIDTHS[spec.model.dtype]
    trained = size.parameters if policy.lora is None else adapter_numbers(size, policy.lora)
    backend, link = BACKENDS[resolved_backend(spec)], cluster.peaks.link
    if backend.writes_file:
        rate = FILE
    elif backend.shared_gpu:
        rate = BUCKET / IPC_BUCKET_S
    else:  # one GPU sends
        rate = link / 2 if len(cluster.nodes("rollout", "policy")) < 2 else min(link, NETWORK)
    moves = spec.roles.sleepers() and not policy.offload_optimizer
    return width * trained / rate + (2 * 12 * trained / policy.workers / PCIE if moves else 0.0)
