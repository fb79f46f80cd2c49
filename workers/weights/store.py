"""Weights through an object store: written there once by the policy, read from there by one engine of each node.

The store (S3, Google Cloud Storage, Azure, or a folder that all nodes mount) replaces only the way of the bytes: each
node has a separate file, which is verified as any other. Every process of the policy has a folder under the URL, in
which only the last version stays.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import psutil
from pyarrow import fs

from troupe.workers.weights.shared_memory import Bytes


class StoreFailed(RuntimeError):
    """The object store cannot be reached, or refuses."""


@dataclass(frozen=True)
class StoredBytes:
    """Location of bytes in an object store."""

    url: str
    """URL of the store, with its options."""
    path: str
    """Path of the object there."""
    nbytes: int

    def fetch(self) -> Bytes:
        """uint8 [nbytes], read from the store. Raises StoreFailed."""
        try:
            files, _ = fs.FileSystem.from_uri(self.url)
            # As a stream: with random access to Google's, Arrow lets no other thread of Python run while it waits.
            with files.open_input_stream(self.path, compression=None) as file:
                content = np.frombuffer(file.read_buffer(self.nbytes + 1), np.uint8)
        except (OSError, ValueError) as error:  # pyarrow's own errors are among them
            raise StoreFailed(f"weight_sync.url: cannot read {self.path}: {error}") from error
        if content.nbytes != self.nbytes:
            raise StoreFailed(f"weight_sync.url: {self.path} does not have the {self.nbytes} bytes that were written")
        return content


class WeightStore:
    """The policy's folder in an object store."""

    def __init__(self, url: str, run_id: str) -> None:
        """Open `s3://bucket/folder`, `gs://`, `abfs://` or `file:///folder`, with pyarrow's options as a query,
        without what dead processes of this host left of the run. Raises StoreFailed."""
        self._url = url
        self._paths: set[str] = set()
        self._prefix = f"troupe-{run_id}-{socket.gethostname()}-"
        try:
            self._files, root = fs.FileSystem.from_uri(url)
            self._root = PurePosixPath(root)
            self._folder = self._root / f"{self._prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self._remove_stale()
            self._files.create_dir(str(self._folder), recursive=True)
        except (OSError, ValueError) as error:
            raise StoreFailed(f"weight_sync.url: {error}") from error

    def put(self, name: str, content: Bytes) -> StoredBytes:
        """Write bytes under a name, once until `clear`. Raises StoreFailed."""
        path = str(self._folder / name)
        if path in self._paths:
            return StoredBytes(self._url, path, content.nbytes)
        try:
            with self._files.open_output_stream(path) as file:
                file.write(content)
        except OSError as error:
            raise StoreFailed(f"weight_sync.url: cannot write {path}: {error}") from error
        self._paths.add(path)
        return StoredBytes(self._url, path, content.nbytes)

    def clear(self) -> None:
        """Remove everything that was written: no engine reads it any more. Raises StoreFailed."""
        try:
            for path in self._paths:
                self._files.delete_file(path)
        except OSError as error:
            raise StoreFailed(f"weight_sync.url: cannot remove old weights: {error}") from error
        self._paths.clear()

    def close(self) -> None:
        self._paths.clear()
        self._delete(str(self._folder))

    def _delete(self, folder: str) -> None:
        if self._files.get_file_info(folder).type == fs.FileType.Directory:
            self._files.delete_dir(folder)

    def _remove_stale(self) -> None:
        selector = fs.FileSelector(str(self._root), allow_not_found=True)
        for info in self._files.get_file_info(selector):
            pid = info.base_name.removeprefix(self._prefix).partition("-")[0]
            if info.base_name.startswith(self._prefix) and pid.isdigit() and not psutil.pid_exists(int(pid)):
                self._delete(info.path)
