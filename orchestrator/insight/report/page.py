"""The page: one HTML file with styles, code and data inside. It makes no network requests."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, select_autoescape

from troupe.workers.contract.text import valid_text

SCRIPTS = (
    *("dom.js", "colors.js", "ticks.js", "chart.js", "runs.js", "sweep.js", "verdicts.js", "evaluations.js"),
    *("curves.js", "tokens.js", "list.js", "samples.js", "tables.js", "main.js"),
)
"""Code of the report, in the order in which it is joined."""
_ASSETS = files("troupe.orchestrator.insight.report") / "assets"
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Within JSON these characters stand in strings only. Escaped, no text of a model can end the block that holds it."""


def render(data: dict[str, Any], live: bool = False) -> str:
    """The report as text. `live`: whether it asks the server it came from for more; otherwise no connection is allowed
    at all."""
    names = " | ".join(run["label"] for run in data["runs"]) or "Troupe"
    script, style = _script(), _asset("report.css")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    template = Environment(autoescape=select_autoescape(default=True), undefined=StrictUndefined).from_string(
        _asset("report.html.j2")
    )
    return template.render(
        title=f"{names} - Troupe report",
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        style=style,
        script=script,
        data=as_json(data | {"live": live}),
    )


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
def _script() -> str:
    return "'use strict';\n(() => {\n" + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"'sha256-{digest}'"
