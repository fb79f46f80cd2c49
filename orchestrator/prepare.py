"""What a spec names is brought in place and checked, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.examples import models_folder
from troupe.orchestrator.spec.hub import uses_hub
from troupe.orchestrator.spec.load import plan_runs
from troupe.orchestrator.spec.stages import PlannedRun
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.orchestrator.starter.demo import named_models

Say = Callable[[str], object]
"""Called with a line for each step that takes long."""


def ready(document: Document, say: Say, out: Path | None = None, *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """Every run of a document, with the models of the examples created and names on the hub pinned to commits.

    Raises:
        SpecError: A spec is invalid, or a file or repository it names does not exist.
    """
    runs = plan_runs(document, out)
    create_models(runs, say)
    return checked(runs, resume=resume)


def single(document: Document, name: str, out: Path | None = None) -> PlannedRun:
    """The only run of a document, nothing of which is checked on this machine.

    Args:
        document: The spec.
        name: What the user calls it.
        out: Run folder; None: the spec's.

    Raises:
        SpecError: The spec is invalid.
        UsageError: It has stages.
    """
    runs = plan_runs(document, out)
    if any(planned.stage for planned in runs):
        raise UsageError(f"{name}: a file with stages is several runs; use the spec.yaml in a stage's run folder")
    return runs[0]


def checked(runs: tuple[PlannedRun, ...], *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """The runs, with names on the hub pinned to commits. Raises SpecError where what they name does not exist."""
    problems = list(dict.fromkeys(problem for planned in runs for problem in planned.missing()))
    if problems:
        raise SpecError(problems)
    if not any(uses_hub(planned.spec) for planned in runs):
        return runs
    from troupe.orchestrator.hub.resolve import pin_run

    return tuple(pin_run(planned, resume=resume) for planned in runs)


def create_models(runs: Sequence[PlannedRun] | None, say: Say) -> None:
    """Create the models of the examples that runs name, or all of them, where this machine does not have them yet."""
    from troupe.orchestrator.starter.demo_models import MODELS, DemoModelError, make_models

    folder = models_folder()
    names = MODELS if runs is None else [name for name in named_models(runs, folder) if name in MODELS]
    try:
        make_models(names, folder, say)
    except DemoModelError as error:
        raise TroupeError(str(error)) from None
