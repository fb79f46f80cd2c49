"""The phases of a step beside what this machine can do at most: its matrix products and its memory.

    python -m benchmarks.roofline                    # bfloat16, which most processors multiply faster
    python -m benchmarks.roofline --dtype float32

Each turn measures the peaks and the phases. The peak of matrix products is the highest rate among the shapes of the
model, at the tokens of a micro-batch, and a square, by torch's library and Troupe's; that of the memory is the rate of
reading 1 GiB. A phase needs at least the time that its products take at the first, or that its weights and cache take
to be read at the second, whichever is longer; the ratio is that time divided by the time that the phase took. Products
are those that the model needs: nothing that is computed again counts, and the head multiplies response tokens only.

What is not in it: `data_plane` and `weight_sync` have puts and publications beside copies of as many bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support.bare_engines import BareLLM, SampledBatch
from benchmarks.support.harness import NotCorrect, Report, Turn, Unit, command_parser, run_benchmark, take_turns
from benchmarks.support.policy_worker import policy_worker
from benchmarks.support.processes import Meter, RemoteObject
from benchmarks.support.train_rows import GroupLengths, train_batch
from benchmarks.support.workload import Settings, add_settings, encode_prompts, groups_by_turn, grpo_spec, without_eos
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.model_facts.model_size import ModelSize, read_size
from troupe.orchestrator.plan.worker_memory import WIDTHS, kv_bytes
from troupe.orchestrator.roles.settings import rollout_config
from troupe.orchestrator.training.micro_batches import plan_ranks, plan_update
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    import torch

PRODUCTS, READS, UPDATE, LOGPROBS, DECODE = "products", "reads", "update", "log-probs", "decode"
ROOFLINE = Unit("seconds at the peak", "second at the peak", digits=3)
GFLOP_S, GB_S, BOUND = "GFLOP/s", "GB/s", "seconds at the peak of the memory"
SQUARE = 2048
READ_BYTES = 2**30
REPEATS = 3
PROMPT, RESPONSE = 64, 64
"""Tokens of each sequence that is trained on."""
GROUPS, GROUP = 2, 8
VOCABULARY = 4000
"""Token ids of training are below it."""
TIMEOUT_S = 300.0
KINDS = {
    "products": (
        "aten::mm",
        "aten::matmul",
        "aten::linear",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "mkldnn::",
        "aten::mkldnn",
        "aten::_addmm",
    ),
    "attention": ("aten::_scaled_dot", "aten::scaled_dot"),
    "conversions and copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::gather", "aten::embed"),
    "optimizer": ("aten::_fused_adam",),
    "element-wise and sums": ("aten::",),
}
"""Beginnings of the names of operators, by kind; the first one that fits counts."""
REST = "Python and other code"


@dataclass(frozen=True)
class Work:
    """What a phase has to do at least."""

    gflop: float
    gigabytes: float = 0.0

    def seconds(self, gflop_s: float, gb_s: float) -> float:
        """Least seconds at these peaks."""
        return max(self.gflop / gflop_s, self.gigabytes / gb_s)


def training(size: ModelSize, sequences: int, passes: int) -> Work:
    """Work of as many forward passes, or of an update with 3: the backward pass has two products for each of the
    forward pass. Attention is causal, so a token attends to half of its sequence."""
    tokens, head = sequences * (PROMPT + RESPONSE), size.vocabulary * size.hidden
    parameters = (size.multiplied() - head) * tokens + head * sequences * RESPONSE
    attention = 2 * size.layers * size.heads * size.head_dim * tokens * (PROMPT + RESPONSE) / 2
    return Work(2 * passes * (parameters + attention) / 1e9)


def decoding(size: ModelSize, width: int, prompts: int, samples: int, prompt: float, tokens: int) -> Work:
    """Work of sampling so many tokens of each of a prompt's samples, all at once, with each prompt computed once.

    The first token comes from the prompt's pass, and the head multiplies the last token of a prompt only.
    """
    sequences, head = prompts * samples, size.vocabulary * size.hidden
    spans = sequences * (tokens * prompt + tokens * tokens / 2)
    attention = 4 * size.layers * size.heads * size.head_dim * (spans + prompts * prompt * prompt / 2)
    passed = prompts * prompt + sequences * (tokens - 1)
    products = 2 * ((size.multiplied() - head) * passed + head * sequences * tokens)
    read = tokens * width * size.multiplied() + size.layers * kv_bytes(size, width) * spans
    return Work((products + attention) / 1e9, read / 1e9)


def kind_of_operator(name: str) -> str | None:
    """The kind of one of torch's operators, or None for anything else that its profiler records."""
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), None)


def seconds_by_kind(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of a call by kind of operator, by torch's profiler; the rest is what no operator took."""
    from torch.profiler import ProfilerActivity, profile

    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
        wall_s = time.perf_counter() - began
    found = dict.fromkeys((*KINDS, REST), 0.0)
    for event in profiler.key_averages():
        if kind := kind_of_operator(event.key):
            found[kind] += event.self_cpu_time_total / 1e6
    return found | {REST: max(0.0, wall_s - sum(found.values()))}


class Peaks:
    """The fastest products and reads of this machine."""

    def __init__(self, size: ModelSize, tokens: int, dtype: torch.dtype) -> None:
        """`tokens`: of a micro-batch."""
        import torch

        width, inner = size.hidden, size.intermediate
        shapes = [(tokens, width, inner), (tokens, inner, width), (tokens, width, size.vocabulary), (SQUARE,) * 3]
        self._pairs = [
            (torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), 2 * m * k * n / 1e9) for m, k, n in shapes
        ]
        self._buffer = torch.ones(READ_BYTES // 4)

    async def products(self, _: int) -> Turn:
        """The highest rate of a product."""
        import torch.nn.functional as F

        from troupe.workers.models import cpu

        ways: list[Callable[..., Any]] = [F.linear]
        if self._pairs[0][0].dtype.itemsize == 4 and cpu.onednn_is_faster():
            ways.append(cpu.product)
        meter, best = Meter(), 0.0
        for given, weight, gflop in self._pairs:
            for way in ways:
                best = max(best, gflop / least_seconds(lambda way=way, x=given, w=weight: way(x, w, None)))
        return replace(meter.turn(1.0), figures={GFLOP_S: best})

    async def reads(self, _: int) -> Turn:
        """The rate of a sum over memory that no cache holds."""
        meter = Meter()
        seconds = least_seconds(self._buffer.sum)
        return replace(meter.turn(1.0), figures={GB_S: READ_BYTES / 1e9 / seconds})


def least_seconds(call: Callable[[], object]) -> float:
    """Seconds of the fastest of `REPEATS` calls, after one that is not counted."""
    call()
    seconds: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def at_the_peak(taken: Mapping[str, Sequence[Turn]], work: Mapping[str, Work]) -> dict[str, list[Turn]]:
    """The turns with the seconds that their work takes at the peaks of their round as their amount."""
    shown: dict[str, list[Turn]] = {PRODUCTS: [], READS: []}
    for products, reads in zip(taken[PRODUCTS], taken[READS], strict=True):
        shown[PRODUCTS].append(replace(products, amount=products.wall_s))
        shown[READS].append(replace(reads, amount=reads.wall_s))
    for name, own in work.items():
        shown[name] = []
        for turn, products, reads in zip(taken[name], taken[PRODUCTS], taken[READS], strict=True):
            gflop_s, gb_s = products.figures[GFLOP_S], reads.figures[GB_S]
            figures = {GFLOP_S: own.gflop / turn.wall_s, BOUND: own.gigabytes / gb_s}
            shown[name].append(replace(turn, amount=own.seconds(gflop_s, gb_s), figures=figures))
    return shown


async def measure(given: argparse.Namespace) -> Report:
    """Start a trainer and an engine, and alternate peaks and phases. Raises NotCorrect."""
    import torch

    torch.set_num_threads(given.threads)
    settings = Settings.of(given, engines=1, lengths="fixed")
    size = read_size(given.model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(given.model, folder / "model")
        spec = grpo_spec(settings, model, given.turns + 1, given.groups * (given.turns + 1))
        pool, _ = load_pools(spec.data)
        prompts = encode_prompts(model, pool.table, range(len(pool.table)), settings.longest_prompt)
        work = groups_by_turn(settings, given.turns + 1, prompts)
        engine = RemoteObject("engine", BareLLM, rollout_config(spec), RolloutWorker)
        stack.callback(engine.close)
        worker = policy_worker(argparse.Namespace(**vars(given), device="cpu"), "roofline", RESPONSE)
        stack.callback(worker.close)
        await asyncio.to_thread(engine.call, "ready", timeout_s=TIMEOUT_S)
        summary, table = train_batch([GroupLengths(PROMPT, (RESPONSE,) * GROUP)] * GROUPS, VOCABULARY, given.seed)
        lengths, everything = [row.tokens for row in summary.rows], range(len(summary.rows))
        budget = given.micro_batch_tokens
        update = plan_update(summary.rows, everything, 1, budget, skip_zero_advantage=False, packed=worker.packs())[0]
        scoring = plan_ranks(lengths, everything, 1, budget, packed=worker.packs())[0]

        async def updates(_: int) -> Turn:
            meter = Meter()
            worker.update(update, table)
            turn = meter.turn(1.0)
            return replace(turn, phases=seconds_by_kind(lambda: worker.update(update, table)))

        async def scores(_: int) -> Turn:
            meter = Meter()
            worker.compute_logprobs(scoring, table)
            return meter.turn(1.0)

        async def decode(turn: int) -> Turn:
            meter = Meter([engine.pid])
            sampled: SampledBatch = await asyncio.to_thread(engine.call, "sample", work[turn], timeout_s=TIMEOUT_S)
            if {len(ids) for ids in sampled.response_ids} != {given.max_tokens}:
                raise NotCorrect(f"not every response has {given.max_tokens} tokens")
            return meter.turn(1.0, sampled.ended - sampled.began)

        dtype = torch.float32 if given.dtype == "float32" else torch.bfloat16
        peaks = Peaks(size, budget, dtype)
        contenders = {PRODUCTS: peaks.products, READS: peaks.reads, UPDATE: updates, LOGPROBS: scores, DECODE: decode}
        taken = await take_turns(contenders, given.turns)
    mean_prompt = sum(map(len, prompts)) / len(prompts)
    least = {
        UPDATE: training(size, GROUPS * GROUP, 3),
        LOGPROBS: training(size, GROUPS * GROUP, 1),
        DECODE: decoding(size, WIDTHS[given.dtype], given.groups, given.samples, mean_prompt, given.max_tokens),
    }
    checks = {"responses": f"all {settings.sequences} of a turn have {given.max_tokens} tokens"}
    return Report("roofline", at_the_peak(taken, least), PRODUCTS, checks, ROOFLINE)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("roofline", __doc__, 5)
    defaults = {"groups": 8, "samples": 8, "max_tokens": 32, "concurrency": 64, "threads": len(os.sched_getaffinity(0))}
    add_settings(parser, **defaults, micro_batch_tokens=1024, seed=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
