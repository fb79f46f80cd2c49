"""The algorithms as text: what `troupe algorithms` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

import yaml
from pydantic import BaseModel

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS, OfflineAlgorithm
from troupe.orchestrator.algorithms.table import ALGORITHMS, ROW_ONLY, Algorithm, unread_options
from troupe.workers.contract.algorithm_config import AdvantageConfig, CriticLossConfig, PolicyLossConfig

_SPEC_NAMES = {"kl_estimator": "kl.estimator", "kl_to_go": "kl.to_go"}
_NEVER_SHOWN = ROW_ONLY | {"kl_coef", "kl_target", "kl_horizon"}
"""What distinguishes the row from others (and is in its formula), or is in the section `kl`."""


@dataclass(frozen=True)
class Advice:
    """Advice on one row of the tables, as Markdown."""

    use: str
    """When to use it."""
    watch: str
    """Metrics by their names, and what to do about them."""
    trl: str = "-"
    """Options that select it in TRL, and differences; `-` if TRL does not have it."""
    verl: str = "-"
    """The same for verl. `actor.` stands for `actor_rollout_ref.actor.`."""
    openrlhf: str = "-"
    """The same for OpenRLHF's `openrlhf.cli.train_ppo_ray`, or the command that the text names."""


def advice_on(name: str) -> Advice | None:
    """Advice on an algorithm; None for a custom one."""
    return all_advice().get(name)


@cache
def all_advice() -> dict[str, Advice]:
    """The advice in `advice.yaml`, by name of the algorithm."""
    text = files("troupe.orchestrator.algorithms").joinpath("advice.yaml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, str]] = yaml.safe_load(text)
    signs = rows.pop("signs")
    return {name: Advice(**own | {"watch": Template(own["watch"]).substitute(signs)}) for name, own in rows.items()}


def listing() -> str:
    """One line for every algorithm."""
    rows = [*ALGORITHMS.values(), *OFFLINE_ALGORITHMS.values()]
    width = max(len(row.name) for row in rows)
    return "\n".join(f"{row.name:<{width}}  {row.summary}" for row in rows)


def listed() -> list[dict[str, Any]]:
    """The same as data."""
    return [{"name": row.name, "summary": row.summary} for row in [*ALGORITHMS.values(), *OFFLINE_ALGORITHMS.values()]]


def description(name: str) -> str:
    """One algorithm, as plain text. Raises KeyError if no table has the name."""
    return describe_row(named(name))


def named(name: str) -> Algorithm | OfflineAlgorithm:
    return OFFLINE_ALGORITHMS[name] if name in OFFLINE_ALGORITHMS else ALGORITHMS[name]


def describe_row(row: Algorithm | OfflineAlgorithm) -> str:
    """An algorithm, as plain text."""
    described = described_row(row)
    defaults: dict[str, str] = described.pop("defaults")
    lines = [described.pop("name"), f"  {described.pop('summary')}"]
    for name, value in described.items():
        lines.append(f"  {name}: {', '.join(value) if isinstance(value, list) else value}")
    return "\n".join([*lines, "  defaults:", *(f"    {name}: {value}" for name, value in defaults.items())])


def described_row(row: Algorithm | OfflineAlgorithm) -> dict[str, Any]:
    """The same as data: `name`, `summary`, `formula`, `source`, advice if there is any, `roles` and `defaults`."""
    described: dict[str, Any] = {"name": row.name, "summary": row.summary, "formula": row.formula, "source": row.source}
    if (advice := advice_on(row.name)) is not None:  # a custom algorithm has none
        described |= {"use": advice.use, "watch": advice.watch}
        described |= {"TRL": advice.trl, "verl": advice.verl, "OpenRLHF": advice.openrlhf}
    if isinstance(row, OfflineAlgorithm):
        return described | {"roles": offline_roles(row), "defaults": dict(offline_defaults(row))}
    return described | {
        "roles": ["rollout", "policy", "reward", *roles_besides(row)],
        "defaults": dict(row_defaults(row)),
    }


def row_defaults(row: Algorithm) -> Iterator[tuple[str, str]]:
    """(field of the section `algorithm`, default) of what the row reads."""
    unread = unread_options(row)
    yield "group_size", str(row.group_size)
    yield "kl.coef", str(max(row.loss.kl_coef, row.advantage.kl_coef))
    if row.dynamic_sampling:
        yield "dynamic_sampling", str(row.dynamic_sampling)
    if row.kl_penalty is not None:
        yield "kl_old", f"{{coef: {row.kl_penalty.coef}, target: {row.kl_penalty.target}}}"
    if row.trust_region is not None:
        yield "trust_region", _shown(row.trust_region)
    if row.natural_gradient is not None:
        yield "natural_gradient", _shown(row.natural_gradient)
    sections: list[PolicyLossConfig | AdvantageConfig | CriticLossConfig] = [row.loss, row.advantage]
    sections += [row.critic_loss] if row.critic_loss is not None else []
    for section in sections:
        for name, value in section:
            other_kl = name == {"reward": "kl_estimator", "loss": "kl_to_go"}[row.kl_in]
            no_teacher = name == "distill" and not row.loss.distill.coef
            hidden = name in _NEVER_SHOWN or name in unread or other_kl or no_teacher
            if hidden or value is None:
                continue
            yield _SPEC_NAMES.get(name, name), _shown(value)


def offline_defaults(row: OfflineAlgorithm) -> Iterator[tuple[str, str]]:
    """(field of the section `algorithm`, default) of what the row reads."""
    yield from ((name, _shown(value)) for name, value in row.loss if name != "kind")
    yield from ((name, "false") for name in sorted(row.options))


def offline_roles(row: OfflineAlgorithm) -> list[str]:
    return ["policy", *(["reference"] if row.reference else [])]


def roles_besides(row: Algorithm) -> list[str]:
    """Roles that an algorithm needs besides rollout, policy and reward."""
    needed = set(row.required)
    if row.loss.kl_coef or row.advantage.kl_coef:
        needed.add("reference")
    return sorted(needed)


def _shown(value: Any) -> str:
    """A value, or a section, as YAML."""
    if isinstance(value, BaseModel):
        return f"{{{', '.join(f'{name}: {as_yaml(own)}' for name, own in value)}}}"
    return as_yaml(value)


def as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, str):
        return f'"{value}"' if not value or "{" in value else value
    return str(value)
