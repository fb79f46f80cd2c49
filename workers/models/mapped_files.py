"""Memory of mapped files: what has been read of them counts as memory of the process until it is given back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4


class WeightMappings:
    """The weight files of a folder, as they are mapped from now on by a reader that does not write to its mappings."""

    def __init__(self, folder: str) -> None:
        """Set the folder."""
        self._inodes = {path.stat().st_ino for path in Path(folder).glob("*.safetensors")}
        self._before = set(self._mappings())

    def release(self) -> None:
        """Give back the pages that have been read. They are read again from the file if they are used again."""
        library = ctypes.CDLL(None)
        for start, end in set(self._mappings()) - self._before:
            # What was mapped before may have been written to, and would lose that.
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)

    def _mappings(self) -> Iterator[tuple[int, int]]:
        """First address, and the address after the last, of each mapping of the files; none if Linux has no list."""
        if not _MAPS.exists():
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            addresses, _, _, _, inode, *_ = line.split()
            if int(inode) in self._inodes:
                start, end = addresses.split("-")
                yield int(start, 16), int(end, 16)
