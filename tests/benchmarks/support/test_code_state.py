"""The state of the measured code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.support.code_state import UNKNOWN, code_state


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a file that counts and one that does not."""
    for name in ("workers/one.py", "docs/page.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command."""
    settings = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> None:
    """Commit everything."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


def test_documentation_and_recorded_results_do_not_change_the_code(checkout: Path) -> None:
    before = code_state(checkout)
    assert not before.dirty and before.text == git(checkout, "rev-parse", "--short=8", "HEAD")
    (checkout / "docs/page.md").write_text("second")
    (checkout / "workers/one.log").write_text("ignored")
    (checkout / "benchmarks/recorded/amd").mkdir(parents=True)
    (checkout / "benchmarks/recorded/amd/one.json").write_text("{}")
    assert code_state(checkout) == before
    commit(checkout)
    assert code_state(checkout) == before


@pytest.mark.parametrize("name", ["workers/one.py", "orchestrator/new.py"])
def test_changed_and_new_files_change_it_and_are_the_same_code_once_committed(checkout: Path, name: str) -> None:
    before = code_state(checkout)
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("second")
    changed = code_state(checkout)
    assert changed.dirty and changed.digest != before.digest and changed.text == f"{before.commit} with changes"
    commit(checkout)
    after = code_state(checkout)
    assert after.digest == changed.digest and not after.dirty and after.commit != before.commit


def test_a_removed_file_changes_it(checkout: Path) -> None:
    before = code_state(checkout)
    (checkout / "workers/one.py").unlink()
    assert code_state(checkout).dirty and code_state(checkout).digest != before.digest


def test_a_file_that_moves_changes_it(checkout: Path) -> None:
    before = code_state(checkout)
    (checkout / "workers/one.py").rename(checkout / "workers/two.py")
    commit(checkout)
    assert code_state(checkout).digest != before.digest


def test_code_without_git_has_no_name(tmp_path: Path) -> None:
    assert code_state(tmp_path) == UNKNOWN and UNKNOWN.text == "code not named"
