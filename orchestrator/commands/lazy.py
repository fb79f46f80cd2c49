"""Commands that are imported when they are used: `troupe --help` and the completion of their names import none."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

_FOLDER = "troupe.orchestrator.commands"


@dataclass(frozen=True)
class Entry:
    """A command, or a group of commands, and its text in `troupe --help`."""

    home: str
    """`module:attribute` of its function or its `Typer`, in `orchestrator/commands/`."""
    help: str
    """The first paragraph of its help text."""


@cache
def load(name: str, home: str) -> Any:
    """The command with this name, imported from its home and built by Typer."""
    module, _, attribute = home.partition(":")
    found = getattr(importlib.import_module(f"{_FOLDER}.{module}"), attribute)
    parent = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(found)
    return get_group(parent).commands[name]


class _Loaded(Mapping[str, Any]):
    """Commands by name. One that is looked up is imported."""

    def __init__(self, table: Mapping[str, Entry]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return load(name, self._table[name].home)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def lazy_group(table: Mapping[str, Entry]) -> type[TyperGroup]:
    """The class of a group of these commands, in this order."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "commands": _Loaded(table)})

        def list_commands(self, ctx: Any) -> list[str]:
            return list(table)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """A command with its help text alone, for lists of commands."""
            return TyperCommand(cmd_name, help=table[cmd_name].help) if cmd_name in table else None

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            """The command itself. It is imported before any command begins, while a signal can still exit at once."""
            name, _, rest = super().resolve_command(ctx, args)
            return name, None if name is None else self.commands[name], rest

    return LazyGroup
