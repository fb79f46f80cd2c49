"""Commands without the package of a feature: exit code 2, and the extra that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.cli import main

SPEC = """\
name: extras
model: {path: MODEL, dtype: float32}
roles:
  rollout: {cpus: 0.5, threads: 1, max_num_seqs: 32, max_model_len: 128, kv_cache_gib: 0.1}
  policy:
    cpus: 0.5
    micro_batch_tokens: 2048
  reward:
    functions:
    - name: last_number
algorithm: {name: grpo, group_size: 4}
schedule: {steps: 2, prompts_per_step: 2}
sampling: {max_tokens: 8}
data:
  train:
    kind: jsonl
    path: rows.jsonl
output:
  folder: runs
"""
ROW = '{"prompt": "1+1=", "answer": "2"}'
KIND = "    kind: jsonl\n    path: rows.jsonl\n"
GYM = "    kind: reasoning_gym\n    recipes: [{name: chain_sum}]\n    size: 8\n    seed: 1\n"
VOTES = """\
  eval: {kind: jsonl, path: held-out.jsonl}
evaluation: {every_steps: 1, sampling: {samples: 4, temperature: 1.0}}
output:
"""

Validate = Callable[[str], tuple[int, list[str]]]


def troupe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """The exit code of a command and the lines of its error."""
    monkeypatch.setattr(sys, "argv", ["troupe", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err.splitlines()


@pytest.fixture
def validate(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Validate:
    """Validates a text as the file spec.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("rows.json").write_text(f"[{ROW}]")
    Path("rows.jsonl").write_text(f"{ROW}\n" * 8)
    Path("held-out.jsonl").write_text(ROW.replace("1+1", "2+3") + "\n")

    def run(text: str) -> tuple[int, list[str]]:
        Path("spec.yaml").write_text(text.replace("MODEL", str(tiny_model)))
        return troupe(monkeypatch, capsys, "validate", "spec.yaml")

    return run


@pytest.mark.parametrize(
    ("module", "old", "new", "line", "field", "remedy"),
    [
        ("reasoning_gym", KIND, GYM, 16, "data.train.kind", "reasoning-gym: pip install 'troupe-rl[gym]'"),
        ("ijson", KIND, "    kind: json\n    path: rows.json\n", 16, "data.train.kind", "'troupe-rl[data]'"),
        (
            "peft",
            "    cpus: 0.5\n",
            "    lora: {rank: 4}\n",
            6,
            "roles.policy.lora",
            "peft: pip install 'troupe-rl[lora]'",
        ),
        ("tensorboard", "  folder: runs", "  sinks: [tensorboard]", 19, "output.sinks.0", "'troupe-rl[metrics]'"),
        ("wandb", "  folder: runs", "  sinks: [wandb]", 19, "output.sinks.0", "'troupe-rl[trackers]'"),
        ("prometheus_client", "  folder: runs", "  prometheus: {}", 19, "output.prometheus", "prometheus-client: pip"),
        ("math_verify", "output:\n", VOTES, 19, "evaluation.sampling.samples", "'troupe-rl[math]'"),
    ],
)
def test_a_spec_is_refused_where_it_asks_for_the_feature(
    module: str,
    old: str,
    new: str,
    line: int,
    field: str,
    remedy: str,
    validate: Validate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SPEC.count(old) == 1
    text = SPEC.replace(old, new)
    if module != "wandb":  # it is not installed for tests
        assert validate(text) == (0, [])
    monkeypatch.setitem(sys.modules, module, None)
    code, (error,) = validate(text)
    assert code == 2 and error.startswith(f"spec.yaml:{line}: {field}: needs the package "), error
    assert module.replace("_", "-") in error and remedy in error


def test_a_reward_function_is_refused_where_it_is_named(validate: Validate, tmp_path: Path) -> None:
    """It is loaded in another process, which serves later checks of this process too: the command has its own."""
    assert validate(SPEC) == (0, [])
    spec, blocked = tmp_path / "spec.yaml", tmp_path / "blocked"
    spec.write_text(spec.read_text().replace("last_number", "numeric"))
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['math_verify'] = None\n")
    command = [sys.executable, "-m", "troupe", "validate", "spec.yaml"]
    environment = {**os.environ, "PYTHONPATH": f"{blocked}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    said = "numeric: needs the package math-verify: pip install 'troupe-rl[math]'"
    assert (done.returncode, done.stderr) == (2, f"spec.yaml:10: roles.reward.functions.0.name: {said}\n")


def test_models_of_the_examples_are_refused_where_they_are_named(
    validate: Validate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    monkeypatch.setenv("TROUPE_MODELS", str(folder))
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, (error,) = validate(SPEC.replace("MODEL", str(folder / "tiny-llama")))
    expected = f"creating {folder / 'tiny-llama'} needs the package gguf: pip install 'troupe-rl[demo]'"
    assert (code, error) == (2, f"spec.yaml:2: model.path: {expected}")


@pytest.mark.parametrize(
    ("module", "command", "error"),
    [
        (
            "duckdb",
            ["samples", "runs/x"],
            "error: troupe samples needs the package duckdb: pip install 'troupe-rl[data]'",
        ),
        (
            "reasoning_gym",
            ["init", "--model", "MODEL", "--data", "reasoning_gym:chain_sum"],
            "error: --data: needs the package reasoning-gym: pip install 'troupe-rl[gym]'",
        ),
        (
            "gguf",
            ["demo", "--prepare", "--models", "models"],
            "error: creating the models needs the package gguf: pip install 'troupe-rl[demo]'",
        ),
    ],
)
def test_a_command_without_its_package(
    module: str,
    command: list[str],
    error: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROUPE_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(sys.modules, module, None)
    words = [word.replace("MODEL", str(tiny_model)) for word in command]
    assert troupe(monkeypatch, capsys, *words) == (2, [error])
