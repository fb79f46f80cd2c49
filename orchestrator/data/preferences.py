"""Columns of published preferences: their usual names, and unread ones that contradict the order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.orchestrator.data.readers import has_column

_SIGNED = {"first": "negative", "second": "positive"}
_OF_ARENAS = {"first": "model_a", "second": "model_b", "ties": ["tie", "tie (bothbad)", "both_bad"]}
_LAYOUTS: Sequence[Mapping[str, Any]] = (
    # SHP, Summarize from Feedback, WebGPT
    {"answers": ["human_ref_A", "human_ref_B"], "preferred": {"column": "labels", "first": 1, "second": 0}},
    {"answers": "summaries.text", "preferred": {"column": "choice", "first": 0, "second": 1}},
    {"answers": ["answer_0", "answer_1"], "scores": ["score_0", "score_1"]},
    # HelpSteer2 and 3, PKU-SafeRLHF, AlpacaFarm
    {"answers": ["response_1", "response_2"], "preferred": {"column": "preference_strength", **_SIGNED}},
    {"answers": ["response1", "response2"], "preferred": {"column": "overall_preference", **_SIGNED}},
    {"answers": ["response_0", "response_1"], "preferred": {"column": "better_response_id", "first": 0, "second": 1}},
    {"answers": ["output_1", "output_2"], "preferred": {"column": "preference", "first": 1, "second": 2}},
    # Chatbot Arena, and its data on Kaggle
    {"answers": ["conversation_a", "conversation_b"], "preferred": {"column": "winner", **_OF_ARENAS}},
    {"answers": ["response_a", "response_b"], "scores": ["winner_model_a", "winner_model_b"]},
    # UltraFeedback, Nectar, and lists of texts
    {"answers": "completions.response", "scores": "completions.overall_score"},
    {"answers": "answers.answer", "ranks": "answers.rank"},
    *({"answers": answers, field: numbers}
      for answers in ("answers", "responses", "candidates")
      for field, numbers in (("scores", "scores"), ("scores", "rewards"), ("ranks", "ranks"))),
)  # fmt: skip
"""Fields of the spec that read answers and their order, as published sets have them."""
_PARTS = re.compile(r"[^\W_]+")
_MERITS = {"score": 1, "rating": 1, "reward": 1, "grade": 1, "winner": 1, "rank": -1}
"""Words in names of columns whose numbers rate answers, with -1 if a lower number is better, or else 1."""


def answer_columns(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of the spec that read the answers of a row like this one and their order, or None if it is unknown."""
    return next(
        ({**layout} for layout in _LAYOUTS if all(has_column(row, name) for name in column_names(layout))), None
    )


def column_names(fields: Mapping[str, Any]) -> list[str]:
    names: list[str] = []
    for value in fields.values():
        many = [value["column"]] if isinstance(value, Mapping) else [value] if isinstance(value, str) else value
        names += many if isinstance(many, list | tuple) else ()
    return names


def doubts(chosen: str, rejected: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Contradictions between unread columns and the order of two answers, with the number of rows."""
    ours, theirs = (_PARTS.findall(name) for name in (chosen, rejected))
    differing = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    names = list(rows[0]) if rows else []
    for column in names:
        merit = next((sign for word, sign in _MERITS.items() if word in column.lower()), 0)
        for mine, other in differing:
            partner = re.sub(rf"(?<![^\W_]){re.escape(mine)}(?![^\W_])", other, column)
            if not merit or partner == column or partner not in names:
                continue
            pairs = [(row.get(column), row.get(partner)) for row in rows]
            against = sum(
                isinstance(a, int | float) and isinstance(b, int | float) and merit * (a - b) < 0 for a, b in pairs
            )
            if against:
                yield f"{against} of the first {len(rows)} rows prefer {rejected}, by {column} and {partner}"
    if chosen != "chosen":
        known = {layout["preferred"]["column"] for layout in _LAYOUTS if "preferred" in layout}
        for column in (name for name in names if name in known):
            yield f"{column} may say which answer is better (answers, preferred), and is not read"
