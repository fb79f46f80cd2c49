"""Chooses the settings of a first spec: of the candidates that fit the machine, the fastest by `troupe plan`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

from troupe.orchestrator.algorithms.description import roles_besides
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.errors import DoesNotFit, UsageError
from troupe.orchestrator.model_facts.families import undivided
from troupe.orchestrator.model_facts.model_size import ModelSize, SizeUnknown, config_or_empty, read_size
from troupe.orchestrator.plan.placement import GPU_GIB, Node
from troupe.orchestrator.plan.plan import Plan, described_nodes, has_fast_bfloat16, plan_stages
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.checks.models import ATTENTION, has_experts, has_latent_attention
from troupe.orchestrator.spec.errors import Place, Source, SpecError
from troupe.orchestrator.spec.load import plan_runs
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.orchestrator.starter.choices import LONG_TURNS, TURNS, Choices, Data, environment_section, reward_of
from troupe.workers.contract.config_base import ModelConfig

_SMALL, _TINY = 500_000_000, 200_000_000
"""Parameters below which a model takes ten times the learning rate; and, with rollouts, thirty times, falling to 0."""
_GENTLE = frozenset({"dpo", "ipo", "kto"})
"""Offline algorithms whose papers use a small learning rate."""
_MOST_SEQUENCES = 256
_ROOMY = (True, True, 0.0)
"""Rank of a candidate that fits and leaves memory free, if nothing predicts its speed."""
_STAGES = 3
"""Settings of a group that differ in ZeRO's stage only: the last ones need the least memory."""
_PER_NODE = 8
"""GPUs of each node of a machine with more."""
_ADAPTER_RATE = 10
"""Learning rate of adapters, as a multiple of the rate of all weights."""


Recomputed = Literal["nothing", "all but products", "all"]
_RECOMPUTED: Mapping[Recomputed, Mapping[str, bool]] = {
    "nothing": {},
    "all but products": {"gradient_checkpointing": True, "recompute_products": False},
    "all": {"gradient_checkpointing": True},
}
"""What the backward pass computes again, and the trainer's fields for it: the fastest first."""


@dataclass(frozen=True)
class Sizing:
    """What the size of machine and model decide."""

    dtype: str = "bfloat16"
    micro_batch_tokens: int = 4096
    recomputed: Recomputed = "nothing"
    """What the backward pass computes again."""
    zero_stage: int = 1
    offload_optimizer: bool = False
    rollouts: int = 1
    policies: int = 1
    critics: int = 0
    """Workers of the critic, or engines of the reference for an algorithm that samples it."""
    tensor_parallel: int = 1
    shared_gpus: bool = False
    """Whether engines run on the policy's GPUs."""
    kv_cache_gib: float = 1.0
    max_num_seqs: int = 64
    adapters: bool = False
    """Whether low-rank adapters train instead of all weights."""


def fitting_document(choices: Choices, data: Data) -> tuple[dict[str, Any], Plan]:
    """The spec for these choices that fits the machine, as plain data, and its plan. Raises DoesNotFit if no candidate
    fits, with the message of the last one; UsageError if there are too few GPUs for the algorithm's roles; SpecError if
    the choices name something that does not exist, or is not valid."""
    first = next(candidates(choices, longest(choices, data)), None)
    if first is not None:  # what the machine lacks is asked once, not of every candidate
        _check(_document(choices, data, first[0]))
    settings, found = _best(choices, data)
    if settings is None or found is None:
        other = "critic" if "critic" in ALGORITHMS[choices.algorithm].required else "an engine of the reference"
        raise UsageError(f"--gpus: {choices.algorithm} needs at least 2 GPUs: policy and {other} have one each")
    if found.misfit:
        why = f"{found.misfit}{_larger_gpus(choices, data)}"
        raise DoesNotFit(f"{choices.model} does not fit this machine: {why}")
    held = min((cache.sequences for cache in found.memory.caches.values()), default=settings.max_num_seqs)
    # Few sequences grow to the full length, so a cache serves twice as many as it holds at that length.
    at_once = min(settings.max_num_seqs, max(8, 1 << (2 * held).bit_length() - 1))
    document = _document(choices, data, replace(settings, max_num_seqs=at_once))
    _check(document)
    return document, _plan(document, choices)


def _best(choices: Choices, data: Data) -> tuple[Sizing | None, Plan | None]:
    """The settings that fit, with adapters if all weights do not fit; else the last ones, or None without a layout."""
    whole = _fastest(choices, data, candidates(choices, longest(choices, data)))
    if whole[1] is None or not whole[1].misfit:
        return whole
    adapted = _fastest(choices, data, adapted_candidates(choices, longest(choices, data)))
    return whole if adapted[1] is None or adapted[1].misfit else adapted


def _fastest(choices: Choices, data: Data, groups: Iterator[list[Sizing]]) -> tuple[Sizing | None, Plan | None]:
    """The fastest settings that leave memory free, else the fastest that fit, else the last, or None. The optimizer
    is in host memory only if nothing else leaves memory free; without a prediction the first settings count."""
    best: tuple[Sizing | None, Plan | None] = None, None
    for group in groups:
        offloads = best[0] is not None and best[0].offload_optimizer
        if _rank(best) == _ROOMY or (_rank(best) > _ROOMY and group[0].offload_optimizer and not offloads):
            break
        one = _first(choices, data, group)
        best = max(best, one, key=_rank) if _rank(best)[0] else one
    settings, found = best
    if settings is not None and found is not None and found.predicted is not None:
        for one in found.predicted.shorter:
            engines = one.sampling // settings.tensor_parallel
            other = _first(choices, data, [replace(settings, rollouts=engines, policies=one.training)])
            if _rank(other) > _rank(best):
                return other
    return best


def _rank(candidate: tuple[Sizing | None, Plan | None]) -> tuple[bool, bool, float]:
    """Whether the candidate fits, whether it leaves memory free, and its predicted speed."""
    found = candidate[1]
    if found is None or found.misfit:
        return False, False, 0.0
    return True, not found.memory.warnings, 0.0 if found.predicted is None else found.predicted.tokens_per_gpu


def _first(choices: Choices, data: Data, group: list[Sizing]) -> tuple[Sizing, Plan]:
    """The first settings that fit and leave memory free, else the first that fit, else the last."""

    @cache
    def planned(settings: Sizing) -> tuple[Sizing, Plan]:
        return settings, _plan(_document(choices, data, settings), choices)

    last = planned(group[-1])
    if all(planned(settings)[1].misfit for settings in reversed(group[-_STAGES:])):
        return last
    tight: tuple[Sizing, Plan] | None = None
    for settings in group:
        one = planned(settings)
        if _rank(one) >= _ROOMY:
            return one
        tight = tight or (None if one[1].misfit else one)
    return tight or last


def _larger_gpus(choices: Choices, data: Data) -> str:
    """The smallest type of GPU that fits in the same number, as the end of a sentence; empty if there is none."""

    def fits(kind: str) -> bool:
        return _fits(replace(choices, gpu_type=kind), data)

    least = GPU_GIB[choices.gpu_type] if choices.gpu_type else math.inf
    larger = sorted((kind for kind in GPU_GIB if GPU_GIB[kind] > least), key=GPU_GIB.__getitem__)
    if not larger or not fits(larger[-1]):
        return ""
    return f"; it fits {choices.gpus} {larger[bisect_left(larger, True, hi=len(larger) - 1, key=fits)]}"


def _fits(choices: Choices, data: Data) -> bool:
    """Whether any candidate fits, with all weights or with adapters."""
    tokens = longest(choices, data)
    groups = chain(candidates(choices, tokens), adapted_candidates(choices, tokens))
    tried = (settings for group in groups for settings in reversed(group[-_STAGES:]))
    return any(not _plan(_document(choices, data, settings), choices).misfit for settings in tried)


def nodes(choices: Choices) -> list[Node] | None:
    """The node that the choices describe, or None for this machine's CPUs."""
    if not choices.gpus:
        return None
    return described_nodes(cluster(choices), choices.cpus)


def cluster(choices: Choices) -> str:
    """The machine as `troupe plan --cluster` takes it: one node, or nodes of eight GPUs each."""
    whole = choices.gpus % _PER_NODE == 0
    described = f"{choices.gpus // _PER_NODE}x{_PER_NODE}" if whole and choices.gpus else f"1x{choices.gpus}"
    return described + (f"x{choices.gpu_type}" if choices.gpu_type else "")


def longest(choices: Choices, data: Data) -> int:
    """Longest sequence in tokens."""
    if choices.offline:
        return data.prompt_tokens + data.response_tokens
    if not choices.environment:
        return data.prompt_tokens + response_tokens(choices)
    # The environment may answer each turn with as much again. An episode ends with the model's positions.
    tokens = data.prompt_tokens + 2 * TURNS * response_tokens(choices)
    positions = config_or_empty(Path(choices.model)).get("max_position_embeddings")
    return min(tokens, positions) if isinstance(positions, int) else tokens


def response_tokens(choices: Choices) -> int:
    """Longest response, or turn of an episode, that is sampled."""
    if choices.max_tokens:
        return choices.max_tokens
    if not choices.gpus:
        return 256 if choices.environment in LONG_TURNS else 64
    return 512 if choices.environment else 1024


def candidates(choices: Choices, tokens: int) -> Iterator[list[Sizing]]:
    """Settings to try: groups of one layout each, the fastest settings of a group first."""
    for group in _layout_groups(choices, tokens):
        if not _solves(choices):
            yield group
        elif whole := [one for one in group if one.zero_stage < 2 and one.recomputed == "nothing"]:
            yield list(dict.fromkeys(replace(one, dtype="float32") for one in whole))


def _solves(choices: Choices) -> bool:
    """Whether the policy's step is a natural gradient: in float32, of all weights, without AdamW."""
    return not choices.offline and ALGORITHMS[choices.algorithm].natural_gradient is not None


def _layout_groups(choices: Choices, tokens: int) -> Iterator[list[Sizing]]:
    micro = [size for size in (16384, 8192, 4096, 2048, 1024) if size >= tokens] or [tokens]
    row = None if choices.offline else ALGORITHMS[choices.algorithm]
    critic = row is not None and ("critic" in row.required or row.advantage.compares_reference)
    if not choices.gpus:
        small = [n for n in micro if n <= max(2048, micro[-1])]
        dtypes = ("bfloat16",) if has_fast_bfloat16() else ("float32", "bfloat16")
        options = product(dtypes, _RECOMPUTED, small, (1.0, 0.5, 0.25))
        yield [
            Sizing(dtype, size, recomputed, critics=int(critic), kv_cache_gib=cache)
            for dtype, recomputed, size, cache in options
        ]
        return
    layouts = list(_layouts(choices, critic))
    for offload, layout, recomputed in product((False, True), layouts, _RECOMPUTED):
        if offload and recomputed == "nothing":
            continue
        yield [
            replace(
                layout,
                micro_batch_tokens=size,
                recomputed=recomputed,
                zero_stage=zero,
                offload_optimizer=offload,
            )
            for size, zero in product(micro, (2, 3) if offload else (1, 2, 3))
        ]


def adapted_candidates(choices: Choices, tokens: int) -> Iterator[list[Sizing]]:
    """The candidates that adapters support, with them."""
    model = ModelConfig(path=choices.model)
    if _solves(choices):
        return
    if has_experts(model) and has_latent_attention(model):
        return  # its layers outside of the experts have other names in every family
    for group in candidates(choices, tokens):
        if not group[0].offload_optimizer:  # the adapters' is small
            yield [replace(settings, adapters=True) for settings in group]


def _layouts(choices: Choices, critic: bool) -> Iterator[Sizing]:
    """Ways to divide the GPUs: some of them sample and the others train, or all do both, one after the other."""
    gpus, base = choices.gpus, Sizing(max_num_seqs=_MOST_SEQUENCES)
    if choices.offline:
        yield replace(base, policies=gpus)
        return
    critics = max(1, gpus // 4) if critic else 0
    size = _size(choices)
    for parallel in (1, 2, 4, 8):
        if parallel > min(gpus // 2, _PER_NODE) or (size is not None and undivided(size, parallel)):
            continue
        for engines in dict.fromkeys(max(1, gpus * quarters // 4 // parallel) for quarters in (2, 1, 3)):
            training = gpus - engines * parallel
            if training > critics:
                yield replace(
                    base, rollouts=engines, policies=training - critics, critics=critics, tensor_parallel=parallel
                )
    policies = gpus - critics
    for parallel in (1, 2, 4, 8):
        if policies < 1 or policies % parallel or (size is not None and undivided(size, parallel)):
            continue
        shared = replace(base, rollouts=policies // parallel, policies=policies, critics=critics, shared_gpus=True)
        yield replace(shared, tensor_parallel=parallel)


def _plan(document: dict[str, Any], choices: Choices) -> Plan:
    """The plan of a document. Raises SpecError if it is not valid."""
    return next(plan for _, plan in plan_stages(_read(document), nodes(choices)))


def _check(document: dict[str, Any]) -> None:
    """Raise SpecError for anything but memory and places that keeps a document from running on this machine."""
    if problems := [problem for run in _read(document) for problem in run.missing()]:
        raise SpecError(problems)


def _read(document: dict[str, Any]) -> tuple[PlannedRun, ...]:
    return plan_runs(Document(document, Source("troupe init", {}, Place("troupe init"))))


def _document(choices: Choices, data: Data, settings: Sizing) -> dict[str, Any]:
    top = {"name": choices.name, "seed": 1, "model": {"path": choices.model, "dtype": settings.dtype}}
    return top | (_offline(choices, data, settings) if choices.offline else _rollouts(choices, data, settings))


def _policy(choices: Choices, settings: Sizing) -> dict[str, Any]:
    rate = {} if _solves(choices) else learning_rate(choices)
    return _trainer(choices, settings, settings.policies, rate)


def _trainer(choices: Choices, settings: Sizing, workers: int, rate: dict[str, Any]) -> dict[str, Any]:
    memory: dict[str, Any] = {"zero_stage": settings.zero_stage} if workers > 1 or settings.offload_optimizer else {}
    if settings.offload_optimizer:
        memory["offload_optimizer"] = True
    memory |= _RECOMPUTED[settings.recomputed]
    if settings.adapters:
        targets = {"targets": [*ATTENTION]} if has_experts(ModelConfig(path=choices.model)) else {}
        memory["lora"] = {"rank": 16, "alpha": 32, **targets}
        rate = rate | {"learning_rate": rate["learning_rate"] * _ADAPTER_RATE}
    return {
        "workers": workers,
        **_cores(choices, settings),
        **memory,
        "micro_batch_tokens": settings.micro_batch_tokens,
        **rate,
    }


def _cores(choices: Choices, settings: Sizing) -> dict[str, Any]:
    """Cores and GPUs of a worker. On the CPU roles run one after another: each may use every core."""
    heavy = settings.rollouts + settings.policies + settings.critics
    if choices.gpus:
        return {"cpus": max(1, min(4, choices.cpus // (2 * heavy))), "gpus": 1}
    share = 0.75 * choices.cpus / (1 if choices.offline else heavy)
    return {"cpus": max(0.1, int(10 * share) / 10), "threads": choices.cpus}


def _size(choices: Choices) -> ModelSize | None:
    try:
        return read_size(Path(choices.model))
    except SizeUnknown:
        return None


def learning_rate(choices: Choices) -> dict[str, Any]:
    """The policy's learning rate and, if it falls, its schedule."""
    known = _size(choices)
    size = math.inf if known is None else known.parameters
    if not choices.offline:
        if size < _TINY:
            return {"learning_rate": 3e-5, "schedule": "linear"}
        return {"learning_rate": 1e-5 if size < _SMALL else 1e-6}
    if choices.algorithm in _GENTLE:
        return {"learning_rate": 5e-6 if size < _SMALL else 5e-7}
    return {"learning_rate": 1e-5}


def _offline(choices: Choices, data: Data, settings: Sizing) -> dict[str, Any]:
    roles: dict[str, Any] = {"policy": _policy(choices, settings)}
    if OFFLINE_ALGORITHMS[choices.algorithm].reference:
        roles["reference"] = {"colocate_with": "policy"}
    return {
        "roles": roles,
        "algorithm": {"name": choices.algorithm},
        "schedule": {"steps": choices.steps, "examples_per_step": max(16, 8 * settings.policies)},
        "data": {**data.section, "max_length": longest(choices, data)},
        **({"evaluation": {"every_steps": 20}} if "eval" in data.section else {}),
        "checkpoint": {"every_steps": 50, "keep": 2},
    }


def _rollouts(choices: Choices, data: Data, settings: Sizing) -> dict[str, Any]:
    row = ALGORITHMS[choices.algorithm]
    prompts = (64 if choices.gpus else 8) if row.group_size > 1 else (256 if choices.gpus else 32)
    prompts *= max(1, choices.gpus // _PER_NODE)
    engine: dict[str, Any] = {"workers": settings.rollouts, **_cores(choices, settings)}
    if settings.tensor_parallel > 1:
        engine |= {"gpus": settings.tensor_parallel, "tensor_parallel_size": settings.tensor_parallel}
    sequences = {"max_num_seqs": settings.max_num_seqs, "max_model_len": longest(choices, data)}
    memory = {"enforce_eager": True, "kv_cache_gib": settings.kv_cache_gib}
    if choices.gpus:
        memory = {"gpu_memory_utilization": 0.9}
    engine |= sequences
    policy = _policy(choices, settings)
    if settings.shared_gpus:
        del engine["gpus"]  # it has the policy's
        engine |= {"colocate_with": "policy", "sleep": "kv_cache"}
    else:
        engine |= memory
    roles: dict[str, Any] = {"rollout": engine, "policy": policy}
    if row.advantage.compares_reference:
        roles["reference_engine"] = {"workers": settings.critics, **_cores(choices, settings), **sequences, **memory}
    elif settings.critics:
        roles["critic"] = _trainer(choices, settings, settings.critics, learning_rate(choices))
    if settings.critics or "reference" in roles_besides(row):
        roles["reference"] = {"colocate_with": "policy"}
    scorers = max(1, min(8, choices.cpus // 4))
    share = 10 if choices.environment else 20  # percent of the cores
    reward_cpus = 1 if choices.gpus else max(0.1, int(share * choices.cpus / scorers) / 100)
    roles["reward"] = {"workers": scorers, "cpus": reward_cpus, "functions": [reward_of(choices, data)]}
    if choices.environment:
        roles["environment"] = environment_section(choices, data)
    ahead = int(bool(choices.gpus) and not settings.shared_gpus)
    algorithm = {"name": choices.algorithm} | ({"group_size": row.group_size} if row.group_size > 1 else {})
    updates = {"minibatches": 2} if row.kl_penalty is not None or row.advantage.covariance == "penalize" else {}
    evaluation = {"evaluation": {"every_steps": 20, "prompts": 64}} if "eval" in data.section else {}
    return {
        "roles": roles,
        "algorithm": algorithm,
        "schedule": {"steps": choices.steps, "prompts_per_step": prompts, "max_staleness": ahead, **updates},
        "sampling": {"temperature": 1.0, "max_tokens": response_tokens(choices)},
        "data": data.section,
        **evaluation,
        "checkpoint": {"every_steps": 20, "keep": 2},
    }
