"""Solutions of PRM800K (arXiv 2305.20050): for each step the completions that were rated, one of which continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.orchestrator.data.bad_rows import BadRow

Step = tuple[str, Any]
"""The text of a step and its rating."""


def branches(tree: Any) -> Iterator[list[Step]]:
    """The ways through a tree of steps (lists of `completions`, `chosen_completion`, `human_completion`): to each
    rated completion with which it does not continue, and to its end. A step that a person wrote is rated 1; one
    without a rating is left out and ends its way before it. Raises BadRow."""
    way: list[Step] = []
    ends = True
    for step in _list(tree, "steps"):
        if not isinstance(step, Mapping):
            raise BadRow("a step is no object with completions")
        rated = [(_text(one), one.get("rating")) for one in _list(step.get("completions"), "completions")]
        chosen, written = step.get("chosen_completion"), step.get("human_completion")
        if chosen is not None and (not isinstance(chosen, int) or not 0 <= chosen < len(rated)):
            raise BadRow(f"the chosen completion is {chosen!r:.60}, of {len(rated)}")
        others = [one for place, one in enumerate(rated) if place != chosen and one[1] is not None]
        yield from ([*way, one] for one in others)
        following = rated[chosen] if chosen is not None else ("", None) if written is None else (_text(written), 1)
        if following[1] is None:
            ends = not others
            break
        way.append(following)
    if way and ends:  # otherwise another way has all of it
        yield way


def _text(completion: Any) -> str:
    text = completion.get("text") if isinstance(completion, Mapping) else None
    if not isinstance(text, str):
        raise BadRow("a completion of a step has no text")
    return text


def _list(value: Any, what: str) -> Sequence[Any]:
    if value is not None and not isinstance(value, list):
        raise BadRow(f"the {what} are no list of objects")
    return value or ()
