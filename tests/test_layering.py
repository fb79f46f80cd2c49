"""The layering of docs and design, held by reading every import: who may know of whom, and who owns which library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orchestrator", "workers")

PURE_WORKER_NAMES = (
    *("advantage_state", "advantages", "config", "estimators", "losses", "messages", "tables", "tensors"),
    *("config_offline", "messages_offline", "preference_losses", "objectives", "peaks"),
)
PURE_WORKERS = {f"workers.{name}" for name in PURE_WORKER_NAMES}
PURE_ORCHESTRATOR = {
    f"orchestrator.{name}"
    for name in (
        "algorithm_table",
        "algorithms",
        "algorithms_offline",
        "batching",
        "errors",
        "ledger",
        "live_spec",
        "memory",
        "model_size",
        "spec",
        "spec_any",
        "spec_chain",
        "spec_checks",
        "spec_errors",
        "spec_files",
        "spec_offline",
        "spec_paths",
        "spec_sections",
        "spec_yaml",
        "train_memory",
    )
}
PURE = PURE_WORKERS | PURE_ORCHESTRATOR
ROOTS = {f"orchestrator.{name}" for name in ("controller", "run", "run_offline", "cli")}
"""All other modules of orchestrator/ are services."""

NAMES_WORKER_CLASSES = {"orchestrator.run", "orchestrator.cli"}
ROLES = {f"workers.{name}" for name in ("rollout", "policy", "critic", "reference", "reward", "offline")}

PURE_LIBRARIES = {"pydantic", "pydantic_core", "yaml", "numpy", "pyarrow"}
TORCH_IN_PURE = {
    f"workers.{name}" for name in ("tensors", "losses", "advantages", "estimators", "preference_losses", "objectives")
}

OWNERS = {
    "ray": {"orchestrator.actor_group", "orchestrator.jobs", "orchestrator.ray_nodes"},
    "deepspeed": {"workers.deepspeed_engine"},
    "vllm": {"workers.rollout", "workers.weight_transfer"},
}
HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "pandas"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True)
class Module:
    """One source file of the product."""

    name: str
    path: Path
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """Where, for a message: `workers/policy.py:17`."""
        return f"{self.path.relative_to(ROOT)}:{vars(node)['lineno']}"


@dataclass(frozen=True)
class Import:
    """One imported module, wherever in the file the import stands."""

    target: str
    where: str

    @property
    def library(self) -> str:
        return self.target.split(".")[0]


@cache
def modules() -> tuple[Module, ...]:
    """All modules of both packages."""
    found: list[Module] = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return tuple(found)


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module; `from a import b` counts as `a.b` where that is a module of ours."""
    names = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, module.at(node))
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                pytest.fail(f"{module.at(node)}: imports are absolute")
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(full if full in names else node.module, module.at(node))


def calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the dotted name of what is called."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def ours(target: str, package: str) -> bool:
    """Whether an import is of this package of ours."""
    return target == package or target.startswith(f"{package}.")


def layer(name: str) -> int:
    """0 pure, 1 workers, 2 services, 3 roots."""
    if name in PURE or name in PACKAGES:
        return 0
    if ours(name, "workers"):
        return 1
    return 3 if name in ROOTS else 2


def report(faults: list[str]) -> None:
    """Fail with all faults at once."""
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_the_tables_of_this_file_name_modules_that_exist() -> None:
    named = PURE | ROOTS | ROLES | NAMES_WORKER_CLASSES | set().union(*OWNERS.values())
    assert named - {module.name for module in modules()} == set()


def test_pure_modules_import_only_pure_modules_and_data_libraries() -> None:
    faults: list[str] = []
    for module in modules():
        if module.name not in PURE:
            continue
        allowed = PURE_LIBRARIES | sys.stdlib_module_names | ({"torch"} if module.name in TORCH_IN_PURE else set())
        for found in imports(module):
            if found.library in PACKAGES:
                if layer(found.target) != 0:
                    faults.append(f"{found.where}: a pure module imports {found.target}")
            elif found.library not in allowed:
                faults.append(f"{found.where}: a pure module imports {found.target}")
    report(faults)


def test_workers_know_neither_orchestrator_nor_another_role() -> None:
    faults: list[str] = []
    for module in modules():
        if not ours(module.name, "workers"):
            continue
        for found in imports(module):
            if found.library in {"orchestrator", "ray"}:
                faults.append(f"{found.where}: a worker imports {found.target}")
            if module.name in ROLES and found.target in ROLES - {module.name}:
                faults.append(f"{found.where}: {module.name} imports another role, {found.target}")
    report(faults)


def test_orchestrator_knows_only_the_pure_half_of_workers() -> None:
    faults: list[str] = []
    for module in modules():
        if not ours(module.name, "orchestrator") or module.name in NAMES_WORKER_CLASSES:
            continue
        faults += [
            f"{found.where}: {module.name} imports {found.target}; only the roots name worker classes"
            for found in imports(module)
            if ours(found.target, "workers") and layer(found.target) != 0
        ]
    report(faults)


def test_services_do_not_import_roots_and_orchestrator_never_touches_a_model() -> None:
    faults: list[str] = []
    for module in modules():
        if not ours(module.name, "orchestrator"):
            continue
        for found in imports(module):
            if layer(module.name) < 3 and layer(found.target) == 3 and found.library == "orchestrator":
                faults.append(f"{found.where}: a service imports the root {found.target}")
            if found.library in {"torch", "transformers", "safetensors"}:
                faults.append(f"{found.where}: {module.name} imports {found.library}")
    report(faults)


@pytest.mark.parametrize("library", OWNERS)
def test_a_heavy_library_has_one_owner(library: str) -> None:
    report(
        [
            f"{found.where}: {module.name} imports {found.target}"
            for module in modules()
            for found in imports(module)
            if found.library == library and module.name not in OWNERS[library]
        ]
    )


def test_product_code_neither_prints_nor_asserts_nor_runs_data() -> None:
    faults: list[str] = []
    for module in modules():
        for found in imports(module):
            if found.library in UNSAFE_MODULES:
                faults.append(f"{found.where}: imports {found.target}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert):
                faults.append(f"{module.at(node)}: assert (validation must survive python -O)")
        for name, call in calls(module):
            if name == "print" or name in UNSAFE_BUILTINS or name == "yaml.load":
                faults.append(f"{module.at(call)}: calls {name}")
            if name == "torch.load" and not _says_weights_only(call):
                faults.append(f"{module.at(call)}: torch.load without weights_only=True")
    report(faults)


def _says_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


@pytest.mark.parametrize(
    "module",
    [
        *("orchestrator", "workers", "workers.config", "orchestrator.spec", "orchestrator.plan", "orchestrator.cli"),
        *("orchestrator.deploy", "orchestrator.kubernetes", "orchestrator.slurm"),
    ],
)
def test_the_front_door_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_naming_the_worker_classes_imports_no_model_library() -> None:
    """The driver names them before Ray starts; what a model or an engine needs is imported where one is loaded."""
    later = {"transformers", "vllm", "deepspeed", "datasets", "pandas"}
    named = "from orchestrator.cli import _worker_classes; _worker_classes()"
    code = f"import sys; {named}; print(*sorted({later!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_a_broken_rule_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules above are only as good as what they can see: lazy, aliased and type-checking imports."""
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import ray as r\n"
        "def f():\n    from workers import policy\n    from vllm.v1 import engine\n    print(1)\n"
    )
    module = Module("orchestrator.bad", tmp_path / "bad.py", ast.parse(source))
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    known = Module("workers.policy", tmp_path / "policy.py", ast.parse(""))
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: (module, known))
    assert [found.target for found in imports(module)] == ["typing", "ray", "workers.policy", "vllm.v1"]
    assert [name for name, _ in calls(module)] == ["print"]
    for broken in (
        test_orchestrator_knows_only_the_pure_half_of_workers,
        test_product_code_neither_prints_nor_asserts_nor_runs_data,
    ):
        with pytest.raises(pytest.fail.Exception):
            broken()
