"""Games of several players that cannot work as a spec describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec.derived.sampling import group_settings, held_out_sets, reward_functions
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import JUDGE, POLICY
from troupe.workers.contract.environments import ASSISTANT, ENVIRONMENTS, USER
from troupe.workers.contract.rewards import JUDGE_REWARD


def player_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Environments with `players` that have none, groups that they do not divide, and what cannot tell them apart."""
    games = {name: role for name, role in spec.roles.environments().items() if role.players}
    for name, role in spec.roles.environments().items():
        path = f"roles.environment.{name}".rstrip(".")
        if role.name == "user_simulator" and role.players != (wanted := simulated_players(role.args)):
            what = ", ".join(f"{player}: {played_by}" for player, played_by in wanted.items())
            why = f"must be {{{what}}}: the judge plays the user" if wanted else "the user has an endpoint; remove it"
            yield f"{path}.players", why
        elif name not in games:
            continue
        elif role.name in ENVIRONMENTS and not ENVIRONMENTS[role.name].has_players:
            yield f"{path}.players", f"{role.name} has one player; remove it"
        elif not role.trained:
            yield f"{path}.players", "the policy plays none of them: it has nothing to train on"
        elif role.has_opponent and spec.roles.judge is None:
            yield "roles.judge", f"is required: its model plays as a player of {path}"
    yield from _renewal(spec)
    several = {name: len(role.trained) for name, role in games.items() if len(role.trained) > 1}
    yield from _groups(spec, several)
    if not several:
        return
    advantage = algorithms.advantage(spec.algorithm)
    if advantage.estimator == "smooth_group" or advantage.baseline == "greedy":
        why = f"{spec.algorithm.name} keeps one result of each prompt, but the players of a game have their own"
        yield "algorithm.name", f"{why}: use an algorithm that compares samples of a group, or rae"
    for path, functions in reward_functions(spec).items():
        for number, function in enumerate(functions):
            if function.compares not in ("", "baseline"):
                why = "compares samples of a prompt, and players of a game have different ones"
                yield f"{path}.{number}.args.compare", f"{why}; remove it"


def simulated_players(args: Mapping[str, Any]) -> dict[str, str]:
    """The players of the environment user_simulator with these arguments: none if the user has an endpoint."""
    return {} if args.get("endpoint") else {ASSISTANT: POLICY, USER: JUDGE}


def _renewal(spec: RolloutSpec) -> Iterator[Finding]:
    """An opponent that is renewed from checkpoints that do not hold it, or on which other results depend."""
    judge, checkpoint, games = spec.roles.judge, spec.checkpoint, spec.roles.environments()
    if judge is None or judge.renew_every is None:
        return
    field = "roles.judge.renew_every"
    if not spec.roles.judge_plays:
        yield field, "no player of a game is the judge (roles.environment.players); remove it"
    if not checkpoint.every_steps or judge.renew_every % checkpoint.every_steps:
        why = f"must be a multiple of checkpoint.every_steps ({checkpoint.every_steps}), as it plays from checkpoints"
        yield field, f"{why}; got {judge.renew_every}"
    changes = f"another model each time ({field})"
    for path, functions in reward_functions(spec).items():
        for number, function in enumerate(functions):
            if function.name == JUDGE_REWARD and not function.args.get("endpoint"):
                yield f"{path}.{number}", f"is scored by {changes}: give it args.endpoint, or remove one of them"
    for one in held_out_sets(spec):
        if one.environment in games and games[one.environment].has_opponent:
            yield f"data.{one.section}", f"is played against {changes}: name an environment without it"


def _groups(spec: RolloutSpec, several: dict[str, int]) -> Iterator[Finding]:
    """Numbers of samples that are no whole episodes, or too few for each player."""
    least = algorithms.row_of(spec.algorithm).min_group_size
    for number, group in enumerate(group_settings(spec)):
        players = 1 if group.environment is None else several.get(group.environment, 1)
        game = ".".join(filter(None, ("roles.environment", group.environment, "players")))
        own = spec.data.mixture and spec.data.mixture[number].group_size is not None
        path = f"data.train.{number}.group_size" if own else "algorithm.group_size"
        if group.samples % players:
            yield path, f"must be a multiple of {players}, the policy's players in {game}, got {group.samples}"
        elif players > 1 and group.samples // players < least:
            why = f"{spec.algorithm.name} compares samples of a player: needs at least {least} for each"
            yield path, f"{why} of {players} in {game}, got {group.samples}"
