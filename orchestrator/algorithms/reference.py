"""What the algorithm table says, for people: `troupe algorithms`, and `python -m orchestrator.algorithm_reference >
docs/algorithms.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pydantic import BaseModel

from orchestrator.algorithm_table import ALGORITHMS, Algorithm
from orchestrator.algorithms import ESTIMATOR_OPTIONS, OBJECTIVE_OPTIONS
from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS, OfflineAlgorithm
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

Every row can learn plain texts in the same updates, `loss + ptx_coef * mean negative log-likelihood per token`
(`algorithm.ptx_coef`, `data.ptx`; PPO-ptx, arXiv 2203.02155, eq. 2; `deploy/algorithms/ppo.yaml` does), and keep a
moving average of the policy's weights (`roles.policy.ema_decay`).

Every step reports KL(old || new), the mean over tokens that TRPO bounds (arXiv 1502.05477, eq. 12), two ways:
`policy/kl_old`, estimated by k3 from the sampled tokens in each update before it moves the policy, and
`policy/kl_exact`, summed over the whole vocabulary at `algorithm.kl_states` tokens after the last update.
`algorithm.kl_stop` ends a step's updates once the first passes a bound.
"""

_GIVEN = """\
# Algorithms on given examples

Nothing is generated: the policy's own workers train on data that are given (`orchestrator/algorithms_offline.py`,
`workers/preference_losses.py`; the specs: [offline.md](offline.md)).
"""


def algorithm_reference() -> str:
    """Every row of the tables, as Markdown."""
    lines = [_HEAD, "| algorithm | what it is | roles besides rollout, policy, reward |", "|---|---|---|"]
    for row in ALGORITHMS.values():
        lines.append(f"| [`{row.name}`](#{row.name}) | {row.summary} | {', '.join(_roles(row)) or 'none'} |")
    lines.append("")
    for row in ALGORITHMS.values():
        lines += [f"## {row.name}", "", row.summary, "", f"- {_escaped(row.formula)}", f"- Source: {row.source}."]
        lines += [f"- KL to the reference: in the {row.kl_in}. Shipped spec: `deploy/algorithms/{row.name}.yaml`.", ""]
        lines += ["| default | value |", "|---|---|"]
        lines += [f"| {name} | `{value}` |" for name, value in row_defaults(row)] + [""]
    lines += [_GIVEN, "| algorithm | what it is | data |", "|---|---|---|"]
    for row in OFFLINE_ALGORITHMS.values():
        lines.append(f"| [`{row.name}`](#{row.name}) | {row.summary} | {' or '.join(row.formats)} |")
    lines.append("")
    for row in OFFLINE_ALGORITHMS.values():
        lines += [f"## {row.name}", "", row.summary, "", f"- {_escaped(row.formula)}", f"- Source: {row.source}."]
        lines += [f"- Roles: {', '.join(_offline_roles(row))}. Trains a {row.trains.replace('_', ' ')}. "]
        lines[-1] += f"Shipped spec: `deploy/{shipped_spec(row)}`."
        lines += ["", "| default | value |", "|---|---|"]
        lines += [f"| {name} | `{value}` |" for name, value in offline_defaults(row)] + [""]
    return "\n".join(lines)


def listing() -> str:
    """One line for every algorithm."""
    rows = [*ALGORITHMS.values(), *OFFLINE_ALGORITHMS.values()]
    width = max(len(row.name) for row in rows)
    return "\n".join(f"{row.name:<{width}}  {row.summary}" for row in rows)


def shipped_spec(row: OfflineAlgorithm) -> str:
    """File name of the row's spec in deploy/."""
    return f"tiny-{row.name.replace('_', '-')}.yaml"


def description(name: str) -> str:
    """One algorithm, as plain text. Raises KeyError for a name the tables do not have."""
    if name in OFFLINE_ALGORITHMS:
        given = OFFLINE_ALGORITHMS[name]
        return _described(given, _offline_roles(given), offline_defaults(given))
    row = ALGORITHMS[name]
    return _described(row, ["rollout", "policy", "reward", *_roles(row)], row_defaults(row))


def _described(row: Algorithm | OfflineAlgorithm, roles: list[str], defaults: Iterator[tuple[str, str]]) -> str:
    lines = [row.name, f"  {row.summary}", f"  formula: {row.formula}", f"  source: {row.source}"]
    lines += [f"  roles: {', '.join(roles)}", "  defaults:"]
    return "\n".join([*lines, *(f"    {name}: {value}" for name, value in defaults)])


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


def offline_defaults(row: OfflineAlgorithm) -> Iterator[tuple[str, str]]:
    """(field of the section `algorithm`, default) of what the row reads."""
    yield from ((name, as_yaml(value)) for name, value in row.loss if name != "kind")
    yield from ((name, "false") for name in sorted(row.options))


def _offline_roles(row: OfflineAlgorithm) -> list[str]:
    return ["policy", *(["reference"] if row.reference else [])]


def _roles(row: Algorithm) -> list[str]:
    needed = set(row.required)
    if row.loss.kl_coef or row.advantage.kl_coef:
        needed.add("reference")
    return sorted(needed)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(algorithm_reference())
