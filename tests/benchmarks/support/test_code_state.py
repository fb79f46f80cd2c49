"""The state of the measured code."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.code_state import UNKNOWN, code_state, modules_of, of_benchmark


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


@pytest.fixture
def benchmarks(checkout: Path) -> Path:
    """The repository with two benchmarks that share a module, of which one has a class that is named by its path."""
    modules = {
        "one": 'from benchmarks.support.shared import f\nCLASS = "benchmarks.support.extension.Extension"\n',
        "two": "from benchmarks.support.shared import f\n",
        "support/shared": "from benchmarks.support.code_state import code_state\n",
        "support/extension": "import benchmarks.support.last\n",
        "support/last": '"""See `benchmarks.NAME` and `benchmarks.one`."""\n',
        "support/code_state": "",
        "support/other": "",
    }
    for name, text in modules.items():
        path = checkout / "benchmarks" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    commit(checkout)
    return checkout


def test_a_benchmark_is_made_of_what_it_imports_and_names(benchmarks: Path) -> None:
    support = {Path("benchmarks/support", f"{name}.py") for name in ("shared", "extension", "last")}
    assert modules_of("benchmarks.one", benchmarks) == {Path("benchmarks/one.py"), *support}
    shared = {Path("benchmarks/two.py"), Path("benchmarks/support/shared.py")}
    assert modules_of("benchmarks.two", benchmarks) == shared
    assert modules_of("pytest", benchmarks) == set()


@pytest.mark.parametrize(
    ("changed", "same"),
    [("support/other", (True, True)), ("support/extension", (False, True)), ("support/shared", (False, False))],
)
def test_a_change_of_a_benchmark_changes_the_code_of_those_that_it_is_part_of(
    benchmarks: Path, changed: str, same: tuple[bool, bool]
) -> None:
    names = ("benchmarks.one", "benchmarks.two")
    before = [of_benchmark(name, code_state(benchmarks), benchmarks) for name in names]
    (benchmarks / "benchmarks" / f"{changed}.py").write_text("changed = True\n")
    after = [of_benchmark(name, code_state(benchmarks), benchmarks) for name in names]
    assert tuple(one.measures_as(other) for one, other in zip(before, after, strict=True)) == same
    assert tuple(not one.dirty for one in after) == same
    assert {one.digest for one in after} == {before[0].digest} and {one.text.split()[0] for one in after} == {
        before[0].commit
    }


def test_another_product_is_other_code_for_every_benchmark(benchmarks: Path) -> None:
    before = of_benchmark("benchmarks.two", code_state(benchmarks), benchmarks)
    (benchmarks / "workers/one.py").write_text("second")
    after = of_benchmark("benchmarks.two", code_state(benchmarks), benchmarks)
    assert after.benchmark == before.benchmark and not after.measures_as(before)


def test_code_without_a_name_is_that_of_no_other_results() -> None:
    unknown = of_benchmark("benchmarks.grpo_step", UNKNOWN)
    assert unknown == UNKNOWN and not unknown.measures_as(UNKNOWN)
    assert not replace(UNKNOWN, commit="1a2b3c4d", dirty=True).measures_as(UNKNOWN)  # changed while it was measured


def test_code_without_git_has_no_name(tmp_path: Path) -> None:
    assert code_state(tmp_path) == UNKNOWN and UNKNOWN.text == "code not named"
