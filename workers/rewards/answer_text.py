"""Where the answer stands in a response: behind the thought, inside <answer> tags, in the last box."""

from __future__ import annotations

import re
from unicodedata import decimal

from troupe.workers.contract.text import THOUGHT_ENDS, THOUGHT_STARTS

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s+(-?[0-9][0-9.,]*[0-9]|-?[0-9])(?![0-9])")
_GROUPING = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|[~'\u2019\u202f\u00a0\u2009])(?=[0-9]{3}(?![0-9]))")
_DIGIT = re.compile(r"(?![0-9])\d")
_DASH = re.compile(r"(?<![\w)\]])[\u2010\u2011\u2012\u2013\ufe63](?=\.?[0-9])")
"""Other dashes directly before a number, unless it is the second one of a range."""

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_UNSEEN = dict.fromkeys([*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF], "")
"""Characters without a width, and characters that change the direction of text."""
_PLAIN = str.maketrans({**_FULL_WIDTH, **_UNSEEN, "\u2212": "-", "\u3002": ". ", "\u3001": ", ", "\u3000": " "})


def visible(response: str, *, opens_thought: bool = False) -> str:
    """The response behind its thought; empty if the thought does not end. With `opens_thought` the chat template opens
    the thought, so that a response without the end of one was cut inside."""
    ends = list(THOUGHT_ENDS.finditer(response))
    text = response[ends[-1].end() :] if ends else response
    cut = THOUGHT_STARTS.search(text)
    if cut is not None:
        return text[: cut.start()]
    return "" if opens_thought and not ends else text


def has_thought(text: str) -> bool:
    """Whether a text has the tag that begins a thought."""
    return THOUGHT_STARTS.search(text) is not None


def in_thought(text: str) -> bool:
    """Whether a text ends inside a thought."""
    starts, ends = (list(tag.finditer(text)) for tag in (THOUGHT_STARTS, THOUGHT_ENDS))
    return bool(starts) and (not ends or starts[-1].start() > ends[-1].start())


def answer_part(response: str, *, opens_thought: bool = False) -> tuple[str, bool]:
    """(text, tagged): what the last <answer> tags of the visible response hold; without any, all of it."""
    text = visible(response, opens_thought=opens_thought)
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text), bool(tagged)


def plain(text: str) -> str:
    """The text without digit grouping, and with ASCII for full-width forms, digits of other scripts and minus signs."""
    text = _DIGIT.sub(lambda digit: str(decimal(digit[0])), text.translate(_PLAIN))
    return _GROUPING.sub("", _DASH.sub("-", text))


def last_box(text: str) -> tuple[str | None, str]:
    r"""(content, text before): of the last \boxed{}, \fbox{} or \framebox{} that is closed; None if there is none. A
    box that is not closed, cut at the longest response, is left out of the text before."""
    before, closings = text, _closings(text)
    for opened in reversed(list(_BOX.finditer(text))):
        end = closings.get(opened.end() - 1)
        if end is not None:
            percent = re.match(r"\s*\\?%", text[end + 1 :])
            return text[opened.end() : end] + (percent.group() if percent else ""), text[: opened.start()]
        before = text[: opened.start()]
    bare = _BARE_BOX.findall(before)
    return (bare[-1] if bare else None), before


def _closings(text: str) -> dict[int, int]:
    """Position of the brace that closes each opening one that is closed; escaped braces are text."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACES.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            found[opened.pop()] = brace.start()
    return found
