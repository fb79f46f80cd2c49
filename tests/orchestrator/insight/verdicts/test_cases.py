"""Verdicts on sick and healthy runs: what is found, and what is found that is not there."""

from __future__ import annotations

import json
import shlex
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from troupe.orchestrator.cli import app
from troupe.orchestrator.commands.options import json_text
from troupe.orchestrator.insight.verdicts.apply import RunReport, apply_rules, fits
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.learning import smaller_steps
from troupe.orchestrator.insight.verdicts.speed import growing_memory
from troupe.orchestrator.insight.verdicts.verdict import Level
from troupe.orchestrator.live.run_state import RunState

from .cases import HELD_OUT, TUNED, Case, lines_of, spec_of

CASES = (*TUNED, *HELD_OUT)
LEAST_RECALL = 0.9


def alarms(case: Case) -> set[str]:
    """Names of the problems and warnings."""
    return {verdict.name for verdict in apply_rules(case.history()) if verdict.is_alarm}


def test_there_are_enough_sick_and_healthy_runs() -> None:
    assert sum(bool(case.expected) for case in CASES) >= 20
    assert sum(not case.expected for case in CASES) >= 10


@pytest.mark.parametrize("part", [TUNED, HELD_OUT], ids=["tuned", "held-out"])
def test_planted_faults_are_found(part: tuple[Case, ...]) -> None:
    sick = [case for case in part if case.expected]
    missed = {str(case): sorted(alarms(case)) for case in sick if not alarms(case) & case.expected}
    assert len(missed) <= (1 - LEAST_RECALL) * len(sick), missed


@pytest.mark.parametrize("case", [case for case in CASES if not case.expected], ids=str)
def test_healthy_runs_raise_no_alarm(case: Case) -> None:
    assert alarms(case) == set()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdicts_name_recorded_evidence_and_remedies_that_load(case: Case) -> None:
    history = case.history()
    for verdict in apply_rules(history):
        assert verdict.since <= history.last_step + 1 and verdict.summary and verdict.title
        assert "nan" not in verdict.summary, verdict.summary
        if verdict.level is not Level.NOTE:
            assert verdict.remedies
            assert any(name in history.metrics for name in verdict.evidence)
        for remedy in verdict.remedies:
            assert fits(remedy, history.spec)
            assert not remedy.spec or isinstance(yaml.safe_load(remedy.spec), dict)


@pytest.mark.parametrize(("function", "offered"), [("planted_rewards:always_one", False), ("last_number", True)])
def test_a_curriculum_is_proposed_where_the_reward_says_what_is_solved(function: str, offered: bool) -> None:
    spec = spec_of("sick-constant-reward")
    spec["roles"]["reward"]["functions"][0] |= {"name": function, "label": "goal"}
    history = History.of(lines_of("sick-constant-reward"), spec)
    (verdict,) = [one for one in apply_rules(history) if one.name == "no-signal"]
    assert ("data:\n  curriculum: {}" in [remedy.spec for remedy in verdict.remedies]) is offered


def test_what_is_printed_for_programs_follows_the_published_schema() -> None:
    found = {case.name: RunReport(RunState(), tuple(apply_rules(case.history()))) for case in CASES[:6]}
    printed = json.loads(json_text(found))
    schema = json.loads(CliRunner().invoke(app, ["schema", "report"]).stdout)
    jsonschema.validate(printed, schema)
    assert jsonschema.Draft202012Validator(schema).is_valid({"run": [{}]}) is False
    for remedy in (remedy for one in found.values() for verdict in one.verdicts for remedy in verdict.remedies):
        assert all(f"--set {shlex.quote(value)}" in remedy.line for value in remedy.set)
        assert bool(remedy.set) is bool(remedy.spec)


def test_memory_that_flattens_is_no_leak_at_any_step() -> None:
    """An engine takes 340 MiB in its first eight steps and no more; a leak of that rate is found a few steps later."""

    def found(steps: int, rising: int) -> bool:
        lines = [{"step": step, "memory/rollout": 3.1 + 0.0425 * min(step, rising)} for step in range(1, steps + 1)]
        return any(verdict.name == "growing-memory" for verdict in growing_memory(History.of(lines)))

    assert not any(found(steps, rising=8) for steps in range(1, 60))
    assert [steps for steps in range(1, 60) if found(steps, rising=60)] == list(range(11, 60))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"name": "grpo"}, "learning_rate: 3e-07"),
        ({"name": "trpo"}, "max_kl: 0.003"),
        ({"name": "trpo", "natural_gradient": {"max_kl": 0.5}}, "max_kl: 0.15"),
    ],
)
def test_smaller_steps_are_those_of_the_algorithm(settings: dict[str, Any], remedy: str) -> None:
    assert smaller_steps(History.of([], {"algorithm": settings})).spec.split("\n")[-1].strip() == remedy


@pytest.mark.parametrize(
    ("reasons", "timeout", "named"),
    [
        ((), True, ""),
        (("error: ValueError (my.py:6)", "error: ValueError (my.py:6)", "timeout after 5 s"), True, "ValueError"),
        (("error: ValueError (my.py:6)", "memory"), False, "`goal: error: ValueError (my.py:6)`"),
    ],
)
def test_more_time_is_proposed_unless_no_reward_has_failed_for_it(
    reasons: tuple[str, ...], timeout: bool, named: str
) -> None:
    dropped = [{"event": "dropped", "reason": f"reward: goal: {reason}", "samples": 9} for reason in reasons]
    dropped.append({"event": "dropped", "reason": "too old", "samples": 90})
    events = [*dropped, {"event": "run_ended", "how": "finished"}]
    history = History.of(lines_of("sick-failing-reward"), spec_of("sick-failing-reward"), events)
    (found,) = (one for one in apply_rules(history) if one.name == "failing-rewards")
    assert any("more time" in remedy.text for remedy in found.remedies) is timeout
    assert (f"most often it is {named}" if not timeout else named) in found.remedies[0].text
    assert "too old" not in found.remedies[0].text


@pytest.mark.parametrize(("first", "left"), [(0.0, True), (7.0, False)])
def test_a_policy_that_leaves_the_reference_in_its_first_step_had_the_right_one(first: float, left: bool) -> None:
    lines = lines_of("sick-learning-rate")
    for line, divergence in zip(lines, (first, *(7.5,) * len(lines)), strict=False):
        line["kl_ref"] = divergence
    (found,) = (
        one for one in apply_rules(History.of(lines, spec_of("sick-learning-rate"))) if one.name == "kl-explosion"
    )
    assert (found.title == "The policy has left the reference") is left
    assert not left or found.remedies[0] == smaller_steps(History.of(lines, spec_of("sick-learning-rate")))
    assert ("Check `roles.reference.model`." in {remedy.text for remedy in found.remedies}) is not left


@pytest.mark.parametrize(
    ("values", "reward", "first"),
    [(300.0, 0.3, "Lower the critic's learning rate."), (20.0, 30.0, "Bound the rewards."), (2.0, 0.3, "Normalize")],
)
def test_a_bound_on_the_rewards_is_proposed_for_large_ones_only(values: float, reward: float, first: str) -> None:
    lines = [
        line | {"critic/grad_norm": 1e4, "critic/value_abs_max": values, "reward/mean": reward}
        for line in lines_of("sick-critic-rate")
    ]
    found = apply_rules(History.of(lines, spec_of("sick-critic-rate")))
    (clipped,) = (one for one in found if one.name == "clipped-gradients" and "critic" in one.title)
    assert clipped.remedies[0].text.startswith(first) or first == "Normalize"
    assert ("Bound the rewards." in {remedy.text for remedy in clipped.remedies}) is (reward > 5)
