"""Adapters: what a spec with them (`roles.policy.lora`, `roles.critic.lora`) cannot have, and whether those that it
names (`model.adapter`) exist and fit the training that continues from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.orchestrator.algorithms.offline import Trains
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.model_facts.model_size import METADATA, SizeUnknown, read_header
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.models import reads_tokens, scores_text
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.roles import EngineRole, ReferenceRole
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_DIGEST,
    SCORES,
    difference,
    parse_settings,
    unsupported_setting,
)
from troupe.workers.contract.config_base import NO_TEMPLATE, ModelConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.contract.weight_backends import BACKENDS

_CONFIG_BYTES = 1 << 20
_MERGE = "merge it first (troupe export --merge)"
_TOKENIZER, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def trained_adapters(spec: RunSpec) -> Iterator[tuple[str, str, LoraConfig]]:
    """(path of the section, section of the model below, section) of all adapters that train."""
    for name, role in spec.roles.trainers().items():
        own = f"roles.{name}.model"
        if role.lora is not None:
            yield f"roles.{name}.lora", own if own in spec.models() else "model", role.lora


def lora_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings of the adapters, and settings of the run that adapters of the policy do not support."""
    yield from adapter_problems(spec)
    if spec.roles.policy.lora is None:
        return
    if spec.roles.rollout.sleep == "weights":
        why = "weights discards the model below, and an update brings only the adapters; use kv_cache"
        yield "roles.rollout.sleep", why
    if not BACKENDS[resolved_backend(spec)].writes_file:
        files = " or ".join(row.name for row in BACKENDS.values() if row.writes_file)
        yield "weight_sync.backend", f"{spec.weight_sync.backend} sends whole models; adapters use {files} (or auto)"


def adapter_problems(spec: RunSpec) -> Iterator[Finding]:
    """Settings of adapters that trainers, and vLLM, do not support, and given adapters that cannot be loaded."""
    yield from _given_adapters(spec)
    for name, role in spec.roles.trainers().items():
        if role.lora is None:
            continue
        field = f"roles.{name}.lora"
        if not role.lora.targets:
            yield f"{field}.targets", "names no layer: nothing would train; remove it for all linear layers"


def _given_adapters(spec: RunSpec) -> Iterator[Finding]:
    """Adapters of models (`model.adapter`) in roles that cannot take them up."""
    models, policy = spec.models(), spec.roles.policy
    if spec.model.adapter is not None and policy.lora is None:
        yield (
            "model.adapter",
            "needs roles.policy.lora with its rank, alpha and targets, to train on; or merge it first",
        )
    divided = "an adapter cannot be added to a model that is divided over workers"
    has_own = policy.lora is None or spec.reference_model != spec.model
    if spec.reference_in_policy and has_own and spec.reference_model.adapter is not None and policy.zero_stage == 3:
        yield "roles.policy.zero_stage", f"{divided}, as the reference would be; {_MERGE}"
    for name, role in spec.roles.present().items():
        if name in spec.in_policy:
            continue
        own = models.get(f"roles.{name}.model")
        if isinstance(role, EngineRole) and own is not None and own.adapter is not None:
            yield f"roles.{name}.model.adapter", f"is not supported in an engine with a frozen model; {_MERGE}"
        elif isinstance(role, ReferenceRole) and role.shards > 1 and (own or spec.model).adapter is not None:
            yield f"roles.{name}.shards", f"{divided}; {_MERGE}"
    for name, role in spec.roles.trainers().items():
        starts_from = models.get(f"roles.{name}.model", spec.model)
        if name != "policy" and starts_from.adapter is not None and role.lora is None and role.zero_stage == 3:
            yield f"roles.{name}.zero_stage", f"{divided}; {_MERGE}"


def wrong_adapters(
    models: Mapping[str, ModelConfig], trains: Trains, trained: Iterable[tuple[str, str, LoraConfig]]
) -> Iterator[Finding]:
    """What is wrong with adapters, by field. `trained`: (path of `lora`, section of its model, `lora` itself)."""
    read = {section: _read(Path(model.adapter)) for section, model in models.items() if model.adapter is not None}
    for section, found in read.items():
        if isinstance(found, str):
            yield f"{section}.adapter", found
        elif wrong := unsupported_setting(found) or _wrong_kind(section, found, trains):
            yield f"{section}.adapter", wrong
    for path, section, lora in trained:
        found = read.get(section)
        if isinstance(found, dict) and not unsupported_setting(found):
            field, why = difference(found, lora)
            if field:
                yield f"{path}.{field}", why


def unverified_adapters(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """One line for each adapter that names another model than its own. Troupe's adapters have its digest, compared
    when they are loaded; peft's only a name, of a folder elsewhere or on the hub."""
    for section, model in models.items():
        folder = Path(model.adapter or "")
        config = {} if model.adapter is None else _read(folder)
        trained_on = "" if isinstance(config, str) else str(config.get("base_model_name_or_path") or "")
        if trained_on and _last_part(trained_on) != _last_part(model.path) and not _has_digest(folder):
            yield (
                f"{section}.adapter: was trained on {trained_on}, and is added to {model.path}; the file has no digest "
                "by which this could be verified"
            )


def adapter_template(adapter: Path, model: Path) -> str | None:
    """The value of `chat_template` with which a model renders as its adapter was trained, or None if its own does.

    Beside an adapter Troupe writes the tokenizer that it was trained with, but a tokenizer is read from the folder of
    the model below. The template of a run (`model.chat_template`) is a file, and one of the model below a copy.
    `model`: folder of the model below. If it is not on this machine, a template of the model cannot be told from a
    run's.
    """
    if not (adapter / _TOKENIZER).is_file():
        return None
    trained, below = _template(adapter), _template(model)
    if (adapter / _TEMPLATE).is_file():
        return None if trained == below else str(adapter / _TEMPLATE)
    return NO_TEMPLATE if trained is None and below is not None else None


def forgotten_templates(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """One line for each model that renders with a different chat template from its adapter's in training."""
    for section, model in models.items():
        if model.adapter is None or model.chat_template is not None or reads_tokens(section):
            continue
        if not Path(model.path).is_dir():  # a name on the hub, whose template is not known here
            continue
        if trained := adapter_template(Path(model.adapter), Path(model.path)):
            why = f"{model.adapter} was trained with another one than that of {model.path}, which is used"
            yield f"{section}.chat_template: {why}; set it to {trained}"


def _template(folder: Path) -> object:
    """The chat template of a tokenizer's folder, to be compared, or None if it has none or it cannot be read."""
    file = folder / _TEMPLATE
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        file = file.with_suffix(".json")
        found = json.loads((file if file.is_file() else folder / _TOKENIZER).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("chat_template") if isinstance(found, dict) else None


def _last_part(model: str) -> str:
    return Path(model).name.casefold()


def _has_digest(folder: Path) -> bool:
    """Whether the tensors' file names the digest of the model below; True if it cannot be read: loading reports why."""
    try:
        metadata = read_header(folder / ADAPTER_WEIGHTS).get(METADATA)
    except SizeUnknown:
        return True
    return isinstance(metadata, dict) and BASE_DIGEST in metadata


def _read(folder: Path) -> dict[str, Any] | str:
    """The configuration of an adapter's folder, or what the folder lacks."""
    file = folder / ADAPTER_CONFIG
    if not folder.is_dir():
        return f"no such folder: {folder}"
    if not file.is_file() or file.stat().st_size > _CONFIG_BYTES:
        return f"{folder} is not the folder of an adapter: it has no {ADAPTER_CONFIG}"
    if not (folder / ADAPTER_WEIGHTS).is_file():
        return f"{folder} has no {ADAPTER_WEIGHTS}"
    try:
        return parse_settings(file.read_bytes())
    except (OSError, ValueError) as error:
        return f"{file} {error}"


def _wrong_kind(section: str, config: Mapping[str, Any], trains: Trains) -> str:
    scores = config.get("task_type") == SCORES
    if scores_text(section):
        return "" if scores else "is the adapter of a language model; the reward role needs a reward model's"
    if section == "roles.critic.model" or (section == "model" and trains == "reward_model"):
        return ""
    return "is the adapter of a reward model; a language model is needed here" if scores else ""
