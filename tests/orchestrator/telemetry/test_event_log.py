"""Events of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from troupe.orchestrator.errors import StopRequested
from troupe.orchestrator.telemetry.event_log import EventLog, recorded_failure


def test_an_event_has_time_step_and_its_fields(tmp_path: Path) -> None:
    events = EventLog()
    events.open(tmp_path, 0)
    events.step = 3
    events.record("weights", version=3, engines={"rollout-0": "d3"})
    events.close()
    events.record("too late")
    (line,) = (json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines())
    assert line.pop("time") > 1e9
    assert line == {"step": 3, "event": "weights", "version": 3, "engines": {"rollout-0": "d3"}}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StopRequested("stop"), {"how": "stopped"}),
        (ValueError("bad"), {"how": "failed", "error": "ValueError", "detail": "bad"}),
    ],
)
def test_a_run_that_raises_ends_with_the_reason(tmp_path: Path, error: Exception, expected: dict[str, str]) -> None:
    events = EventLog()
    events.open(tmp_path, 0)
    with pytest.raises(type(error)), recorded_failure(events):
        raise error
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert {name: line[name] for name in line if name not in ("time", "step", "event")} == expected
