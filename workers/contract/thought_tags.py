"""The tags that models mark their thoughts with, as text and as special tokens."""

from __future__ import annotations

import re

_NAME = r"(?:seed:|mm:)?(?:think|thinking|thought|reasoning)(?::[\w.-]+)?"
STARTS = re.compile(rf"<{_NAME}>|\[THINK\]|<\|START_THINKING\|>|\u25c1think\u25b7|<\|channel>|<\|channel\|>\s*analysis")
"""Begins a thought: tags, the forms of Mistral, Cohere, Kimi and Gemma 4, and the channel of gpt-oss."""
ENDS = re.compile(
    rf"</{_NAME}>|\[/THINK\]|<\|END_THINKING\|>|\u25c1/think\u25b7|<channel\|>"
    r"|<\|channel\|>\s*(?:final|commentary)(?:(?!<\|message\|>|<\|channel\|>).)*<\|message\|>",
    re.DOTALL,
)
"""Ends a thought. In the form of gpt-oss this is the head of the next channel."""
_PARTS = ("<|channel|>", "<|message|>")
"""Special tokens that gpt-oss builds its tags from."""


def is_tag(token: str) -> bool:
    """Whether the text of a special token is the tag of a thought, or a part of one."""
    return token in _PARTS or any(tag.fullmatch(token) for tag in (STARTS, ENDS))
