"""Learning curves of the algorithms: settings, the results file, the figure and what the reference shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import algorithm_curves
from benchmarks.algorithm_curves import FIGURE, IMAGE, METRIC_OF, Run, curves, draw, measure, overrides, recorded, write
from tests.conftest import ROOT
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.spec.load import plan_runs, read_document

ONE = Run("reward/mean", ("schedule.steps=2",), {"1": 0.25, "2": 0.75}, "a machine")
TWO = Run("eval/loss", (), {"0": 3.0, "10": 1.5}, "a machine")
FALLS = ("eval/loss", *METRIC_OF.values())


@pytest.mark.parametrize("name", [*ALGORITHMS, *OFFLINE_ALGORITHMS])
def test_the_settings_of_every_run_fit_its_spec(name: str) -> None:
    spec = algorithm_curves.spec_of(name)
    planned = plan_runs(read_document(ROOT / spec.path, list(overrides(name, 20))))
    assert [run.spec.algorithm.name for run in planned] == [name]


def test_runs_are_recorded_in_the_order_of_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    assert recorded(path) == {}
    write({"dpo": TWO, "grpo": ONE}, path)
    assert list(recorded(path).items()) == [("grpo", ONE), ("dpo", TWO)]


def test_the_reference_shows_the_first_and_the_last_step() -> None:
    shown = curves({"grpo": ONE, "dpo": TWO})
    assert shown.rows["grpo"] == "`reward/mean` 0.250 at step 1, 0.750 at step 2"
    assert "| [`dpo`](#dpo) | `eval/loss` | 3.000 (step 0) | 1.500 (step 10) |" in shown.section
    assert f"({IMAGE})" in shown.section and shown.section.count("Measured on a machine.") == 1


def test_the_figure_has_a_panel_for_each_run_and_is_the_same_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw({"grpo": ONE, "dpo": TWO}, tmp_path / name)
    text = (tmp_path / "one").read_text()
    assert ">grpo<" in text and ">dpo<" in text and text == (tmp_path / "two").read_text()


def test_a_failed_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_curves.sys, "executable", "false")
    with pytest.raises(algorithm_curves.subprocess.CalledProcessError):
        measure("grpo", 1)


def test_unknown_algorithms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        algorithm_curves.parse(["grpo", "gropo"])
    assert "no algorithm gropo" in capsys.readouterr().err
    assert algorithm_curves.parse([]).names == [*ALGORITHMS, *OFFLINE_ALGORITHMS]


def test_every_algorithm_has_a_recorded_run_that_learns() -> None:
    assert list(recorded()) == [*ALGORITHMS, *OFFLINE_ALGORITHMS]
    for name, run in recorded().items():
        (_, first), (_, last) = run.ends
        assert last < first if run.metric in FALLS else last > first + 0.05, name


def test_the_figure_is_small_and_shows_every_recorded_run() -> None:
    text = FIGURE.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert all(f">{name}<" in text for name in recorded())


def test_the_reference_names_the_algorithms_without_a_run() -> None:
    assert "No run is recorded of `reinforce`, " in curves({"grpo": ONE}).section
    assert "No run" not in curves(dict.fromkeys((*ALGORITHMS, *OFFLINE_ALGORITHMS), ONE)).section
