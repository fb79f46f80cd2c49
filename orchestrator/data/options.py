"""Questions with options: the options stand below the prompt, and the answer is the letter of the right one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from string import ascii_uppercase as LETTERS
from typing import Any

from troupe.orchestrator.data.bad_rows import BadRow, WrongForm


def with_options(prompt: Any, options: Any, answer: Any, *, mixed: bool) -> tuple[str, str]:
    """The prompt with its options, and the letter of the right one. Raises BadRow if they are no such question.

    Args:
        answer: The right one: its text, its letter, or its number from 0 on.
        mixed: It is one of the options itself, which are put in an order that follows from the question alone.
    """
    texts = [str(one).strip() for one in options] if isinstance(options, list) and None not in options else []
    if not isinstance(prompt, str):
        raise BadRow("the prompt with options is not text")
    if not 2 <= len(texts) <= len(LETTERS) or len(set(texts)) < len(texts):
        raise BadRow(f"the options are not 2 to {len(LETTERS)} different texts")
    places = {texts.index(str(answer).strip())} if mixed else {*_places(answer, options, texts)}
    if len(places) != 1:
        raise BadRow(f"the answer, {answer!r:.60}, {'names several' if places else 'is none'} of the options")
    right = texts[places.pop()]
    if mixed:
        texts.sort(key=lambda text: hashlib.blake2b(f"{prompt}\0{text}".encode()).digest())
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    return f"{prompt}\n\n{listed}", LETTERS[texts.index(right)]


def _places(answer: Any, options: list[Any], texts: list[str]) -> Iterator[int]:
    """What an answer may mean, as numbers of options."""
    word = str(answer).strip()
    is_text = word in texts and (isinstance(answer, str) or answer in options)
    if is_text:
        yield texts.index(word)
    if len(word) == 1 and word in LETTERS[: len(texts)]:
        yield LETTERS.index(word)
    if word.isdecimal() and int(word) < len(texts):
        yield int(word)
    elif word.isdecimal() and not is_text:
        raise WrongForm("answer", f"the answer is option {word} of {len(texts)}, which are counted from 0")
