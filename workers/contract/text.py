"""Text from models and users: as UTF-8, on one line, without secrets, and the tags of its thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit


def valid_text(text: str) -> str:
    """The text with every lone surrogate as its escape, such as the six characters `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def valid_json(value: Any) -> Any:
    """A JSON value whose texts, names of fields included, are valid; sequences become lists."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {valid_text(str(name)): valid_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    return value


LONGEST_LINE = 300
"""Characters."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Terminal escape sequences (ECMA-48): control sequences such as colours, operating system commands, two characters."""


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The text without escape sequences and control characters, with single spaces, cut to `longest` characters."""
    visible = "".join(char if char.isprintable() else " " for char in _ESCAPES.sub("", text[: 16 * longest]))
    line = " ".join(visible.split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters besides the tab and the end of a line."""


def printable(text: str) -> str:
    """The text without escape sequences, which a terminal would obey, and with `?` for control characters."""
    return _CONTROLS.sub("?", _ESCAPES.sub("", text))


_SECRET = re.compile(r"secret|token|key|password|credential|^sig$", re.IGNORECASE)
"""In the names of options that are credentials."""
_NO_USER = "gs://anonymous@"
"""How a URL asks Google Cloud Storage for no credentials."""
_AZURE = ("abfs://", "abfss://")
"""In such URLs the container or the account replaces the user."""
_NO_SECRET = "credential_kind"
"""An option of Azure that names where credentials come from."""


def has_credentials(url: str) -> bool:
    """Whether a URL holds a user, a password or an option that is a credential."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no URL: opening it reports that
        return "@" in url
    names = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - {_NO_SECRET}
    if any(_SECRET.search(name) for name in names):
        return True
    if url.startswith(_AZURE):
        return ":" in parts.netloc.rpartition("@")[0]
    return "@" in parts.netloc and not url.startswith(_NO_USER)


_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|API_KEY|ACCESS_KEY|PRIVATE_KEY)(?:_|$)"
    r"|SECRET|_TOKEN$|PASSWORD|_KEY$|^(?:KEY|AUTHORIZATION|COOKIE)$|(?:^|_)(?:PAT|CONNECTION_STRING)$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable or a field of this name may hold a token or a password."""
    return _SECRET_NAME.search(name) is not None


HIDDEN = "(hidden)"
"""What others see of a text that may be secret."""
_KEY_FORM = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,})"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY|^(?:Bearer|Basic) "
)
"""Keys of widespread services, JSON web tokens, PEM keys and values of `Authorization`."""


def without_secrets(value: Any, name: str = "") -> Any:
    """A JSON value of the field `name` in which every text that may be a password or a key is `HIDDEN`."""
    if isinstance(value, Mapping):
        return {field: without_secrets(item, str(field)) for field, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    known = _KEY_FORM.search(value) or ("://" in value and has_credentials(value))
    return HIDDEN if known or (is_secret(name) and not name.lower().endswith("_env")) else value


_THOUGHT = r"(?:seed:|mm:)?(?:think|thinking|thought|reasoning)(?::[\w.-]+)?"
THOUGHT_STARTS = re.compile(
    rf"<{_THOUGHT}>|\[THINK\]|<\|START_THINKING\|>|\u25c1think\u25b7|<\|channel>|<\|channel\|>\s*analysis"
)
"""Begins a thought: tags, the forms of Mistral, Cohere, Kimi and Gemma 4, and the channel of gpt-oss."""
THOUGHT_ENDS = re.compile(
    rf"</{_THOUGHT}>|\[/THINK\]|<\|END_THINKING\|>|\u25c1/think\u25b7|<channel\|>"
    r"|<\|channel\|>\s*(?:final|commentary)(?:(?!<\|message\|>|<\|channel\|>).)*<\|message\|>",
    re.DOTALL,
)
"""Ends a thought. In the form of gpt-oss this is the head of the next channel."""
_TAG_PARTS = ("<|channel|>", "<|message|>")
"""Special tokens that gpt-oss builds its tags from."""


def is_thought_tag(token: str) -> bool:
    """Whether the text of a special token is the tag of a thought, or a part of one."""
    return token in _TAG_PARTS or any(tag.fullmatch(token) for tag in (THOUGHT_STARTS, THOUGHT_ENDS))
