"""`troupe demo`: which example runs, with which changes, and what a user can do next."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.examples import PREFIX, examples
from troupe.orchestrator.spec.paths import path_fields
from troupe.orchestrator.spec.stages import PlannedRun, is_chain, read_document

logger = logging.getLogger(__name__)

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
        steps: Number of training steps, of each stage where it has stages; None: the example's.

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
    """The run folder where none is given; None: the spec's own, runs/NAME."""
    return _DEFAULT_OUT if name.removeprefix(PREFIX) == DEFAULT else None


def named_models(runs: Iterable[PlannedRun], folder: Path) -> list[str]:
    """Names of the models in `folder` that runs read."""
    paths = (Path(path) for planned in runs for _, path in path_fields(planned.spec.model_dump(mode="json")))
    return sorted({path.name for path in paths if path.parent == folder})


def write_demo_report(runs: Sequence[PlannedRun]) -> Path | None:
    """The report of all runs, beside their results; None, with a warning, where it cannot be written."""
    from troupe.orchestrator.reporting.html.report import REPORT, write_report

    folder = runs[-1].out.parent if runs[-1].stage else runs[-1].out
    try:
        return write_report([planned.out for planned in runs], folder / REPORT)
    except (TroupeError, OSError) as error:
        logger.warning("the report was not written: %s", error)
        return None


def next_steps(spec: Path, runs: Sequence[PlannedRun], report: Path | None = None) -> str:
    """Where the results are, what to try next and, in the last line, the report."""
    last, name = runs[-1], str(spec).removeprefix(PREFIX)
    folder = last.out.parent if last.stage else last.out
    commands = [(f"troupe export {last.out} trained/", "the trained model, for transformers and vLLM")]
    if not last.stage and last.spec.evaluation is not None:
        commands.append((f"troupe eval {spec} --model trained/", "its score on held-out prompts"))
    commands.append((f"troupe init --from {name}", "this spec as a file to edit: run.yaml"))
    commands.append(("troupe init", "a spec for your own model and data"))
    width = max(len(command) for command, _ in commands)
    lines = [f"results are in {folder}; next:", *(f"  {command:<{width}}  {what}" for command, what in commands)]
    if report is not None:
        lines.append(f"report: open {report} in a browser")
    return "\n".join(lines)
