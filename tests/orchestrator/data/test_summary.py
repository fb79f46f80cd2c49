"""The data of a spec are read and counted before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from troupe.orchestrator.cli import app, main
from troupe.orchestrator.data.summary import data_metrics, describe, load_data
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.load import plan_runs, read_document

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"


def rows(path: Path, *prompts: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return f"{{kind: jsonl, path: {path}}}"


def spec(tmp_path: Path, *overrides: str) -> RunSpec:
    train = rows(tmp_path / "train.jsonl", "a", "b", "", 3, "c", "", "")
    held_out = rows(tmp_path / "eval.jsonl", "a", "x", "")
    data = [f"data.train={train}", f"data.eval={held_out}"]
    return plan_runs(read_document(GRPO, [*data, *overrides]))[0].spec


def test_rows_bad_rows_and_removed_rows_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    pools = load_data(spec(tmp_path)).pools
    assert describe(pools) == [
        "data.train: 3 rows, 4 bad rows skipped: train.jsonl:3: the prompt is empty; "
        "train.jsonl:4: the prompt is neither text nor messages; train.jsonl:6: the prompt is empty; ...",
        "data.eval: 1 rows, 1 removed because data.train has the same prompt, spaces aside (data.held_out), "
        "1 bad rows skipped: eval.jsonl:3: the prompt is empty",
    ]
    assert data_metrics(pools) == {
        "data/train_rows": 3.0,
        "data/train_bad_rows": 4.0,
        "data/eval_rows": 1.0,
        "data/eval_bad_rows": 1.0,
        "data/eval_removed_rows": 1.0,
    }
    assert data_metrics({"train": pools["train"]}, {"train": 7}) == {
        "data/train_rows": 3.0,
        "data/train_bad_rows": 4.0,
        "data/train_refused_rows": 7.0,
    }


def test_a_bad_row_is_refused_where_the_spec_stops_at_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:3: the prompt is empty"):
        load_data(spec(tmp_path, "failures.on_bad_row=stop"))


def test_validate_shows_the_rows_of_every_stage(tiny_model: Path) -> None:
    answer = CliRunner().invoke(app, ["validate", str(CHAIN), "--set", f"model.path={tiny_model}"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.count("is valid") == 3
    assert answer.output.count("  data.train: ") == 3


@pytest.mark.parametrize("command", ["validate", "run"])
def test_the_data_of_a_later_stage_are_read_before_the_first_starts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    broken = rows(tmp_path / "broken.jsonl", "", "")
    sets = [f"model.path={tiny_model}", f"stages.ppo.data.train={broken}", f"output.folder={tmp_path}"]
    options = [part for value in sets for part in ("--set", value)]
    monkeypatch.setattr("sys.argv", ["troupe", command, str(CHAIN), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "stages.ppo.data: data.train: no row can be used (2 bad; the first: broken.jsonl:1: the prompt is" in line
