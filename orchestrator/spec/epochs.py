"""`schedule.data_epochs`: the length of a run as passes over its training data instead of steps."""

from __future__ import annotations

import math
from dataclasses import replace

from troupe.orchestrator.spec.errors import Place, SpecError
from troupe.orchestrator.spec.yaml_reader import OVERRIDE, Document

FIELD = "schedule.data_epochs"
_UNCOUNTED = "is a number of steps only once the data are read: set schedule.steps, which `troupe validate` prints"


def given_epochs(document: Document) -> float | None:
    """Passes over the data that a run takes, or None if it takes `schedule.steps`. Raises SpecError if both are given
    and `--set` does not decide, or the number is none."""
    schedule = document.data.get("schedule") if isinstance(document.data, dict) else None
    if not isinstance(schedule, dict) or (epochs := schedule.get("data_epochs")) is None:
        return None
    if schedule.get("steps") is not None:
        places = document.source.places
        given = [name for name in ("steps", "data_epochs") if _is_override(places.get(("schedule", name)))]
        if given == ["steps"]:
            return None
        if given != ["data_epochs"]:
            raise SpecError([document.source.problem(FIELD, "and schedule.steps are both given: remove one")])
    if type(epochs) not in (int, float) or not 0 < epochs < math.inf:
        why = f"expected a number above 0, got {str(epochs)[:60]!r}"
        raise SpecError([document.source.problem(FIELD, why, "out-of-range")])
    return float(epochs)


def in_steps(document: Document, steps: int | None = None) -> Document:
    """The document without passes over the data; with a number of steps, if one is given. Raises SpecError if it has
    only passes, and no number is given."""
    if steps is None and given_epochs(document) is not None:
        raise SpecError([document.source.problem(FIELD, _UNCOUNTED)])
    if not isinstance(document.data, dict) or not isinstance(schedule := document.data.get("schedule"), dict):
        return document
    length = {} if steps is None else {"steps": steps}
    kept = {name: value for name, value in schedule.items() if name != "data_epochs"}
    return replace(document, data=document.data | {"schedule": kept | length})


def _is_override(place: Place | None) -> bool:
    return place is not None and place.file == OVERRIDE
