"""`--json` of commands that print a table of what Troupe has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.cli import app
from troupe.orchestrator.commands.options import json_text
from troupe.orchestrator.platforms.ray_jobs import JobState
from troupe.orchestrator.spec.examples import examples

NO_TABLE = {
    "run",  # progress; metrics.jsonl has its numbers
    "init",  # writes a spec
    "schema",  # prints JSON
    "logs",  # prints the log as it is
    "watch",  # serves a page
    "deploy",  # writes a manifest or a script
    "env install",  # progress
    "env rows",  # writes rows
}
"""Commands that print nothing for a script to read, other than what they write."""


def commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command by its name, with those of subcommands."""
    if not hasattr(group, "commands"):
        yield " ".join(path), group
        return
    for name, command in group.commands.items():
        yield from commands(command, *path, name)


def test_every_command_that_prints_a_table_prints_json_too() -> None:
    known = dict(commands(typer.main.get_command(app)))
    assert len(known) > 25 and known.keys() >= NO_TABLE
    without = {name for name, command in known.items() if not any("--json" in one.opts for one in command.params)}
    assert without == NO_TABLE


def printed(*command: str) -> Any:
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_algorithms() -> None:
    assert [row["name"] for row in printed("algorithms")] == [*ALGORITHMS, *OFFLINE_ALGORITHMS]
    grpo = printed("algorithms", "grpo")
    assert grpo["formula"] == ALGORITHMS["grpo"].formula and grpo["roles"][:3] == ["rollout", "policy", "reward"]
    assert grpo["defaults"]["group_size"] == str(ALGORITHMS["grpo"].group_size) and grpo["verl"]
    assert printed("algorithms", "dpo")["source"] == OFFLINE_ALGORITHMS["dpo"].source


def test_what_is_printed_as_text_and_as_json_is_the_same() -> None:
    for name in (*ALGORITHMS, *OFFLINE_ALGORITHMS):
        text, data = CliRunner().invoke(app, ["algorithms", name]).stdout, printed("algorithms", name)
        for field in ("formula", "source", "use", "TRL"):
            assert f"  {field}: {data[field]}\n" in text
        assert f"  roles: {', '.join(data['roles'])}\n" in text
        for field, value in data["defaults"].items():
            assert f"    {field}: {value}\n" in text


def test_examples() -> None:
    assert {row["name"]: row["summary"] for row in printed("demo", "--list")} == examples()


def test_numbers_that_json_does_not_have_are_null() -> None:
    state = JobState("j", "n", "FAILED", "failed", -math.inf, "m")
    found = {"a": math.nan, "b": [math.inf, 1.5, True], "c": state, "d": Path("x")}
    job = {"job": "j", "name": "n", "status": "FAILED", "state": "failed", "seconds": None, "message": "m"}
    assert json.loads(json_text(found)) == {"a": None, "b": [None, 1.5, True], "c": job, "d": "x"}
