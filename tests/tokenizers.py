"""Tokenizers of the small models, each loaded once."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def new_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, which the test may change. A copy takes a third of the time that loading takes."""
    return deepcopy(_loaded(folder))
