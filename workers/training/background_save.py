"""Saving during training: a copy of the state in host memory, and a thread that writes it.

torch's `DefaultStager` copies (`torch.distributed.checkpoint` uses it for its `async_save`): it keeps which tensors
share a storage, so that the files equal a synchronous save's, and it keeps its memory for the next copy.
DeepSpeed's own engines do not serve here: its decoupled one is part of FastPersist, which needs a compiled writer.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_leaves

from troupe.workers.contract.messages import SaveStatus

logger = logging.getLogger(__name__)

Write = Callable[[], object]
"""Writes files of a checkpoint."""
_OF_TORCH = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos")
"""In the errors of torch's writer of files."""


class HostCopies:
    """Copies states to host memory, which is pinned if the tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager = DefaultStager(options)

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state. It is overwritten by the next copy of the same tensors."""
        copied = cast("dict[str, Any]", self._stager.stage(state))
        for copy, tensor in zip(tree_leaves(copied), tree_leaves(state), strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:  # which is saved with a tensor, not copied
                copy.requires_grad_()
        return copied


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self._name = ""
        self._thread: threading.Thread | None = None
        self._failed = ""
        self._export_failed = ""

    @property
    def writes(self) -> bool:
        """Whether a checkpoint is being written: its copies must not change."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, state: Sequence[Write], exports: Sequence[Write]) -> None:
        """Begin to write a checkpoint, the folder `name`; exports may fail. Raises RuntimeError if one is under way."""
        if self.writes:
            raise RuntimeError(f"{self._name} is still being written")
        self._name, self._failed, self._export_failed = name, "", ""
        # A daemon: the process may end although a disk hangs.
        self._thread = threading.Thread(target=self._write, args=(state, exports), name="save", daemon=True)
        self._thread.start()

    def status(self, name: str) -> SaveStatus:
        """Whether this folder's checkpoint is written, and what failed. Raises RuntimeError for an earlier one."""
        if self._thread is None or name != self._name:
            raise RuntimeError(f"{name} is not being written")
        return SaveStatus(not self.writes, self._failed, self._export_failed)

    def _write(self, state: Sequence[Write], exports: Sequence[Write]) -> None:
        self._failed = self._run(state)
        if not self._failed:
            self._export_failed = self._run(exports)

    def _run(self, writes: Sequence[Write]) -> str:
        """Calls these in order; what the first one that fails raises, as text."""
        try:
            with whole_files(self._name):
                for write in writes:
                    write()
        except Exception as error:  # it is reported with the status
            logger.exception("a checkpoint could not be written")
            return f"{type(error).__name__}: {error}"
        return ""


@contextmanager
def whole_files(folder: str) -> Iterator[None]:
    """Raise OSError with the folder and its disk if torch cannot write a file: it names a position in it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not _OF_TORCH.search(reason):
            raise
        there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
        free = f"{shutil.disk_usage(there).free >> 20} MiB are free on its disk"
        raise OSError(errno.EIO, f"a file was not written whole: {free} (torch: {reason})", folder) from error
