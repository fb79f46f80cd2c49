"""`troupe demo` and `troupe init --from`: what runs, what is created first, and what the user reads at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from troupe.orchestrator.cli import app
from troupe.orchestrator.commands.train import next_steps, resume_steps, write_run_report
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms.ray_jobs import SENT
from troupe.orchestrator.spec.checks.machine import missing
from troupe.orchestrator.spec.examples import MODELS_VARIABLE, examples
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.starter import demo
from troupe.orchestrator.starter.command import InitFlags, copy_of
from troupe.orchestrator.starter.demo import (
    DEFAULT,
    demo_folder,
    demo_spec,
    list_examples,
    named_models,
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the models, and an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


def test_the_default_is_an_example_and_the_list_names_all() -> None:
    assert DEFAULT in examples()
    lines = list_examples().splitlines()
    assert [line.split()[0] for line in lines] == list(examples())
    assert CliRunner().invoke(app, ["demo", "--list"]).stdout.splitlines() == lines


def test_steps_are_those_of_the_run_or_of_every_stage(models: Path) -> None:
    for name in ("tiny-grpo", "examples:tiny-three-stage"):
        spec, overrides = demo_spec(name, 1)
        assert {planned.spec.schedule.steps for planned in plan_runs(read_document(spec, overrides))} == {1}
    assert demo_spec("tiny-grpo", None) == (Path("examples:tiny-grpo"), [])
    with pytest.raises(UsageError, match="no such example"):
        demo_spec("tiny-grop", None)


def test_the_run_folder_is_that_of_the_documentation_for_the_default_only() -> None:
    assert demo_folder(DEFAULT) == demo_folder(f"examples:{DEFAULT}") == Path("runs/demo")
    assert demo_folder("tiny-grpo") is None


def test_only_models_of_the_folder_that_a_run_names_are_created(models: Path) -> None:
    assert named_models(plan_runs(read_document("examples:tiny-three-stage")), models) == [demo.TINY]
    assert named_models(plan_runs(read_document("examples:algorithms/distill")), models) == [demo.TINY, demo.TEACHER]
    own = plan_runs(read_document("examples:tiny-grpo", ["model.path=/models/mine"]))
    assert named_models(own, models) == []


def test_a_spec_that_is_invalid_is_refused_before_any_model_is_created(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "make_models", lambda *arguments: pytest.fail("created"))
    result = CliRunner().invoke(app, ["validate", "examples:tiny-grpo", "--set", "schedule.steps=0"])
    assert "schedule.steps: must be at least 1" in str(result.exception)


def test_validate_creates_no_model_and_says_so(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "make_models", lambda *arguments: pytest.fail("created"))
    for name in ("tiny-grpo", "tiny-three-stage"):
        result = CliRunner().invoke(app, ["validate", f"examples:{name}"])
        assert result.exception is None, result.output
        assert f"model.path: {models / demo.TINY} is created when the run starts" in result.output
    assert not models.exists() or not any(models.iterdir())
    wrong = CliRunner().invoke(app, ["validate", "examples:tiny-grpo", "--set", "model.path=/none"])
    assert "model.path: no such folder: /none" in str(wrong.exception)


def test_a_model_that_cannot_be_created_is_one_message(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise demo.DemoModelError("no weights; install them")

    monkeypatch.setattr(demo, "make_models", fail)
    for command in (["run", "examples:tiny-grpo"], ["demo", "--prepare"]):
        result = CliRunner().invoke(app, command)
        assert str(result.exception) == "no weights; install them"


def test_the_end_names_the_results_and_commands_that_work(models: Path) -> None:
    runs = plan_runs(read_document("examples:tiny-dpo"))
    text = next_steps(Path("examples:tiny-dpo"), runs)
    assert text.startswith("results are in runs/tiny-dpo; next:\n")
    assert "troupe export runs/tiny-dpo trained/" in text and "troupe init --from tiny-dpo " in text
    assert "troupe eval runs/tiny-dpo/spec.yaml --model trained/" in text and "--best" not in text
    kept = next_steps(Path("x"), plan_runs(read_document("examples:tiny-evaluation")))
    assert "troupe export runs/tiny-evaluation best/ --best" in kept
    chain = next_steps(Path("examples:tiny-three-stage"), plan_runs(read_document("examples:tiny-three-stage")))
    assert "results are in runs/tiny-three-stage;" in chain and "export runs/tiny-three-stage/ppo" in chain
    plain = next_steps(Path("examples:tiny-grpo"), plan_runs(read_document("examples:tiny-grpo")))
    assert "troupe eval" not in chain + plain, "nothing is held out"
    adapters = next_steps(Path("x"), plan_runs(read_document("examples:tiny-lora")))
    assert "troupe export runs/tiny-lora trained/ --merge" in adapters, "engines evaluate whole models"
    own = next_steps(Path("run.yaml"), plan_runs(read_document("examples:tiny-grpo")))
    assert "troupe samples runs/tiny-grpo " in own and "troupe init" not in own


def test_a_job_is_resumed_by_another_submission_and_not_by_its_copy_of_the_spec(models: Path) -> None:
    runs = plan_runs(read_document("examples:tiny-grpo"))
    job = resume_steps(["run", f"{SENT}tiny-grpo.yaml", "--resume"], runs, None)
    assert "troupe submit SPEC " in job and SENT not in job
    assert "troupe run my.yaml --resume " in resume_steps(["run", "my.yaml"], runs, None)


def test_the_last_line_names_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = plan_runs(read_document("examples:tiny-grpo"), tmp_path / "run")
    assert write_run_report(runs) is None and not caplog.text, "nothing has run"
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 0.5}\n')
    assert write_run_report(runs) is None and "the report was not written: " in caplog.text
    (tmp_path / "run" / "report.html").rmdir()
    report = write_run_report(runs)
    assert report is not None and report == tmp_path / "run" / "report.html" and report.is_file()
    last = next_steps(Path("examples:tiny-grpo"), runs, report).splitlines()[-1]
    assert str(report) in last and last.startswith("report:")


def test_an_example_is_copied_as_a_file_to_edit(models: Path) -> None:
    output = Path("my.yaml")
    result = CliRunner().invoke(app, ["init", "--from", "examples:tiny-dpo", "-o", str(output)])
    assert result.exit_code == 0 and "next: troupe validate my.yaml" in result.stdout
    text = output.read_text()
    assert "#   troupe run my.yaml\n" in text and f"path: {models}/tiny-llama" in text
    (planned,) = plan_runs(read_document(output))
    assert planned.spec == plan_runs(read_document("examples:tiny-dpo"))[0].spec
    assert [path for path, _ in missing(planned.spec)] == ["model.path"], "created by the first command that needs it"


def test_flags_that_a_copy_would_not_heed_are_refused(models: Path) -> None:
    with pytest.raises(UsageError, match=r"drop --max-tokens and edit the file"):
        copy_of("tiny-grpo", InitFlags(max_tokens=9), Path("run.yaml"))
    for flags, name in ((InitFlags(args={"a": 1}), "args"), (InitFlags(column={"answer": "gold"}), "column")):
        with pytest.raises(UsageError, match=f"drop --{name} and edit the file"):
            copy_of("tiny-grpo", flags, Path("run.yaml"))
    with pytest.raises(UsageError, match="no such example"):
        copy_of("tiny", InitFlags(), Path("run.yaml"))
