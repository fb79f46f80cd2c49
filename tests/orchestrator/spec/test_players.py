"""Specs of games: groups that players divide, and what cannot tell them apart."""

from __future__ import annotations

import pytest

from troupe.orchestrator.spec.derived.digests import plays_and_judges
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec

SPEC = "deploy/specs/tiny-self-play.yaml"
ENDPOINT = "{url: http://localhost/v1, model: m}"
ONE = "roles.environment.players={first: policy}"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.group_size=3"],
            "algorithm.group_size: must be a multiple of 2, the policy's players in roles.environment.players",
        ),
        (
            ["algorithm.name=grpo", "algorithm.group_size=2"],
            "grpo compares samples of a player: needs at least 2 for each of 2 in roles.environment.players, got 2",
        ),
        (["roles.environment.name=guess_number"], "roles.environment.players: guess_number has one player; remove it"),
        (
            ["roles.environment.name=user_simulator", "roles.environment.players={assistant: policy, user: policy}"],
            "roles.environment.players: must be {assistant: policy, user: judge}: the judge plays the user",
        ),
        (
            ["roles.environment.name=user_simulator", f"roles.environment.args={{endpoint: {ENDPOINT}}}"],
            "roles.environment.players: the user has an endpoint; remove it",
        ),
        (["roles.environment.players={a b: policy}"], "roles.environment.players"),
        (["roles.environment.players={first: nobody}"], "roles.environment.players.first"),
        (
            ["roles.environment.players={first: policy, second: judge}"],
            "roles.judge: is required: its model plays as a player of roles.environment",
        ),
        (
            ["roles.environment.players={first: judge, second: judge}"],
            "roles.environment.players: the policy plays none of them",
        ),
        (["algorithm.name=remax"], "algorithm.name: remax keeps one result of each prompt"),
        (["algorithm.name=dcpo"], "algorithm.name: dcpo keeps one result of each prompt"),
        (
            [f"roles.reward.functions=[{{name: judge, args: {{compare: ruler, endpoint: {ENDPOINT}}}}}]"],
            "roles.reward.functions.0.args.compare: compares samples of a prompt",
        ),
    ],
)
def test_games_that_cannot_work_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(SpecError) as error:
        load_rollout_spec(SPEC, overrides)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "overrides", [[], [ONE, "algorithm.group_size=3"], [ONE, "algorithm.name=remax", "algorithm.kl.coef=0"]]
)
def test_games_that_can(overrides: list[str]) -> None:
    load_rollout_spec(SPEC, overrides)


def test_a_judge_that_plays_needs_no_function_and_decides_results() -> None:
    """Another opponent makes another evaluation."""
    data = "data.eval={kind: jsonl, path: deploy/specs/data/answers-eval.jsonl}"
    players = "roles.environment.players={first: policy, second: judge}"
    judges = [f"roles.judge={{model: {{path: {path}}}, max_model_len: 128, max_tokens: 2}}" for path in ("a", "b")]
    specs = [load_rollout_spec(SPEC, [data, players, judge]) for judge in judges]
    assert all(spec.roles.judge_plays for spec in specs)
    one, other = ([plays_and_judges(spec, held_out) for held_out in held_out_sets(spec)] for spec in specs)
    assert one != other and one[0]["judged_by"]


RENEWED = (
    "roles.environment.players={first: policy, second: judge}",
    "roles.judge={model: {path: a}, max_model_len: 128, max_tokens: 2, renew_every: 20}",
    "checkpoint.every_steps=10",
)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("checkpoint.every_steps=3", "roles.judge.renew_every: must be a multiple of checkpoint.every_steps (3)"),
        ("checkpoint.every_steps=0", "roles.judge.renew_every: must be a multiple of checkpoint.every_steps (0)"),
        ("roles.environment.players={first: policy, second: policy}", "renew_every: no player of a game is the judge"),
        (
            "roles.reward.functions=[{name: environment}, {name: judge, args: {rubric: Rate it.}}]",
            "roles.reward.functions.1: is scored by another model each time (roles.judge.renew_every)",
        ),
        (
            "data.eval={kind: jsonl, path: deploy/specs/data/answers-eval.jsonl}",
            "data.eval: is played against another model each time (roles.judge.renew_every)",
        ),
    ],
)
def test_an_opponent_that_cannot_be_renewed_is_refused(override: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        load_rollout_spec(SPEC, [*RENEWED, override])
    assert problem in str(error.value)


def test_an_evaluation_plays_an_episode_for_each_of_its_samples() -> None:
    data = "data.eval={kind: jsonl, path: deploy/specs/data/answers-eval.jsonl}"
    both = load_rollout_spec(SPEC, [data])
    assert [one.players for one in held_out_sets(both)] == [("first", "second")]
    assert [one.players for one in held_out_sets(load_rollout_spec(SPEC, [data, ONE]))] == [()]
