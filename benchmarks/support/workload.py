"""The work of all contenders: the same model, prompts, seeds and settings for each of them."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from benchmarks.support.harness import NotCorrect
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.orchestrator.spec.errors import Source
from troupe.orchestrator.spec.load import parse_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.workers.data.chat import encode_prompt
from troupe.workers.rewards.functions import last_number, letter_share

Lengths = Literal["fixed", "long-tail", "natural"]
TaskName = Literal["vowels", "sums"]
Backend = Literal["auto", "shm", "ipc", "nccl"]

PHASES = ("generate", "prepare", "update", "sync")
MODEL = Path(".cache/models/smollm2-135m-instruct")
HELP = {
    "groups": "prompts per turn or step",
    "examples": "solved problems in front of each prompt, about 30 tokens each",
    "samples": "samples per prompt",
    "max_tokens": "maximum tokens per response",
    "concurrency": "sequences that one engine decodes at once",
    "engines": "engines of each contender",
    "threads": "compute threads of each engine and trainer",
    "micro_batch_tokens": "tokens per micro-batch of each trainer; memory must hold three trainers",
    "seed": "seed of prompts and samples",
}
"""Help texts of the settings that benchmarks share."""
DEVICE = "cuda: all contenders share one GPU, each with its own engine and trainer"
_EXAMPLES_SEED = 2
_QUESTION_TOKENS, _EXAMPLE_TOKENS = 128, 48
"""More tokens than a prompt without examples, and than one example, can have."""
MAX_GAP = 0.1
"""Highest accepted mean difference between sampler and trainer log-probs, in nats per token.

A larger gap means stale weights in an engine, or wrong log-probs.
"""
MIN_CHANGE = 2.0
"""A check of new weights needs a gap to the old weights of at least this multiple of the gap to the new ones."""
_UNSAMPLED_EOS = "<|never sampled|>"
_TAIL_SIGMA = 0.8
_TAIL_MEAN = 0.25
"""Mean of the lognormal (long-tail) lengths, as a share of the maximum length."""
GPU_SHARE = float(os.environ.get("TROUPE_GPU_SHARE", "0.28"))
"""Share of a GPU's memory for one engine: the engines of three contenders share the GPU."""
_REWRITTEN = ("config.json", "generation_config.json", "tokenizer_config.json")
_TEMPLATE = "chat_template.jinja"
_LETTERS = "aeiou"


@dataclass(frozen=True)
class Task:
    """A task: its prompts and its reward."""

    chain_sum: Mapping[str, int]
    """Arguments of reasoning-gym's `chain_sum`."""
    function: Mapping[str, Any]
    """The reward function as it appears in a spec."""
    reward: Callable[[str, str], float]
    """The same function of (response, right answer), for contenders without a spec."""


def _sums(terms: tuple[int, int], digits: tuple[int, int]) -> Mapping[str, int]:
    return {"min_terms": terms[0], "max_terms": terms[1], "min_digits": digits[0], "max_digits": digits[1]}


TASKS: Mapping[TaskName, Task] = {
    # A dense reward: every group has non-zero advantages and no row is skipped.
    "vowels": Task(
        chain_sum=_sums(terms=(2, 4), digits=(2, 4)),
        function={"name": "letter_share", "args": {"letters": _LETTERS}},
        reward=lambda response, answer: float(letter_share(response, answer, {}, letters=_LETTERS)),  # pyright: ignore
    ),
    # A task that a small model can learn.
    "sums": Task(
        chain_sum=_sums(terms=(2, 2), digits=(1, 1)),
        function={"name": "last_number"},
        reward=lambda response, answer: last_number(response, answer, {}),
    ),
}


@dataclass(frozen=True)
class Settings:
    """Size of the work, and the resources of each contender."""

    model: Path
    dtype: Literal["bfloat16", "float32"]
    lengths: Lengths
    groups: int
    """Prompts per turn."""
    samples: int
    """Samples per prompt."""
    max_tokens: int
    concurrency: int
    """Sequences that one engine decodes at once."""
    engines: int
    threads: int
    seed: int
    prefix_caching: bool = True
    device: Literal["cpu", "cuda"] = "cpu"
    task: TaskName = "vowels"
    micro_batch_tokens: int = 4096
    examples: int = 0
    """Solved problems of the task in front of each prompt (few-shot)."""

    @classmethod
    def of(cls, given: argparse.Namespace, **fixed: Any) -> Settings:
        """The settings of a command line, and those that a benchmark fixes."""
        names = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in vars(given).items() if name in names} | fixed)

    @property
    def longest_prompt(self) -> int:
        """Upper limit of a prompt's tokens."""
        return _QUESTION_TOKENS + _EXAMPLE_TOKENS * self.examples

    @property
    def endless(self) -> bool:
        """Whether every response has a predetermined length, which the model cannot cut short."""
        return self.lengths != "natural"

    @property
    def sequences(self) -> int:
        """Sequences per turn."""
        return self.groups * self.samples


@dataclass(frozen=True)
class Group:
    """One prompt and the number of its samples."""

    uid: str
    row: int
    prompt_ids: tuple[int, ...]
    samples: int
    seed: int
    """The group's seed, derived as the product derives it; it determines the seeds of the samples."""
    answer: str = ""
    """The right answer, where the reward depends on it."""


def response_lengths(settings: Settings, group: Group) -> list[int]:
    """Number of tokens of each response of the group; only for settings that are `endless`."""
    if settings.lengths == "long-tail":
        return [tail_length(group.seed, index, settings.max_tokens) for index in range(group.samples)]
    return [settings.max_tokens] * group.samples


def check_lengths(name: str, steps: Sequence[Sequence[Sequence[int]]], settings: Settings) -> None:
    """Check that a contender sampled the requested numbers of responses and of tokens.

    Args:
        name: The contender.
        steps: Token ids of each response of each step.
        settings: What was requested.

    Raises:
        NotCorrect: A step has another number of responses, or a response another number of tokens.
    """
    least = settings.max_tokens if settings.endless else 1
    wanted = str(settings.max_tokens) if settings.endless else f"1 to {settings.max_tokens}"
    for number, responses in enumerate(steps, 1):
        found = sorted({len(one) for one in responses})
        if len(responses) != settings.sequences or found[0] < least or found[-1] > settings.max_tokens:
            raise NotCorrect(
                f"{name}, step {number}: {len(responses)} responses of {found} tokens, expected {settings.sequences} "
                f"of {wanted}"
            )


def phases_of(metrics: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Seconds by phase of a line of metrics.jsonl; the rest of the step is `other`."""
    phases = {phase: metrics[f"seconds/{phase}"] for phase in PHASES}
    return phases | {"other": wall_s - sum(phases.values())}


def tail_length(seed: int, index: int, longest: int) -> int:
    """Long-tailed length of sample `index` of the group with this seed.

    Lognormal with a mean of a quarter of `longest`, truncated to 1 .. `longest`.
    """
    location = math.log(_TAIL_MEAN * longest) - _TAIL_SIGMA**2 / 2
    drawn = random.Random(f"{seed}/{index}").lognormvariate(location, _TAIL_SIGMA)
    return min(max(round(drawn), 1), longest)


def add_settings(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add the shared arguments: `--model`, `--dtype`, and each setting of HELP that has a default here."""
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, help="model folder")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, default in defaults.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{HELP[name]} (default: {default})")


def group(settings: Settings, uid: str, row: int, prompt_ids: Sequence[int], answer: str = "") -> Group:
    """A group with the seed that the product would use for it."""
    return Group(uid, row, tuple(prompt_ids), settings.samples, sampling_seed(settings.seed, uid), answer)


def groups_by_turn(
    settings: Settings, turns: int, prompt_ids: Sequence[Sequence[int]], first: int = 0
) -> list[list[Group]]:
    """The groups of each turn, every group with a different prompt.

    Args:
        settings: Size of a turn.
        turns: Number of turns.
        prompt_ids: Token ids of each prompt of the pool.
        first: First row of the pool to use.
    """
    starts = range(first, first + turns * settings.groups, settings.groups)
    return [
        [group(settings, f"turn-{turn}-{i}", start + i, prompt_ids[start + i]) for i in range(settings.groups)]
        for turn, start in enumerate(starts)
    ]


def grpo_spec(settings: Settings, model: Path, turns: int, prompts: int, learning_rate: float = 1e-5) -> RolloutSpec:
    """The spec of a GRPO run of `turns` steps over a pool of `prompts` prompts.

    Args:
        settings: Size of the work.
        model: The folder to load, which may differ from `settings.model` (see `without_eos`).
        turns: Number of steps.
        prompts: Number of prompts in the pool.
        learning_rate: Learning rate of the policy.
    """
    threads, task = settings.threads, TASKS[settings.task]
    gpus = float(settings.device == "cuda")
    document: dict[str, Any] = {
        "name": "benchmark",
        "seed": settings.seed,
        "model": {"path": str(model), "dtype": settings.dtype},
        "roles": {
            "rollout": {
                "workers": settings.engines,
                "cpus": 0.5,
                "threads": threads,
                "max_num_seqs": settings.concurrency,
                "max_model_len": settings.longest_prompt + settings.max_tokens,
                "enforce_eager": True,
                "kv_cache_gib": 0.5,
                "enable_prefix_caching": settings.prefix_caching,
                "gpu_memory_utilization": GPU_SHARE,
                "gpus": gpus,
            },
            "policy": {
                "cpus": 0.5,
                "gpus": gpus,
                "threads": threads,
                "micro_batch_tokens": settings.micro_batch_tokens,
                "learning_rate": learning_rate,
            },
            "reward": {"cpus": 0.2, "functions": [task.function]},
        },
        # The mean that the baseline loops use. GRPO's own mean per sequence differs from it where lengths differ.
        "algorithm": {"name": "grpo", "group_size": settings.samples, "aggregation": "token_mean"},
        # Baseline turns block the controller; the long interval keeps it from declaring its workers dead.
        "failures": {"health_interval_s": 600.0},
        "schedule": {"steps": turns, "prompts_per_step": settings.groups},
        "sampling": {"temperature": 1.0, "max_tokens": settings.max_tokens},
        "data": {
            "train": {
                "kind": "reasoning_gym",
                "recipes": [{"name": "chain_sum", "args": task.chain_sum}],
                "size": prompts,
                "seed": 1,
                "template": prompt_template(task, settings.examples),
            }
        },
        "checkpoint": {"every_steps": 0},
    }
    return parse_rollout_spec(Document(document, Source("workload")))


def prompt_template(task: Task, examples: int) -> str:
    """A template of prompts with so many solved problems of the task in front of the prompt's own."""
    import reasoning_gym

    if not examples:
        return "{prompt}"
    problems = reasoning_gym.create_dataset("chain_sum", size=examples, seed=_EXAMPLES_SEED, **task.chain_sum)
    return "".join(f"{one['question']} {one['answer']}\n\n" for one in problems) + "{prompt}"


def on_device(spec: RolloutSpec, device: Literal["cpu", "cuda"], backend: Backend) -> RolloutSpec:
    """The spec with a device and a weight-sync backend.

    On `cuda`, rollout and policy share one GPU for `ipc` and have one GPU each otherwise.

    Raises:
        SpecError: The backend does not work on the device.
    """
    document = spec.model_dump(mode="json", exclude_defaults=True)
    document["weight_sync"] = {"backend": backend}
    if device == "cuda":
        share = 0.5 if backend == "ipc" else 1.0
        for role in ("rollout", "policy"):
            document["roles"][role]["gpus"] = share
        if backend == "ipc":
            document["roles"]["rollout"]["colocate_with"] = "policy"
    return parse_rollout_spec(Document(document, Source("workload")))


def without_eos(model: Path, folder: Path) -> Path:
    """Create `folder` with links to `model`, but with an end-of-sequence token that the model has no logit for.

    The chat template does not tell what it writes behind the last turn of the assistant.

    Every response then has `max_tokens` tokens for every contender, without an option that the product lacks.
    """
    folder.mkdir(parents=True)
    for file in model.resolve().iterdir():
        if file.name == _TEMPLATE:
            template = file.read_text()
            (folder / _TEMPLATE).write_text("{% if messages[-1].role != 'assistant' %}" + template + "{% endif %}")
        elif file.name not in _REWRITTEN:
            (folder / file.name).symlink_to(file)
    for name in _REWRITTEN:
        settings = json.loads((model / name).read_text())
        if name == "tokenizer_config.json":
            settings["eos_token"] = _UNSAMPLED_EOS
        else:
            settings.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(settings))
    return folder


def encode_prompts(model: Path, table: pa.Table, rows: Sequence[int], longest: int) -> list[list[int]]:
    """Token ids of `rows` of a PROMPTS table, from the product's own `encode_prompt`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = table.select(["messages"]).to_pylist()
    return [encode_prompt(tokenizer, prompts[row]["messages"], longest) for row in rows]
