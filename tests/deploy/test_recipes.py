"""The recipes: each spec is valid, reads its rows in the layout of the data, and its rewards tell right from wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT
from troupe.orchestrator.cli import app
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.examples import PREFIX, RECIPES, example_text, examples
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.workers.rewards.loading import load

NAMES = [name for name in examples() if name.startswith(RECIPES)]
CODE = "```python\ndef add_2(x):\n    return x + {}\n```"
RESPONSES = {
    "gsm8k": ("She keeps 10.", "She keeps 12."),
    "gsm8k-calculator": ("She keeps 10.", "She keeps 12."),
    "dapo-math": ("Answer: 16", "Answer: 17"),
    "mbpp": (CODE.format(2), CODE.format(3)),
    "search-r1": ("<answer> ann teller </answer>", "Ann Teller directed it.\n<answer>Omar Reed</answer>"),
    "distillation": ("She keeps 10.", "She keeps 12."),
}
"""A right and a wrong response to the first row."""
SAME_DATA = {"gsm8k-calculator": "gsm8k", "distillation": "gsm8k"}


def local(name: str) -> dict[str, Any]:
    """The spec of a recipe with the rows beside it in place of the data on the hub."""
    folder = name.removeprefix(RECIPES)
    rows = ROOT / "deploy" / "recipes" / SAME_DATA.get(folder, folder) / "rows.jsonl"

    def replaced(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node.get("kind") == "hub":
            columns = {key: value for key, value in node.items() if key not in ("name", "subset", "split")}
            return columns | {"kind": "jsonl", "path": str(rows)}
        if node.get("kind") == "reasoning_gym":
            return node | {"size": 8}
        found = {key: replaced(value) for key, value in node.items()}
        return found | ({"held_out": False} if "train" in found else {})  # both parts are the same rows

    return replaced(yaml.safe_load(example_text(name)))


def runs_of(document: dict[str, Any], folder: Path) -> tuple[PlannedRun, ...]:
    """The runs of a spec that is written to a folder."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return plan_runs(read_document(file))


def test_there_are_recipes_and_the_commands_know_them(tmp_path: Path) -> None:
    folders = sorted(path.parent.name for path in (ROOT / "deploy" / "recipes").glob("*/spec.yaml"))
    assert [name.removeprefix(RECIPES) for name in NAMES] == folders and len(folders) >= 10
    listed = CliRunner().invoke(app, ["demo", "--list"]).stdout
    page = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    for name in NAMES:
        assert f"\n{name} " in listed and f"`{name.removeprefix(RECIPES)}`" in page
        text = example_text(name)
        assert text.startswith("#") and all(word in text for word in ("# Data: ", "Machine: ", "Curve: ", "# Watch: "))
    written = tmp_path / "run.yaml"
    done = CliRunner().invoke(app, ["init", "--recipe", "gsm8k", "-o", str(written)])
    assert done.exit_code == 0 and plan_runs(read_document(written))[0].spec.name == "gsm8k"
    assert f"troupe run {written}" in written.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_and_reads_every_row_of_its_layout(name: str, tmp_path: Path) -> None:
    assert plan_runs(read_document(PREFIX + name))
    for planned in runs_of(local(name), tmp_path):
        for part, pool in load_data(planned.spec).pools.items():
            assert pool.rows == 8 and not pool.bad_rows, (name, part)


@pytest.mark.parametrize("name", RESPONSES)
def test_the_reward_of_a_recipe_tells_right_from_wrong(name: str, tmp_path: Path) -> None:
    (planned,) = runs_of(local(RECIPES + name), tmp_path)
    spec = planned.spec.rollouts
    assert spec is not None
    row = load_data(spec).pools["train"].table.slice(0, 1).to_pylist()[0]
    first = spec.roles.reward.functions[0]
    chosen = (first.name, first.args)
    if name == "gsm8k-calculator":
        chosen = (spec.roles.environments()[""].args["function"], {})
    function = load(*chosen)
    metadata = row["metadata"] if isinstance(row["metadata"], dict) else json.loads(row["metadata"] or "{}")
    right, wrong = (function(text, row["answer"], metadata, **chosen[1]) for text in RESPONSES[name])
    assert (float(right), float(wrong)) == (1.0, 0.0)
