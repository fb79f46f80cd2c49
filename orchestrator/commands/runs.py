"""The runs of a spec, as several commands need them: checked, with their models and their data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.examples import models_folder
from troupe.orchestrator.spec.hub import uses_hub
from troupe.orchestrator.spec.stages import PlannedRun, plan_runs, read_document
from troupe.orchestrator.starter.demo import named_models


def ready(path: Path, overrides: list[str], out: Path | None = None, *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """Load every run of a file, with the models of the examples created and names on the hub pinned to commits.

    Raises:
        SpecError: A spec is invalid, or a file or repository it names does not exist.
    """
    runs = plan_runs(read_document(path, overrides), out)
    create_models(runs)
    return checked(runs, resume=resume)


def checked(runs: tuple[PlannedRun, ...], *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """The runs, with names on the hub pinned to commits. Raises SpecError where what they name does not exist."""
    problems = list(dict.fromkeys(problem for planned in runs for problem in planned.missing()))
    if problems:
        raise SpecError(problems)
    if not any(uses_hub(planned.spec) for planned in runs):
        return runs
    from troupe.orchestrator.hub.resolve import pin_run

    return tuple(pin_run(planned, resume=resume) for planned in runs)


def create_models(runs: Sequence[PlannedRun] | None) -> None:
    """Create the models of the examples that runs name, or all of them, where this machine does not have them yet."""
    from troupe.orchestrator.starter.demo_models import MODELS, DemoModelError, make_models

    folder = models_folder()
    names = MODELS if runs is None else [name for name in named_models(runs, folder) if name in MODELS]
    try:
        make_models(names, folder, lambda line: typer.echo(line, err=True))
    except DemoModelError as error:
        raise TroupeError(str(error)) from None


def models_to_create(planned: PlannedRun) -> dict[str, Path]:
    """Models of the examples that a run names and this machine does not have yet, by the path of their field."""
    from troupe.orchestrator.starter.demo_models import MODELS

    known = {models_folder() / name for name in MODELS}
    named = {f"{section}.path": Path(model.path) for section, model in planned.spec.models().items()}
    return {field: folder for field, folder in named.items() if folder in known and not folder.exists()}


def read_data(runs: Sequence[PlannedRun]) -> list[list[str]]:
    """Read all data of several runs; a description of the data of each. Raises SpecError where data cannot be used."""
    from troupe.orchestrator.data.prompt_check import check_prompts
    from troupe.orchestrator.data.readers import DataError
    from troupe.orchestrator.data.summary import describe, read_pools

    problems = []
    described = []
    for planned in runs:
        if uses_hub(planned.spec):
            from troupe.orchestrator.hub.resolve import describe as describe_hub

            described.append(describe_hub(planned.spec))  # nothing is downloaded before the run
            continue
        try:
            pools = read_pools(planned.spec)
        except DataError as error:
            problems.append(planned.problem("data", str(error)))
            continue
        found = check_prompts(planned.spec, pools)
        problems += [planned.problem(field, problem) for field, problem in found.problems]
        described.append([*describe(pools), *found.lines])
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return described
