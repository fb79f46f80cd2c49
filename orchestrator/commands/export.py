"""`troupe export`: the trained policy as a model folder, or on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from troupe.orchestrator.commands.options import USER_ERROR, JsonOption, RunArgument, echo_json, exit_with


def export(
    run_folder: RunArgument,
    target: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Folder to write the Hugging Face model to.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest valid one).")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint of the best evaluation (checkpoint.best).")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Export the moving average of the weights (ema_decay).")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a whole model: adapters (roles.policy.lora) merged into it.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="Upload the model to the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is public.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --push: do not ask before uploading.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a run's trained policy as a Hugging Face model folder for transformers and vLLM.

    If the run trained adapters (roles.policy.lora), that is peft's folder of an adapter, or with --merge the whole
    model.
    """
    from troupe.orchestrator import library

    if target is None and push is None:
        exit_with("error: export where? Name a FOLDER, or --push ORG/NAME", USER_ERROR)
    if best and step is not None:
        exit_with("error: --best and --step name different checkpoints; give one of them", USER_ERROR)
    if merge and push is not None:
        exit_with("error: --merge writes a FOLDER; --push uploads what the checkpoint holds", USER_ERROR)
    if as_json and push is not None and not yes:
        exit_with("error: --json with --push needs --yes: nothing can be asked", USER_ERROR)
    source = library.model_of(run_folder, step=step, best=best, average=average)
    done: dict[str, str] = {"checkpoint": source.parent.name}
    if target is not None:
        done["folder"] = str(library.export(run_folder, target, step=step, best=best, average=average, merge=merge))
        if not as_json:
            typer.echo(f"wrote {done['folder']}")
    if push is not None:
        done["pushed"] = _push(source, push, private=not public, ask=not yes, quiet=as_json)
    if as_json:
        echo_json(done)


def _push(folder: Path, name: str, *, private: bool, ask: bool, quiet: bool) -> str:
    """Upload a model's folder to the hub, after listing what it holds, and return its page."""
    from troupe.orchestrator.hub.client import contents, push_model

    for line in contents(folder, name, private=private):
        typer.echo(line, err=quiet)
    if ask:
        typer.confirm("Upload?", abort=True)
    page = push_model(folder, name, private=private)
    if not quiet:
        typer.echo(f"pushed {page}")
    return page
