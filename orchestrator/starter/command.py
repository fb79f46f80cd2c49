"""`troupe init`: completes the choices, by questions if a terminal is there, and writes the spec."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.errors import UsageError, nearest
from troupe.orchestrator.plan.nvidia import graphics
from troupe.orchestrator.plan.placement import CPUS_PER_NODE, GPU_GIB
from troupe.orchestrator.plan.plan import FASTER_BFLOAT16, has_fast_bfloat16
from troupe.orchestrator.spec.errors import models_in
from troupe.orchestrator.spec.examples import PREFIX, example_text
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.starter.choices import GYM, Choices, check_algorithm, check_environment
from troupe.orchestrator.starter.data import read_data
from troupe.orchestrator.starter.sizing import cluster, fitting_document
from troupe.workers.contract.imports import gym_factory, missing_package

_WIDTH = 110
_SENTENCE_END = re.compile(r"(?<=[.])\s+(?=[A-Z`0-9])")
Ask = Callable[[str, str], str]
"""Asks a question with a default answer, which may be empty, and returns the answer."""


@dataclass(frozen=True)
class InitFlags:
    """The flags of `troupe init` by their names; None if not given."""

    model: str | None = None
    data: str | None = None
    algorithm: str | None = None
    gpus: int | None = None
    gpu_type: str | None = None
    name: str | None = None
    steps: int = 100
    max_tokens: int = 0
    environment: str | None = None
    args: Mapping[str, Any] | None = None
    column: Mapping[str, str] | None = None


def complete(flags: InitFlags, ask: Ask | None) -> Choices:
    """All choices, from flags, questions and this machine. Raises UsageError if a required flag is missing and cannot
    be asked for, or a flag is not valid.

    Args:
        ask: Asks for missing choices, or None to ask nothing (standard input is no terminal).
    """
    missing = [flag for flag, value in (("--model", flags.model), ("--data", flags.data)) if value is None]
    if missing and ask is None:
        raise UsageError(
            f"{' and '.join(missing)}: required where there is no terminal to ask (--data: a file, a "
            f"dataset on the hub, or {GYM}chain_sum)"
        )
    model = flags.model or _answer(ask, "Model folder (Hugging Face format)", "")
    data = flags.data or _answer(ask, f"Data: a file, a dataset on the hub, or {GYM}TASK", f"{GYM}chain_sum")
    # Choices with a default are requested only if others are.
    algorithm = flags.algorithm or _answer(ask if missing else None, "Algorithm (see `troupe algorithms`)", "grpo")
    check_algorithm(algorithm)
    if flags.environment is not None:
        configured = flags.args is not None
        check_environment(flags.environment, offline=algorithm in OFFLINE_ALGORITHMS, configured=configured)
    shown = graphics().gpus
    gpus = flags.gpus
    if gpus is None:
        gpus = _whole(_answer(ask if missing else None, "GPUs", str(len(shown))))
    kind = flags.gpu_type or (_gpu_type(shown[0].name, shown[0].memory) if shown else "")
    if kind and kind.upper() not in GPU_GIB:
        hint = nearest(kind.upper(), GPU_GIB) or f"known: {', '.join(GPU_GIB)}"
        raise UsageError(f"--gpu-type: no GPU type '{kind[:60]}' ({hint})")
    own = len(os.sched_getaffinity(0))
    cpus = own if not gpus or len(shown) >= gpus else CPUS_PER_NODE
    name = flags.name or re.sub(r"[^a-z0-9]+", "-", f"{Path(model).name}-{algorithm}".lower()).strip("-")[:63]
    return Choices(
        model=model,
        data=data,
        algorithm=algorithm,
        gpus=gpus,
        gpu_type=kind.upper(),
        cpus=cpus,
        name=name,
        steps=flags.steps,
        max_tokens=flags.max_tokens,
        environment=flags.environment or "",
        environment_args=flags.args or {},
        columns=flags.column or {},
    )


def text_of(choices: Choices, output: Path, say: Callable[[str], None] = lambda _: None) -> str:
    """The spec for these choices; `say` gets what is known at once. Raises UsageError, SpecError, DoesNotFit."""
    if choices.data.startswith(GYM):
        check_task(choices.data.removeprefix(GYM))
    data = read_data(choices)
    document, _ = fitting_document(choices, data)
    adapters = "lora" in document["roles"]["policy"]
    described = f" --cluster {cluster(choices)}" if choices.gpus else ""
    machine = (
        f"{choices.gpus} {choices.gpu_type or 'GPU'}{'s' if choices.gpus > 1 else ''}"
        if choices.gpus
        else (f"{choices.cpus} CPU core{'s' if choices.cpus > 1 else ''}")
    )
    heading = [
        f"{choices.algorithm} for {machine}, written by `troupe init`. Fields that are not here have their defaults.",
        f"  troupe validate {output}",
        f"  troupe plan {output}{described}",
        f"  troupe run {output}",
    ]
    if choices.environment:
        heading.insert(2, f"  troupe env check {output}    plays an episode without the model")
    if data.reward is not None and data.reward.note:
        heading.append(f"Reward: {data.reward.note}.")
    if data.unused:
        heading.append(data.unused_note)
        say(data.unused_note)
    for note in data.notes:
        heading.append(note)
        say(note)
    if data.without_evaluation:
        heading.append(f"No evaluation: {data.without_evaluation} (data.eval).")
    if not choices.gpus and has_fast_bfloat16() and document["model"]["dtype"] == "bfloat16":
        heading.append(f"bfloat16: {FASTER_BFLOAT16} (model.dtype).")
    if adapters:
        heading.append("All weights do not fit this machine in training: the spec trains adapters (roles.policy.lora).")
    if choices.gpus and not choices.gpu_type:
        heading.append("The type of GPU is not known (--gpu-type): the memory of the GPUs is not checked.")
    return commented(document, OfflineSpec if choices.offline else RolloutSpec, heading)


def copy_of(example: str, flags: InitFlags, output: Path) -> str:
    """An example as a file to edit. Raises UsageError for an unknown example, or for flags that it would not heed."""
    given = [name for name, value in vars(flags).items() if value != vars(InitFlags())[name]]
    if given:
        raise UsageError(f"--from: writes the example as it is; drop --{given[0].replace('_', '-')} and edit the file")
    name = example.removeprefix(PREFIX)
    return example_text(name).replace(f"{PREFIX}{name}", str(output))


def write(text: str, output: Path, force: bool) -> None:
    """Write the spec. Raises UsageError if the file exists and `force` is false, or cannot be written."""
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} exists; --force overwrites it, --output names another file") from None
    except OSError as error:
        raise UsageError(f"--output: {output}: {error.strerror}") from None


def check_task(name: str) -> None:
    """Raise UsageError unless reasoning-gym has this task."""
    if problem := missing_package("reasoning_gym"):
        raise UsageError(f"--data: {problem}")
    known = gym_factory().DATASETS
    if name not in known:
        raise UsageError(f"--data: reasoning-gym has no task '{name[:60]}' ({nearest(name, known) or 'see its list'})")


def _answer(ask: Ask | None, question: str, default: str) -> str:
    return ask(question, default) if ask is not None else default


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"GPUs: expected a whole number, got '{text[:60]}'")
    return int(text)


def _gpu_type(name: str, memory: int) -> str:
    """The type of a GPU by its name; of types with several sizes, the one with the nearest memory."""
    words = re.sub(r"[^A-Z0-9]", "", name.upper())
    fitting = [kind for kind in GPU_GIB if kind.partition("-")[0] in words]
    return min(fitting, key=lambda kind: (abs(GPU_GIB[kind] - memory / 2**30), -len(kind)), default="")


def commented(document: Mapping[str, Any], root: type[BaseModel], heading: list[str]) -> str:
    """The document as YAML with a comment for each field: the first sentence of the field's own description."""
    lines = [f"# {line}".rstrip().replace("\n", " ") for line in heading]
    for key, value in document.items():
        lines += ["", *_field(key, value, root, "")]
    return "\n".join(lines) + "\n"


def _field(key: str, value: Any, model: type[BaseModel] | None, indent: str) -> Iterator[str]:
    info = model.model_fields.get(key) if model is not None else None
    meaning = _first_sentence(info.description or "") if info is not None else ""
    inner = _section_model(info.annotation, value) if info is not None else None
    if isinstance(value, dict) and inner is not None:
        yield from _with_comment(f"{indent}{key}:", meaning, indent)
        for name, item in value.items():
            yield from _field(name, item, inner, indent + "  ")
    else:
        style = '"' if isinstance(value, str) and "\n" in value else None  # others would take several lines
        text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10_000, sort_keys=False)
        text = text.removesuffix("...\n")
        yield from _with_comment(f"{indent}{key}: {text.strip()}", meaning, indent)


def _with_comment(text: str, meaning: str, indent: str) -> Iterator[str]:
    """The line with its comment behind it, or above it if the two are too long."""
    if not meaning:
        yield text
    elif len(line := f"{text}  # {meaning}") <= _WIDTH:
        yield line
    else:
        yield f"{indent}# {meaning}"
        yield text


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(" ".join(text.split()))[0]


def _section_model(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The model of a section; of several kinds, the value's `kind`, or else the first one."""
    found = list(models_in(annotation))
    if len(found) < 2 or not isinstance(value, dict) or "kind" not in value:
        return found[0] if found and isinstance(value, dict) else None
    kind = value.get("kind")
    return next((model for model in found if kind in get_args(model.model_fields["kind"].annotation)), None)
