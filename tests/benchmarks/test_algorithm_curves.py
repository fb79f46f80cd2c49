"""Learning curves of the algorithms: settings, the results file, the figure and what the reference shows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from benchmarks import algorithm_curves
from benchmarks.algorithm_curves import (
    FIGURE,
    IMAGE,
    METRIC_OF,
    Run,
    Runs,
    add,
    assignments,
    curves,
    draw,
    measure,
    overrides,
    recorded,
    write,
)
from tests.conftest import ROOT
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS, TAUGHT
from troupe.orchestrator.spec.load import plan_runs, read_document

ONE = Runs("reward/mean", ("schedule.steps=2",), {"7": Run({"1": 0.25, "2": 0.75}, 0.5, "a machine")})
TWO = Runs("eval/loss", (), {"7": Run({"0": 3.0, "10": 1.5}, None, "a machine")})
FALLS = ("eval/loss", *METRIC_OF.values())


@pytest.mark.parametrize("name", [*ALGORITHMS, *OFFLINE_ALGORITHMS])
def test_the_settings_of_every_run_fit_its_spec(name: str) -> None:
    spec = algorithm_curves.spec_of(name)
    planned = plan_runs(read_document(ROOT / spec.path, list(overrides(name, 20))))
    assert [run.spec.algorithm.name for run in planned] == [name]


@pytest.mark.parametrize("name", sorted(TAUGHT))
def test_the_student_fits_its_teacher(name: str, demo_model: Path) -> None:
    given = assignments(name, 20, 7, demo_model)
    (run,) = plan_runs(read_document(ROOT / algorithm_curves.spec_of(name).path, given))
    assert run.missing() == []


def test_runs_are_recorded_in_the_order_of_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    assert recorded(path) == {}
    write({"dpo": TWO, "grpo": ONE}, path)
    assert list(recorded(path).items()) == [("grpo", ONE), ("dpo", TWO)]


def test_the_reference_shows_the_first_and_the_last_step() -> None:
    shown = curves({"grpo": ONE, "dpo": TWO})
    assert shown.rows["grpo"] == "`reward/mean` 0.250 at step 1, 0.750 at step 2, one seed"
    assert "| [`dpo`](#dpo) | `eval/loss` | 1 | 3.000 (step 0) | 1.500 (step 10) |  |" in shown.section
    assert f"({IMAGE})" in shown.section and shown.section.count("Measured on a machine.") == 1


def test_seeds_are_joined_unless_their_settings_differ() -> None:
    runs = add({"grpo": ONE}, "grpo", ONE.overrides, 10, Run({"1": 0.5}, 0.4, "another"))
    runs = add(runs, "grpo", ONE.overrides, 8, Run({"1": 0.75}, 0.6, "another"))
    assert list(runs["grpo"].seeds) == ["7", "8", "10"]
    assert runs["grpo"].steps == ["1"] and runs["grpo"].step_s == 0.4
    assert runs["grpo"].estimate("1").value == pytest.approx(0.5)
    assert list(add(runs, "grpo", ("schedule.steps=3",), 8, runs["grpo"].seeds["8"])["grpo"].seeds) == ["8"]


def test_algorithms_are_ranked_by_equal_samples_and_by_equal_seconds() -> None:
    """With 0.5 s a step, the budget of 20 of them is 10 s: 10 of a second each."""
    fast = Runs("reward/mean", (), {seed: Run({str(k): k / 100 for k in range(1, 21)}, 0.5, "m") for seed in "78"})
    values = [{str(k): k / 50 + sign / 100 for k in range(1, 21)} for sign in (-1, 1)]
    slow = Runs("reward/mean", (), {seed: Run(one, 1.0, "m") for seed, one in zip("78", values, strict=True)})
    lines = curves({"grpo": fast, "ppo": slow}).section.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("| algorithm | after"))
    assert "after 20 steps" in lines[head] and "after 10.0 s" in lines[head]
    # Student's t with one degree of freedom: 12.706 * 0.01.
    assert lines[head + 2 : head + 4] == [
        "| [`ppo`](#ppo) | 0.400 | 0.273 to 0.527 | 1.00 | 0.200 | 0.073 to 0.327 |",
        "| [`grpo`](#grpo) | 0.200 |  | 0.50 | 0.200 |  |",
    ]


def test_the_figure_has_a_panel_for_each_run_and_is_the_same_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw({"grpo": ONE, "dpo": TWO}, tmp_path / name)
    text = (tmp_path / "one").read_text()
    assert ">grpo<" in text and ">dpo<" in text and text == (tmp_path / "two").read_text()


def test_only_runs_that_are_not_recorded_are_listed_and_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two threads none writes the student: it is there before they start."""
    file, students, ran = tmp_path / "curves.json", list[Path](), list[tuple[str, int, Path | None]]()

    def student(teacher: Path, folder: Path) -> Path:
        assert threading.current_thread() is threading.main_thread()
        students.append(folder)
        return folder

    def one(name: str, steps: int, seed: int, student: Path | None) -> Run:
        ran.append((name, seed, student))
        return Run({"1": 1.0, "2": 0.5}, 0.1, "a machine")

    def main(*options: str) -> str:
        names = ["dpo", "gkd", "grpo"]
        files = ("--json", str(file), "--figure", str(tmp_path / "figure.svg"))
        monkeypatch.setattr(algorithm_curves.sys, "argv", ["curves", *names, "--missing", *files, *options])
        assert algorithm_curves.main() == 0
        return capsys.readouterr().out

    monkeypatch.setattr(algorithm_curves, "noisy_copy", student)
    monkeypatch.setattr(algorithm_curves, "measure", one)
    write({"dpo": Runs("eval/loss", overrides("dpo", 20), TWO.seeds), "grpo": ONE}, file)
    listed = "14 runs are not recorded\n  dpo: seeds 8 9 10 11\n  gkd: seeds 7 8 9 10 11\n  grpo: seeds 7 8 9 10 11\n"
    assert listed in main("--draw") and ran == [] and students == []
    assert listed in main("--at-once", "2") and len(ran) == 14 and len(students) == 1
    assert {folder for name, _, folder in ran if name == "gkd"} == {*students}
    assert "0 runs are not recorded\n" in main() and len(ran) == 14 and len(students) == 1
    assert [len(row.seeds) for row in recorded(file).values()] == [5, 5, 5]


def test_a_failed_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_curves.sys, "executable", "false")
    with pytest.raises(algorithm_curves.subprocess.CalledProcessError):
        measure("grpo", 1, 7)


def test_unknown_algorithms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        algorithm_curves.parse(["grpo", "gropo"])
    assert "no algorithm gropo" in capsys.readouterr().err
    assert algorithm_curves.parse([]).names == [*ALGORITHMS, *OFFLINE_ALGORITHMS]


@pytest.mark.parametrize("name", [*ALGORITHMS, *OFFLINE_ALGORITHMS])
def test_every_algorithm_has_recorded_runs_that_learn(name: str) -> None:
    run = recorded()[name]
    seeds = [*map(str, algorithm_curves.SEEDS)]
    # Only what is compared with others needs an interval.
    assert [*run.seeds] == (seeds if run.metric == algorithm_curves.METRIC else seeds[: len(run.seeds)])
    first, last = run.estimate(run.steps[0]).value, run.estimate(run.steps[-1]).value
    assert last < first if run.metric in FALLS else last > first + 0.03


def test_the_figure_is_small_and_shows_every_recorded_run() -> None:
    text = FIGURE.read_text(encoding="utf-8")
    assert len(text) < 350_000
    assert all(f">{name}<" in text for name in recorded())


def test_the_reference_names_the_algorithms_without_a_run() -> None:
    assert "No run is recorded of `reinforce`, " in curves({"grpo": ONE}).section
    assert "No run" not in curves(dict.fromkeys((*ALGORITHMS, *OFFLINE_ALGORITHMS), ONE)).section
