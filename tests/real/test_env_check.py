"""`troupe env check`: episodes without a model, as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forked_commands import Finished, run_command

SPEC = ROOT / "deploy" / "specs" / "tiny-environment.yaml"


def env_check(tiny_model: Path, *arguments: str) -> Finished:
    """Run the command on the tiny model."""
    return run_command("env", "check", str(SPEC), *arguments, "--set", f"model.path={tiny_model}")


@pytest.mark.real
def test_given_turns_are_played_then_random_ones(tiny_model: Path) -> None:
    """Every stretch of tokens says who wrote it and whether it has loss; only turns of the policy have."""
    turns = ("--say", "1", "--say", "10", "--say", "nothing", "--episodes", "2")
    done = env_check(tiny_model, *turns)
    assert done.returncode == 0, done.stderr
    given = done.stdout.count("guess_number, turns as given")
    assert given == done.stdout.count("guess_number, turns of random tokens") == 2
    lines = done.stdout.splitlines()
    stretches = [line for line in lines if " tokens, " in line]
    assert {line.split()[0] for line in stretches} == {"prompt", "assistant", "environment"}
    for line in stretches:
        assert ("no loss" in line) == (line.split()[0] != "assistant"), line
    ends = [line for line in lines if line.startswith("end: ")]
    assert len(ends) == 4 and all(line.startswith("end: ok, ") for line in ends)
    assert any("'1" in line for line in lines), "the text of the turn is shown"


@pytest.mark.real
def test_the_episodes_as_json(tiny_model: Path) -> None:
    done = env_check(tiny_model, "--say", "1", "--json")
    assert done.returncode == 0, done.stderr
    given, drawn = json.loads(done.stdout)
    assert (given["turns"], drawn["turns"]) == ("turns as given", "turns of random tokens")
    for episode in (given, drawn):
        assert (episode["environment"], episode["status"]) == ("guess_number", "ok") and "lines" not in episode
        assert all(part["loss"] == (part["name"] == "assistant") for part in episode["stretches"])
    said = next(part for part in given["stretches"] if part["name"] == "assistant")
    assert said["text"].startswith("1") and said["row"] == 0 and isinstance(said["ids"][0], int)


@pytest.mark.real
def test_an_episode_that_fails_is_a_failure(tiny_model: Path) -> None:
    name = "roles.environment.name=tests.workers.agents.environments.misbehaving:Faulty"
    overrides = (f"model.path={tiny_model}", name, "roles.environment.args={fault: start}")
    done = run_command("env", "check", str(SPEC), *(part for override in overrides for part in ("--set", override)))
    assert done.returncode == 1 and "end: environment: turn 0: start: " in done.stdout
    assert done.stderr.splitlines()[-1] == "1 of 1 episodes failed"


@pytest.mark.real
def test_an_environment_that_cannot_be_loaded_is_one_line(tiny_model: Path) -> None:
    overrides = (f"model.path={tiny_model}", "roles.environment.args={low: 1, hihg: 10}")
    done = run_command("env", "check", str(SPEC), *(part for override in overrides for part in ("--set", override)))
    assert done.returncode == 2 and done.stdout == ""
    assert "hihg" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.real
def test_a_spec_without_an_environment_has_nothing_to_check(tiny_model: Path) -> None:
    spec = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
    done = run_command("env", "check", str(spec), "--set", f"model.path={tiny_model}")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [f"error: {spec}: there is no roles.environment to check"]
