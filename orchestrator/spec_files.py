"""What a spec needs on this machine: model folders, data, libraries. Reads a few small files, imports nothing heavy."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orchestrator.spec_sections import ReasoningGymSource
from workers.config import ModelConfig

if TYPE_CHECKING:
    from orchestrator.spec import Spec
    from orchestrator.spec_offline import OfflineSpec

RESOLVED_SPEC = "spec.yaml"
"""What a run's folder holds of its spec, every default written out, as it is now."""


class _Kind(Protocol):
    @property
    def kind(self) -> str: ...


class _Table(_Kind, Protocol):
    @property
    def path(self) -> str: ...


_CONFIG_BYTES = 1 << 20
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def missing(spec: Spec) -> list[tuple[str, str]]:
    """(dotted path, what is wrong) of everything the spec names that is not there."""
    return [*_models(spec), *_data(spec), *_libraries(spec)]


def missing_offline(spec: OfflineSpec) -> list[tuple[str, str]]:
    """As :func:`missing`, of a run on given examples."""
    reference = spec.roles.reference
    sections = {"model": spec.model, "roles.reference.model": reference.model if reference is not None else None}
    sources = {"train": spec.data.train, "eval": spec.data.eval}
    found = [*_folders(sections), *_tables(sources), *_splits(sources)]
    positions = _positions(Path(spec.model.path))
    if positions is not None and spec.data.max_length > positions:
        found.append(("data.max_length", f"{spec.data.max_length} is more than the model's {positions} positions"))
    return [*found, *_tensorboard(spec.output.tensorboard)]


def _models(spec: Spec) -> Iterator[tuple[str, str]]:
    roles = spec.roles
    sections: dict[str, ModelConfig | None] = {
        "model": spec.model,
        "roles.critic.model": roles.critic.model if roles.critic is not None else None,
        "roles.reference.model": roles.reference.model if roles.reference is not None else None,
        "roles.reward.model": roles.reward.model,
    }
    yield from _folders(sections)
    positions = _positions(Path(spec.model.path))
    if positions is not None and spec.roles.rollout.max_model_len > positions:
        longest = spec.roles.rollout.max_model_len
        yield "roles.rollout.max_model_len", f"{longest} is more than the model's {positions} positions"


def _folders(sections: Mapping[str, ModelConfig | None]) -> Iterator[tuple[str, str]]:
    for section, model in sections.items():
        if model is not None and (wrong := _model_folder(Path(model.path))):
            yield f"{section}.path", wrong


def _model_folder(folder: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}"
    if not (folder / "config.json").is_file():
        return f"{folder} is no model folder: it has no config.json"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)})"
    return ""


def _positions(folder: Path) -> int | None:
    """The model's longest sequence, where its config says so."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return value if isinstance(value, int) else None


def _data(spec: Spec) -> Iterator[tuple[str, str]]:
    sources = {"train": spec.data.train, "eval": spec.data.eval}
    tables = {split: None if isinstance(source, ReasoningGymSource) else source for split, source in sources.items()}
    yield from _tables(tables | {"ptx": spec.data.ptx})
    positions = _positions(Path(spec.model.path))
    if spec.data.ptx is not None and positions is not None and spec.data.ptx.max_tokens > positions:
        yield "data.ptx.max_tokens", f"{spec.data.ptx.max_tokens} is more than the model's {positions} positions"


def _tables(sources: Mapping[str, _Table | None]) -> Iterator[tuple[str, str]]:
    for split, source in sources.items():
        if source is None:
            continue
        path = Path(source.path)
        if source.kind == "datasets" and not path.is_dir():
            yield f"data.{split}.path", f"no such folder: {path}"
        if source.kind != "datasets" and not path.is_file():
            yield f"data.{split}.path", f"no such file: {path}"


def _libraries(spec: Spec) -> Iterator[tuple[str, str]]:
    yield from _splits({"train": spec.data.train, "eval": spec.data.eval, "ptx": spec.data.ptx})
    yield from _tensorboard(spec.output.tensorboard)


def _splits(sources: Mapping[str, _Kind | None]) -> Iterator[tuple[str, str]]:
    for split, source in sources.items():
        library = {"reasoning_gym": "reasoning_gym", "datasets": "datasets"}.get(source.kind) if source else None
        if library is not None and importlib.util.find_spec(library) is None:
            yield f"data.{split}.kind", f"needs the package {library.replace('_', '-')}, which is not installed"


def _tensorboard(wanted: bool) -> Iterator[tuple[str, str]]:
    if wanted and importlib.util.find_spec("tensorboard") is None:
        yield "output.tensorboard", "needs the package tensorboard, which is not installed"
