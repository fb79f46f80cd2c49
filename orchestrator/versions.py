"""Versions of Troupe and of the packages that it builds on, without importing them."""

from __future__ import annotations

import platform

from troupe.orchestrator.doctor.facts import installed_versions
from troupe.orchestrator.doctor.software import ENGINES, TROUPE


def versions() -> str:
    """One line for each package; engines that are not installed are left out."""
    installed = installed_versions()
    lines = [f"troupe {installed.get(TROUPE, '(not installed as a package)')}", f"python {platform.python_version()}"]
    engines = [name for name in ENGINES if name in installed] or ["vllm"]
    names = ("torch", *engines, "deepspeed", "ray", "transformers")
    lines += [f"{name} {installed.get(name, 'not installed')}" for name in names]
    return "\n".join(lines)
