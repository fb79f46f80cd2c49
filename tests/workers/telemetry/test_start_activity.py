"""Stages that starting processes announce."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from troupe.workers.telemetry.stacks import VARIABLE
from troupe.workers.telemetry.start_activity import Activity, announce, read_activities


def test_the_last_announced_activity_of_each_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    announce(Activity.GROUP)
    announce(Activity.MODEL)
    announce(Activity.WARM_UP, 7)
    assert read_activities(tmp_path, [os.getpid(), 7, 8]) == {os.getpid(): "model load", 7: "engine warm-up"}


def test_without_a_folder_nothing_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    announce(Activity.MODEL)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    announce(Activity.MODEL)
    assert read_activities(tmp_path / "gone", [os.getpid()]) == {} and not list(tmp_path.iterdir())


def test_a_link_is_not_followed_and_a_long_activity_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "activity-7.txt").symlink_to(victim)
    announce(Activity.MODEL, 7)
    assert victim.read_text() == "as it was"
    (tmp_path / "activity-8.txt").write_text("x" * 1000)
    assert len(read_activities(tmp_path, [8])[8]) == 80
