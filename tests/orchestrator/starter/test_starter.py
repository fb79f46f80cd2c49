"""A first spec: valid and planned for every algorithm, commented, and refused where it cannot be written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.capacity.stages import plan_stages
from troupe.orchestrator.errors import DoesNotFit, UsageError
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.stages import plan_runs, read_document
from troupe.orchestrator.starter.choices import Choices, check_algorithm, read_data
from troupe.orchestrator.starter.command import InitFlags, complete, text_of, write
from troupe.orchestrator.starter.sizing import fitting_document, nodes

DATA = ROOT / "deploy" / "specs" / "data"
FILES = {"demonstrations": "demonstrations", "pairs": "pairs", "labelled": "labelled", "ranked": "ranked"}
ONLINE = sorted(set(ALGORITHMS) - {"distill"})


def chosen(model: Path, **changes: Any) -> Choices:
    return Choices(**({"model": str(model), "data": "reasoning_gym:chain_sum", "cpus": 2} | changes))


def llama(folder: Path, hidden: int, layers: int, intermediate: int) -> Path:
    """A model folder of which only the size is real: its weights are a header without data."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    config = shape | {"model_type": "llama", "num_attention_heads": hidden // 128, "vocab_size": 128_256}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"model.embed_tokens.weight": 128_256 * hidden, "lm_head.weight": 128_256 * hidden}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.weight"] = hidden * (5 * hidden // 2 + 3 * intermediate)
    header = json.dumps({name: {"shape": [count]} for name, count in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def check(text: str, path: Path, choices: Choices) -> Mapping[str, Any]:
    """The written file, after what `troupe validate` and `troupe plan` do with it."""
    path.write_text(text)
    runs = plan_runs(read_document(path))
    assert [problem for run in runs for problem in run.missing()] == []
    assert [plan.misfit for _, plan in plan_stages(runs, nodes(choices))] == [""]
    return yaml.safe_load(text)


@pytest.mark.parametrize("algorithm", ONLINE)
def test_every_algorithm_on_rollouts_gets_a_spec_that_is_valid_and_fits(
    algorithm: str, tiny_model: Path, tmp_path: Path
) -> None:
    choices = chosen(tiny_model, algorithm=algorithm)
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert ("critic" in document["roles"]) == ("critic" in ALGORITHMS[algorithm].required)
    assert sum(role.get("cpus", 0) * role.get("workers", 1) for role in document["roles"].values()) <= 2


@pytest.mark.parametrize("algorithm", OFFLINE_ALGORITHMS)
def test_every_offline_algorithm_gets_a_spec_that_is_valid_and_fits(
    algorithm: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = DATA / f"{FILES[OFFLINE_ALGORITHMS[algorithm].formats[0]]}-train.jsonl"
    choices = chosen(tiny_model, algorithm=algorithm, data=str(file))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert set(document["roles"]) == {"policy", *(["reference"] if OFFLINE_ALGORITHMS[algorithm].reference else [])}


@pytest.mark.parametrize(
    ("gpus", "algorithm", "workers"),
    [
        (8, "grpo", {"rollout": 4, "policy": 4}),
        (8, "ppo", {"rollout": 4, "policy": 2, "critic": 2}),
        (2, "grpo", {"rollout": 1, "policy": 1}),
        (2, "ppo", {"rollout": 1, "policy": 1, "critic": 1}),
        (1, "grpo", {"rollout": 1, "policy": 1}),
        (8, "sft", {"policy": 8}),
    ],
)
def test_the_gpus_are_divided_and_none_is_left_over(
    gpus: int, algorithm: str, workers: dict[str, int], tmp_path: Path
) -> None:
    model = llama(tmp_path / "model", 1024, 16, 4096)
    data = str(DATA / "demonstrations-train.jsonl") if algorithm == "sft" else "reasoning_gym:chain_sum"
    choices = chosen(model, algorithm=algorithm, gpus=gpus, gpu_type="H100", cpus=128, data=data)
    roles = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]
    assert {name: role["workers"] for name, role in roles.items() if role.get("gpus")} == workers
    assert sum(role.get("gpus", 0) * role.get("workers", 1) for role in roles.values()) == gpus


def test_a_larger_model_gets_the_settings_that_make_it_fit(tmp_path: Path) -> None:
    """An 8B model: two engines' worth of GPUs hold it, one trainer alone does not."""
    model = llama(tmp_path / "model", 4096, 32, 14336)
    assert 7e9 < read_size(model).parameters < 9e9
    choices = chosen(model, gpus=8, gpu_type="H100", cpus=128)
    policy = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]["policy"]
    assert policy["gradient_checkpointing"] and policy["workers"] > 1
    with pytest.raises(DoesNotFit, match=r"does not fit this machine: .*GiB"):
        fitting_document(single := chosen(model, gpus=1, gpu_type="L4", cpus=16), read_data(single))


def test_an_algorithm_with_a_critic_needs_two_gpus(tiny_model: Path) -> None:
    choices = chosen(tiny_model, algorithm="ppo", gpus=1)
    with pytest.raises(UsageError, match="--gpus: ppo needs at least 2 GPUs"):
        fitting_document(choices, read_data(choices))


def test_every_field_has_a_comment(tiny_model: Path, tmp_path: Path) -> None:
    lines = text_of(chosen(tiny_model), tmp_path / "run.yaml").splitlines()
    fields = [index for index, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")]
    assert len(fields) > 30
    assert [lines[i] for i in fields if "# " not in lines[i] and not lines[i - 1].lstrip().startswith("# ")] == []


def test_columns_are_found_under_their_usual_names(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2 + 2?", "solution": "4"}\n{"question": "Half of 9?", "solution": "4.5"}\n')
    choices = chosen(tiny_model, data=str(file))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["data"]["train"] | {"path": ""} == {
        "kind": "jsonl",
        "path": "",
        "prompt": "question",
        "answer": "solution",
    }
    assert document["roles"]["reward"]["functions"] == [{"name": "last_number"}]
    file.write_text('{"prompt": "Capital of France?", "answer": "Paris"}\n')
    assert read_data(choices).reward == "exact_match"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"text": "a"}\n', "has no column prompt (it has: text)"),
        ('{"prompt": "a"}\n', "has no column with the answer (it has: prompt)"),
        ('{"prompt": "a"}\n{"prompt\n', "line 2 is not a JSON object"),
        ("\n", "has no JSON object"),
    ],
)
def test_data_that_do_not_fit_are_refused(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_data(chosen(tmp_path, data=str(file)))
    assert error in str(raised.value) and str(raised.value).startswith("--data: ")


def test_a_missing_model_and_an_unknown_task_are_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"troupe init: model.path: no such folder: .*/none"):
        text_of(chosen(tmp_path / "none"), tmp_path / "run.yaml")
    with pytest.raises(UsageError, match=r"no task 'chain_sun' .did you mean 'chain_sum'"):
        text_of(chosen(tiny_model, data="reasoning_gym:chain_sun"), tmp_path / "run.yaml")


@pytest.mark.parametrize(("name", "error"), [("gropo", "did you mean 'grpo'"), ("distill", "as teacher")])
def test_an_algorithm_without_a_first_spec_is_refused(name: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        check_algorithm(name)


def test_what_is_missing_is_asked_in_a_terminal_and_refused_elsewhere() -> None:
    asked: list[str] = []

    def ask(question: str, default: str) -> str:
        asked.append(question.split()[0])
        return default or "/models/my-1b"

    choices = complete(InitFlags(gpus=0), ask)
    assert asked == ["Model", "Data:", "Algorithm"]
    assert (choices.model, choices.data, choices.algorithm) == ("/models/my-1b", "reasoning_gym:chain_sum", "grpo")
    assert choices.name == "my-1b-grpo"
    asked.clear()
    complete(InitFlags(model="m", data="reasoning_gym:gcd", gpus=0), ask)
    assert asked == []
    with pytest.raises(UsageError, match=r"^--model and --data: required where there is no terminal"):
        complete(InitFlags(), None)


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write("a: 1\n", path, force=False)
    with pytest.raises(UsageError, match="--force overwrites it"):
        write("a: 2\n", path, force=False)
    assert path.read_text() == "a: 1\n"
    write("a: 3\n", path, force=True)
    assert path.read_text() == "a: 3\n"
