"""Code in the files of a checkpoint."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import torch


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def poisoned(saved: Path, canary: Path) -> list[tuple[str, str, Path]]:
    """Copies of a checkpoint, each with code in one file: (file, how, copy)."""
    copies = []
    for file in sorted(path for path in saved.rglob("*") if path.suffix in (".pt", ".safetensors")):
        forms = {"a pickle": pickle.dumps({"a": Canary(canary)})}
        if file.suffix == ".pt":  # nothing else differs from what DeepSpeed wrote
            state = torch.load(file, weights_only=False)
            state["added"] = Canary(canary)
            buffer = io.BytesIO()
            torch.save(state, buffer)
            forms["an entry"] = buffer.getvalue()
        for number, (form, content) in enumerate(forms.items()):
            copy = saved.with_name(f"{saved.name}-{file.stem}-{number}")
            shutil.copytree(saved, copy)
            (copy / file.relative_to(saved)).write_bytes(content)
            copies.append((file.name, form, copy))
    return copies
