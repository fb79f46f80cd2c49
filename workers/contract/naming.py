"""Objects that a spec names: `package.module:attribute`, or a built-in name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any


class NameProblem(ValueError):
    """A name leads to nothing: it is unknown, its module cannot be imported, or has no such attribute."""


def locate(name: str, shipped: Mapping[str, str], kind: str, form: str) -> tuple[str, str]:
    """Module and attribute of a built-in name or of `package.module:attribute`. Imports nothing.

    Args:
        name: The name.
        shipped: The built-in ones, each with what it stands for.
        kind: What is named, for messages: `reward function`.
        form: How one's own is named: `package.module:function`.

    Raises:
        NameProblem: it is neither.
    """
    module, colon, attribute = shipped.get(name, name).partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), attribute]):
        return module, attribute
    near = difflib.get_close_matches(name, shipped, n=1)
    built_in = f"; built-in {kind.rpartition(' ')[2]}s: {', '.join(shipped)}" if shipped else ""
    hint = f"; did you mean {near[0]!r}?" if near else built_in
    use = f"use a built-in name or {form}" if shipped else f"use {form}"
    raise NameProblem(f"no {kind} {name!r}: {use}{hint}")


def import_attribute(name: str, module: str, attribute: str) -> Any:
    """The attribute of a module; `name` is what messages call it.

    Raises:
        NameProblem: the import fails, or there is no such attribute.
    """
    try:
        found = vars(importlib.import_module(module)).get(attribute)
    except Exception as error:  # the module may be the user's
        raise NameProblem(f"{name}: cannot import {module}: {type(error).__name__}: {error}") from error
    if found is None:
        raise NameProblem(f"{name}: module {module} has no {attribute!r}")
    return found
