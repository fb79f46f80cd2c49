"""Questions to a short-lived process, answered in this one, where the libraries are imported already."""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch  # noqa: F401 (some answers block its import where it has not been imported)

from troupe.workers.isolation.probe import ProbeFailed


def ask_here(entry: str, request: Any, timeout_s: float, python: str | None = None) -> list[Any]:
    """As `troupe.workers.isolation.probe.ask`; requests and replies are JSON here, too."""
    module, function = entry.split(":")
    replies: list[Any] = []
    try:
        for reply in vars(importlib.import_module(module))[function](json.loads(json.dumps(request))):
            replies.append(json.loads(json.dumps(reply)))
    except ValueError as error:
        raise ProbeFailed(f"ValueError: {error}", replies, str(error)) from None
    return replies
