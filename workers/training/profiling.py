"""A trace of what a rank computes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from troupe.workers.contract.config import Device


@contextmanager
def profiled(trace: str, device: Device) -> Iterator[None]:
    """Record the block with torch's profiler, and write it to the file `trace`; nothing if that is empty.

    Chrome (`chrome://tracing`) and Perfetto read the file.
    """
    if not trace:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    Path(trace).parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(trace)
