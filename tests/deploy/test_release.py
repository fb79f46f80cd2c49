"""What `make release` writes: both distributions with valid metadata, bills of materials, and checksums."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.install import install, release


def test_a_release_has_everything_and_its_sums_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["release", str(tmp_path / "dist")])
    monkeypatch.setenv("TRIAL", "1")
    release.main()
    files = {path.name: path for path in (tmp_path / "dist").iterdir()}
    lines = [line.split("  ") for line in files.pop("SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert sums == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert "nothing was uploaded" in capsys.readouterr().out
    wheel, source = (next(path for name, path in files.items() if name.endswith(end)) for end in (".whl", ".tar.gz"))
    held = zipfile.ZipFile(wheel).namelist()
    for part in ("skills/repair-a-spec/SKILL.md", "recipes/gsm8k/spec.yaml", "recipes/gsm8k/rows.jsonl"):
        assert f"troupe/deploy/{part}" in held
    assert "troupe/deploy/specs/models/tiny-llama/config.json" in held and "troupe/py.typed" in held
    with tarfile.open(source) as archive:
        inside = archive.getnames()
    assert any(name.endswith("/troupe/orchestrator/cli.py") for name in inside)
    bill = json.loads(next(path for name, path in files.items() if name.endswith("cpu.cdx.json")).read_text())
    pins = install.pins(install.CPU.lock)
    assert pins.items() <= {one["name"]: one["version"] for one in bill["components"]}.items()
    with pytest.raises(SystemExit, match="is not empty"):
        release.main()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("## [Unreleased]\n\n## [0.2.0] - 2026-11-30\n\n- a\n\n## [0.1.0]\n\n- b\n", ""),
        ("## [0.2.0] - 2026-11-30\n\n- a\n", ""),
        ("## [Unreleased]\n\n### Added\n\n- a\n  more\n- b\n\n## [0.2.0]\n\n- c\n", "has 2 entries under [Unreleased]"),
        ("## [Unreleased]\n\n## [0.1.0]\n\n- b\n", "has no section [0.2.0]"),
    ],
)
def test_a_changelog_names_a_version_with_all_of_its_changes(text: str, problem: str) -> None:
    found = release.changelog_problem(text, "0.2.0")
    assert problem in found and bool(found) is bool(problem)


def test_a_version_that_the_changelog_does_not_name_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["release", str(tmp_path)])
    monkeypatch.delenv("TRIAL", raising=False)
    monkeypatch.setattr(release, "build", lambda target: (target / "a.whl", target / "a.tar.gz"))
    monkeypatch.setattr(release, "metadata_of", lambda file: type("Found", (), {"version": "99.0"}))
    monkeypatch.setattr(release, "changelog_problem", lambda text, version: f"no section [{version}]")
    with pytest.raises(SystemExit, match=r"no section \[99.0\]"):
        release.main()
