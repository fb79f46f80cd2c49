"""Commands that are imported when they are used."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from tests.conftest import ROOT
from troupe.orchestrator.cli import COMMANDS, app, load
from troupe.workers.contract.weight_backends import TransferBackend

WAITS = ("pydantic", "pyarrow", "numpy", "yaml", "psutil", "torch", "ray")
"""What a command may import and the list of commands must not."""
BACKENDS = ("auto", *get_args(TransferBackend))
OF_EACH_MODULE = {entry.home.partition(":")[0]: name for name, entry in COMMANDS.items()}.values()
RUN = """
import atexit, sys
from troupe.__main__ import main

sys.argv = ["troupe", *sys.argv[1:]]
atexit.register(lambda: sys.stderr.write(" ".join(sys.modules)))
main()
"""


def imported(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that its process has imported."""
    command = [sys.executable, "-c", RUN, *arguments]
    env = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.split())


def commands_of(modules: set[str]) -> set[str]:
    """The modules of commands among these."""
    prefix = "troupe.orchestrator.commands."
    own = {"bash_completion", "options"}
    return {name.removeprefix(prefix) for name in modules if name.startswith(prefix)} - own


def test_help_imports_no_command_and_no_library_of_one() -> None:
    printed, modules = imported("--help")
    assert all(f"│ {name} " in printed for name in COMMANDS)
    assert "troupe.orchestrator.cli" in modules
    assert sorted(modules & set(WAITS)) == []
    assert commands_of(modules) == set()
    assert sorted(name for name in modules if name.startswith("troupe.orchestrator.spec")) == []


def test_help_of_a_command_imports_no_other_command() -> None:
    printed, modules = imported("why", "--help")
    assert "--timeout-s" in printed
    assert commands_of(modules) == {"diagnose"}


@pytest.mark.parametrize(("words", "completed"), [("troupe ", [*COMMANDS]), ("troupe sc", ["schema", "scale"])])
def test_the_completion_of_a_name_imports_no_command(words: str, completed: list[str]) -> None:
    position = str(words.count(" "))
    printed, modules = imported(_TROUPE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert printed.split() == completed
    assert sorted(modules & set(WAITS) - {"pydantic"}) == []  # Typer's own: it parses `--version` with it
    assert commands_of(modules) == set()


def completed(words: str) -> tuple[list[str], set[str]]:
    """What Tab completes, and the modules that its process has imported."""
    variables = {"_TROUPE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    printed, modules = imported(**variables)
    return printed.split(), modules


@pytest.mark.parametrize(
    ("words", "found"),
    [
        *((f"troupe {name} --hel", ["--help"]) for name in OF_EACH_MODULE),
        ("troupe why --t", ["--timeout-s"]),
        ("troupe run a.yaml --set roles.policy.lea", ["roles.policy.learning_rate="]),
        ("troupe env check a.yaml --set algorithm.kl.c", ["algorithm.kl.coef="]),
        ("troupe submit a.yaml --set algorithm.name=raf", ["algorithm.name=raft"]),
        ("troupe run a.yaml --set algorithm.nam", ["algorithm.name="]),
        ("troupe run a.yaml --set weight_sync.backend=", [f"weight_sync.backend={one}" for one in BACKENDS]),
        ("troupe run a.yaml --set deterministic=", ["deterministic=true", "deterministic=false"]),
        ("troupe run a.yaml --set seed=", []),
        ("troupe algorithms raf", ["raft"]),
        ("troupe init --algorithm raf", ["raft"]),
        ("troupe run examples:laptop-p", ["examples:laptop-ppo"]),
    ],
)
def test_the_completion_behind_a_command_imports_no_spec_and_no_library(words: str, found: list[str]) -> None:
    printed, modules = completed(words)
    assert printed == found
    assert sorted(modules & set(WAITS) - {"pydantic"}) == []
    assert {name for name in modules if name.startswith("troupe.orchestrator.spec.")} <= {
        "troupe.orchestrator.spec.examples"
    }


def test_a_spec_is_completed_with_examples_and_a_run_with_the_folders_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/one", "runs/chain/sft", "runs/other"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("runs/one", "runs/chain/sft"):
        (tmp_path / folder / "spec.yaml").touch()

    def found(words: str) -> list[str]:
        variables = {"_TROUPE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
        return CliRunner().invoke(app, [], prog_name="troupe", env=variables).output.split()

    assert "examples:recipes/gsm8k" in found("troupe run ex")
    assert found("troupe run my.yaml") == found("troupe run ") == []
    assert found("troupe why runs/") == ["runs/chain/sft", "runs/one"]
    assert found("troupe report runs/o") == ["runs/one"]


def test_validation_of_tasks_imports_only_what_it_uses() -> None:
    printed, modules = imported("validate", "deploy/specs/tiny-grpo.yaml")
    assert "data.train: 32 rows" in printed and "reasoning_gym.algorithmic.game_of_life" in modules
    unused = {"matplotlib", "cellpylib", "sympy", "pandas", "torch", "transformers", "ray", "aiohttp", "datasets"}
    assert sorted(modules & unused) == []
    assert len(modules) < 900, "each module costs about a millisecond"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = load(name, COMMANDS[name].home)
    assert command.name == name
    assert COMMANDS[name].help == " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split())


def test_the_group_of_commands_holds_each_with_its_parameters() -> None:
    group: Any = typer.main.get_command(app)
    assert list(group.commands) == [*COMMANDS]
    assert {parameter.name for parameter in group.commands["schema"].params} <= {"help", "of"}
    assert "dry_run" in {parameter.name for parameter in group.commands["apply"].params}
    assert list(group.commands["env"].commands) == ["check", "install", "rows"]


def test_an_unknown_command_is_refused_with_the_nearest_one() -> None:
    result = CliRunner().invoke(app, ["shcema"])
    assert result.exit_code == 2 and "Did you mean 'schema'" in " ".join(result.output.split())
