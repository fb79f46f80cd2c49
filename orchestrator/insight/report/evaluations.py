"""What the page shows of the held-out sets: each result before and after training, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, comparable, read_evaluations
from troupe.orchestrator.telemetry.run_folder import RunFolder

Json = dict[str, Any]


def evaluations(run: RunFolder) -> Json:
    """The first and the last evaluation of a run by set; empty if it has none, or if they do not have this form.

    The first one is the first that was made like the last one: a resumed run may have changed how.
    """
    content = read_evaluations(run.path / EVALUATIONS)
    try:
        found = comparable(content["evaluations"])
        sets = [_set(label, one, found) for label, one in content["sets"].items()]
        return {"first": found[0]["step"], "last": found[-1]["step"], "sets": sets}
    except (LookupError, TypeError, AttributeError):
        return {}


def _set(label: str, description: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> Json:
    results = [one["sets"][label] for one in (found[0], found[-1])]
    return {
        "label": label,
        "sampling": sampling_text(description["sampling"]),
        "environment": str(description.get("environment", "")),
        "rewards": ", ".join(str(one.get("label") or one["name"]) for one in description["rewards"]),
        "prompts": results[-1]["prompts"],
        "failed": results[-1]["failed_samples"],
        "refused": results[-1]["refused"],
        "rows": list(_rows(results)),
        "levels": [
            {"level": level, "rows": [_row(name, results, level) for name in estimates]}
            for level, estimates in results[-1]["levels"].items()
        ],
    }


def _rows(results: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    for name in results[-1]["estimates"]:
        yield _row(name, results)
    for name in ("truncated", "response_tokens"):
        first, last = (
            None if one[name] is None else {"value": one[name], "low": None, "high": None} for one in results
        )
        if last is not None:
            yield {"name": name, "share": name == "truncated", "first": first, "last": last}


def _row(name: str, results: Sequence[Mapping[str, Any]], level: str | None = None) -> Json:
    samples = results[-1]["samples"]
    estimates = [one["estimates"] if level is None else one["levels"].get(level, {}) for one in results]
    first, last = (one.get(name) for one in estimates)
    shown = f"avg@{samples}" if name in ("avg", "accuracy") else name
    return {"name": shown, "share": name != "reward", "first": first, "last": last}


def sampling_text(sampling: Mapping[str, Any]) -> str:
    """How a set is sampled: `8 samples at temperature 1, top-p 0.95, at most 512 tokens`."""
    samples, temperature = sampling["samples"], sampling["temperature"]
    count = "1 sample" if samples == 1 else f"{samples} samples"
    parts = ["greedy" if temperature == 0 else f"{count} at temperature {temperature:g}"]
    parts += [f"top-p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    parts += [f"top-k {sampling['top_k']}"] if sampling["top_k"] else []
    return ", ".join([*parts, f"at most {sampling['max_tokens']} tokens"])
