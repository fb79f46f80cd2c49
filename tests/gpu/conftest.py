"""What the tests on GPUs measure, in pytest's report (`make gpu-check`) and in the file that `--junitxml` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from benchmarks.support.harness import machine, versions
from benchmarks.support.workload import GPU_SHARE
from tests.conftest import gpus
from tests.gpu.isolated import Measurements
from troupe.workers.contract.rdma import rdma
from troupe.workers.contract.units import GIB


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[Measurements], None]:
    """Records measurements of the test."""

    def record(measurements: Measurements) -> None:
        for name, value in measurements.items():
            record_property(name, f"{value:.4g}" if isinstance(value, float) else value)

    return record


@pytest.fixture(scope="session", autouse=True)
def _machine(record_testsuite_property: Callable[[str, object], None]) -> None:
    for name, value in _facts().items():
        record_testsuite_property(name, value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the machine, the versions, and what each test measured."""
    reports = [report for report in terminalreporter.getreports("passed") if report.user_properties]
    if reports:
        terminalreporter.section("measurements")
        terminalreporter.write_line("; ".join(f"{name}: {value}" for name, value in _facts().items()))
    for report in reports:
        found = "; ".join(f"{name}: {value}" for name, value in report.user_properties)
        terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]} ({report.duration:.0f} s): {found}")


def _facts() -> Mapping[str, object]:
    """What the measurements depend on."""
    found = gpus()
    here = {name: value for name, value in machine().items() if name != "load_average"}
    cards = ", ".join(f"{gpu.name} {gpu.memory / GIB:.0f} GiB" for gpu in found.gpus) or "none"
    here |= {"GPUs": cards, "network": str(rdma())}
    return here | {"driver": found.driver or "none", "share of an engine": GPU_SHARE} | versions()
