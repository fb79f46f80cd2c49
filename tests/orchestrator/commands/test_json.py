"""`--json` of commands that print a table of what Troupe has."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.cli import app
from troupe.orchestrator.spec.examples import examples


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
    assert CliRunner().invoke(app, ["demo", "--json"]).exit_code == 2
