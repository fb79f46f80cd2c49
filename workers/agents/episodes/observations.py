"""What a policy reads of a long message of its environment: all that is from the prompt, and so much of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from troupe.workers.contract.environments import cut

_BLOCK = 16
"""Characters that identify parts of a prompt; every part of twice as many is found."""
_Span = tuple[int, int]


def cut_observation(text: str, longest: int, prompts: Sequence[str]) -> str:
    """A message with at most `longest` characters that are not from the prompts, and a note at each cut. An environment
    can trim the prompt, show a part of it, join its messages, or put it behind other text. What is left of it is kept
    as it is shown. Of the rest, the longest pieces are cut."""
    if len(text) <= longest:
        return text
    spans = [*_merged(_shown(text, prompts)), (len(text), len(text))]
    own = [(end, start) for (_, end), (start, _) in zip([(0, 0), *spans], spans, strict=False)]
    room, left = dict[_Span, int](), longest
    for start, end in sorted(own, key=lambda span: span[1] - span[0]):
        room[start, end] = min(left, end - start)
        left -= room[start, end]
    pieces = list[str]()
    for (start, end), (_, following) in zip(own, spans, strict=True):
        piece = cut(text[start:end], room[start, end])
        is_cut = room[start, end] < end - start
        pieces += [piece, "\n" if is_cut and end < len(text) else "", text[end:following]]
    return "".join(pieces)


def _shown(text: str, prompts: Sequence[str]) -> Iterator[_Span]:
    """Where the text shows the prompts: each of their characters at most once."""
    blocks: dict[str, int] | None = None
    for prompt in filter(None, map(str.strip, prompts)):
        # The start of a text is kept in any case; so the last place is the one to know.
        if (start := text.rfind(prompt)) >= 0:
            yield start, start + len(prompt)
            continue
        if blocks is None:
            places = reversed(range(0, len(text) - _BLOCK + 1, _BLOCK))
            blocks = {text[at : at + _BLOCK]: at for at in places}
        yield from _parts(text, prompt, blocks)


def _parts(text: str, prompt: str, blocks: dict[str, int]) -> Iterator[_Span]:
    """Where the text shows parts of the prompt, by the text's blocks."""
    read = at = 0
    while at <= len(prompt) - _BLOCK:
        start = blocks.get(prompt[at : at + _BLOCK])
        if start is None:
            at += 1
            continue
        before = prompt[max(read, at - _BLOCK) : at][::-1]
        earlier = _alike(text[max(0, start - _BLOCK) : start][::-1], before)
        length = _alike(text[start : start + len(prompt) - at], prompt[at:])
        yield start - earlier, start + length
        read = at = at + length


def _alike(one: str, other: str) -> int:
    """Number of equal characters at the beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def _merged(spans: Iterator[_Span]) -> list[_Span]:
    """The spans in order, with touching ones joined."""
    merged = list[_Span]()
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
