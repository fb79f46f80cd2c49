"""Layering rules, checked on every import: which module may import which, and which folder owns which library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from troupe.orchestrator.cli import COMMANDS
from troupe.orchestrator.roles import table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orchestrator", "workers")
"""Folders of the checkout, and packages of `troupe`. The rules below name modules without `troupe.`."""

PURE = (
    *("workers.contract", "workers.algorithms"),
    *("workers.models.token_batch", "workers.models.ragged"),
    *("workers.telemetry", "workers.isolation", "workers.preload.forked_worker", "workers.preload.setup_worker"),
    *("orchestrator.spec", "orchestrator.algorithms", "orchestrator.errors"),
    *("orchestrator.roles", "orchestrator.plan", "orchestrator.model_facts", "orchestrator.live.diff"),
    *("orchestrator.telemetry", "orchestrator.cluster.ray_environment"),
    *("orchestrator.starter.choices", "orchestrator.starter.sizing"),
    *("orchestrator.training.ledger", "orchestrator.training.micro_batches", "orchestrator.training.state"),
)
"""Layer 0, as folders and modules. They import each other, the standard library and data libraries."""
WRITING = ("orchestrator.telemetry.console", "orchestrator.telemetry.sinks")
"""Services in a folder of layer 0: they write to terminals and trackers, with libraries of their own."""
ROOTS = tuple(
    f"orchestrator.{name}" for name in ("cli", "commands", "controller", "insight", "launcher", "library", "runs")
)
"""Layer 3. All other modules of orchestrator/ are services, layer 2."""
ROOF = "orchestrator.insight"
"""Reads the folders of runs, and starts runs to measure or repeat them."""
ABOVE_THE_ROOF = ("orchestrator.commands", "orchestrator.library")
"""What may import all of it."""
PARTS_OF_A_RUN = {
    "orchestrator.insight.why.observer": "orchestrator.runs.session",
    "orchestrator.insight.audit.auditor": "orchestrator.runs.audit",
}
"""The modules of the roof that a run needs, each with the one module that imports it."""
AGENTS = "workers.agents"
AGENTS_INTERFACE = "workers.agents.interface"
"""What the rest of workers/ names of agents."""

CREATES_MODELS = "orchestrator.starter.demo"
"""Writes the models of the examples with transformers, in a separate process."""
ROLES = {row.worker.partition(":")[0].removeprefix("troupe.") for row in table.ROLES.values()}
BUILT_ON = {role: {"workers.rollout"} for role in ("workers.judge", "workers.reference_engine")}
"""Roles whose worker is another one, with more around it."""

PURE_LIBRARIES = {"packaging", "pydantic", "pydantic_core", "yaml", "numpy", "pyarrow", "fsspec", "tokenizers"}
TENSORS_IN_PURE = ("workers.algorithms", "workers.models.token_batch", "workers.models.ragged")
"""Modules of layer 0 that may import torch, because they compute on tensors."""

OWNERS = {
    "ray": ("orchestrator.cluster", "orchestrator.platforms"),
    "deepspeed": ("workers.training",),
    "duckdb": ("orchestrator.insight.samples",),
    "huggingface_hub": ("orchestrator.hub.client",),
    "peft": ("workers.audit", "workers.training.adapter"),
    "vllm": (
        "workers.rollout",
        "workers.measured_rollout",
        "workers.engine",
        "workers.weights.vllm_transfer",
        "workers.weights.vllm_adapter",
        "workers.weights.vllm_verified",
        "workers.weights.cpu_kernels",
        "workers.weights.reload",
        "workers.weights.receiver",
    ),
}
STATE_OF_OTHERS = {
    "orchestrator.controller: self._recorder.events.step": "events name the step in which they happen",
    "orchestrator.controller: self.parts.penalty.state": "an update's result, which the next one starts from",
    "orchestrator.rollouts.scoring: self._group.workers": "a wave is scored by the workers that serve",
    "orchestrator.training.best_checkpoints: self._store.protected": "the steps whose checkpoints stay",
}
"""Attributes that another object sets, with what they are: state that changes while a run is active, not wiring."""
HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "pandas"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
STARTING_PROCESSES = {f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True)
class Module:
    """One source file of the two packages."""

    name: str
    path: Path
    tree: ast.Module

    def location(self, node: ast.AST) -> str:
        """Location of a node, for messages: `workers/policy.py:17`."""
        return f"{self.path.relative_to(ROOT)}:{vars(node)['lineno']}"


@dataclass(frozen=True)
class Import:
    """One imported module, at any place in a file."""

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


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every import of a module. `from a import b` is an import of `a.b` if that is a module of the two packages."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[Import]:
    names = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name.removeprefix("troupe."), module.location(node))
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                pytest.fail(f"{module.location(node)}: imports are absolute")
            if node.module.split(".")[0] in PACKAGES:
                pytest.fail(f"{module.location(node)}: the package is troupe.{node.module}")
            for alias in node.names:
                target, full = (
                    f"{name}".removeprefix("troupe.") for name in (node.module, f"{node.module}.{alias.name}")
                )
                yield Import(full if full in names else target, module.location(node))


@cache
def calls(module: Module) -> tuple[tuple[str, ast.Call], ...]:
    """Every call and the dotted name of the called function."""
    found = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return tuple((ast.unparse(node.func), node) for node in found)


def belongs_to(target: str, package: str) -> bool:
    """Whether a module is this package or in it."""
    return target == package or target.startswith(f"{package}.")


def within(name: str, places: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one of these packages."""
    return any(belongs_to(name, place) for place in places)


def layer(name: str) -> int:
    """0 pure, 1 workers, 2 services, 3 roots."""
    if name in PACKAGES or (within(name, PURE) and not within(name, WRITING)):
        return 0
    if belongs_to(name, "workers"):
        return 1
    return 3 if within(name, ROOTS) else 2


def report(violations: list[str]) -> None:
    """Fail with all violations."""
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)


def test_all_modules_named_in_the_rules_exist() -> None:
    owners = [place for places in OWNERS.values() for place in places]
    named = {*PURE, *WRITING, *ROOTS, *ABOVE_THE_ROOF, *PARTS_OF_A_RUN, *ROLES, *TENSORS_IN_PURE, *owners}
    assert named - {module.name for module in modules()} == set()


def test_pure_modules_import_only_pure_modules_and_data_libraries() -> None:
    violations: list[str] = []
    for module in modules():
        if layer(module.name) != 0:
            continue
        allowed = PURE_LIBRARIES | sys.stdlib_module_names
        allowed |= {"torch"} if within(module.name, TENSORS_IN_PURE) else set()
        for found in imports(module):
            if found.library in PACKAGES:
                if layer(found.target) != 0:
                    violations.append(f"{found.where}: a pure module imports {found.target}")
            elif found.library not in allowed:
                violations.append(f"{found.where}: a pure module imports {found.target}")
    report(violations)


def test_workers_import_neither_orchestrator_nor_ray_nor_another_role() -> None:
    violations: list[str] = []
    for module in modules():
        if not belongs_to(module.name, "workers"):
            continue
        for found in imports(module):
            if found.library in {"orchestrator", "ray"}:
                violations.append(f"{found.where}: a worker imports {found.target}")
            if module.name in ROLES and found.target in ROLES - {module.name} - BUILT_ON.get(module.name, set()):
                violations.append(f"{found.where}: {module.name} imports another role, {found.target}")
    report(violations)


def test_the_rest_of_workers_names_agents_by_one_interface() -> None:
    """In imports, and in the paths that tables of workers/ have as text."""
    violations: list[str] = []
    for module in modules():
        if not belongs_to(module.name, "workers") or belongs_to(module.name, AGENTS):
            continue
        named = [(found.target, found.where) for found in imports(module)]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("troupe."):
                named.append((node.value.partition(":")[0].removeprefix("troupe."), module.location(node)))
        violations += [
            f"{where}: {module.name} names {target}; import it from {AGENTS_INTERFACE}"
            for target, where in named
            if belongs_to(target, AGENTS) and target != AGENTS_INTERFACE
        ]
    report(violations)


def test_orchestrator_imports_only_pure_modules_of_workers() -> None:
    violations: list[str] = []
    for module in modules():
        if not belongs_to(module.name, "orchestrator"):
            continue
        violations += [
            f"{found.where}: {module.name} imports {found.target}; roles are named by their path"
            for found in imports(module)
            if belongs_to(found.target, "workers") and layer(found.target) != 0
        ]
    report(violations)


def test_services_do_not_import_roots_and_orchestrator_imports_no_model_library() -> None:
    violations: list[str] = []
    for module in modules():
        if not belongs_to(module.name, "orchestrator"):
            continue
        for found in imports(module):
            if layer(module.name) < 3 and layer(found.target) == 3 and found.library == "orchestrator":
                violations.append(f"{found.where}: a service imports the root {found.target}")
            if found.library in {"torch", "transformers", "safetensors"} and module.name != CREATES_MODELS:
                violations.append(f"{found.where}: {module.name} imports {found.library}")
    report(violations)


def test_the_cluster_writes_to_no_terminal() -> None:
    report(
        [
            f"{found.where}: {module.name} imports {found.target}; what both need is in orchestrator/telemetry/"
            for module in modules()
            if belongs_to(module.name, "orchestrator.cluster")
            for found in imports(module)
            if within(found.target, WRITING)
        ]
    )


def test_only_commands_and_the_library_import_the_roof() -> None:
    """A run needs three things of `troupe why`, `audit` and `replay`: two of them are parts of the roof."""
    report(
        [
            f"{found.where}: {module.name} imports {found.target}"
            for module in modules()
            if not within(module.name, (ROOF, *ABOVE_THE_ROOF))
            for found in imports(module)
            if belongs_to(found.target, ROOF) and PARTS_OF_A_RUN.get(found.target) != module.name
        ]
    )


def _file(name: str) -> str:
    return name


def _folder(name: str) -> str:
    """A folder of a package, or of the roof: what starts runs there is above what they need of it."""
    return ".".join(name.split(".")[: 3 if belongs_to(name, ROOF) else 2])


@pytest.mark.parametrize("part", [_file, _folder])
def test_imports_form_no_circle(part: Callable[[str], str]) -> None:
    """Neither between files nor between folders."""
    graph: dict[str, set[str]] = {}
    names = {module.name for module in modules()}
    for module in modules():
        targets = {part(found.target) for found in imports(module) if found.target in names}
        graph.setdefault(part(module.name), set()).update(targets - {part(module.name), *PACKAGES})
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_worker_methods_are_named_by_their_protocol() -> None:
    violations: list[str] = []
    for module in modules():
        for name, call in calls(module):
            if name.endswith((".call", ".call_for_table")) and call.args and isinstance(call.args[0], ast.Constant):
                violations.append(f"{module.location(call)}: names a worker method in quotes")
    report(violations)


def test_no_code_tells_the_kinds_of_spec_apart() -> None:
    violations: list[str] = []
    for module in modules():
        for name, call in calls(module):
            if name == "isinstance" and ast.unparse(call.args[1]).endswith("Spec"):
                violations.append(f"{module.location(call)}: isinstance on a spec: use a function of both kinds")
    report(violations)


@pytest.mark.parametrize("library", OWNERS)
def test_only_its_owners_import_a_heavy_library(library: str) -> None:
    report(
        [
            f"{found.where}: {module.name} imports {found.target}"
            for module in modules()
            for found in imports(module)
            if found.library == library and not within(module.name, OWNERS[library])
        ]
    )


def test_the_packages_contain_no_print_no_assert_and_no_unsafe_loading() -> None:
    violations: list[str] = []
    for module in modules():
        for found in imports(module):
            if found.library in UNSAFE_MODULES:
                violations.append(f"{found.where}: imports {found.target}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert):
                violations.append(f"{module.location(node)}: assert (validation must survive python -O)")
        for name, call in calls(module):
            if name == "print" or name in UNSAFE_BUILTINS or name == "yaml.load":
                violations.append(f"{module.location(call)}: calls {name}")
            if name == "torch.load" and not _loads_weights_only(call):
                violations.append(f"{module.location(call)}: torch.load without weights_only=True")
    report(violations)


def _set_on_others(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Attribute]:
    """Attributes of an object that `self` holds or is constructed with, and callbacks set on any other object."""
    given = [argument.arg for argument in function.args.args] if function.name == "__init__" else []
    callbacks = {
        name
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and (isinstance(node.value, ast.Lambda) or ast.unparse(node.value) == "self")
        for name in node.targets
    }
    for name in ast.walk(function):
        if isinstance(name, ast.Attribute) and isinstance(name.ctx, ast.Store):
            holder = ast.unparse(name.value)
            if holder != "self" and (holder.startswith("self.") or holder in given or name in callbacks):
                yield name


def test_constructors_get_what_they_need_and_no_object_sets_another_s_attributes() -> None:
    """An order of construction that only assignments know is checked by nothing."""
    found = {
        f"{module.name}: {ast.unparse(name)}": module.location(name)
        for module in modules()
        if module.name.startswith("orchestrator.")
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in _set_on_others(function)
    }
    report([f"{where}: {name} is set from outside" for name, where in found.items() if name not in STATE_OF_OTHERS])


def test_every_process_is_given_its_environment() -> None:
    """One that inherits it reads it while it is created, and fails ("Bad address") where another thread sets it."""
    report(
        [
            f"{module.location(call)}: {name} without env"
            for module in modules()
            for name, call in calls(module)
            if name in STARTING_PROCESSES and "env" not in {keyword.arg for keyword in call.keywords}
        ]
    )


def _loads_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def test_importing_the_command_imports_no_heavy_library() -> None:
    modules = ("troupe", "troupe.orchestrator", "troupe.workers", "troupe.workers.contract.config")
    modules += ("troupe.orchestrator.spec.rollout", "troupe.orchestrator.plan.plan", "troupe.orchestrator.cli")
    modules += ("troupe.orchestrator.platforms.manifest", "troupe.orchestrator.platforms.slurm")
    modules += tuple({f"troupe.orchestrator.commands.{entry.home.partition(':')[0]}" for entry in COMMANDS.values()})
    code = (
        f"import importlib, sys\nfor module in {modules}:\n    importlib.import_module(module)\n"
        f"    print(module, *sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (0, [*modules]), done.stderr


@pytest.mark.parametrize("module", ["troupe.workers.rewards.child", "troupe.workers.agents.environments.child"])
def test_a_process_of_user_code_starts_without_pydantic(module: str) -> None:
    """It starts in a third of the time then, also after every fault of the user's code."""
    code = f"import sys, {module}; print(*sorted({HEAVY | {'pydantic'}!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_importing_the_worker_classes_imports_no_model_library() -> None:
    """A worker's process imports model libraries when it loads a model."""
    model_libraries = {"transformers", "vllm", "deepspeed", "datasets", "pandas"}
    imported = "from troupe.orchestrator.roles.table import ROLES; from troupe.workers.contract.imports import resolve"
    statement = f"{imported}; [resolve(row.worker) for row in ROLES.values()]"
    code = f"import sys; {statement}; print(*sorted({model_libraries!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_driver_imports_no_model_library_to_start_workers() -> None:
    statement = (
        "from troupe.orchestrator.runs import training; from troupe.orchestrator.roles.table import ROLES;"
        "from troupe.orchestrator.cluster.actors import actor_class;"
        "[actor_class(row.worker, row.protocol, concurrent=row.concurrent) for row in ROLES.values()]"
    )
    code = f"import sys; {statement}; print(*sorted({HEAVY - {'ray'}!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_what_a_worker_unpickles_imports_no_spec(tmp_path: Path) -> None:
    """Its class, and what the watch calls in its process: the models of the spec would take a second in each worker."""
    dump = (
        "import sys; from pathlib import Path; from ray import cloudpickle;"
        "from troupe.orchestrator.cluster.actors import actor_class;"
        "from troupe.orchestrator.cluster.own_process import register;"
        "from troupe.orchestrator.roles.table import ROLES;"
        "sent = [register, *(actor_class(r.worker, r.protocol, concurrent=r.concurrent) for r in ROLES.values())];"
        "Path(sys.argv[1]).write_bytes(cloudpickle.dumps(sent))"
    )
    load = (
        "import pickle, sys; from pathlib import Path; pickle.loads(Path(sys.argv[1]).read_bytes());"
        "print(*(name for name in sys.modules if name.startswith('troupe.orchestrator.spec')))"
    )
    for code in (dump, load):
        command = [sys.executable, "-c", code, str(tmp_path / "sent")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_rules_detect_violations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules see lazy, aliased and type-checking imports."""
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import ray as r\n"
        "def f():\n    from troupe.workers import policy\n    from vllm.v1 import engine\n    print(1)\n"
        "    worker.call('update', 1.0)\n    isinstance(spec, OfflineSpec)\n    subprocess.run([])\n"
        "    from troupe.orchestrator.insight.why import observer\n"
        "def wire(self, pool):\n    pool.renew = lambda: None\n"
    )
    module = Module("orchestrator.bad", tmp_path / "bad.py", ast.parse(source))
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    table = "FUNCTIONS = {'python_tests': 'troupe.workers.agents.sandbox.python_tests:python_tests'}"
    known = Module("workers.policy", tmp_path / "policy.py", ast.parse(table))
    part = Module("orchestrator.insight.why.observer", tmp_path / "observer.py", ast.parse(""))
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: (module, known, part))
    targets = ["typing", "ray", "workers.policy", "vllm.v1", part.name]
    assert [found.target for found in imports(module)] == targets
    assert [name for name, _ in calls(module)] == ["print", "worker.call", "isinstance", "subprocess.run"]
    for broken in (
        test_orchestrator_imports_only_pure_modules_of_workers,
        test_only_commands_and_the_library_import_the_roof,
        test_the_rest_of_workers_names_agents_by_one_interface,
        test_the_packages_contain_no_print_no_assert_and_no_unsafe_loading,
        test_every_process_is_given_its_environment,
        test_constructors_get_what_they_need_and_no_object_sets_another_s_attributes,
        test_worker_methods_are_named_by_their_protocol,
        test_no_code_tells_the_kinds_of_spec_apart,
    ):
        with pytest.raises(pytest.fail.Exception):
            broken()
