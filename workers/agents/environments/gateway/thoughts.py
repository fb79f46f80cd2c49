"""Thoughts beside texts: some protocols have them in separate blocks, and agents send these back or leave them out.

The text of a turn must come back as it was. So a block has, besides the thought that is shown, the whole text up to the
answer as its seal, instead of the services' signature or encrypted thought.
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from troupe.workers.contract.text import THOUGHT_ENDS, THOUGHT_STARTS


class Thought(NamedTuple):
    """The parts of a turn's text."""

    shown: str
    """The thought without its tags; empty if there is none."""
    before: str
    """The text before the answer, tags and white space included."""
    answer: str


def read_thought(text: str) -> Thought:
    """The thought of a turn and the answer behind it. A thought that does not end has no answer."""
    ends = list(THOUGHT_ENDS.finditer(text))
    start = THOUGHT_STARTS.search(text)
    if not ends and start is None:
        return Thought("", "", text)
    stop, until = (ends[-1].start(), ends[-1].end()) if ends else (len(text), len(text))
    answer = text[until:].lstrip()
    begin = start.end() if start is not None and start.end() <= stop and not text[: start.start()].strip() else 0
    return Thought(text[begin:stop].strip(), text[: len(text) - len(answer)], answer)


def seal(before: str) -> str:
    """The text before an answer, for a field that agents send back unread."""
    return base64.b64encode(before.encode(errors="surrogatepass")).decode()


def unseal(sealed: object, shown: str) -> str:
    """The text before an answer; of a seal that another service made, the thought that is shown, in tags."""
    try:
        text = base64.b64decode(str(sealed), validate=True).decode(errors="surrogatepass") if sealed else ""
    except (binascii.Error, ValueError):
        text = ""
    return text or (f"<think>\n{shown}\n</think>\n\n" if shown else "")
