"""Commands for the first run: `troupe demo` trains an example, `troupe init` writes a spec."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from troupe.orchestrator.commands.options import (
    SetOption,
    algorithm_names,
    disk_folder,
    echo_json,
    read_mapping,
)
from troupe.orchestrator.commands.train import train
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.examples import DEFAULT, MODELS_VARIABLE, RECIPES, examples, models_folder


def demo(
    spec: Annotated[str, typer.Option(metavar="EXAMPLE", help="Example to run, as --list shows it.")] = DEFAULT,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (default: the example's).")] = None,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", callback=disk_folder, help="Run folder (default: runs/demo, or runs/NAME with --spec NAME)."
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(envvar=MODELS_VARIABLE, help="Folder for the models (default: in the user's cache folder)."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the examples and exit.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Create both models and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print JSON.")] = False,
) -> None:
    """Create small models, once, and train one of them on this machine; a second call resumes.

    The default teaches SmolLM2-135M one-digit sums with GRPO, in some minutes on two cores.
    """
    if as_json and not list_:
        raise UsageError("--json is for --list")
    if as_json:
        echo_json([{"name": name, "summary": summary} for name, summary in examples().items()])
        return
    from troupe.orchestrator.commands.runs import create_models, ready
    from troupe.orchestrator.starter.demo import demo_folder, demo_spec, list_examples

    if list_:
        typer.echo(list_examples())
        return
    if models is not None:
        os.environ[MODELS_VARIABLE] = str(models)
    if prepare:
        create_models(None)
        typer.echo(f"the models are in {models_folder()}")
        return
    example, overrides = demo_spec(spec, steps)
    runs = ready(example, [*overrides, *set_], out or demo_folder(spec))
    resume = any(any((planned.out / "checkpoints").glob("step-*")) for planned in runs)
    train(example, runs, resume, None)


def _columns(listed: list[str]) -> dict[str, str] | None:
    """The columns of `--column`, by field; None without any."""
    if wrong := next((one for one in listed if not all(one.partition("="))), None):
        raise UsageError(f"--column: expected FIELD=COLUMN, got {wrong!r}")
    columns = dict(one.split("=", 1) for one in listed)
    if len(columns) < len(listed):
        raise UsageError("--column: a field is named twice")
    return columns or None


def init(
    model: Annotated[str | None, typer.Option(help="Model folder in Hugging Face format.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="File or pattern of files, `datasets` folder, dataset on the hub, or reasoning_gym:TASK."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(autocompletion=algorithm_names, help="Algorithm (default: grpo).")
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Episodes of several turns: a built-in environment or package.module:Class."),
    ] = None,
    args: Annotated[
        str | None, typer.Option(help="Arguments of the environment: a YAML mapping, such as '{taskset: glossary}'.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of the machine (default: those it has).")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="Their type, such as H100 (default: as detected).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest response (0: 64 on CPUs, 1024 on GPUs).")] = 0,
    column: Annotated[
        list[str],
        typer.Option(metavar="FIELD=COLUMN", help="The column of a field, such as answer=gt_answer; may be repeated."),
    ] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="Name of the run (default: from model and algorithm).")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="EXAMPLE", help="Write this example (`troupe demo --list`) instead.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write the spec of a known result, as in --recipe gsm8k, instead."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a first spec that fits this machine, with a comment for each field; in a terminal, ask what is missing."""
    from troupe.orchestrator.commands.runs import shown_copies
    from troupe.orchestrator.starter.choices import own_tasks
    from troupe.orchestrator.starter.command import InitFlags, complete, copy_of, text_of, write
    from troupe.orchestrator.starter.environments import write_rows

    if output.exists() and not force:
        raise UsageError(f"{output} exists; --force overwrites it, --output names another file")

    def ask(question: str, default: str) -> str:
        return str(typer.prompt(question, default=default or None))

    values = None if args is None else read_mapping(args, "{taskset: glossary}")
    flags = InitFlags(
        model, data, algorithm, gpus, gpu_type, name, steps, max_tokens, environment, values, _columns(column)
    )
    if from_ is not None and recipe is not None:
        raise UsageError("--from and --recipe name different specs; give one of them")
    copied = from_ if recipe is None else f"{RECIPES}{recipe}"
    if copied is not None:
        text = copy_of(copied, flags, output)
    else:
        if data is None and environment is not None and own_tasks(environment):
            flags = replace(flags, data=str(write_rows(environment, values or {}, output, force=force)))
            typer.echo(f"wrote {flags.data}: the tasks of {environment}")
        choices = complete(flags, ask if sys.stdin.isatty() else None)
        with shown_copies():
            text = text_of(choices, output, typer.echo)
    write(text, output, force)
    typer.echo(f"wrote {output}; next: troupe validate {output}")
