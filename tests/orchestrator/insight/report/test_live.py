"""What a live page is sent, and what not again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from troupe.orchestrator.insight import watch
from troupe.orchestrator.insight.report import samples
from troupe.orchestrator.insight.watch import LiveData
from troupe.workers.isolation.probe import ProbeFailed

from .folders import GROUP, RECORDED, sample, write_run, write_samples


def test_samples_have_the_stamp_of_their_file(tmp_path: Path) -> None:
    """A page keeps those whose stamp is that of the file now."""
    run = write_run(tmp_path / "run", steps=3, tokens=0)
    data = LiveData([run])
    store, block = data.data()["samples"][0], data.samples(0, 3)
    assert block is not None and store["steps"] == [1, 2, 3] and store["blocks"] == []
    assert block["stamp"] == store["stamps"][3]
    with (run / "metrics.jsonl").open("a") as file:
        file.write((RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[3] + "\n")
    assert data.data()["samples"][0] == store, "a line of metrics changes no samples"
    os.utime(run / "trajectories" / "step-000003.parquet", (2e9, 2e9))
    assert data.data()["samples"][0]["stamps"] == store["stamps"] | {3: str(2 * 10**18)}
    write_samples(run, 4, [sample(4, 0, lambda step, row: "new", 0)])
    assert data.data()["samples"][0]["steps"] == [1, 2, 3, 4]


def test_of_a_step_with_many_samples_the_first_groups_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LiveData([write_run(tmp_path / "run", steps=1, rows=10 * GROUP, tokens=0)])
    whole = data.samples(0, 1)
    assert whole is not None and len(whole["group"]) == 10 * GROUP
    monkeypatch.setattr(watch, "_STEP_BYTES", 10_000)
    block = data.samples(0, 1)
    assert block is not None and block["rows"] == 10 * GROUP
    assert 0 < len(block["group"]) < 10 * GROUP and len(block["group"]) % GROUP == 0


def test_a_tokenizer_that_did_not_answer_is_asked_again_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    asked: list[float] = []

    def ask(entry: str, request: dict[str, Any], timeout_s: float) -> list[list[str]]:
        asked.append(clock[0])
        if len(asked) == 1:
            raise ProbeFailed("did not end within 60 s", [])
        return [[f"t{number}" for number in request["ids"]]]

    monkeypatch.setattr(samples, "ask", ask)
    monkeypatch.setattr(samples.time, "monotonic", lambda: clock[0])
    data = LiveData([write_run(tmp_path / "run", steps=1)])
    block = data.samples(0, 1)
    assert block is not None and block["problem"] == "did not end within 60 s" and "tokens" not in block
    clock[0] += 59
    data.samples(0, 1)
    assert data.data()["samples"][0]["problem"] and asked == [1000.0]
    clock[0] += 2
    block = data.samples(0, 1)
    assert block is not None and block["problem"] == "" and "tokens" in block
