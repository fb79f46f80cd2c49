"""Pages of mapped weight files: given back while the mapping stays, and never where something may have been written."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from troupe.workers.contract.units import MIB
from troupe.workers.training.zero3 import WeightMappings

NUMBERS = 8 * MIB
"""Of the tensor in the file: 32 MiB."""


def resident() -> int:
    """Bytes of mapped files that are resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


def written(folder: Path) -> str:
    save_file({"weight": torch.arange(NUMBERS, dtype=torch.float32)}, folder / "model.safetensors")
    return str(folder / "model.safetensors")


def test_what_was_read_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    path = written(tmp_path)
    files = WeightMappings(str(tmp_path))
    with safe_open(path, framework="pt") as file:
        weight = file.get_slice("weight")[...]
        total = float(weight.double().sum())
        read = resident()
        files.release()
        assert read - resident() > 30 * MIB
        assert float(weight.double().sum()) == total


def test_what_was_written_to_an_earlier_mapping_stays(tmp_path: Path) -> None:
    path = written(tmp_path)
    with safe_open(path, framework="pt") as file:
        weight = file.get_slice("weight")[...]
        weight.fill_(3.0)
        WeightMappings(str(tmp_path)).release()
        assert bool((weight == 3.0).all())


def test_a_folder_without_weight_files_has_nothing_to_give_back(tmp_path: Path) -> None:
    WeightMappings(str(tmp_path)).release()
