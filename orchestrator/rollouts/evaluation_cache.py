"""Results of `troupe eval` that are used again: by what they depend on, digested.

A key covers the content of the model's folder, the rows of the set, how they are sampled and scored, whether on a GPU,
the seed, the code of Troupe and the versions of the packages that it builds on. What a key cannot cover is evaluated
every time: answers of environments and judges, and reward functions whose code is not found. Of a user's reward
function the key covers the module, or the whole package that it is in, not what these import from elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import xxhash

from troupe.orchestrator.rollouts.held_out import MeanEstimate, SetResult
from troupe.orchestrator.spec.examples import models_folder
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.versions import installed_versions, versions
from troupe.workers.contract.atomic_file import write_atomic
from troupe.workers.contract.config import ModelConfig
from troupe.workers.contract.reward_names import ENVIRONMENT_REWARD, JUDGE_REWARD, REWARD_FUNCTIONS

_FORMAT = 1
_BLOCK = 16 << 20
_SCORING = ("antlr4-python3-runtime", "latex2sympy2-extended", "math-verify", "reasoning-gym", "sympy")
"""Packages that affect the results of the built-in reward functions."""

Json = dict[str, Any]


def cache_folder() -> Path:
    """Folder of the results: `troupe/evaluations` in the user's cache folder, next to the example models."""
    return models_folder().parent / "evaluations"


def model_digest(folder: Path) -> str:
    """Digest of every file of a model's folder, with their names. Raises OSError."""
    digest = xxhash.xxh3_128()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def set_keys(spec: RolloutSpec, model: str, sets: Mapping[str, Json]) -> dict[str, str]:
    """Key of each set by its label; a set without one is evaluated every time.

    Args:
        spec: The spec, with models that are folders.
        model: Digest of the model.
        sets: How each set is sampled and scored, with the digest of its rows (`described_sets`).
    """
    shared = {
        "format": _FORMAT,
        "versions": versions(),
        "troupe": _own_code(),
        "scoring": {name: version for name, version in installed_versions().items() if name in _SCORING},
        "model": model,
        "settings": spec.model.model_dump(mode="json", exclude={"path", "revision"}),
        "template": _text_of(spec.model.chat_template),
        "sampling": spec.sampling.model_dump(mode="json", include={"stop", "structured"}),
        "engine": [spec.device, spec.roles.rollout.max_model_len, spec.roles.rollout.engine],
        "seed": spec.seed,
        "prompts": 0 if spec.evaluation is None else spec.evaluation.prompts,
    }
    keys: dict[str, str] = {}
    for one in spec.held_out_sets():
        code = _code_of(function.name for function in one.functions)
        if code is None or one.environment is not None:
            continue
        own = {"code": code, "set": sets[one.label], "level": one.level, "name": one.name}
        own["reward_model"] = None if one.own_rewards else _digest_of(spec.roles.reward.model)
        content = json.dumps(shared | own, sort_keys=True, default=str)
        keys[one.label] = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    return keys


def _digest_of(model: ModelConfig | None) -> Json | None:
    """All that a model's output depends on. Raises OSError."""
    if model is None:
        return None
    return {
        "settings": model.model_dump(mode="json", exclude={"path", "revision", "adapter"}),
        "template": _text_of(model.chat_template),
        "model": model_digest(Path(model.path)),
        "adapter": None if model.adapter is None else model_digest(Path(model.adapter)),
    }


def cached(folder: Path, key: str) -> SetResult | None:
    """The result under a key, or None if it is missing or unreadable."""
    try:
        return result_of(json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def keep(folder: Path, key: str, result: SetResult) -> None:
    """Keeps a result. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{key}.json", json.dumps(asdict(result)) + "\n")


def result_of(content: Json) -> SetResult:
    """The result that `asdict` made this of. Raises TypeError, LookupError or AttributeError for other content."""
    levels = {level: _estimates(of) for level, of in content["levels"].items()}
    return SetResult(**(content | {"estimates": _estimates(content["estimates"]), "levels": levels}))


@cache
def _own_code() -> str:
    """Digest of Troupe's modules: in a checkout they change without a new version."""
    digest, root = xxhash.xxh3_128(), Path(__file__).resolve().parents[2]
    for folder in ("orchestrator", "workers"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _estimates(content: Json) -> dict[str, MeanEstimate]:
    return {name: MeanEstimate(**fields) for name, fields in content.items()}


def _text_of(template: str | None) -> str:
    """Content of a template's file, or empty if it is no file."""
    file = Path(template or "")
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _code_of(functions: Iterable[str]) -> dict[str, str] | None:
    """Digests of the users' code by its top-level module; None if a function is not determined by code."""
    found: dict[str, str] = {}
    for name in functions:
        if name in (JUDGE_REWARD, ENVIRONMENT_REWARD):
            return None
        if name in REWARD_FUNCTIONS:
            continue
        module = name.partition(":")[0].partition(".")[0]
        spec = PathFinder.find_spec(module, [os.getcwd(), *(path or os.getcwd() for path in sys.path)])
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
        files = sorted(Path(folders[0]).rglob("*.py")) if folders else [Path(spec.origin)] if spec.origin else []
        if not files:
            return None
        digest = xxhash.xxh3_128()
        for file in files:
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
        found[module] = digest.hexdigest()
    return found
