"""Reads YAML for specs: the JSON-like core of YAML 1.2, with the line of every field.

PyYAML's own loader reads `1e-5` as text, `on` as true and 1:30 as 90, lets the last of two equal keys win, and can
build arbitrary objects or grow without limit. This reader builds plain data from the parser's events instead.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml

from troupe.orchestrator.spec.errors import Path, Place, Problem, Source, SpecError, format_path, parse_path
from troupe.orchestrator.spec.examples import PREFIX, examples

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 32
OVERRIDE = "--set"

_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_INT_DIGITS = 18


@dataclass(frozen=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and where it was written."""

    data: Any
    source: Source


def read_file(path: str | FilePath) -> Document:
    """Read a YAML file. Raises SpecError if it is no regular UTF-8 file below 1 MiB of YAML as specs use it."""
    name = os.path.expanduser(path)
    return parse(_read_text(name), name)


def parse(text: str, name: str) -> Document:
    """Read YAML text. Raises SpecError with every problem found."""
    builder = _Builder(name)
    try:
        data, empty = builder.document(text)
    except yaml.YAMLError as error:
        raise SpecError([*builder.problems, _syntax(error, text, name)]) from None
    except UnicodeEncodeError:
        builder.report(None, (), "is not valid Unicode")
        raise SpecError(builder.problems) from None
    if empty:
        builder.report(None, (), "the file is empty; a spec starts with `name: ...`")
    if builder.problems:
        raise SpecError(builder.problems)
    return Document(data, Source(name, builder.places))


def override(document: Document, assignments: list[str]) -> Document:
    """The document with fields replaced by `field.path=YAML`. Raises SpecError with a line for each that cannot be."""
    data, places = copy.deepcopy(document.data), dict(document.source.places)
    problems: list[Problem] = []
    for assignment in assignments:
        try:
            path, value = _parse_assignment(assignment)
            _assign(data, path, value)
        except SpecError as error:
            problems += error.problems
            continue
        places = {key: place for key, place in places.items() if key[: len(path)] != path}
        for end in range(1, len(path) + 1):
            places.setdefault(path[:end], Place(OVERRIDE))
    if problems:
        raise SpecError(problems)
    return Document(data, Source(document.source.file, places))


class _Builder:
    """Builds plain data from parser events; collects problems and continues if it can."""

    def __init__(self, name: str) -> None:
        self.places: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self._name = name
        self._nodes = 0
        self._events: Iterator[Any] = iter(())

    def document(self, text: str) -> tuple[Any, bool]:
        self._events = yaml.parse(text, Loader=_LOADER)
        self._take(yaml.StreamStartEvent)
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return None, True
        first = next(self._events)
        data = self._value(first, ())
        empty = isinstance(first, yaml.ScalarEvent) and first.value == "" and first.implicit[0]
        self._take(yaml.DocumentEndEvent)
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self.report(event, (), "a second document starts here; a spec is one document")
        return data, empty

    def report(self, event: Any, path: Path, message: str) -> None:
        line = 1 if event is None or event.start_mark is None else event.start_mark.line + 1
        place = Place(self._name) if self._name == OVERRIDE else Place(self._name, line)
        self.problems.append(Problem(place, format_path(path), message, "unreadable"))

    def _take(self, kind: type[yaml.Event]) -> None:
        if not isinstance(next(self._events), kind):
            raise yaml.YAMLError("unexpected structure")

    def _value(self, event: Any, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            what = f"more than {MAX_NODES} values" if self._nodes > MAX_NODES else f"nested deeper than {MAX_DEPTH}"
            self.report(event, path[:4], f"{what}: this is not a spec")
            raise SpecError(self.problems)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self.report(event, path, "anchors and aliases (& and *) are not allowed; write the value out")
        if isinstance(event, yaml.AliasEvent):
            return None
        if event.tag is not None:
            self.report(event, path, f"tags are not allowed, got '{event.tag[:60]}'")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._scalar(event, path)

    def _mapping(self, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.report(event, path, "a key must be text")
                self._value(event, path)
                self._value(next(self._events), path)
                continue
            key = (*path, event.value)
            if event.anchor is not None or event.tag is not None:
                self.report(event, key, "a key may have no anchor and no tag")
            if event.value in result:
                self.report(event, key, f"given twice (first on line {self.places[key].line})")
            else:
                self._place(key, event)
            result[event.value] = self._value(next(self._events), key)
        return result

    def _sequence(self, path: Path) -> list[Any]:
        result: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            key = (*path, len(result))
            self._place(key, event)
            result.append(self._value(event, key))
        return result

    def _place(self, path: Path, event: Any) -> None:
        self.places[path] = Place(self._name, event.start_mark.line + 1)

    def _scalar(self, event: Any, path: Path) -> Any:
        text = event.value
        if not event.implicit[0]:
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text):
            if len(text.lstrip("+-")) > _MAX_INT_DIGITS:
                self.report(event, path, f"the number has more than {_MAX_INT_DIGITS} digits")
                return None
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            number = float(text) if text[-1] in "0123456789." else math.inf
            if not math.isfinite(number):
                self.report(event, path, f"must be a finite number, got {text[:60]}")
            return number
        return text


def _parse_assignment(assignment: str) -> tuple[Path, Any]:
    dotted, equals, text = assignment.partition("=")
    dotted = dotted.strip()
    if not equals or "" in dotted.split(".") or dotted.count(".") >= MAX_DEPTH:
        raise _override_error("", f"expected FIELD.PATH=VALUE, got {assignment[:60]!r}")
    try:
        value = parse(text, OVERRIDE).data if text.strip() else None
    except SpecError as error:
        raise _override_error(dotted, "; ".join(problem.message for problem in error.problems)) from None
    return parse_path(dotted), value


def _assign(data: Any, path: Path, value: Any) -> None:
    """Set a field in place, and create missing sections on the way."""
    node = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not isinstance(part, int) or part >= len(node):
                above = format_path(path[:depth])
                raise _override_error(format_path(path), f"{above} is a list with entries 0 to {len(node) - 1}")
        elif isinstance(node, dict):
            part = str(part)
        else:
            raise _override_error(format_path(path), f"{format_path(path[:depth]) or 'the spec'} is not a section")
        if last:
            node[part] = value  # pyright: ignore[reportArgumentType, reportCallIssue]
        elif isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[part]  # pyright: ignore[reportArgumentType, reportCallIssue]


def _override_error(dotted: str, message: str) -> SpecError:
    return SpecError([Problem(Place(OVERRIDE), dotted, message, "unreadable")])


def _syntax(error: yaml.YAMLError, text: str, name: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        position = error.position if isinstance(error.position, int) else 0
        line, what = text.count("\n", 0, position) + 1, f"a character that YAML does not allow ({error.reason})"
    elif isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, what = (mark.line + 1 if mark else 1), error.problem or "cannot be read"
    else:
        line, what = 1, str(error)
    if name == OVERRIDE:
        quoted = "text with special characters is in quotes, inside of the shell's: --set 'FIELD=\"*.jsonl\"'"
        return Problem(Place(name), "", f"not valid YAML: {what} ({quoted})", "unreadable")
    return Problem(Place(name, line), "", f"not valid YAML: {what}", "unreadable")


def _read_text(name: str) -> str:
    def failed(message: str, line: int | None = None) -> SpecError:
        return SpecError([Problem(Place(name, line), "", message, "unreadable")])

    try:
        path = FilePath(name)
        if path.is_dir():
            spec = path / "spec.yaml"
            raise failed(
                f"is a folder, not a spec (did you mean {spec}?)" if spec.is_file() else "is a folder, not a spec"
            )
        if path.exists() and not path.is_file():
            raise failed("is not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        example = f" (did you mean {PREFIX}{name}?)" if name in examples() else ""
        raise failed(f"no such file{example}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise failed(f"cannot be read ({reason})") from None
    if len(raw) > MAX_BYTES:
        raise failed("is larger than 1 MiB: this is not a spec")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise failed("is not UTF-8 text", raw.count(b"\n", 0, error.start) + 1) from None
