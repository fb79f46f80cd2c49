"""The runs of a spec, as several commands need them: checked, with their models and their data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from troupe.orchestrator.runs import prepare
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.derived.paths import uses_hub
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import read_document
from troupe.workers.contract.text import printable


def ready(path: Path, overrides: list[str], out: Path | None = None, *, resume: bool = False) -> tuple[PlannedRun, ...]:
    """See `prepare.ready`; what takes long is said on standard error."""
    return prepare.ready(read_document(path, overrides), announce, out, resume=resume)


def create_models(runs: Sequence[PlannedRun] | None) -> None:
    """See `prepare.create_models`; what takes long is said on standard error."""
    prepare.create_models(runs, announce)


def announce(line: str) -> None:
    """Print a line about what takes long to standard error."""
    typer.echo(printable(line), err=True)


@contextmanager
def shown_copies() -> Iterator[None]:
    """Shows the bytes and the rate of files that are copied from a store within the block, if standard error is a
    terminal."""
    from rich.console import Console

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield
        return
    from rich.progress import DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    from troupe.orchestrator.data.remote import copies_shown

    columns = TextColumn("copying {task.description}"), DownloadColumn(binary_units=True), TransferSpeedColumn()
    progress, tasks = Progress(*columns, console=terminal, transient=True), dict[str, TaskID]()

    def show(name: str, done: int, total: int) -> None:
        progress.start()
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done, visible=done < total)

    try:
        with copies_shown(show):
            yield
    finally:
        progress.stop()


def read_data(runs: Sequence[PlannedRun]) -> list[list[str]]:
    """Read all data of several runs; a description of the data of each. Raises SpecError if data cannot be used."""
    from troupe.orchestrator.data.prompt_check import check_prompts
    from troupe.orchestrator.data.summary import describe, load_data
    from troupe.orchestrator.errors import DataError
    from troupe.workers.contract.arrow import spare_pandas

    spare_pandas()
    problems = []
    described = []
    for planned in runs:
        if planned.samples_of:
            described.append([f"data: the samples of {', '.join(map(str, planned.samples_of))}"])
            continue
        if uses_hub(planned.spec):
            from troupe.orchestrator.hub.resolve import describe as describe_hub

            described.append(describe_hub(planned.spec))  # left to the run to download
            continue
        try:
            with shown_copies():
                pools = load_data(planned.spec).pools
        except DataError as error:
            problems.append(planned.problem("data", str(error)))
            continue
        found = check_prompts(planned.spec, pools)
        problems += [planned.problem(field, problem) for field, problem in found.problems]
        described.append([*describe(pools), *found.lines])
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return described
