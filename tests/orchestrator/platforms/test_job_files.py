"""The copy of a working directory that a job gets: no secrets, nothing from outside, and the folder stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms import job_files
from troupe.orchestrator.platforms.job_files import copy_folder

SECRETS = (
    *(".env", ".env.production", "prod.env", ".netrc", ".git-credentials", "id_rsa", "id_ed25519.bak", "server.pem"),
    *("TLS.KEY", "keystore.jks", "auth_token", "hub.token", "credentials.json", "secrets.yaml", ".npmrc", ".pypirc"),
    *(".aws/credentials", ".ssh/config", "secrets/x.txt", ".kube/config", ".docker/config.json"),
)
UNNEEDED = (
    ".git/config",
    ".venv/bin/python",
    "runs/a/metrics.jsonl",
    "a/__pycache__/x.pyc",
    "model.safetensors",
    "w.pt",
)
WANTED = (
    "rewards.py",
    "a/b/c.py",
    "secrets.py",
    "tokenizer.json",
    ".env.example",
    ".config/keys.txt",
    "data/token.csv",
)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (path := tmp_path / "mine").mkdir()
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (path := tmp_path / "copy").mkdir()
    return path


def test_secrets_and_what_a_job_does_not_need_stay_behind_and_are_named(folder: Path, target: Path) -> None:
    write(folder, *SECRETS, *UNNEEDED, *WANTED)
    before = {name: (folder / name).stat().st_mtime_ns for name in names_below(folder)}
    sent = copy_folder(folder, target)
    assert names_below(target) == set(WANTED)
    assert all((target / name).read_text() == f"content of {name}" for name in WANTED)
    assert {name: (folder / name).stat().st_mtime_ns for name in names_below(folder)} == before
    reasons: dict[str, set[str]] = {}
    for name, why in sent.left_out:
        reasons.setdefault(why, set()).add(name)
    assert reasons["may hold a secret"] == {name.split("/")[0] for name in SECRETS}
    assert reasons["not needed"] == {".git", ".venv", "runs", "a/__pycache__", "model.safetensors", "w.pt"}
    assert all("\n" not in note and note.startswith("not sent, ") for note in sent.notes())
    assert any("and 9 more" in note for note in sent.notes())


def test_a_private_key_is_known_by_its_content(folder: Path, target: Path) -> None:
    (folder / "notes.txt").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    assert copy_folder(folder, target).left_out == [("notes.txt", "may hold a secret")]
    assert names_below(target) == set()


def test_links_out_of_the_folder_are_not_followed(folder: Path, target: Path, tmp_path: Path) -> None:
    write(tmp_path, "outside/passwords", "outside/inner/more")
    write(folder, "lib/shared.py", ".env")
    links = {
        "file": tmp_path / "outside" / "passwords",
        "folder": tmp_path / "outside",
        "relative": Path("../outside/passwords"),
        "system": Path("/etc/passwd"),
        "loop": folder,
        "nothing": folder / "none",
        "hidden": folder / ".env",
        "inside.py": folder / "lib" / "shared.py",
    }
    for name, leads_to in links.items():
        (folder / name).symlink_to(leads_to)
    sent = copy_folder(folder, target)
    assert names_below(target) == {"lib/shared.py", "inside.py"}
    assert (target / "inside.py").read_text() == "content of lib/shared.py"
    assert not (target / "inside.py").is_symlink()
    assert dict(sent.left_out) == {
        ".env": "may hold a secret",
        "hidden": "may hold a secret",
        "loop": "a link to a folder, or to nothing",
        "nothing": "a link to a folder, or to nothing",
        **dict.fromkeys(("file", "folder", "relative", "system"), "a link that leads out of the folder"),
    }


def test_what_is_not_a_file_is_not_opened(folder: Path, target: Path) -> None:
    os.mkfifo(folder / "pipe")
    write(folder, "a.py")
    assert copy_folder(folder, target).left_out == [("pipe", "not a file")]
    assert names_below(target) == {"a.py"}


def test_a_folder_without_end_is_left_out(folder: Path, target: Path) -> None:
    write(folder, "/".join(["d"] * 400 + ["x.py"]), "y.py")
    ((name, why),) = copy_folder(folder, target).left_out
    assert (name, why) == ("/".join(["d"] * 65), "nested too deeply")
    assert names_below(target) == {"y.py"}


def test_ignore_files_are_followed_and_not_sent(folder: Path, target: Path) -> None:
    write(folder, "a.py", "big/data.bin", "b/c.log", "b/d.py")
    (folder / ".gitignore").write_text("big/\n*.yaml\n")
    (folder / "b" / ".rayignore").write_text("*.log\n")
    assert copy_folder(folder, target).left_out == []
    assert names_below(target) == {"a.py", "b/d.py"}


def test_a_copy_is_for_its_owner_only(folder: Path, target: Path) -> None:
    write(folder, "a.py", "run.sh")
    (folder / "run.sh").chmod(0o755)
    copy_folder(folder, target)
    assert [oct((target / name).stat().st_mode & 0o777) for name in ("a.py", "run.sh")] == ["0o600", "0o700"]


def test_too_much_is_refused_with_the_largest_file(folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "a.py", "b.py", "c.py")
    with (folder / "large.bin").open("wb") as file:
        file.truncate(job_files.MOST_BYTES + 1)  # a sparse file
    with pytest.raises(UsageError, match=r"large\.bin: 256 MiB is too much to send; list it in \.rayignore"):
        copy_folder(folder, target)
    (folder / "large.bin").unlink()
    monkeypatch.setattr(job_files, "MOST_FILES", 2)
    with pytest.raises(UsageError, match=r"^--working-dir .*: more than 256 MiB or 2 files to send .*\.rayignore"):
        copy_folder(folder, target)
