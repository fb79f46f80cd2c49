"""What the contenders work on: the same model, prompts, seeds and settings for all of them."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from benchmarks.harness import NotCorrect
from orchestrator.scheduler import sampling_seed
from orchestrator.spec import Spec
from workers.rewards.functions import last_number, letter_share
from workers.rollout_prompts import encode_prompt

Lengths = Literal["fixed", "long-tail", "natural"]
TaskName = Literal["vowels", "sums"]
Backend = Literal["auto", "shm", "ipc", "nccl"]

MODEL = Path(".cache/models/smollm2-135m-instruct")
HELP = {
    "groups": "prompts in a turn, or in a step",
    "samples": "samples of a prompt",
    "max_tokens": "tokens of a response, at most",
    "concurrency": "sequences decoded together by one engine",
    "engines": "engines of every contender",
    "threads": "compute threads of every engine and trainer",
    "micro_batch_tokens": "tokens of a micro-batch of every trainer: three of them must fit the memory",
    "turns": "turns of each contender, after a warm-up turn",
    "seed": "of prompts and samples",
}
"""What the settings that benchmarks share mean."""
DEVICE = "cuda: all contenders side by side on one GPU, each with its engine and its trainer"
_UNSAMPLED_EOS = "<|never sampled|>"
_TAIL_SIGMA = 0.8
_TAIL_MEAN = 0.25
"""Long-tailed lengths: lognormal, their mean as a share of the longest one."""
GPU_SHARE = 0.28
"""Of a GPU's memory for an engine: those of three contenders live on it side by side."""
_REWRITTEN = ("config.json", "generation_config.json", "tokenizer_config.json")
_LETTERS = "aeiou"


@dataclass(frozen=True)
class Task:
    """What is asked, and what earns a reward."""

    chain_sum: Mapping[str, int]
    """Arguments of reasoning-gym's family of that name."""
    function: Mapping[str, Any]
    """The reward function, as a spec names it."""
    reward: Callable[[str, str], float]
    """The same for contenders that have no spec: of a response and the right answer."""


def _sums(terms: tuple[int, int], digits: tuple[int, int]) -> Mapping[str, int]:
    return {"min_terms": terms[0], "max_terms": terms[1], "min_digits": digits[0], "max_digits": digits[1]}


TASKS: Mapping[TaskName, Task] = {
    # Dense, so that every group has something to teach and no row is skipped.
    "vowels": Task(
        chain_sum=_sums(terms=(2, 4), digits=(2, 4)),
        function={"name": "letter_share", "args": {"letters": _LETTERS}},
        reward=lambda response, answer: letter_share(response, answer, {}, letters=_LETTERS),
    ),
    # What a small model can learn.
    "sums": Task(
        chain_sum=_sums(terms=(2, 2), digits=(1, 1)),
        function={"name": "last_number"},
        reward=lambda response, answer: last_number(response, answer, {}),
    ),
}


@dataclass(frozen=True)
class Settings:
    """The size of the work, and what it is done with."""

    model: Path
    dtype: Literal["bfloat16", "float32"]
    lengths: Lengths
    groups: int
    """Prompts in a turn."""
    samples: int
    """Samples of a prompt."""
    max_tokens: int
    concurrency: int
    """Sequences decoded together."""
    engines: int
    threads: int
    seed: int
    prefix_caching: bool = True
    device: Literal["cpu", "cuda"] = "cpu"
    task: TaskName = "vowels"
    micro_batch_tokens: int = 4096

    @property
    def endless(self) -> bool:
        """Every response has a length that is known beforehand: the model does not end it."""
        return self.lengths != "natural"

    @property
    def sequences(self) -> int:
        """Sequences in a turn."""
        return self.groups * self.samples


@dataclass(frozen=True)
class Group:
    """One prompt of a turn."""

    uid: str
    row: int
    prompt_ids: tuple[int, ...]
    samples: int
    seed: int
    """Of the group, as the product derives it; the samples' own seeds follow from it."""
    answer: str = ""
    """The right one, where the reward depends on it."""


def lengths_of(settings: Settings, group: Group) -> list[int]:
    """Tokens of each of the group's responses, where the model does not end them."""
    if settings.lengths == "long-tail":
        return [tail_length(group.seed, index, settings.max_tokens) for index in range(group.samples)]
    return [settings.max_tokens] * group.samples


def check_lengths(name: str, steps: Sequence[Sequence[Sequence[int]]], settings: Settings) -> None:
    """Raises NotCorrect where a step of a contender has other numbers of responses or of tokens than were asked for.

    :param steps: token ids of the responses of every step
    """
    least = settings.max_tokens if settings.endless else 1
    wanted = str(settings.max_tokens) if settings.endless else f"1 to {settings.max_tokens}"
    for number, responses in enumerate(steps, 1):
        found = sorted({len(one) for one in responses})
        if len(responses) != settings.sequences or found[0] < least or found[-1] > settings.max_tokens:
            raise NotCorrect(f"{name}, step {number}: {len(responses)} responses of {found} tokens, not {wanted}")


def tail_length(seed: int, index: int, longest: int) -> int:
    """Length of a sample of the group with this seed: lognormal with a mean of a quarter of `longest`, cut at it."""
    location = math.log(_TAIL_MEAN * longest) - _TAIL_SIGMA**2 / 2
    drawn = random.Random(f"{seed}/{index}").lognormvariate(location, _TAIL_SIGMA)
    return min(max(round(drawn), 1), longest)


def add_settings(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Arguments that benchmarks share: `--model`, `--dtype`, `--json`, and those of HELP that are given a default."""
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, help="model folder")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, default in defaults.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{HELP[name]} (default: {default})")
    add("--json", type=Path, default=None, help="results file (default: benchmarks/results/)")


def group(settings: Settings, uid: str, row: int, prompt_ids: Sequence[int], answer: str = "") -> Group:
    """A group with the seed that the product samples it with."""
    return Group(uid, row, tuple(prompt_ids), settings.samples, sampling_seed(settings.seed, uid), answer)


def turns_of(settings: Settings, turns: int, prompt_ids: Sequence[Sequence[int]], first: int = 0) -> list[list[Group]]:
    """The groups of every turn, each on a prompt of its own: rows of the pool from `first` on.

    `prompt_ids`: of the whole pool.
    """
    starts = range(first, first + turns * settings.groups, settings.groups)
    return [
        [group(settings, f"turn-{turn}-{i}", start + i, prompt_ids[start + i]) for i in range(settings.groups)]
        for turn, start in enumerate(starts)
    ]


def spec(settings: Settings, model: Path, turns: int, prompts: int, learning_rate: float = 1e-5) -> Spec:
    """A GRPO run of `turns` steps over a pool of `prompts` prompts; `model` is the folder that is really loaded."""
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
                "max_model_len": 128 + settings.max_tokens,
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
        # As the loops without orchestration have it; GRPO's own mean over each sequence differs where lengths do.
        "algorithm": {"name": "grpo", "group_size": settings.samples, "aggregation": "token_mean"},
        # A turn of the baseline holds the controller up for a while; nobody is to be taken for dead meanwhile.
        "failures": {"health_interval_s": 600.0},
        "schedule": {"steps": turns, "prompts_per_step": settings.groups},
        "sampling": {"temperature": 1.0, "max_tokens": settings.max_tokens},
        "data": {
            "train": {
                "kind": "reasoning_gym",
                "recipes": [{"name": "chain_sum", "args": task.chain_sum}],
                "size": prompts,
                "seed": 1,
            }
        },
        "checkpoint": {"every_steps": 0},
    }
    return Spec.model_validate_json(json.dumps(document))


def on_device(plan: Spec, device: Literal["cpu", "cuda"], backend: Backend) -> Spec:
    """The spec with rollout and policy on GPUs: the same one for `ipc`, one each otherwise. Raises ValidationError."""
    document = plan.model_dump(mode="json", exclude_defaults=True)
    document["weight_sync"] = {"backend": backend}
    if device == "cuda":
        share = 0.5 if backend == "ipc" else 1.0
        for role in ("rollout", "policy"):
            document["roles"][role]["gpus"] = share
        if backend == "ipc":
            document["roles"]["rollout"]["colocate_with"] = "policy"
    return Spec.model_validate(document)


def without_end(model: Path, folder: Path) -> Path:
    """A folder whose model is `model`, but with an end-of-sequence token that it has no logit for.

    With it every response is `max_tokens` long for every contender, without an option that the product does not have.
    """
    folder.mkdir(parents=True)
    for file in model.resolve().iterdir():
        if file.name not in _REWRITTEN:
            (folder / file.name).symlink_to(file)
    for name in _REWRITTEN:
        settings = json.loads((model / name).read_text())
        if name == "tokenizer_config.json":
            settings["eos_token"] = _UNSAMPLED_EOS
        else:
            settings.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(settings))
    return folder


def encoded(model: Path, table: pa.Table, rows: Sequence[int], longest: int) -> list[list[int]]:
    """Token ids of rows of a PROMPTS table, by the product's own function."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = table.select(["messages"]).to_pylist()
    return [encode_prompt(tokenizer, prompts[row]["messages"], longest) for row in rows]
