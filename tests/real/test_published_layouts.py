"""A step on every published layout that `troupe init` reads, in one chain of runs.

SFT (with xLAM's calls), preferences, rewards of steps, and GRPO with the reward functions that `init` proposes, beside
a source that the process reward model of the chain scores step by step.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml

from tests.conftest import ROOT
from tests.orchestrator.starter.test_layouts import COMPARED, LAYOUTS, SAMPLED, SFT, TESTS
from tests.pairs.runs import shared_cluster
from tests.real.commands import metrics_lines, trajectories
from tests.workers.data.test_tool_examples import PUBLISHED
from troupe.orchestrator.commands.runs import ready
from troupe.orchestrator.data.readers import file_format
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.runs.training import train
from troupe.orchestrator.telemetry.console import Console

QWEN = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
"""A template that renders tools and calls."""
GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
PAIRS = {name: columns for name, (algorithm, columns, _) in COMPARED.items() if algorithm == "dpo"}
JUDGED = "tasks"
"""The source that the role scores."""


def sources(layouts: Iterable[tuple[str, dict[str, Any]]], **more: Any) -> list[dict[str, Any]]:
    """A source for each layout, with these fields."""
    return [
        {"name": f"s{number}", "kind": file_format(name), "path": str(LAYOUTS / name), **columns, **more}
        for number, (name, columns) in enumerate(layouts)
    ]


def trained(algorithm: str, found: list[dict[str, Any]], model: str = "stage:sft") -> dict[str, Any]:
    """A stage of a step with an example of each source."""
    roles: dict[str, Any] = {"policy": {"cpus": 0.5, "threads": 1, "micro_batch_tokens": 2048, "learning_rate": 1e-4}}
    if algorithm in ("dpo", "kto"):
        roles["reference"] = {"colocate_with": "policy"}
    section = found[0] if len(found) == 1 else found
    if len(found) == 1:
        section = {name: value for name, value in found[0].items() if name != "name"}
    return {
        "model": {"path": model},
        "roles": roles,
        "algorithm": {"name": algorithm},
        "schedule": {"steps": 1, "examples_per_step": max(2, len(found))},
        "data": {"train": section, "max_length": 1000},
    }


def chain(folder: Path, model: Path) -> Path:
    (folder / "xlam.jsonl").write_text(json.dumps(PUBLISHED["xLAM"][0]) + "\n")
    xlam = {
        "name": "xlam",
        "kind": "jsonl",
        "path": str(folder / "xlam.jsonl"),
        **PUBLISHED["xLAM"][1],
        "tools": "tools",
    }
    of = {
        algorithm: sources((name, columns) for name, (own, columns, _) in COMPARED.items() if own == algorithm)
        for algorithm in ("kto", "process_reward_model")
    }
    roles = yaml.safe_load(GRPO.read_text())["roles"]
    roles["rollout"] |= {"max_model_len": 1024}
    steps = {"path": "stage:steps", "dtype": "float32"}
    roles["reward"] = {"cpus": 0.25, "threads": 1, "model": {**steps, "level": "step", "separator": "e"}}
    sampled = sources((name, columns) for name, (columns, _, _) in SAMPLED.items())
    for source, (columns, function, _) in zip(sampled, SAMPLED.values(), strict=True):
        tests = {"args": {"tests": next(iter(columns["metadata"]), "answer")}} if function == TESTS else {}
        source["rewards"] = [{"name": function, **tests}]
    tasks = {"name": JUDGED, "kind": "reasoning_gym", "recipes": [{"name": "gcd"}], "size": 8, "seed": 1}
    rollouts = {
        "model": {"path": "stage:dpo"},
        "roles": roles,
        "algorithm": {"name": "grpo", "group_size": 2},
        "schedule": {"steps": 1, "prompts_per_step": len(sampled) + 1},
        "sampling": {"max_tokens": 12},
        "data": {"train": [*sampled, tasks]},
    }
    document = {
        "name": "layouts",
        "seed": 7,
        "model": {"path": str(model), "dtype": "float32", "chat_template": str(QWEN)},
        "checkpoint": {"every_steps": 0},
        "stages": {
            "sft": trained("sft", [*sources((name, columns) for name, (columns, _) in SFT.items()), xlam], str(model)),
            "dpo": trained("dpo", sources(PAIRS.items())),
            "kto": trained("kto", of["kto"]),
            "rewards": trained("reward_model", sources(PAIRS.items())),
            "steps": trained("process_reward_model", of["process_reward_model"]),
            "rollouts": rollouts,
        },
    }
    path = folder / "spec.yaml"
    path.write_text(json.dumps(document, indent=1))
    return path


@pytest.mark.long
def test_a_step_on_every_published_layout(tmp_path: Path, tiny_model: Path) -> None:
    path, out = chain(tmp_path, tiny_model), tmp_path / "chain"
    with shared_cluster():
        for run in ready(path, [], out):
            train(RunRequest(run.spec, run.out, False, None), Console(io.StringIO()))
    document = json.loads(path.read_text())
    for name, stage in document["stages"].items():
        (metrics,) = metrics_lines(out / name)
        trainer = "reward_model" if name in ("rewards", "steps") else "policy"
        assert metrics[f"{trainer}/skipped_updates"] == 0 < metrics[f"{trainer}/grad_norm"]
        assert math.isfinite(metrics[f"{trainer}/loss"])
        given = stage["data"]["train"]
        for source in given if isinstance(given, list) else ():
            assert metrics[f"source/{source['name']}/share"] > 0, source
    rows = trajectories(out / "rollouts", 1).to_pylist()
    judged = [row for row in rows if row["source"] == JUDGED]
    assert len(rows) == 2 * (len(SAMPLED) + 1) and {row["status"] for row in rows} == {"ok"}
    assert [component["name"] for row in judged for component in row["components"]] == ["reward_model"] * 2
    assert all(row["reward_spans"] for row in judged)
