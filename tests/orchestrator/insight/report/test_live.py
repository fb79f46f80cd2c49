"""What a live page is sent, and what not again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from troupe.orchestrator.insight import watch
from troupe.orchestrator.insight.report import samples
from troupe.orchestrator.insight.watch import LiveData
from troupe.workers.isolation.probe import ProbeFailed

from .folders import GROUP, RECORDED, sample, write_run, write_samples


def test_the_newest_samples_are_sent_again_only_when_their_file_has_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, tokens=0)
    data = LiveData([run])
    first = data.data(3)["samples"][0]
    assert [one["step"] for one in first["blocks"]] == [3]

    with (run / "metrics.jsonl").open("a") as file:
        file.write((RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[3] + "\n")
    again = data.data(3, held=first["file"])["samples"][0]
    assert again == first | {"blocks": []}, "a line of metrics sends no samples"
    assert data.data(-1, held=first["file"])["samples"][0] == first, "a page that starts anew has none"

    os.utime(run / "trajectories" / "step-000003.parquet", (2e9, 2e9))
    assert data.data(3, held=first["file"])["samples"][0]["blocks"] == first["blocks"]
    write_samples(run, 4, [sample(4, 0, lambda step, row: "new", 0)])
    assert [one["step"] for one in data.data(3, held=first["file"])["samples"][0]["blocks"]] == [4]


def test_an_evaluation_that_ended_later_is_sent_to_a_page_that_has_its_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, tokens=0)
    data = LiveData([run])
    known = data.data(-1)["runs"][0]["line"]
    assert data.data(3, known)["after"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "time": 1.0, "eval/late": 0.5}) + "\n")
    again = data.data(3, known)
    assert again["after"] == -1 and again["runs"][0]["metrics"]["eval/late"] == {"steps": [2], "values": [0.5]}
    assert data.data(3, again["runs"][0]["line"])["after"] == 3


def test_of_a_step_with_many_samples_the_first_groups_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LiveData([write_run(tmp_path / "run", steps=1, rows=10 * GROUP, tokens=0)])
    whole = data.samples(0, 1)
    assert whole is not None and len(whole["group"]) == 10 * GROUP
    monkeypatch.setattr(watch, "_STEP_BYTES", 10_000)
    for block in (data.samples(0, 1), data.data(-1)["samples"][0]["blocks"][0]):
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
    store = data.data(-1)["samples"][0]
    assert store["problem"] == "did not end within 60 s" and "tokens" not in store["blocks"][0]
    clock[0] += 59
    assert data.data(-1)["samples"][0]["problem"] and asked == [1000.0]
    clock[0] += 2
    store = data.data(-1, held=store["file"])["samples"][0]
    assert store["problem"] == "" and "tokens" in store["blocks"][0]
