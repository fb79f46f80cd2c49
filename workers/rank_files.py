"""What each rank of a training group writes into a checkpoint beside DeepSpeed's files: one file, named after both."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

_RANK_FILE = re.compile(r"rank-\d{5}-of-(\d{5})\.safetensors")


def rank_file(directory: str, rank: int, world: int) -> Path:
    """A rank's own file."""
    return Path(directory) / f"rank-{rank:05d}-of-{world:05d}.safetensors"


def rank_files(directory: str) -> list[Path]:
    """The own file of every rank that saved. Raises FileNotFoundError where one is missing."""
    found = [_RANK_FILE.fullmatch(path.name) for path in Path(directory).glob("rank-*")]
    worlds = {int(match[1]) for match in found if match}
    if len(worlds) != 1:
        raise FileNotFoundError(f"{directory} is not a checkpoint of one training group")
    world = worlds.pop()
    files = [rank_file(directory, rank, world) for rank in range(world)]
    for file in files:
        require(file, world)
    return files


def opened(file: Path) -> safe_open:
    """Such a file, to read from. Raises ValueError where it is cut off or something else."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def require(file: Path, world: int) -> None:
    """Raises FileNotFoundError where the file is not there."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing from a checkpoint of {world} rank(s)")
