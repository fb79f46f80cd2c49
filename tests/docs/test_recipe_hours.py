"""The hours on the page of recipes are what `troupe plan` predicts for H100s."""

from __future__ import annotations

import re

import pytest

from docs.tooling import layouts
from tests.conftest import ROOT
from troupe.orchestrator.plan.plan import described_nodes, plan_stages
from troupe.orchestrator.spec.load import plan_runs
from troupe.orchestrator.spec.yaml_reader import parse

ROWS = re.findall(
    r"^\| `(\S+)` \|.* \| (?:(\d) nodes of )?(\d) x \d+ GB \| (\S+) \|",
    (ROOT / "docs/guides/recipes.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
SMALL = {"0.5B": (896, 4864, 24, 14), "3B": (2048, 11008, 36, 16)}
"""Hidden size, width of the feed-forward, layers and heads of Qwen2.5, the rest of which is as in 1.5B."""


def predicted_hours(recipe: str, nodes: int, gpus: int) -> float:
    """Hours of all stages, with responses as long as the recipe allows."""
    text = (ROOT / f"deploy/recipes/{recipe}/spec.yaml").read_text(encoding="utf-8")
    text = re.sub(r"Qwen/Qwen2\.5[\w-]*?-([\d.]+B)[\w-]*", lambda found: str(layouts.folder(found[1])), text)
    runs = plan_runs(parse(text, recipe))
    found = [*plan_stages(runs, described_nodes(f"{nodes}x{gpus}xH100", 128))]
    assert len(found) == len(runs) and not found[-1][1].misfit
    seconds = 0.0
    for run, plan in found:
        assert plan.predicted is not None
        seconds += run.spec.schedule.steps * plan.predicted.step_s
    return seconds / 3600


@pytest.mark.parametrize(("recipe", "nodes", "gpus", "hours"), ROWS)
def test_the_hours_of_a_recipe_are_predicted(
    recipe: str, nodes: str, gpus: str, hours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (hidden, width, layers, heads) in SMALL.items():
        sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
        known = layouts.MODELS["1.5B"] | sizes | {"num_attention_heads": heads}
        monkeypatch.setitem(layouts.MODELS, name, known)
    assert hours == f"{predicted_hours(recipe, int(nodes or 1), int(gpus)):,.1f}"


def test_every_recipe_for_gpus_has_hours() -> None:
    recipes = {folder.name for folder in (ROOT / "deploy/recipes").iterdir() if folder.is_dir()}
    assert {row[0] for row in ROWS} == recipes - {"self-play"}
