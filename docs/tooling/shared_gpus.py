"""Write the tables of the page on shared GPUs, from the arithmetic of `troupe plan`.

Run it with `python -m docs.tooling.shared_gpus`.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from troupe.orchestrator.model_facts.model_size import ModelSize, read_size
from troupe.orchestrator.plan.fit import SharedUse, gib
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.plan import Plan, described_nodes, plan
from troupe.orchestrator.plan.worker_memory import PERIODS, Part, Period, WorkerMemory
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.rollout import RolloutSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "shared-gpus.md"
SPEC = ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
GPUS = (1, 8, 16)
RANKS = (1, 2, 4, 8)
"""GPUs of an engine."""
SLEEPS = ("none", "kv_cache", "weights")
QWEN = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40},
    "72B": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Configurations of Qwen2.5. What they have in common is added."""
_KV_HEADS = {"7B": 4, "32B": 8, "72B": 8}
_SHOWN = (("7B", 8, "shared, kv_cache"), ("32B", 16, "shared, weights"))


@dataclass(frozen=True)
class Row:
    """One layout of one model."""

    model: str
    gpus: int
    layout: str
    """`apart`, or `shared`, of how many GPUs an engine is if of more than one, and what the engines release."""
    share: float
    offloads: bool
    """Whether the optimizer stays in host memory."""
    plan: Plan
    use: SharedUse
    """The fullest GPU. Apart, all periods are those of the policy's GPU."""
    engine: int = 0
    """Apart: what an engine's GPU needs."""
    ranks: int = 1
    """GPUs of an engine."""

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return not self.plan.misfit


@cache
def size(model: str) -> ModelSize:
    """Size of a Qwen2.5."""
    common = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
    config = common | QWEN[model] | {"num_key_value_heads": _KV_HEADS[model], "tie_word_embeddings": False}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return read_size(Path(folder))


def _spec(policies: int, rollout: str, gpus: float) -> RolloutSpec:
    changes = [f"roles.rollout={{{rollout}, max_num_seqs: 256, max_model_len: 4096}}", "model.path=given"]
    changes += [f"roles.policy.workers={policies}", f"roles.policy.gpus={gpus}", "weight_sync.backend=auto"]
    changes += ["schedule.max_staleness=0"]
    return plan_runs(read_document(SPEC, changes))[0].spec.rollouts


def _first(spec: RolloutSpec, model: str, gpus: int) -> tuple[float, bool, Plan]:
    """The largest share with which everything fits, or with the optimizer in host memory; else the smallest share.

    That is the smallest with which an engine has a cache, with the optimizer where the engine leaves room for it.
    """
    nodes = described_nodes("1x1xH100" if gpus == 1 else f"{gpus // 8}x8xH100", 256)
    known, smallest = (
        Sizes({"given": size(model)}),
        (SHARES[0], False, plan(spec, nodes, Sizes({"given": size(model)}))),
    )
    for offloads, share in itertools.product((False, True), SHARES):
        rollout = spec.roles.rollout.model_copy(update={"gpu_memory_utilization": share})
        policy = spec.roles.policy.model_copy(update={"offload_optimizer": offloads})
        roles = spec.roles.model_copy(update={"rollout": rollout, "policy": policy})
        found = plan(spec.model_copy(update={"roles": roles}), nodes, known)
        if not found.misfit:
            return share, offloads, found
        if not offloads and all(cache.sequences for cache in found.memory.caches.values()):
            smallest = share, offloads, found
    return smallest


def _shared(model: str, gpus: int, sleep: str) -> Row:
    """Every engine on the GPUs of as few policy workers as everything fits with."""
    return _fewest([_divided(model, gpus, sleep, ranks) for ranks in RANKS if ranks <= gpus])


def _divided(model: str, gpus: int, sleep: str, ranks: int) -> Row:
    """Engines over the GPUs of so many policy workers each."""
    engine = f"colocate_with: policy, workers: {gpus // ranks}, cpus: 1, sleep: {sleep}"
    engine += f", gpus: {ranks}, tensor_parallel_size: {ranks}" if ranks > 1 else ", gpus: 0.5"
    share, offloads, found = _first(_spec(gpus, engine, 1 if ranks > 1 else 0.5), model, gpus)
    layout = f"shared by {ranks}, {sleep}" if ranks > 1 else f"shared, {sleep}"
    if found.memory.shared:
        return Row(model, gpus, layout, share, offloads, found, found.memory.shared[0], ranks=ranks)
    needs = _gpu(found, "policy-0").total + _gpu(found, "rollout-0").total
    use = SharedUse(("policy-0", "rollout-0"), dict.fromkeys(PERIODS, needs), needs, 0)
    return Row(model, gpus, layout, share, offloads, found, use, ranks=ranks)


def _apart(model: str, gpus: int) -> Row:
    """Half of the GPUs for each; an engine has as few as it fits on."""
    rows: list[Row] = []
    for ranks in RANKS:
        if ranks > gpus // 2:
            break
        engine = f"workers: {gpus // 2 // ranks}, cpus: 1, gpus: {ranks}, tensor_parallel_size: {ranks}"
        share, offloads, found = _first(_spec(gpus // 2, engine, 1), model, gpus)
        needs = _gpu(found, "policy-0").total
        use = SharedUse(("policy-0",), dict.fromkeys(PERIODS, needs), needs, 0)
        name = f"apart, engines on {ranks}"
        rows.append(Row(model, gpus, name, share, offloads, found, use, _gpu(found, "rollout-0").total, ranks))
    return _fewest(rows)


def _fewest(rows: Sequence[Row]) -> Row:
    """The first row that fits; else the first whose engines have a cache, or the last."""
    cached = (row for row in rows if row.plan.memory.caches["rollout-0"].sequences)
    return next((row for row in rows if row.fits), next(cached, rows[-1]))


def _gpu(found: Plan, worker: str) -> WorkerMemory:
    return next(m for m in found.memory.workers if (m.worker, m.where) == (worker, "gpu"))


@cache
def rows() -> tuple[Row, ...]:
    """Every layout."""
    return tuple(
        row
        for model in QWEN
        for gpus in GPUS
        for row in (*([_apart(model, gpus)] if gpus > 1 else []), *(_shared(model, gpus, s) for s in SLEEPS))
    )


def table() -> str:
    """The Markdown table."""
    lines = [
        "| model | GPUs | layout | share | offload | sampling | updates | new weights | fullest | at once | result |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows():
        if row.engine:
            periods = f"engine {gib(row.engine)} | policy {gib(row.use.most)} | |"
            most = f"{gib(max(row.engine, row.use.most))} | |"
        else:
            periods = " | ".join(gib(row.use.periods[period]) for period in PERIODS) + " |"
            most = f"{gib(row.use.most)} | {gib(row.use.alone)} |"
        place = f"| {row.model} | {row.gpus} | {row.layout} | {row.share:g} | {'yes' if row.offloads else ''}"
        lines.append(f"{place} | {periods} {most} {_result(row)} |")
    return "\n".join(lines)


def _result(row: Row) -> str:
    cache = row.plan.memory.caches["rollout-0"]
    if row.fits:
        return f"fits; each engine holds {cache.sequences} sequences"
    if not cache.sequences:
        return "no: the model leaves an engine no cache"
    return "no"


def arithmetic() -> str:
    """Some of the sums, part by part."""
    lines: list[str] = []
    for model, gpus, layout in _SHOWN:
        row = next(r for r in rows() if (r.model, r.gpus, r.layout) == (model, gpus, layout))
        lines += [f"Qwen2.5-{model} on {gpus} GPUs, {layout}, a share of {row.share:g}, in GiB:", "", "```"]
        for period in PERIODS:
            sums = [f"{w} {_sum(_gpu(row.plan, f'{w}-0'), period)}" for w in ("policy", "rollout")]
            lines += [f"{period}: {gib(row.use.periods[period])}", *(f"  {text}" for text in sums)]
        lines += ["```", ""]
    return "\n".join(lines).strip()


def _sum(memory: WorkerMemory, period: Period) -> str:
    held = [part for part in memory.parts if period in part.periods]
    phases = ("pass", "step")
    either = max(phases, key=lambda phase: sum(part.bytes for part in held if part.phase == phase))
    counted: Sequence[Part] = [part for part in held if part.phase in ("always", either)]
    return f"{gib(memory.during(period))} = " + " + ".join(f"{part.name} {gib(part.bytes)}" for part in counted)


def written(page: str) -> str:
    """The page with its generated parts."""
    return written_with(page, [("table", table()), ("arithmetic", arithmetic())], "docs.tooling.shared_gpus")


def written_with(page: str, parts: Sequence[tuple[str, str]], tool: str) -> str:
    """The page with its parts between the comments of a tool (a module) that name them."""
    for name, text in parts:
        begin, end = f"<!-- {name}: python -m {tool} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    """Write the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
