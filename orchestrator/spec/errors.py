"""Errors of a spec: `file:line: field.path: what is wrong (did you mean X?)`, all of them at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from troupe.orchestrator.errors import TroupeError, nearest, nearest_word
from troupe.orchestrator.spec.engine_options import engine_option
from troupe.orchestrator.spec.former_fields import former_advice
from troupe.orchestrator.spec.migration import counterpart
from troupe.orchestrator.spec.roles import DEFAULT_TEACHER
from troupe.orchestrator.spec.sources import LIST, MAP, SECTION

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the spec."""


@dataclass(frozen=True)
class Place:
    """Where something was written."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


Code = Literal[
    "unreadable",
    "unknown-field",
    "missing-field",
    "wrong-type",
    "unknown-value",
    "out-of-range",
    "conflict",
    "unusable",
]
"""Kinds of problems, which stay the same from version to version.

`unreadable`: no YAML; `conflict`: fields that exclude each other; `unusable`: a file, model, package or row of data
that the spec names.
"""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; its text is one line."""

    place: Place
    path: str
    message: str
    code: Code = "conflict"
    suggestion: str = ""
    """What to write instead, where one word does it; if empty, what `did you mean` names."""

    def __str__(self) -> str:
        parts = (str(self.place), self.path, self.message)
        return ": ".join(_one_line(part) for part in parts if part)

    def found(self) -> FoundProblem:
        meant = _MEANT.search(self.message)
        suggestion = self.suggestion or (meant[1] if meant else None)
        return FoundProblem(self.place.file, self.place.line, self.path, self.code, self.message, suggestion)


_MEANT = re.compile(r"(?:did you mean |it belongs at )'?([^'?\s)]+)")


@dataclass(frozen=True)
class FoundProblem:
    """A problem in what `--json` prints."""

    file: str
    line: int | None
    field: str
    code: Code
    message: str
    suggestion: str | None


@dataclass(frozen=True)
class Failure:
    """What a command that fails prints with `--json`."""

    error: str
    exit_code: int
    problems: tuple[FoundProblem, ...]


class SpecError(TroupeError):
    """A spec that is not valid. Its text has one line for each problem."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.place.file, p.place.line or 0)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class Source:
    """Where each field of a spec was written."""

    file: str
    places: Mapping[Path, Place] = field(default_factory=dict)
    top: Place | None = None
    """Where the spec as a whole begins, or None for the file's first line."""

    def find(self, path: Path) -> Place:
        """Place of the field, or of the nearest section around it that was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.top or Place(self.file, 1)

    def problem(self, dotted: str, message: str, code: Code = "conflict") -> Problem:
        """A problem at a field given as text (`roles.reward.functions.0`)."""
        if message.startswith("is required"):
            code = "missing-field"
        elif code == "conflict" and _MEANT.search(message):
            code = "unknown-value"
        return Problem(self.find(parse_path(dotted)), dotted, message, code)


def parse_path(dotted: str) -> Path:
    """`roles.reward.functions.0` as keys and list indices."""
    return tuple(int(part) if part.isdecimal() and part.isascii() else part for part in dotted.split("."))


def format_path(path: Path) -> str:
    """The inverse of `parse_path`."""
    return ".".join(str(part) for part in path)


def from_validation(error: ValidationError, root: type[BaseModel], data: Any, source: Source) -> list[Problem]:
    """Every problem of a validation error, in terms of the spec."""
    problems: list[Problem] = []
    items = error.errors(include_url=False)
    # A misspelt required field is one mistake, and the hint for the unknown key already names it.
    misspelt = {
        (*item["loc"][:-1], nearest_word(str(item["loc"][-1]), fields_at(root, item["loc"][:-1])))
        for item in items
        if item["type"] == "extra_forbidden"
    }
    for item in items:
        if item["type"] == "missing" and item["loc"] in misspelt:
            continue
        if item["type"] == "too_short" and any(
            one["loc"][: len(item["loc"])] == item["loc"] != one["loc"] for one in items
        ):
            continue  # pydantic counts the entries that are valid
        kind, context = item["type"], item.get("ctx", {})
        path = _without_tags(item["loc"], data)
        if kind in ("union_tag_invalid", "union_tag_not_found") and context.get("tag") not in _FORM_WORDS:
            path = (*path, "kind")
        if kind == "extra_forbidden":
            names = [str(part) for part in path if not isinstance(part, int)]
            told = former_advice(names) or counterpart(names, item["input"], _paths(root)) or engine_option(names)
            hint = f" ({told})" if told else _key_hint(str(path[-1]), path[:-1], item["loc"][:-1], root)
            message = f"unknown field{hint}"
        else:
            message = _message(kind, item["msg"], item.get("input"), context)
            if context.get("ge") == 0:  # other tools write -1 for what is 0 here
                info = fields_at(root, item["loc"][:-1]).get(str(item["loc"][-1]))
                zero = None if info is None else _ZERO.search(" ".join((info.description or "").split()))
                message = message if zero is None else message.replace(", got", f" ({zero[0]}), got", 1)
        if kind in _EXPECTED and problems and problems[-1].path == format_path(path):  # another member of a union
            first = problems.pop().message.rpartition(", got")[0]
            message = message.replace("expected", f"{first} or", 1)
        bound = f"{context[_BOUNDS[kind][1]]:.12g}" if kind.endswith("_equal") else ""
        code = _code(kind, context, message)
        problems.append(Problem(source.find(path), format_path(path), message, code, bound))
    return problems


_FORMS: Mapping[Any, str] = {tuple: LIST, dict: MAP}
"""Forms of data by the type of their annotation; any other is a section."""

_FORM_WORDS: Mapping[Any, str] = {SECTION: "a section", LIST: "a list", MAP: "sections by name"}

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "model_attributes_type": "a section",
}
_ZERO = re.compile(r"\b0(?::| turns| is| runs| keeps) [^.;,]+")
"""What 0 means, in the text of a field."""
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _code(kind: str, context: Mapping[str, Any], message: str) -> Code:
    """The code of an error of pydantic's."""
    if kind in ("missing", "union_tag_not_found"):
        return "missing-field"
    if kind in _EXPECTED or context.get("tag") in _FORM_WORDS:
        return "wrong-type"
    if kind in _BOUNDS or kind.startswith(("too_", "string_")) or kind == "finite_number":
        return "out-of-range"
    return _CODES.get(kind, "unknown-value" if _MEANT.search(message) else "conflict")


_CODES: Mapping[str, Code] = {
    "extra_forbidden": "unknown-field",
    "literal_error": "unknown-value",
    "union_tag_invalid": "unknown-value",
}


def _message(kind: str, text: str, value: Any, context: Mapping[str, Any]) -> str:
    if kind in ("missing", "union_tag_not_found"):
        return "is required (for example jsonl)" if context.get("discriminator") else "is required"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {show(value)}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:.12g}, got {show(value)}"
    if kind == "literal_error":
        return f"expected {context['expected']}, got {show(value)}{_value_hint(value, context['expected'])}"
    if kind == "union_tag_invalid" and context["tag"] in _FORM_WORDS:
        expected = " or ".join(words for form, words in _FORM_WORDS.items() if f"'{form}'" in context["expected_tags"])
        return f"expected {expected}, got {_FORM_WORDS[context['tag']]}"
    if kind == "union_tag_invalid":
        expected = context["expected_tags"]
        return f"expected one of {expected}, got '{context['tag'][:60]}'{_value_hint(context['tag'], expected)}"
    if kind == "too_short":
        return f"needs {context['min_length']} or more entries, got {context['actual_length']}"
    if kind == "too_long":
        return f"takes at most {context['max_length']} entries, got {context['actual_length']}"
    if kind == "string_too_short":
        return "may not be empty"
    if kind == "string_too_long":
        return f"may have at most {context['max_length']} characters, got {len(str(value))}"
    if kind == "string_pattern_mismatch":  # names have the only pattern
        return f"may hold lowercase letters, digits and, between them, '-', got {show(value)}"
    if kind == "value_error":
        return text.removeprefix("Value error, ")
    return f"{text[:1].lower()}{text[1:]}, got {show(value)}"


def show(value: Any) -> str:
    """A value in an error message: short, on one line."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "?", text)


def _value_hint(value: Any, expected: str) -> str:
    hint = nearest(str(value), re.findall(r"'([^']*)'", expected))
    return f" ({hint})" if hint else ""


def _key_hint(key: str, section: Path, location: Path, root: type[BaseModel]) -> str:
    """The nearest field of the same section, or the section the field belongs to, or the fields there are."""
    fields = fields_at(root, location)
    if hint := nearest(key, fields):
        return f" ({hint})"
    found = dict.fromkeys(path for path in known_paths(root) if path.rpartition(".")[2] == key)
    homes = sorted(found, key=lambda path: path.count("."))
    if homes and f"{format_path(section)}.{key}" not in homes:  # else it belongs to another kind of this section
        return f" (it belongs at {' or '.join(homes[:3])})"
    return f" (fields of {format_path(section) or 'a spec'}: {', '.join(fields)})" if fields else ""


def _without_tags(location: Path, data: Any) -> Path:
    """The path as the user wrote it, without the tags that pydantic inserts for members of unions."""
    path: list[str | int] = []
    node: Any = data
    for part in location:
        if isinstance(node, dict) and part not in node and part in (node.get("kind", DEFAULT_TEACHER), SECTION, MAP):
            continue
        if isinstance(part, str) and not isinstance(node, dict):
            continue
        if part == "[key]":  # the key of a map is wrong
            continue
        path.append(part)
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return tuple(path)


def fields_at(root: type[BaseModel], location: Path) -> dict[str, FieldInfo]:
    """The fields a section may have by name, given pydantic's location of it."""
    annotation: Any = root
    for part in location:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
            continue
        if part in (SECTION, LIST, MAP) and (forms := _of_form(annotation, part)):
            annotation = forms
            continue
        models = list(models_in(annotation))
        tagged = [model for model in models if part in _tags(model)]
        if tagged:
            annotation = tagged[0]
        elif isinstance(part, str):
            annotation = next((m.model_fields[part].annotation for m in models if part in m.model_fields), None)
    return {name: info for model in models_in(annotation) for name, info in model.model_fields.items()}


def _of_form(annotation: Any, form: str | int) -> Any:
    """The members of a union of a section, a list and a map that have this form, or None if it is no such union."""
    forms = [(_FORMS.get(get_origin(member), SECTION), member) for member in _members(annotation)]
    if {name for name, _ in forms} == {SECTION}:
        return None
    return Union[tuple(member for name, member in forms if name == form)]  # noqa: UP007


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, also of unions in it, without what annotates them."""
    if get_origin(annotation) in _FORMS or not get_args(annotation):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _members(argument)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models an annotation names, through unions, lists and Annotated."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            yield annotation
    elif get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            yield from models_in(argument)


def known_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted path of every field of a spec."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in models_in(info.annotation):
            yield from known_paths(inner, f"{prefix}{name}.")


@cache
def _paths(root: type[BaseModel]) -> frozenset[str]:
    return frozenset(known_paths(root))


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()
