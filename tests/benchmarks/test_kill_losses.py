"""What `kill_losses` reads of a run's folder, and its table."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.kill_losses import Moment, moment, parse, table


def write_checkpoint(out: Path, step: int, groups: list[dict[str, object]] | None) -> None:
    folder = out / "checkpoints" / f"step-{step:06d}"
    (folder / "samples").mkdir(parents=True) if groups is not None else folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    if groups is not None:
        (folder / "samples" / "groups.json").write_text(json.dumps({"groups": groups}))


def test_what_a_kill_throws_away_is_neither_trained_nor_kept(tmp_path: Path) -> None:
    """Finished samples that are not scored yet are in no count."""
    scored = tmp_path / "scored"
    scored.write_text("x\n" * 90)
    assert moment(tmp_path, scored, 16) == Moment(90, 0, 0, 0)
    write_checkpoint(tmp_path, 2, None)
    assert moment(tmp_path, scored, 16) == Moment(90, 2, 32, 0)
    group = {"summary": {"samples": [{}] * 16}, "finished": None}
    write_checkpoint(tmp_path, 3, [group, group, {"summary": None, "finished": {"samples": [{}] * 7}}])
    found = moment(tmp_path, scored, 16)
    assert (found, found.thrown, found.thrown_before) == (Moment(90, 3, 48, 32), 10, 42)


def test_the_table_has_the_means() -> None:
    lines = table([Moment(90, 3, 48, 32), Moment(60, 2, 32, 20)]).splitlines()
    assert lines[2] == "| 60 | step 2 | 28 | 8 |" and lines[-1] == "| mean | | 35 | 9 |"


def test_the_command_line() -> None:
    assert parse(["--moments", "3"]).moments == 3 and parse([]).saves == 1
