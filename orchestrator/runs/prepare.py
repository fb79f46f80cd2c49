"""Fetches and checks the models and data of a spec before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.runs.epochs import Say, plan_counted
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.derived.paths import uses_hub, with_sections
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.examples import MODEL_CONFIGS, models_folder
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.orchestrator.starter.demo import named_models
from troupe.workers.contract.imports import missing_package


def ready(document: Document, say: Say, out: Path | None = None, *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """Every run of a document, with the models of the examples created and names on the hub pinned to commits. Raises
    SpecError if a spec is invalid, or a file or repository it names does not exist."""
    runs = plan_counted(document, say, out)
    create_models(runs, say)
    return checked(runs, resume=resume)


def single(document: Document, name: str, say: Say, out: Path | None = None) -> PlannedRun:
    """The only run of a document, unchecked on this machine. Raises SpecError; UsageError if it has stages."""
    runs = plan_counted(document, say, out)
    if any(planned.stage for planned in runs):
        raise UsageError(f"{name}: a file with stages is several runs; use the spec.yaml in a stage's run folder")
    return runs[0]


def checked(runs: tuple[PlannedRun, ...], *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """The runs, with names on the hub pinned to commits. Raises SpecError if something named does not exist."""
    problems = list(dict.fromkeys(problem for planned in runs for problem in planned.missing()))
    if problems:
        raise SpecError(problems)
    if not any(uses_hub(planned.spec) for planned in runs):
        return runs
    from troupe.orchestrator.hub.resolve import pin_run

    return tuple(pin_run(planned, resume=resume) for planned in runs)


def check_models_to_create(runs: Sequence[PlannedRun]) -> None:
    """Raise SpecError if runs name models of the examples that have to be created, and this machine cannot do that."""
    if not (problem := missing_package("gguf")):
        return
    problems = [
        planned.problem(field, f"creating {folder} {problem}")
        for planned in runs
        for field, folder in models_to_create(planned).items()
    ]
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))


def models_to_create(planned: PlannedRun) -> dict[str, Path]:
    """Models of the examples that a run names and this machine does not have yet, by the path of their field."""
    from troupe.orchestrator.starter.demo import MODELS

    known = {models_folder() / name for name in MODELS}
    named = {f"{section}.path": Path(model.path) for section, model in planned.spec.models().items()}
    return {field: folder for field, folder in named.items() if folder in known and not folder.exists()}


def with_configs(planned: PlannedRun) -> PlannedRun:
    """The run with shipped configurations instead of models of the examples that do not exist yet, to plan with."""
    models, missing = planned.spec.models(), models_to_create(planned)
    shipped = {
        section: model.model_copy(update={"path": str(MODEL_CONFIGS / Path(model.path).name)})
        for section, model in models.items()
        if f"{section}.path" in missing
    }
    return replace(planned, spec=with_sections(planned.spec, shipped))


def create_models(runs: Sequence[PlannedRun] | None, say: Say) -> None:
    """Create the models of the examples that runs name, or all of them, if this machine does not have them yet."""
    from troupe.orchestrator.starter.demo import MODELS, DemoModelError, make_models

    check_models_to_create(runs or ())
    folder = models_folder()
    names = MODELS if runs is None else [name for name in named_models(runs, folder) if name in MODELS]
    if not all((folder / name).exists() for name in names) and (problem := missing_package("gguf")):
        raise UsageError(f"creating the models {problem}")
    try:
        make_models(names, folder, say)
    except DemoModelError as error:
        raise TroupeError(str(error)) from None
