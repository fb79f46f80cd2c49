"""What a live page is sent, and what not again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.reporting.html import live
from orchestrator.reporting.html.live import LiveData

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


def test_of_a_step_with_many_samples_the_first_groups_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LiveData([write_run(tmp_path / "run", steps=1, rows=10 * GROUP, tokens=0)])
    whole = data.samples(0, 1)
    assert whole is not None and len(whole["group"]) == 10 * GROUP
    monkeypatch.setattr(live, "_STEP_BYTES", 10_000)
    for block in (data.samples(0, 1), data.data(-1)["samples"][0]["blocks"][0]):
        assert block is not None and block["rows"] == 10 * GROUP
        assert 0 < len(block["group"]) < 10 * GROUP and len(block["group"]) % GROUP == 0


def test_of_a_long_run_evenly_spread_timelines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LiveData([write_run(tmp_path / "run", steps=4, tokens=0)])
    assert [one["step"] for one in data.data(-1)["timeline"][0]["times"]] == [1, 2, 3, 4]
    monkeypatch.setattr(live, "MOST_POINTS", 2)
    timeline = data.data(-1)["timeline"][0]
    assert [one["step"] for one in timeline["times"]] == [1, 4] and timeline["steps"] == [1, 2, 3, 4]
