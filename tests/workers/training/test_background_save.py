"""Copies of a trainer's state, and the thread that writes them."""

from __future__ import annotations

import io
import re
import resource
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.workers.contract.messages import SaveStatus
from troupe.workers.training.background_save import BackgroundWriter, HostCopies, whole_files


def saved(state: Any) -> bytes:
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


def state() -> dict[str, Any]:
    """What DeepSpeed's states are made of: views of flat tensors, tied ones, empty ones, leaves with a gradient."""
    flat = torch.arange(20, dtype=torch.float32)
    masters = torch.arange(6, dtype=torch.float32).requires_grad_()
    module = OrderedDict([("a", flat[:6].view(2, 3)), ("b", flat[6:]), ("tied", flat[:6].view(2, 3))])
    adam = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": flat.bfloat16()}},
        "param_groups": [{"betas": (0.9, 1)}],
    }
    shapes = [OrderedDict([("a", torch.Size([2, 3]))])]
    return {"module": module, "adam": adam, "masters": [masters], "none": torch.empty(0), "shapes": shapes, "x": None}


def test_a_copy_is_saved_as_the_same_bytes_and_does_not_follow_its_original() -> None:
    copies, original = HostCopies(torch.device("cpu")), state()
    copied, before = copies.of(original), saved(original)
    assert saved(copied) == before
    original["module"]["b"].zero_()
    original["adam"]["state"][0]["step"] += 1
    with torch.no_grad():
        original["masters"][0].zero_()
    assert saved(original) != before and saved(copied) == before


def test_the_memory_of_a_copy_serves_the_next_one() -> None:
    copies, original = HostCopies(torch.device("cpu")), state()
    first = copies.of(original)["module"]["b"].data_ptr()
    original["module"]["b"].add_(1)
    second = copies.of(original)
    assert second["module"]["b"].data_ptr() == first
    assert saved(second) == saved(original)


def finished(writer: BackgroundWriter, name: str) -> SaveStatus:
    while not (status := writer.status(name)).done:
        time.sleep(0.001)
    return status


def test_one_checkpoint_at_a_time() -> None:
    writer, released, written = BackgroundWriter(), threading.Event(), list[str]()
    writer.start("a", [released.wait, lambda: written.append("state")], [lambda: written.append("model")])
    assert writer.status("a") == SaveStatus(done=False) and written == []
    assert writer.writes
    with pytest.raises(RuntimeError, match="a is still being written"):
        writer.start("b", [], [])
    released.set()
    assert finished(writer, "a") == SaveStatus(done=True) and written == ["state", "model"]
    assert not writer.writes
    with pytest.raises(RuntimeError, match="b is not being written"):
        writer.status("b")


def test_what_fails_is_said_and_the_model_is_not_written_without_the_state() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer, written = BackgroundWriter(), list[str]()
    writer.start("a", [fail], [lambda: written.append("model")])
    assert finished(writer, "a") == SaveStatus(done=True, failed="OSError: [Errno 28] No space left on device")
    writer.start("b", [lambda: written.append("state")], [fail])
    assert finished(writer, "b").export_failed == "OSError: [Errno 28] No space left on device"
    assert written == ["state"] and finished(writer, "b").failed == ""
    with pytest.raises(RuntimeError, match="is not being written"):
        BackgroundWriter().status("a")


def test_a_disk_that_is_full_is_named_instead_of_a_position_in_a_file(tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: torch sees the same short write."""
    writer, folder = BackgroundWriter(), tmp_path / "step" / "policy"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        writer.start(str(folder), [lambda: torch.save(torch.zeros(1 << 18), tmp_path / "state.pt")], [])
        failed = finished(writer, str(folder)).failed
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    free = r"a file was not written whole: \d+ MiB are free on its disk \(torch: .*\)"
    assert re.fullmatch(rf"OSError: \[Errno 5\] {free}: '{folder}'", failed)
    with pytest.raises(RuntimeError, match="another cause"), whole_files(str(folder)):
        raise RuntimeError("another cause")
