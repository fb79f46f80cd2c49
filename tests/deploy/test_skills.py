"""The skills, followed to the letter: planted bad specs become valid, and remedies of sick runs load and fit."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.warm_probes import forked_probes
from troupe.orchestrator.cli import app, fail
from troupe.orchestrator.insight.verdicts.apply import with_lines
from troupe.orchestrator.spec.errors import Code, SpecError

SKILLS = {file.parent.name: file.read_text() for file in sorted((ROOT / "deploy" / "skills").glob("*/SKILL.md"))}
RECORDED = ROOT / "tests" / "orchestrator" / "insight" / "verdicts" / "recorded"


def commands(skill: str) -> list[str]:
    """The commands in the fences of a skill, in their order."""
    fences = re.findall(r"^```\n(.*?)^```", SKILLS[skill], re.DOTALL | re.MULTILINE)
    return [line for fence in fences for line in fence.splitlines()]


def answer(command: str, capsys: pytest.CaptureFixture[str], **names: object) -> tuple[int, Any]:
    """Exit code and JSON of a command of a skill, with these words in place of its capitals."""
    words = [str(names.get(word, word)) for word in re.split(r"\b([A-Z]+)\b", command)]
    result = CliRunner().invoke(app, shlex.split("".join(words))[1:])
    if not isinstance(result.exception, SpecError):
        return result.exit_code, json.loads(result.stdout)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("sys.argv", ["troupe", "--json"])
        fail(str(result.exception), 2, [problem.found() for problem in result.exception.problems])
    return 2, json.loads(capsys.readouterr().out)


def at(document: Any, path: str) -> tuple[Any, str | int]:
    """The section of a dotted path, and the last part."""
    *sections, last = (int(part) if part.isdecimal() else part for part in path.split("."))
    for part in sections:
        document = document[part] if isinstance(part, int) else document.setdefault(part, {})
    return document, last


def repaired(document: dict[str, Any], problem: Mapping[str, Any], meant: dict[str, Any]) -> dict[str, Any]:
    """A spec with the change of the table in `repair-a-spec` for one problem; `meant`: what the user knows."""
    section, last = at(document, problem["field"])
    suggestion = problem["suggestion"]
    match problem["code"]:
        case "unknown-field" if suggestion is None:
            del section[last]
        case "unknown-field":
            top = suggestion.partition(".")[0] in {"model", "roles", "algorithm", "schedule", "sampling", "data"}
            parent = "" if "." in suggestion and top else problem["field"].rpartition(".")[0]
            target, name = at(document, f"{parent}.{suggestion}".strip("."))
            target[name] = section.pop(last)
        case "unknown-value" | "out-of-range":
            section[last] = yaml.safe_load(suggestion)
        case "wrong-type":
            section[last] = yaml.safe_load(section[last])
        case "missing-field":
            section[last] = at(meant, problem["field"])[0][last]
        case "conflict" if problem["message"].endswith("; remove it"):
            del section[last]
        case "unusable":
            (quoted, *_) = re.findall(r"'([^']*)'", problem["message"])
            at(document, problem["field"])
            text = yaml.safe_dump(document["data"]).replace(quoted, suggestion)
            document["data"] = yaml.safe_load(text)
        case code:
            pytest.fail(f"{code}: {problem['message']}")
    return document


@pytest.mark.parametrize(
    ("field", "value", "codes"),
    [
        ("roles.rolout", {"workers": 1}, ["unknown-field"]),
        ("schedule.step", 3, ["unknown-field"]),
        ("learning_rate", 1e-5, ["unknown-field"]),
        ("algorithm.num_generations", 4, ["unknown-field"]),
        ("sampling.wings", 2, ["unknown-field"]),
        ("algorithm.name", "gpro", ["unknown-value"]),
        ("data.train.kind", "josnl", ["unknown-value"]),
        ("roles.reward.functions.0.name", "last_numbr", ["unknown-value"]),
        ("sampling.temperature", -1.0, ["out-of-range"]),
        ("sampling.top_p", 1.5, ["out-of-range"]),
        ("schedule.prompts_per_step", "8", ["wrong-type"]),
        ("data.train.prompt", "qestion", ["unusable"]),
        ("model.path", None, ["missing-field"]),
        ("roles.reward.functions.0.name", None, ["missing-field"]),
        ("algorithm.importance", {"mode": "none", "level": "sequence"}, ["conflict"]),
    ],
)
def test_a_bad_spec_is_repaired_by_the_skill(
    field: str,
    value: object,
    codes: list[str],
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    document = yaml.safe_load((ROOT / "deploy/specs/tiny-grpo.yaml").read_text()) | {"name": "bad"}
    document["model"]["path"] = str(tiny_model)
    document["data"]["train"] = {"kind": "jsonl", "path": "deploy/recipes/gsm8k/rows.jsonl", "prompt": "question"}
    document["roles"]["reward"]["functions"] = [{"name": "last_number"}]
    meant = copy.deepcopy(document)
    section, last = at(document, field)
    if field == "roles.rolout":
        value = document["roles"].pop("rollout")
    section[last] = value
    if value is None:
        del section[last]
    (validate,) = commands("repair-a-spec")
    spec, found, code, said = tmp_path / "spec.yaml", list[str](), -1, None
    for _ in range(4):
        spec.write_text(yaml.safe_dump(document))
        with forked_probes():
            code, said = answer(validate, capsys, SPEC=spec)
        if code == 0:
            break
        found += [problem["code"] for problem in said["problems"]]
        for problem in said["problems"]:
            document = repaired(document, problem, meant)
    assert code == 0 and found == codes, said


@pytest.mark.parametrize(
    ("right", "wrong", "mended"),
    [("\n  name: grpo", "\n\tname: grpo", ("\t", "  ")), ("project: team", "project: @team", ("@team", "'@team'"))],
)
def test_yaml_that_cannot_be_read_is_mended_at_its_line(
    right: str,
    wrong: str,
    mended: tuple[str, str],
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Spaces instead of tabs, and quotes around special characters."""
    document = yaml.safe_load((ROOT / "deploy/specs/tiny-grpo.yaml").read_text()) | {"name": "bad"}
    document["model"]["path"], spec = str(tiny_model), tmp_path / "spec.yaml"
    document["output"] = {"project": "team"}
    text = yaml.safe_dump(document, sort_keys=False)
    assert text.count(right) == 1
    spec.write_text(text.replace(right, wrong))
    (validate,) = commands("repair-a-spec")
    code, said = answer(validate, capsys, SPEC=spec)
    (problem,) = said["problems"]
    assert (code, problem["code"]) == (2, "unreadable")
    lines = spec.read_text().splitlines()
    lines[problem["line"] - 1] = lines[problem["line"] - 1].replace(*mended)
    spec.write_text("\n".join(lines))
    assert answer(validate, capsys, SPEC=spec)[0] == 0


def test_the_skill_has_a_row_for_every_code() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", SKILLS["repair-a-spec"], re.MULTILINE)
    assert sorted({*rows} - {"code"}) == sorted(get_args(Code))


@pytest.mark.parametrize(
    "sick", ["sick-collapse-grpo", "sick-learning-rate", "sick-kl-coef", "sick-never-solved", "sick-slow-reward"]
)
def test_a_sick_run_is_changed_by_the_skill(sick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / sick
    run.mkdir()
    before = yaml.safe_load((RECORDED / f"{sick}.yaml").read_text())
    (run / "spec.yaml").write_text(yaml.safe_dump(before))
    (run / "metrics.jsonl").write_text((RECORDED / f"{sick}.jsonl").read_text())
    report, plan, *_ = commands("tune-a-run")
    code, said = answer(report, capsys, RUN=run)
    (found,) = said.values()
    verdict = next(one for one in found["verdicts"] if one["level"] in ("problem", "warning") and one["until"] is None)
    remedy = next(one for one in verdict["remedies"] if one["set"])
    changes = " --set ".join(shlex.quote(value) for value in remedy["set"])
    code, planned = answer(plan, capsys, RUN=run, CHANGE=f"{changes} --allow-unknown --cluster 1x8")
    assert code in (0, 1) and planned, planned  # the spec is valid; this cluster may lack room
    assert with_lines(before, remedy["spec"]) != before


def test_every_command_of_the_skills_exists_with_its_options() -> None:
    known = typer.main.get_command(app)
    said = [command for skill in SKILLS for command in commands(skill)]
    assert len(said) > 15
    for command in said:
        program, name, *words = shlex.split(command)
        found = known.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        options = {option for one in found.params for option in one.opts}
        assert program == "troupe" and {word for word in words if re.match(r"--?[a-z]", word)} <= {*options, "-reward"}


def test_the_command_lists_prints_and_copies_them(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["skill", "--to", str(tmp_path / "skills"), "--json"])
    described = json.loads(listed.stdout)
    assert list(described) == list(SKILLS) and all(described.values())
    for name, text in SKILLS.items():
        assert CliRunner().invoke(app, ["skill", name]).stdout == text
        assert (tmp_path / "skills" / name / "SKILL.md").read_text() == text
        head = yaml.safe_load(text.split("---")[1])
        assert head == {"name": name, "description": described[name]}
