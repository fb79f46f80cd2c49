"""The RDMA devices of a machine, and the library that NCCL needs to use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.workers.contract.rdma import EFA, IBVERBS, Rdma, rdma


@pytest.mark.parametrize(
    ("drivers", "libraries", "found", "text"),
    [
        ({}, set(), Rdma(), "TCP: no RDMA device"),
        (
            {"mlx5_1": "mlx5_core", "mlx5_0": "mlx5_core"},
            {IBVERBS},
            Rdma(("mlx5_0", "mlx5_1")),
            "RDMA: mlx5_0, mlx5_1",
        ),
        ({"mlx5_0": "mlx5_core"}, {EFA}, Rdma(("mlx5_0",), IBVERBS), "TCP: libibverbs.so.1 is missing"),
        ({"efa_0": "efa"}, {IBVERBS}, Rdma(("efa_0",), EFA), "TCP: libnccl-net-ofi.so is missing"),
        ({"efa_0": "efa"}, {EFA}, Rdma(("efa_0",)), "RDMA: efa_0"),
    ],
)
def test_devices_count_only_with_the_library_of_their_driver(
    drivers: dict[str, str], libraries: set[str], found: Rdma, text: str, tmp_path: Path
) -> None:
    for device, driver in drivers.items():
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "infiniband" / device / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert rdma(tmp_path / "infiniband", libraries.__contains__, {}) == found
    assert str(found) == text


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "TCP: NCCL_IB_DISABLE is set"),
        ({"NCCL_NET": "socket"}, "TCP: NCCL_NET=Socket is set"),
        ({"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, "RDMA: mlx5_0"),
    ],
)
def test_a_variable_of_nccl_may_forbid_the_devices(environment: dict[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "mlx5_0" / "device").mkdir(parents=True)
    assert str(rdma(tmp_path / "infiniband", lambda _: True, environment)) == text
    assert rdma(tmp_path / "none", lambda _: True, environment) == Rdma()
