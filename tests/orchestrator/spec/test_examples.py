"""Shipped examples by name: complete, with paths that exist in any folder, and refused where there is no such one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import troupe
from tests.conftest import ROOT
from troupe.orchestrator.cli import app
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.spec import examples
from troupe.orchestrator.spec.derived.paths import path_fields
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.starter.demo import MODELS

SPECS = ROOT / "deploy" / "specs"
ELSEWHERE = ("/models/", "/data/", "models/policy-7b-instruct")
"""Where paths of the specs for clusters start: the user's own models and data."""


@pytest.fixture(autouse=True)
def another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(examples.MODELS_VARIABLE, raising=False)


def test_every_spec_is_an_example_with_a_summary() -> None:
    known = examples.examples()
    recipes = [name for name in known if name.startswith(examples.RECIPES)]
    assert set(known) - {*recipes} == {str(path.relative_to(SPECS).with_suffix("")) for path in SPECS.rglob("*.yaml")}
    assert [*known][-len(recipes) :] == recipes and all(examples.example_file(name).is_file() for name in known)
    assert all(known.values())
    assert known["tiny-grpo"].startswith("GRPO on a random two-layer model")
    assert next(iter(known)) == "laptop-agent" and [*known][-len(recipes) - 1].startswith("algorithms/")


@pytest.mark.parametrize("name", sorted(examples.examples()))
def test_an_example_is_valid_in_any_folder_and_its_paths_are_absolute(name: str, tmp_path: Path) -> None:
    runs = plan_runs(read_document(examples.PREFIX + name))
    models = tmp_path / "troupe" / "models"
    for planned in runs:
        for field, text in path_fields(planned.spec.model_dump(mode="json")):
            path = Path(text)
            if field == "output.folder" or field in planned.borrowed or text.startswith(ELSEWHERE):
                continue
            assert (path.parent == models and path.name in MODELS) or (path.is_file() and path.is_absolute()), field
    assert "deploy/specs/" not in examples.example_text(name).replace(str(SPECS), "")


def test_lines_are_those_of_the_file() -> None:
    with pytest.raises(Exception, match=r"--set: roles.rolout: unknown field"):
        plan_runs(read_document("examples:tiny-grpo", ["roles.rolout.workers=2"]))
    document = read_document("examples:tiny-grpo")
    assert str(document.source.problem("model.path", "x")) == "examples:tiny-grpo:5: model.path: x"
    text, file = examples.example_text("tiny-grpo"), (SPECS / "tiny-grpo.yaml").read_text()
    assert len(text.splitlines()) == len(file.splitlines())
    assert "#   troupe run examples:tiny-grpo\n" in text


@pytest.mark.parametrize("folder", ["/plain/path", "/a b/{c}, d: #e", "/with 'both' \"quotes\""])
def test_a_folder_with_any_characters_is_kept(folder: str) -> None:
    data = yaml.safe_load(examples.example_text("tiny-grpo", Path(folder)))
    assert data["model"] == {"path": f"{folder}/tiny-llama", "dtype": "float32"}


def test_an_unknown_example_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"examples:tiny-grop: no such example \(did you mean 'tiny-grpo'\?\)"):
        read_document("examples:tiny-grop")
    with pytest.raises(UsageError, match=r"`troupe demo --list`"):
        read_document("examples:../../pyproject")


def test_the_folder_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples.models_folder() == tmp_path / "troupe" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert examples.models_folder() == Path.home() / ".cache" / "troupe" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert examples.models_folder() == Path.home() / ".cache" / "troupe" / "models"
    monkeypatch.setenv(examples.MODELS_VARIABLE, "here")
    assert examples.models_folder() == tmp_path / "here"


def test_a_plan_creates_no_model_and_is_that_of_the_model(
    tmp_path: Path, demo_model: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {folder.name: folder for folder in (demo_model, tiny_model, tiny_model.with_name("tiny-teacher"))}
    for name, folder in folders.items():
        shipped = json.loads((examples.MODEL_CONFIGS / name / "config.json").read_text())
        made = json.loads((folder / "config.json").read_text())
        assert shipped.items() <= made.items(), name
        assert read_size(examples.MODEL_CONFIGS / name).parameters == read_size(folder).parameters
    before = CliRunner().invoke(app, ["plan", "examples:tiny-three-stage", "--cluster", "1x0", "--json"])
    assert before.exit_code == 0, before.output
    assert troupe.plan("examples:laptop-grpo", cluster="1x0").memory.workers
    assert not examples.models_folder().exists()
    monkeypatch.setenv(examples.MODELS_VARIABLE, str(tiny_model.parent))
    after = CliRunner().invoke(app, ["plan", "examples:tiny-three-stage", "--cluster", "1x0", "--json"])
    assert json.loads(after.stdout) == json.loads(before.stdout)
