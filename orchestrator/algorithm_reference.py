"""What the algorithm table says, for people: `troupe algorithms`, and `python -m orchestrator.algorithm_reference >
docs/algorithms.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pydantic import BaseModel

from orchestrator.algorithm_table import ALGORITHMS, Algorithm
from orchestrator.algorithms import ESTIMATOR_OPTIONS, OBJECTIVE_OPTIONS
from orchestrator.spec_reference import as_yaml
from workers.config import AdvantageConfig, CriticLossConfig, PolicyLossConfig

_HEAD = """\
# Algorithms

Written by `python -m orchestrator.algorithm_reference > docs/algorithms.md` from the code; a test keeps it current.
`troupe algorithms` lists them, `troupe algorithms NAME` shows one.

An algorithm is a row of one table (`orchestrator/algorithm_table.py`) and pure functions: how rewards become
advantages (`workers/advantages.py`, `workers/estimators.py`) and which loss follows (`workers/losses.py`). The loop
knows none by name. Every default below can be changed in the section `algorithm` of a spec ([spec.md](spec.md)).

Words: `r` is the ratio of new to old probability, `pi` the policy being trained, `pi_old` the policy before the
update, `pi_ref` the reference, `A` the advantage, `sg` stops the gradient, `KL` is estimated per token by k1, k2 or k3
(Schulman, "Approximating KL divergence", 2020).

Every row corrects for the gap between the engine that sampled and the trainer (`algorithm.importance`: truncated or
masked importance weights, by token or by sequence). With `schedule.max_staleness` above 0 that makes each of them its
decoupled form (arXiv 2110.00641): the ratio is clipped around the policy before the update, and the weight stands for
the step from the policy that sampled to that one.
"""


def algorithm_reference() -> str:
    """Every row of the table, as Markdown."""
    lines = [_HEAD, "| algorithm | what it is | roles besides rollout, policy, reward |", "|---|---|---|"]
    for row in ALGORITHMS.values():
        lines.append(f"| [`{row.name}`](#{row.name}) | {row.summary} | {', '.join(_roles(row)) or 'none'} |")
    lines.append("")
    for row in ALGORITHMS.values():
        lines += [f"## {row.name}", "", row.summary, "", f"- {_escaped(row.formula)}", f"- Source: {row.source}."]
        lines += [f"- KL to the reference: in the {row.kl_in}. Shipped spec: `deploy/algorithms/{row.name}.yaml`.", ""]
        lines += ["| default | value |", "|---|---|"]
        lines += [f"| {name} | `{value}` |" for name, value in row_defaults(row)] + [""]
    return "\n".join(lines)


def listing() -> str:
    """One line for every algorithm."""
    width = max(map(len, ALGORITHMS))
    return "\n".join(f"{row.name:<{width}}  {row.summary}" for row in ALGORITHMS.values())


def description(row: Algorithm) -> str:
    """One algorithm, as plain text."""
    roles = ["rollout", "policy", "reward", *_roles(row)]
    lines = [row.name, f"  {row.summary}", f"  formula: {row.formula}", f"  source: {row.source}"]
    lines += [f"  roles: {', '.join(roles)}", "  defaults:"]
    return "\n".join([*lines, *(f"    {name}: {value}" for name, value in row_defaults(row))])


def row_defaults(row: Algorithm) -> Iterator[tuple[str, str]]:
    """(field of the section `algorithm`, default) of what the row reads."""
    unread = frozenset().union(*ESTIMATOR_OPTIONS.values(), *OBJECTIVE_OPTIONS.values())
    unread -= ESTIMATOR_OPTIONS[row.advantage.estimator] | OBJECTIVE_OPTIONS[row.loss.objective]
    yield "group_size", str(row.group_size)
    yield "kl.coef", str(max(row.loss.kl_coef, row.advantage.kl_coef))
    if row.dynamic_sampling:
        yield "dynamic_sampling", str(row.dynamic_sampling)
    if row.kl_penalty is not None:
        yield "kl_old", f"{{coef: {row.kl_penalty.coef}, target: {row.kl_penalty.target}}}"
    sections: list[PolicyLossConfig | AdvantageConfig | CriticLossConfig] = [row.loss, row.advantage]
    sections += [row.critic_loss] if row.critic_loss is not None else []
    for section in sections:
        for name, value in section:
            hidden = name in _NEVER_SHOWN or name in unread or (name == "kl_estimator" and row.kl_in == "reward")
            if hidden or value is None:
                continue
            shown = (
                f"{{{', '.join(f'{k}: {as_yaml(v)}' for k, v in value)}}}"
                if isinstance(value, BaseModel)
                else as_yaml(value)
            )
            yield name.replace("kl_estimator", "kl.estimator"), shown


_NEVER_SHOWN = frozenset(
    {"objective", "ratio", "dynamic_clip", "max_ratio", "estimator", "baseline", "reward_to_go", "kl_coef"}
    | {"kl_target", "kl_horizon"}
)
"""What makes a row this row and no other (the formula says it), or is named otherwise in a spec."""


def _roles(row: Algorithm) -> list[str]:
    needed = set(row.required)
    if row.loss.kl_coef or row.advantage.kl_coef:
        needed.add("reference")
    return sorted(needed)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(algorithm_reference())
