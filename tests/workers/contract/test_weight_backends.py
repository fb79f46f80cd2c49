"""The table of weight-transfer back-ends."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from troupe.workers.contract.weight_backends import (
    BACKENDS,
    TransferBackend,
    WeightBackend,
    automatic_backend,
    backend_problem,
    describe_backends,
)


def test_the_table_has_every_backend_of_a_spec() -> None:
    assert set(BACKENDS) == set(get_args(TransferBackend))
    assert all(row.summary in describe_backends() for row in BACKENDS.values())


@pytest.mark.parametrize("row", BACKENDS.values(), ids=BACKENDS)
def test_a_row_either_writes_a_file_or_sends_from_device_to_device(row: WeightBackend) -> None:
    assert (row.publisher is None) != (row.sender is None)
    assert row.writes_file == (row.engine_buckets == row.sender_buckets == 0)


@pytest.mark.parametrize("row", BACKENDS.values(), ids=BACKENDS)
def test_what_a_row_names_exists(row: WeightBackend) -> None:
    """Read and not imported: some of it is vLLM's side."""
    for path in filter(None, (row.publisher, row.sender, row.receiver, row.check)):
        module, _, name = path.partition(":")
        found = find_spec(module)
        assert found is not None and found.origin is not None, module
        tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, path


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shared", [False, True])
def test_what_auto_chooses_can_be_used(device: str, shared: bool) -> None:
    assert device in ("cpu", "cuda")
    row = automatic_backend(device, shared)
    assert backend_problem(row.name, device, shared) is None


@pytest.mark.parametrize(
    ("backend", "device", "shared", "problem"),
    [
        ("shm", "cuda", True, None),
        ("nccl", "cpu", False, "nccl needs GPUs; on the CPU use shm (or auto)"),
        ("gloo", "cuda", False, "gloo sends between CPUs; on GPUs use nccl or ipc (or auto)"),
        ("ipc", "cuda", False, "ipc needs rollout on the policy's GPUs (roles.rollout.colocate_with: policy)"),
        ("nccl", "cuda", True, "nccl needs rollout and policy on separate GPUs; here use ipc (or auto)"),
    ],
)
def test_a_backend_that_cannot_work_is_refused_with_one_that_can(
    backend: TransferBackend, device: str, shared: bool, problem: str | None
) -> None:
    assert device in ("cpu", "cuda")
    assert backend_problem(backend, device, shared) == problem
