"""The results of the GPU check as JSON, and the page that is generated from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from troupe.workers.contract.atomic_file import write_atomic

Status = Literal["passed", "failed", "skipped"]
Measurement = float | str


@dataclass(frozen=True)
class PieceResult:
    """How a piece ended."""

    name: str
    what: str
    status: Status
    reason: str = ""
    """Why it failed or was skipped."""
    seconds: float = 0.0
    time: str = ""
    """When it ended (UTC); empty where it did not run."""
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    error: tuple[str, ...] = ()
    """Last lines of the log of a piece that failed."""


@dataclass(frozen=True)
class Record:
    """Results of one kind of machine with one set of versions."""

    mode: Literal["gpu", "cpu"]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    results: Mapping[str, PieceResult] = field(default_factory=dict)
    """By the name of the piece."""

    @property
    def passed(self) -> frozenset[str]:
        """Names of the pieces that passed."""
        return frozenset(name for name, result in self.results.items() if result.status == "passed")

    @property
    def failed(self) -> frozenset[str]:
        """Names of the pieces that failed."""
        return frozenset(name for name, result in self.results.items() if result.status == "failed")

    def comparable(self, other: Record) -> bool:
        """Whether results of `other` can stand beside these: the same mode, GPUs, driver and versions."""
        own, theirs = ((one.mode, one.machine.get("gpus"), one.machine.get("driver")) for one in (self, other))
        return own == theirs and self.versions == other.versions

    def write(self, path: Path) -> None:
        """Write the JSON to `path` and the page beside it; a crash leaves the old files."""
        _replace(path, json.dumps(asdict(self), indent=2) + "\n")
        _replace(path.with_suffix(".md"), page(self))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def read(path: Path) -> Record | None:
    """The record in a JSON file; None where there is no file.

    Raises:
        ValueError: The file is not a record.
    """
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text())
        results = {name: _result(entry) for name, entry in document["results"].items()}
        return Record(**document | {"results": results})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a result of the GPU check ({error}): remove it, or choose another --out"
        ) from None


def _result(entry: dict[str, Any]) -> PieceResult:
    if "figures" in entry:  # the name in records of earlier versions
        entry["measurements"] = entry.pop("figures")
    entry["error"] = tuple(entry["error"])
    return PieceResult(**entry)


def page(record: Record) -> str:
    """The Markdown page of a record."""
    title = (
        "GPU check" if record.mode == "gpu" else "GPU check, on the CPU: it shows that the check works, nothing else"
    )
    machine = "; ".join(f"{name} {_plain(value)}" for name, value in record.machine.items())
    packages = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = [f"# {title}", "", f"- Machine: {machine}", f"- Versions: {packages}", ""]
    lines += ["| piece | status | seconds | what | measurements or reason |", "|---|---|---:|---|---|"]
    for result in record.results.values():
        measurements = ", ".join(f"{name}: {_plain(value)}" for name, value in result.measurements.items())
        seconds = f"{result.seconds:.0f}" if result.time else ""
        cells = (result.name, result.status, seconds, result.what, result.reason or measurements)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for result in record.results.values():
        if result.error:
            lines += ["", f"## {result.name}: last lines of the log", "", *(f"    {line}" for line in result.error)]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)
