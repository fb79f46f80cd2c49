"""Checks that a machine has what a spec needs: model folders, data, libraries.

Reads a few small files and imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from troupe.orchestrator.errors import nearest
from troupe.orchestrator.model_facts.model_size import CONFIG_BYTES, config_or_empty
from troupe.orchestrator.spec.hub_names import is_hub_name
from troupe.workers.contract.config import NO_TEMPLATE, ModelConfig

RESOLVED_SPEC = "spec.yaml"
"""File in a run's folder that holds its spec as it is now, with every default written out."""

Finding = tuple[str, str]
"""(dotted path of a field, what is wrong)"""

_OWN_LENGTH = "roles.reward.model"
"""A model that reads the conversation through its own tokenizer, and fails samples that are too long for it."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LIBRARIES = {"reasoning_gym": "reasoning_gym", "datasets": "datasets"}
"""Library that reads a kind of data, where it is an optional one."""


class DataSource(Protocol):
    """A section that names data."""

    @property
    def kind(self) -> str: ...


@runtime_checkable
class Located(DataSource, Protocol):
    """A section whose data are at a path."""

    @property
    def path(self) -> str: ...


def missing_models(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Model folders that are missing or incomplete, by the path of their section; no names on the hub."""
    for section, model in models.items():
        if not is_hub_name(model.path) and (wrong := model_folder(Path(model.path))):
            yield f"{section}.path", wrong


def missing_templates(models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
    """Files of chat templates that do not exist, by the path of their field."""
    for section, model in models.items():
        path = model.chat_template
        if path is not None and not model.plain and not Path(path).is_file():
            hint = nearest(path, (NO_TEMPLATE,))
            yield f"{section}.chat_template", f"no such file: {path}" + (f" ({hint})" if hint else "")


def model_folder(folder: Path) -> str:
    """What a folder lacks of a model; empty: nothing."""
    if not folder.is_dir():
        return f"no such folder: {folder}"
    if not (folder / "config.json").is_file():
        return f"{folder} is not a model folder: it has no config.json"
    if (folder / "config.json").stat().st_size > CONFIG_BYTES:
        return f"{folder / 'config.json'} is larger than {CONFIG_BYTES >> 20} MiB: this is no model's configuration"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"{folder} has no tokenizer ({', '.join(TOKENIZERS)})"
    return ""


def too_long(models: Mapping[str, ModelConfig], lengths: Mapping[str, int]) -> Iterator[Finding]:
    """Limits on the length of a sequence, by field, that are above what a model can be trained with.

    Args:
        models: The models that read the sequences, by the path of their section; the trained one first.
        lengths: The limits, by field.
    """
    for section, model in models.items():
        whose = "the model" if section == "model" else section
        config = _text_config(Path(model.path))
        positions, bound = config.get("max_position_embeddings"), _steady_positions(config)
        for field, tokens in lengths.items():
            if bound is not None and tokens > bound[0]:
                yield (
                    field,
                    (
                        f"{tokens} is more than {bound[0]}, the original positions of {whose}: beyond them its rotary "
                        f"embedding ({bound[1]}) depends on the longest sequence of a batch, and differs from vLLM's"
                    ),
                )
            elif isinstance(positions, int) and tokens > positions and section != _OWN_LENGTH:
                yield field, f"{tokens} is more than {whose}'s {positions} positions"


def _steady_positions(config: dict[str, Any]) -> tuple[int, str] | None:
    """Positions up to which rotary frequencies do not depend on the batch, and their kind; None without a bound.

    transformers computes "dynamic" frequencies from the longest sequence of a batch, and vLLM has none for such
    positions. Of "longrope" transformers takes the short or long factors by the longest sequence of a batch, and vLLM
    by `max_model_len`.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Gemma 3 and others have parameters for each kind of layer.
    for rope in [found, *found.values()] if isinstance(found, dict) else []:
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
        if kind == "dynamic":
            bound = config.get("max_position_embeddings")
        elif kind in ("longrope", "su"):
            places = (rope, config)
            known = (place.get("original_max_position_embeddings") for place in places)
            bound = next((value for value in known if value is not None), config.get("max_position_embeddings"))
        else:
            continue
        if isinstance(bound, int):
            return bound, kind
    return None


def _text_config(folder: Path) -> dict[str, Any]:
    """The configuration of the language model in a folder; empty if it cannot be read."""
    config = config_or_empty(folder)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def missing_data(sources: Mapping[str, DataSource]) -> Iterator[Finding]:
    """Files and folders of data that do not exist, by the name of their section in `data`."""
    for name, source in sources.items():
        if not isinstance(source, Located):
            continue
        path = Path(source.path)
        if source.kind == "datasets" and not path.is_dir():
            yield f"data.{name}.path", f"no such folder: {path}"
        if source.kind != "datasets" and not path.is_file():
            yield f"data.{name}.path", f"no such file: {path}"


def missing_libraries(sources: Mapping[str, DataSource], sinks: Sequence[str]) -> Iterator[Finding]:
    """Optional packages that the spec needs and that are not installed."""
    for name, source in sources.items():
        library = _LIBRARIES.get(source.kind)
        if library is not None and importlib.util.find_spec(library) is None:
            yield f"data.{name}.kind", f"needs the package {library.replace('_', '-')}, which is not installed"
    for number, sink in enumerate(sinks):
        if importlib.util.find_spec(sink) is None:
            yield f"output.sinks.{number}", f"needs the package {sink}, which is not installed: pip install {sink}"
