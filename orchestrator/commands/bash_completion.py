"""Completion in bash of words with `=` or `:`, as in `--set algorithm.name=grpo` and `examples:laptop-grpo`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from typer import _completion_shared
from typer._click.shell_completion import CompletionItem, split_arg_string
from typer._completion_classes import BashComplete

_BREAKS = frozenset(("=", ":"))
"""Where bash splits words (COMP_WORDBREAKS). Each is a separate word, and bash replaces what follows it."""


def _whole_words() -> tuple[list[str], str, int]:
    """The words before the cursor as typed, the word at the cursor, and how many of its characters bash keeps."""
    split, position = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
    at_cursor = split[position] if position < len(split) else None
    words = list(_joined(split[: position + 1]))
    if at_cursor is None:
        return words[1:], "", 0
    replaced = 0 if at_cursor in _BREAKS else len(at_cursor)
    return words[1:-1], words[-1], len(words[-1]) - replaced


def _joined(split: list[str]) -> Iterator[str]:
    word = ""
    for part in split:
        if word and not (part in _BREAKS or word[-1] in _BREAKS):
            yield word
            word = ""
        word += part
    if word:
        yield word


def _arguments(self: BashComplete) -> tuple[list[str], str]:
    before, word, _kept = _whole_words()
    return before, word


def _shown(self: BashComplete, item: CompletionItem) -> str:
    return str(item.value)[_whole_words()[2] :]


def install() -> None:
    """Make Typer complete such words in bash, and add no space behind a field, which waits for its value."""
    BashComplete.get_completion_args = _arguments
    BashComplete.format_completion = _shown
    shared = vars(_completion_shared)["_completion_scripts"]
    shared["bash"] = shared["bash"].replace(
        "    return", "    [[ $COMPREPLY == *= ]] && compopt -o nospace\n    return"
    )
