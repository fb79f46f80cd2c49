"""Write the table of layouts by model and cluster, from what `troupe init` chooses and `troupe plan` predicts.

Run it with `python -m docs.tooling.layouts`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs.tooling.shared_gpus import written_with
from troupe.orchestrator.errors import DoesNotFit
from troupe.orchestrator.model_facts.model_size import ModelSize, read_size
from troupe.orchestrator.plan.fit import gib
from troupe.orchestrator.plan.plan import Plan
from troupe.orchestrator.plan.worker_memory import WorkerMemory
from troupe.orchestrator.starter.choices import GYM, Choices
from troupe.orchestrator.starter.data import read_data
from troupe.orchestrator.starter.sizing import fitting_document

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "layouts.md"
GPU, GPUS = "H100", (1, 8, 32, 128)
RESPONSE = 3584


def _dense(kind: str, hidden: int, width: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv}
    positions = {"max_position_embeddings": 32768}
    return {"model_type": kind, "tie_word_embeddings": False} | sizes | attention | positions | more


def _experts(count: int, width: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": 8, "moe_intermediate_size": width}


_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_ROUTED = {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "1.5B": _dense("qwen2", 1536, 8960, 28, 12, 2, 151_936, tie_word_embeddings=True),
    "7B": _dense("qwen2", 3584, 18944, 28, 28, 4, 152_064),
    "32B": _dense("qwen2", 5120, 27648, 64, 40, 8, 152_064),
    "70B": _dense("llama", 8192, 28672, 80, 64, 8, 128_256),
    "30B-A3B": _dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936, head_dim=128) | _experts(128, 768),
    "235B-A22B": _dense("qwen3_moe", 4096, 12288, 94, 64, 4, 151_936, head_dim=128) | _experts(128, 1536),
    "671B-A37B": _dense("deepseek_v3", 7168, 18432, 61, 128, 128, 129_280, first_k_dense_replace=3) | _LATENT | _ROUTED,
}
"""Configurations of Qwen2.5, Llama 3, Qwen3 and DeepSeek-V3."""


@dataclass(frozen=True)
class Layout:
    """What `troupe init` writes for a model and a number of GPUs, and its plan."""

    model: str
    gpus: int
    roles: dict[str, Any]
    plan: Plan

    def memory(self, role: str) -> WorkerMemory:
        """Memory of the GPU of a role's first worker."""
        return next(m for m in self.plan.memory.workers if (m.worker, m.where) == (f"{role}-0", "gpu"))

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and optimizer on a GPU of the policy, by the plan."""
        kinds = ("weights", "gradients", "optimizer", "base model")
        return sum(part.bytes for part in self.memory("policy").parts if part.name in kinds)

    @property
    def by_hand(self) -> int:
        """The same by the formulas of the page, in bytes."""
        policy, numbers = self.roles["policy"], size(self.model).parameters
        if "offload_optimizer" in policy:
            return round(2 * numbers / policy["workers"])
        whole, divided = {1: (8, 12), 2: (2, 16), 3: (0, 18)}[policy.get("zero_stage", 1)]
        return round(whole * numbers + divided * numbers / policy["workers"])


@cache
def folder(model: str) -> Path:
    """A folder with the model's configuration and the headers of its weights."""
    path = Path(tempfile.mkdtemp()) / model
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    size = read_size(path)
    embedding = size.vocabulary * size.hidden
    whole, rest = divmod(size.backbone - embedding, size.largest)
    blocks = [size.largest] * whole + [rest]
    tensors = {f"model.layers.0.{number}.weight": count for number, count in enumerate(blocks)}
    tensors |= {"model.embed_tokens.weight": embedding} | ({"lm_head.weight": size.head} if size.head else {})
    header = json.dumps({name: {"shape": [count]} for name, count in tensors.items()}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@cache
def size(model: str) -> ModelSize:
    """Size of a model."""
    return read_size(folder(model))


@cache
def layout(model: str, gpus: int) -> Layout | str:
    """The layout of a model on so many GPUs, or why there is none."""
    sizes = {"gpus": gpus, "gpu_type": GPU, "cpus": 128, "max_tokens": RESPONSE}
    choices = Choices(str(folder(model)), f"{GYM}chain_sum", **sizes)
    try:
        document, found = fitting_document(choices, read_data(choices))
    except DoesNotFit as error:
        return str(error).partition("does not fit this machine: ")[2].partition(":")[0].partition(";")[0]
    return Layout(model, gpus, document["roles"], found)


def line(model: str, gpus: int) -> str:
    """A row of the table."""
    found = layout(model, gpus)
    if isinstance(found, str):
        return f"| {model} | {gpus} | does not fit: {found} | | | | | | | |"
    rollout, policy, speed = found.roles["rollout"], found.roles["policy"], found.plan.predicted
    if speed is None:
        raise ValueError(f"{model} on {gpus} {GPU}: nothing is predicted")
    engines = f"{rollout['workers']} x TP {rollout.get('tensor_parallel_size', 1)}"
    stage = f"ZeRO-{policy['zero_stage']}" if "zero_stage" in policy else "no ZeRO"
    words = [f"{policy['workers']} x {stage}", f"{policy['micro_batch_tokens'] // 1024}k"]
    if "gradient_checkpointing" in policy:
        words.append("recompute all but products" if "recompute_products" in policy else "recompute")
    words += ["offload"] if "offload_optimizer" in policy else []
    words += ["adapters"] if "lora" in policy else []
    between = "on the GPUs of" if "colocate_with" in rollout else "beside"
    waits = f"engines {speed.idle[0]:.0%}, trainers {speed.idle[1]:.0%}" if speed.divided else "in turn"
    used = (*(found.memory(role).total for role in ("rollout", "policy")), found.states, found.by_hand)
    numbers = f"{' | '.join(map(gib, used))} | {speed.tokens_per_gpu:,.0f} | {speed.mfu:.0%} | {waits}"
    return f"| {model} | {gpus} | {engines} {between} {', '.join(words)} | {numbers} |"


def table() -> str:
    """The Markdown table."""
    heading = "| model | GPUs | engines and trainers | engine | policy | states | by hand | tokens/s/GPU | MFU | wait |"
    rule = "|---|---:|---|---:|---:|---:|---:|---:|---:|---|"
    return "\n".join([heading, rule, *(line(model, gpus) for model in MODELS for gpus in GPUS)])


def written(page: str) -> str:
    """The page with its generated part."""
    return written_with(page, [("table", table())], "docs.tooling.layouts")


def main() -> None:
    """Write the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
