"""Command line and table of delta_nodes; its nodes need root and minutes."""

from __future__ import annotations

import pytest

from benchmarks import delta_nodes
from benchmarks.delta_nodes import SETTINGS, SPEC, Sent, main, parse, table
from benchmarks.support import network_nodes
from benchmarks.support.harness import SKIPPED
from troupe.orchestrator.spec.load import load_rollout_spec


def sent(to_nodes: int, seconds: float) -> Sent:
    return Sent(3, "d", 100_000_000, to_nodes, seconds)


def test_the_settings_fit_the_spec() -> None:
    spec = load_rollout_spec(SPEC, [*SETTINGS, "weight_sync.delta=auto"])
    assert spec.roles.rollout.workers == len(delta_nodes.FAR) and spec.model.dtype == "bfloat16"


def test_a_row_compares_with_all_weights() -> None:
    found = {("1e-6", "off"): [sent(300_000_000, 4.0)], ("1e-6", "auto"): [sent(3_000_000, 0.5), sent(1_000_000, 1.5)]}
    rows = table(found).splitlines()[2:]
    assert rows == [
        "| 1e-6 | off | 300.00 | 1 | 4.00 (4.00 .. 4.00) | 1.000 |",
        "| 1e-6 | auto | 2.00 | 150 | 1.00 (0.50 .. 1.50) | 0.250 |",
    ]


def test_without_the_commands_it_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--rates", "1e-5"]).rates == ["1e-5"]
    monkeypatch.setattr(network_nodes.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network_nodes.shutil, "which", lambda tool: None if tool == "tc" else tool)
    monkeypatch.setattr("sys.argv", ["delta_nodes"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == SKIPPED and "skipped: there is no command tc" in capsys.readouterr().out
