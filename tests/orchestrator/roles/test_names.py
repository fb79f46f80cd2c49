"""Names of workers: each has one reading, whatever environments are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.orchestrator.roles.names import is_worker, role_of, section_of


@pytest.mark.parametrize(
    ("worker", "role", "section"),
    [
        ("policy-0", "policy", "policy"),
        ("environment-12", "environment", "environment"),
        ("environment.tools-0", "environment.tools", "environment"),
        ("environment.tools-2-7", "environment.tools-2", "environment"),
    ],
)
def test_a_worker_is_called_by_its_role_and_index(worker: str, role: str, section: str) -> None:
    assert is_worker(worker)
    assert (role_of(worker), section_of(role_of(worker))) == (role, section)


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", fullmatch=True), st.integers(0, 99))
def test_no_name_of_an_environment_is_read_as_an_index(name: str, index: int) -> None:
    worker = f"environment.{name}-{index}"
    assert role_of(worker) == f"environment.{name}" and is_worker(worker)


def test_what_is_no_worker_has_no_index() -> None:
    assert not is_worker("cluster") and not is_worker("node 10.0.0.7")
    assert role_of("node 10.0.0.7") == "node"
