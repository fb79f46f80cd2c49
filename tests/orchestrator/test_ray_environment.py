"""Variables that Ray reads are checked before it starts, and name what helps."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.ray_environment import sockets_problem
from troupe.orchestrator.errors import ClusterUnreachable


def test_an_address_of_a_job_server_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ClusterUnreachable, match=r"^RAY_ADDRESS http://head:8265 is .*unset RAY_ADDRESS"):
        ray_nodes.join("http://head:8265")
    with pytest.raises(
        ClusterUnreachable, match=r"^--address head:x is not the address of a Ray head: expected HOST:PORT"
    ):
        ray_nodes.join("head:x")


def test_a_long_temporary_folder_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp/" + "x" * 80)
    with pytest.raises(ClusterUnreachable, match=r"Ray cannot start: TMPDIR has 85 bytes.*TMPDIR=/tmp"):
        ray_nodes.start(1)


@pytest.mark.real
@pytest.mark.parametrize("number", [0, 7])
def test_the_bound_is_that_of_ray(number: int) -> None:
    """The longest folder that is accepted starts a Ray, and 7 bytes more never do.

    The bound leaves room for a process id of 7 digits, so a process id of one digit still fits with 6 bytes more.
    """
    folder = next("/tmp/" + "y" * size for size in range(90, 0, -1) if not sockets_problem("/tmp/" + "y" * size))
    folder += "y" * number
    code = (
        f"import os; os.makedirs({folder!r}, exist_ok=True); import ray; "
        "print(ray.init(num_cpus=1, include_dashboard=False).address_info['session_dir'])"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env={"TMPDIR": folder, "PATH": "/usr/bin:/bin", "HOME": "/root"}, cwd=ROOT,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert (done.returncode == 0) == (number == 0), done.stderr
