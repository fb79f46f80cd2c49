"""`troupe demo`: which example runs, and with which changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from troupe.orchestrator.spec.chain import PlannedRun, is_chain
from troupe.orchestrator.spec.derived.paths import path_fields
from troupe.orchestrator.spec.examples import PREFIX, examples
from troupe.orchestrator.spec.load import read_document

DEFAULT = "laptop-grpo"
_DEFAULT_OUT = Path("runs/demo")


def list_examples() -> str:
    """The names of the examples, each with what it is."""
    known = examples()
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {summary}" for name, summary in known.items())


def demo_spec(name: str, steps: int | None) -> tuple[Path, list[str]]:
    """What the demo runs.

    Args:
        name: Name of the example, with or without `examples:`.
        steps: Number of training steps, of each stage if it has stages, or None for the example's.

    Returns:
        The spec, and its overrides. Raises UsageError for an unknown example.
    """
    spec = Path(PREFIX + name.removeprefix(PREFIX))
    document = read_document(spec)
    if steps is None:
        return spec, []
    data: dict[str, Any] = document.data
    sections = [f"stages.{stage}." for stage in data["stages"]] if is_chain(document) else [""]
    return spec, [f"{section}schedule.steps={steps}" for section in sections]


def demo_folder(name: str) -> Path | None:
    """The default run folder, or None for the spec's own, runs/NAME."""
    return _DEFAULT_OUT if name.removeprefix(PREFIX) == DEFAULT else None


def named_models(runs: Iterable[PlannedRun], folder: Path) -> list[str]:
    """Names of the models in `folder` that runs read."""
    paths = (Path(path) for planned in runs for _, path in path_fields(planned.spec.model_dump(mode="json")))
    return sorted({path.name for path in paths if path.parent == folder})
