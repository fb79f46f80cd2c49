"""`troupe skill`: what an agent needs to know to use Troupe, one folder of `deploy/skills/` for each task."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from troupe.orchestrator.commands.options import JsonOption, echo_json
from troupe.orchestrator.errors import UsageError, nearest

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "skills"
_FILE = "SKILL.md"


def skill(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Skill to print (default: list them).")] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="Copy all of them into this folder, as in .claude/skills."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print, list or copy the skills: how an agent starts, reads, repairs and tunes a run."""
    known = {file.parent.name: file.read_text("utf-8") for file in sorted(FOLDER.glob(f"*/{_FILE}"))}
    if name is not None and name not in known:
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise UsageError(f"no skill '{name[:60]}' ({hint})")
    if to is not None:
        for folder in known:
            shutil.copytree(FOLDER / folder, to / folder, dirs_exist_ok=True)
    found = {folder: _description(text) for folder, text in known.items()}
    if as_json:
        echo_json(found if name is None else {"name": name, "text": known[name]})
    elif name is not None:
        typer.echo(known[name], nl=False)
    else:
        names = {folder: folder if to is None else str(to / folder / _FILE) for folder in known}
        width = max(map(len, names.values()))
        typer.echo("\n".join(f"{names[folder]:<{width}}  {text}" for folder, text in found.items()))


def _description(text: str) -> str:
    """The field `description` at the top of a skill."""
    return next(line.removeprefix("description: ") for line in text.splitlines() if line.startswith("description: "))
