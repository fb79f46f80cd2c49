"""The page: one HTML file with styles, code and data inside. It makes no network requests."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, select_autoescape

from troupe.workers.contract.atomic_file import write_atomic
from troupe.workers.contract.text import valid_text

SCRIPTS = (
    *("dom.js", "colors.js", "ticks.js", "chart.js", "runs.js", "verdicts.js", "evaluations.js", "curves.js"),
    *("tokens.js", "list.js", "samples.js", "tables.js", "main.js"),
)
"""Code of the report, in the order in which it is joined."""
BENCH_SCRIPTS = ("dom.js", "colors.js", "ticks.js", "chart.js", "bench.js")
"""Code of the page of a benchmark."""
_ASSETS = files("troupe.orchestrator.insight.report") / "assets"
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Within JSON these characters stand in strings only. Escaped, no text of a model can end the block that holds it."""


def render(data: dict[str, Any], live: bool = False) -> str:
    """The report as text.

    Args:
        data: What it shows.
        live: Whether it asks the server it came from for more; otherwise no connection is allowed at all.
    """
    names = " | ".join(run["label"] for run in data["runs"]) or "Troupe"
    return render_page(data | {"live": live}, title=f"{names} - Troupe report", scripts=SCRIPTS, connects=live)


def render_page(data: dict[str, Any], title: str, scripts: tuple[str, ...], *, connects: bool = False) -> str:
    """A page as text.

    Args:
        data: What it shows.
        title: Its title.
        scripts: Its code.
        connects: Whether it may ask the server it came from for more.
    """
    script, style = _script(scripts), _asset("report.css")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if connects else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    template = Environment(autoescape=select_autoescape(default=True), undefined=StrictUndefined).from_string(
        _asset("report.html.j2")
    )
    return template.render(
        title=title,
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        style=style,
        script=script,
        data=as_json(data),
    )


def write_bench_page(record: dict[str, Any], output: Path) -> Path:
    """Write the page of a benchmark.

    Args:
        record: The results (`orchestrator/insight/bench/bounds.py`).
        output: The file. It is replaced as a whole.

    Returns:
        The file. Raises OSError if it cannot be written.
    """
    text = render_page(record, title=f"{record['name']} - Troupe bench", scripts=BENCH_SCRIPTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, text)
    return output


def as_json(data: Any) -> str:
    """JSON that may stand inside an HTML document."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = valid_text(text)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _script(scripts: tuple[str, ...]) -> str:
    return "'use strict';\n(() => {\n" + "\n".join(_asset(name) for name in scripts) + "\n})();\n"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
