"""Where compiled code is kept: in one folder of the machine, for all libraries and processes of a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from troupe.workers.isolation import compiled_code
from troupe.workers.isolation.compiled_code import FOLDER_VARIABLE, FOLDERS, keep_compiled_code

INFORMATION = "Model:           NVIDIA {}\nIRQ:             {}\n"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a worker that starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (FOLDER_VARIABLE, *FOLDERS):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    return tmp_path


def folders() -> set[Path]:
    """Those that the environment names."""
    return {Path(os.environ[name]) for name in FOLDERS}


def test_every_library_has_a_subfolder_of_one_folder(environment: Path) -> None:
    keep_compiled_code()
    assert len(folders()) == len(FOLDERS)
    (parent,) = {folder.parent for folder in folders()}
    assert parent.parent == environment / "troupe" / "compiled"
    before = folders()
    keep_compiled_code()
    assert folders() == before


def test_what_the_environment_says_is_kept(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(environment / "disk"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/mine")
    keep_compiled_code()
    assert os.environ["VLLM_CACHE_ROOT"] == "/mine"
    assert {folder.parents[1] for folder in folders() - {Path("/mine")}} == {environment / "disk"}


@pytest.mark.parametrize("changed", ["package_versions", "_processor", "_gpus", "gethostname"])
def test_another_version_machine_or_host_has_another_folder(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for AVX-512 ends a process without it; two containers write to one temporary file."""
    key = compiled_code._key.__wrapped__
    before = key()
    assert key() == before
    where = compiled_code.socket if changed == "gethostname" else compiled_code
    monkeypatch.setattr(where, changed, lambda *_: "other")
    assert key() != before


def test_versions_and_hardware_are_those_of_the_machine(tmp_path: Path) -> None:
    assert {"torch", "deepspeed"} <= set(compiled_code.package_versions(compiled_code._PACKAGES))
    processor = compiled_code._processor(Path("/proc/cpuinfo"))
    assert 0 < len(processor) <= 4, "a line for each kind, not for each core, and no clock rates"
    for number, model in enumerate(("H100", "H100", "L4")):
        folder = tmp_path / f"0000:{number}"
        folder.mkdir()
        (folder / "information").write_text(INFORMATION.format(model, number))
    assert compiled_code._gpus(tmp_path) == ["Model:           NVIDIA H100", "Model:           NVIDIA L4"]
    assert compiled_code._gpus(tmp_path / "none") == []
