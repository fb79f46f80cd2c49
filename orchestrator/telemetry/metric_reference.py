"""The metrics of a run as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from troupe.orchestrator.roles import table
from troupe.orchestrator.spec.derived.sampling import COMPARISONS
from troupe.workers.contract.config import BUDGETS

PHASES = ("generate", "prepare", "update", "sync", "evaluate", "checkpoint")
"""What `PHASE` in a pattern stands for: the phases of `seconds/PHASE` and `utilisation/PHASE`."""

_PLACEHOLDERS = {
    "TRAINER": "|".join(table.TRAINED),
    "ROLE": "|".join((*table.NAMES, r"(?:environment|teacher)\.[a-z0-9-]+")),
    "PHASE": "|".join(PHASES),
}
_PLACEHOLDERS |= {"COMPONENT": ".+", "LEVEL": ".+", "K": "[0-9]+", "SET": "[a-z0-9-]+", "SOURCE": "[a-z0-9-]+"}
_PLACEHOLDERS |= {"BUDGET": "|".join(BUDGETS), "ENVIRONMENT": "[a-z0-9-]+"}
_PLACEHOLDERS |= {"TEACHER": "[a-z0-9-]+", "PLAYER": "[A-Za-z0-9._-]+"}
_OF_SETS = ("prompts", "refused", "failed_samples", "reward", "reward_low", "reward_high", "solved_at")
_OF_SETS += ("response_tokens", "truncated", "accuracy", "avg", "pass@[0-9]+", "maj@[0-9]+")
_OF_SETS += tuple(f"{name}{bound}" for name in COMPARISONS for bound in ("", "_low", "_high"))
_PLACEHOLDERS |= {"RESULT": "|".join(_OF_SETS), "COUNT": "rows|bad_rows|removed_rows|refused_rows"}
_PLACEHOLDER = re.compile(r"[A-Z]+")


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose names follow a pattern."""

    name: str
    """Name in `metrics.jsonl`. Words in capitals stand for a role, a phase, a reward component, a held-out set, a
    number, or another name."""
    unit: str
    meaning: str
    healthy: str
    """What to expect of a run that goes well; `-` if any value may be right."""

    def matches(self, name: str) -> bool:
        """Whether a metric of this name belongs to the row."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        pattern = "".join(f"(?:{_PLACEHOLDERS[part]})" if part in _PLACEHOLDERS else re.escape(part) for part in parts)
        return re.fullmatch(pattern, name) is not None


@cache
def metric_sections() -> dict[str, tuple[Metric, ...]]:
    """Every metric of `metrics.jsonl` (`metrics.yaml`), by section of the page."""
    text = files("troupe.orchestrator.telemetry").joinpath("metrics.yaml").read_text(encoding="utf-8")
    return {
        title: tuple(Metric(name, **fields) for name, fields in rows.items())
        for title, rows in yaml.safe_load(text).items()
    }


def metric_named(name: str) -> Metric | None:
    """The row that describes a metric, or None if the table has none."""
    rows = (row for section in metric_sections().values() for row in section)
    return next((row for row in rows if row.matches(name)), None)
