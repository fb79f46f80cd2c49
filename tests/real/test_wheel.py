"""Troupe as a user installs it: the wheel in a separate environment, and the first commands and the documentation's
notebook in a folder with packages that have the names of Troupe's folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.commands import Command, running

pytestmark = pytest.mark.long
PROBE = "import troupe.orchestrator, troupe.workers; print(troupe.orchestrator.__file__, troupe.workers.__file__)"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = {"deploy", "orchestrator", "workers"}
"""Packages of the user. Importing one raises."""
NOTEBOOK = ROOT / "docs" / "notebooks" / "first-run.ipynb"
PROGRAM = """
import asyncio, json, os, signal, sys
import ray

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
names = {}

async def kernel():  # as Jupyter's, which runs every cell inside its loop
    for cell in cells:
        exec("".join(cell["source"]), names)

asyncio.run(kernel())
troupe, outcome = names["troupe"], names["outcome"]
assert troupe.__file__.startswith(sys.prefix), "the wheel's"
assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 4
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
assert not outcome.stopped and outcome.steps == 16
metrics = outcome.metrics
rewards = metrics["reward/mean"].to_pylist()
assert metrics["step"].to_pylist() == list(range(1, 17)) and names["rewards"] == rewards
assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1, rewards  # the first run of a reader learns
pairs = zip(metrics["rollout/tokens_per_s"].to_pylist(), metrics["response_tokens_per_s"].to_pylist(), strict=True)
assert all(sampling > step for sampling, step in pairs)
assert outcome.checkpoint.name == "step-000016"
assert troupe.samples(outcome, step=2, columns=["reward", "response"]).num_rows == 64
assert troupe.samples("runs/notebook", where="step = 1", limit=3).num_rows == 3
assert names["best"]["reward"].to_pylist() == sorted(names["best"]["reward"].to_pylist(), reverse=True)
assert names["best"].num_rows == 3
assert "config.json" in os.listdir("notebook-model")
assert os.path.isfile("runs/notebook/report.html") and isinstance(outcome.verdicts, tuple)
assert [state for state in ray.util.placement_group_table().values() if state["state"] != "REMOVED"] == []
ray.shutdown()
print("done")
"""


def pip(folder: Path, *arguments: str | Path) -> None:
    """Run pip in a folder."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of this checkout, because building leaves files."""
    folder = tmp_path_factory.mktemp("wheel")
    source, ignore = folder / "source", shutil.ignore_patterns("__pycache__")
    for name in ("troupe", "orchestrator", "workers", "deploy", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip(folder, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    shutil.rmtree(source)
    (built,) = folder.glob("troupe_rl-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """A virtual environment with Troupe from its wheel; the other packages are those of the tests' environment."""
    venv = wheel.with_name("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, capture_output=True)
    pip(wheel.parent, "--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    site = next((venv / "lib").glob("python*/site-packages"))
    # A plain path in a .pth file: the .pth files behind it, such as that of an editable Troupe, are not read.
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return venv


class User:
    """Types commands in a folder with `PACKAGES` and nothing else."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.environment, self.folder, self.logs = environment, folder / "project", folder / "logs"
        for package in PACKAGES:
            (self.folder / package).mkdir(parents=True)
            (self.folder / package / "__init__.py").write_text("raise RuntimeError('a package of the user')\n")
        self.logs.mkdir()
        self.models = ROOT / ".cache" / "models"

    def types(self, program: str, *arguments: str) -> str:
        """Run a program of the environment, require exit code 0, and return its standard output."""
        return self.streams(program, *arguments)[0]

    def streams(self, program: str, *arguments: str) -> tuple[str, str]:
        """As `types`; standard output and standard error."""
        env = {"PYTHONPATH": "", "TROUPE_MODELS": str(self.models)}
        command = [str(self.environment / "bin" / program), *arguments]
        with running(Command(self.logs, command, env, self.folder)) as typed:
            assert typed.wait() == 0, typed.output
            assert typed.leftover_processes() == []
            return typed.stdout, typed.stderr

    def written(self) -> set[str]:
        """Names of what the commands have left in the folder."""
        return {path.name for path in self.folder.iterdir()} - PACKAGES


@pytest.fixture(scope="module")
def user(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(environment, tmp_path_factory.mktemp("user"))


def test_the_wheel_holds_one_package_with_the_examples_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.split("/")[0] for name in names}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    assert tops == {"troupe", f"troupe_rl-{VERSION}.dist-info"}
    files = {path for top in ("orchestrator", "workers") for path in (ROOT / top).rglob("*.py")}
    files |= {path for kind in ("*.j2", "*.sh") for path in (ROOT / "orchestrator" / "platforms").rglob(kind)}
    files |= {
        path for name in ("specs", "examples", "skills", "recipes") for path in (ROOT / "deploy" / name).rglob("*.*")
    }
    assets = {*(ROOT / "orchestrator" / "insight" / "report" / "assets").iterdir()}
    assets |= {ROOT / "orchestrator" / "algorithms" / "advice.yaml", ROOT / "orchestrator" / "spec" / "migration.yaml"}
    assets |= {ROOT / "orchestrator" / name for name in ("telemetry/metrics.yaml", "commands/completions.txt")}
    assets |= {*(ROOT / "workers" / "isolation" / "locks").iterdir()}
    own = {f"troupe/{path.name}" for path in (ROOT / "troupe").iterdir() if path.is_file()}
    expected = {f"troupe/{path.relative_to(ROOT)}" for path in files | assets if "__pycache__" not in path.parts}
    assert {name for name in names if name.startswith("troupe/")} == own | expected


def test_the_command_and_its_packages_are_those_of_the_wheel(user: User) -> None:
    for file in user.types("python", "-c", PROBE).split():
        assert Path(file).is_relative_to(user.environment)
    assert user.types("troupe", "--version").startswith(f"troupe {VERSION}\n")
    assert "tiny-grpo " in user.types("troupe", "demo", "--list")


@pytest.fixture(scope="module")
def notebook(user: User, tiny_model: Path) -> str:
    """Standard output of the notebook's cells, which run within an event loop, on a Ray that the program started."""
    assert tiny_model.parent.samefile(user.models)
    return user.types("python", "-c", PROGRAM, str(NOTEBOOK))


def test_the_notebook_runs_beside_a_ray_and_a_loop_of_its_own(notebook: str, user: User) -> None:
    assert notebook.split()[-1:] == ["done"]
    assert "roles.policy.lr" in notebook and "learning_rate" in notebook, "a mistake is named with its remedy"
    assert user.written() == {"runs", "notebook-model"}


def test_export_writes_the_notebooks_model(notebook: str, user: User) -> None:
    assert user.types("troupe", "export", "runs/notebook", "trained") == "wrote trained\n"
    cells, command = ((user.folder / name / "model.safetensors").read_bytes() for name in ("notebook-model", "trained"))
    assert command == cells


def test_the_spec_of_init_is_valid_and_planned(user: User, tiny_model: Path) -> None:
    """A spec of `init` is trained in test_first_runs.py, and the notebook above trains with this installation."""
    data = ("--data", "reasoning_gym:chain_sum")
    user.types("troupe", "init", "--model", str(tiny_model), *data, "--name", "first")
    assert "run.yaml: first is valid: grpo" in user.types("troupe", "validate", "run.yaml")
    assert "rollout-0" in user.types("troupe", "plan", "run.yaml")
    assert user.written() <= {"runs", "notebook-model", "trained", "run.yaml"}


def test_a_shipped_example_is_copied_with_its_data(user: User) -> None:
    copied = user.types("troupe", "init", "--from", "tiny-dpo", "--output", "dpo.yaml")
    assert copied == "wrote dpo.yaml; next: troupe validate dpo.yaml\n"
    assert str(user.environment) in (user.folder / "dpo.yaml").read_text(), "the data are those of the wheel"
    assert "data.train: 48 rows" in user.types("troupe", "validate", "dpo.yaml")


def test_the_demo_trains_a_shipped_example_on_shipped_data_and_resumes(user: User) -> None:
    command = ("demo", "--spec", "tiny-dpo", "--steps", "1")
    first = user.types("troupe", *command)
    assert "results are in runs/tiny-dpo; next:" in first
    run = user.folder / "runs" / "tiny-dpo"
    assert str(user.environment) in (run / "spec.yaml").read_text(), "the data are those of the wheel"
    assert "already complete in runs/tiny-dpo" in user.types("troupe", *command)


@dataclass(frozen=True)
class Measured:
    """What a benchmark wrote."""

    folder: Path
    stdout: str
    stderr: str

    @property
    def record(self) -> dict[str, Any]:
        """The record on standard output."""
        return json.loads(self.stdout)


@pytest.fixture(scope="module")
def measured(user: User, tiny_model: Path) -> Measured:
    """Two points on one engine."""
    assert tiny_model.parent.samefile(user.models)
    folder = user.logs.parent / "bench"
    sweep = ("--prompts", "5", "--batches", "2", "--sweep", "sampling.max_tokens=6,24")
    what = ("--json", "-o", str(folder / "bench.json"))
    return Measured(folder, *user.streams("troupe", "bench", "examples:tiny-grpo", *sweep, *what))


def test_two_points_are_measured_on_one_engine(measured: Measured) -> None:
    assert measured.stderr.splitlines().count("starting 1 rollout") == 1, "both points use the same engine"
    record = measured.record
    for point, longest in zip(record["points"], (6, 24), strict=True):
        measures = point["measures"]
        assert point["settings"] == {"sampling.max_tokens": longest} and not point["problem"]
        assert measures["sequences"] == 5 * 16 and 1 <= measures["response_tokens"] <= longest
        assert measures["most_running"] == 32 and measures["waiting"] > 0, "max_num_seqs is 32"
        assert measures["cached"] > 0.5, "the samples of a group share their prompt"
        assert 0 < measures["most_kv_use"] <= 1 and 0 < measures["busy"] <= 1
        assert 0 < measures["first_token_s"]["p50"] <= measures["latency_s"]["p50"] <= measures["latency_s"]["p99"]
        assert measures["prefill_per_s"] > 0 and measures["decode_per_s"] > 0
        assert point["bound"]["why"]
    assert record["points"][1]["measures"]["response_tokens"] > record["points"][0]["measures"]["response_tokens"]
    assert record == json.loads((measured.folder / "bench.json").read_text())
