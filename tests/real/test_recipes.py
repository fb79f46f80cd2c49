"""The first step of each recipe: a tiny model, on rows in the layout of each recipe's data."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.test_recipes import NAMES, local
from tests.pairs.runs import shared_cluster
from tests.real.commands import metrics_lines
from troupe.deploy.examples.search import write_index
from troupe.orchestrator.commands.runs import ready
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.runs.training import train
from troupe.orchestrator.spec.examples import RECIPES
from troupe.orchestrator.telemetry.console import Console

pytestmark = [pytest.mark.real, pytest.mark.long]

STEPS = 5
TRAINER = {"workers": 1, "cpus": 0.5, "gpus": 0, "threads": 1, "zero_stage": 1, "micro_batch_tokens": 4096}
SMALL: dict[str, dict[str, Any]] = {
    "rollout": {"workers": 1, "cpus": 0.5, "threads": 1, "max_num_seqs": 16, "max_model_len": 512, "kv_cache_gib": 0.1},
    "policy": TRAINER,
    "critic": TRAINER | {"warmup_steps": 0},
    "reward": {"workers": 1, "cpus": 0.25, "gpus": 0},
    "environment": {"cpus": 0.25, "episodes": 16},
}
"""What a role of a recipe has on two cores."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, shared_cluster():
        patch.chdir(ROOT)
        yield


def small(section: dict[str, Any], model: Path) -> dict[str, Any]:
    """A spec, or a stage of one, as two cores can run it for some steps."""
    for name, role in section["roles"].items():
        role |= SMALL.get(name, {})
        if name == "critic" or "model" in role:
            role["model"]["dtype"] = "float32"
        if name == "reference" and "model" in role:
            role |= {"cpus": 0.5, "gpus": 0, "model": {"path": ".cache/models/tiny-teacher", "dtype": "float32"}}
        for field in ("offload_optimizer", "gradient_checkpointing", "tensor_parallel_size", "warmup_updates"):
            role.pop(field, None)
        if name == "rollout":
            role |= {"gpus": 0, "enforce_eager": True}
    if "model" in section and not str(section["model"]["path"]).startswith("stage:"):
        section["model"] = {"path": str(model), "dtype": "float32"}
    batch = "prompts_per_step" if "sampling" in section else "examples_per_step"
    section["schedule"] = {"steps": STEPS, batch: 4}
    section["checkpoint"] = {"every_steps": 0, "keep": 1}
    if "evaluation" in section:
        section["evaluation"] = {"every_steps": 0, "at_end": True}
    if "sampling" in section:
        section["sampling"] |= {"max_tokens": 8}
        section["algorithm"] |= {"group_size": 2} if section["algorithm"]["name"] != "ppo" else {}
    return section


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_of_a_recipe(name: str, tiny_model: Path, tmp_path: Path) -> None:
    spec = local(name)
    if "stages" in spec:
        base = {key: spec.pop(key) for key in ("model", "roles", "checkpoint")}
        for stage in spec["stages"].values():
            stage["roles"]["policy"] = base["roles"]["policy"] | stage["roles"].get("policy", {})
            small(stage, tiny_model)
            del stage["checkpoint"]
        spec |= {"model": {"path": str(tiny_model), "dtype": "float32"}, "checkpoint": {"every_steps": 0, "keep": 1}}
    else:
        small(spec, tiny_model)
        if name == f"{RECIPES}dapo-math":
            letters = {"name": "letter_share", "label": "correct", "args": {"letters": "aeiou"}}
            overlong = {"name": "overlong", "args": {"limit": 8, "buffer": 4}}
            spec["roles"]["reward"]["functions"] = [letters, overlong]  # a random model solves nothing
    if name == f"{RECIPES}search-r1":
        passages, index = tmp_path / "passages.jsonl", tmp_path / "passages.db"
        passages.write_text('{"contents": "Night Harbour is a play."}')
        assert write_index(index, [passages]) == 1
        spec["roles"]["environment"]["args"]["index"] = str(index)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    planned = ready(file, [], tmp_path / "run")
    for run in planned:
        outcome = train(RunRequest(run.spec, run.out, False, None), Console(io.StringIO()))
        assert outcome.steps_done == STEPS == metrics_lines(run.out)[-1]["step"]
    assert len(planned) == len(spec.get("stages", [1]))
