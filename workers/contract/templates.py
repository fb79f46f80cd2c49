"""Templates of questions and prompts: names in braces, and what fills them."""

from __future__ import annotations

import string
from collections.abc import Sequence

TEMPLATE_FIELDS = ("prompt", "response", "answer")
"""What a template contains besides columns of the data."""
FEEDBACK, DEMONSTRATION = "feedback", "demonstration"
"""What the template of a teacher contains of a sample whose reward is known: the text that comes with its reward, and a
better response of its group."""
TEACHER_FIELDS = ("prompt", "answer", FEEDBACK, DEMONSTRATION)
"""What the template of a teacher's prompt contains besides them."""


def template_fields(template: str) -> list[str]:
    """The names in braces. Raises ValueError for braces that do not close."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def checked_fields(template: str, own: Sequence[str]) -> list[str]:
    """The names in braces. Raises ValueError for a name that is neither of `own` nor a column, or a bad template."""
    names = template_fields(template)
    if wrong := [name for name in names if not name or {".", "["} & set(name)]:
        can = f"{', '.join(own)} and columns of metadata"
        raise ValueError(f"has no field {{{wrong[0]}}}; it can have {can}; write {{{{ for a brace")
    try:
        template.format_map(dict.fromkeys(names, ""))
    except (ValueError, KeyError) as error:
        raise ValueError(f"cannot be filled in: {error}") from error
    return names
