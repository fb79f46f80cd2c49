"""The report of an audit, and how the command refuses what it cannot audit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.audit.attribution import Cause, Gap
from troupe.orchestrator.insight.audit.auditor import AuditFailed, AuditReport
from troupe.orchestrator.runs.audit import audit, audited_roles, one_engine
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.spec.load import load_rollout_spec, parse_spec, read_document
from troupe.orchestrator.telemetry.console import Console
from troupe.workers.contract.audit import PromptDifference

SPECS = ROOT / "deploy" / "specs"
GOOD = Gap("sampler", "rollout-0", 256, 0.024, 0.14, 0.021, ())
REPORT = AuditReport(
    "the initial weights", 0, "bfloat16", (GOOD, replace(GOOD, side="trainer", worker="trainer")), 0.03, 4, (), {}
)


def failed(*causes: Cause, side: str = "sampler") -> AuditReport:
    """The report with one side that failed."""
    gaps = tuple(replace(gap, causes=causes) if gap.side == side else gap for gap in REPORT.gaps)
    return replace(REPORT, gaps=gaps)


def test_a_report_that_passed_has_figures_and_no_findings() -> None:
    assert REPORT.passed
    assert REPORT.findings() == []
    assert REPORT.lines()[-1] == "passed"
    assert "0.024" in REPORT.lines()[1]
    assert REPORT.require() is None


@pytest.mark.parametrize(
    ("kind", "side", "words", "remedy"),
    [
        ("temperature", "sampler", "temperature 1", "sampling.temperature"),
        ("temperature", "trainer", "temperature 1", "once"),
        ("head", "sampler", "an output head in 1", "head_dtype"),
        ("weights", "sampler", "older weights in 1", "did not reach all weights"),
        ("prefix cache", "sampler", "a stale prefix cache", "enable_prefix_caching"),
        ("positions", "trainer", "shifted positions (1)", "packing"),
    ],
)
def test_a_cause_has_a_name_and_a_remedy(kind: str, side: str, words: str, remedy: str) -> None:
    report = failed(Cause(kind, "1", 0.97), side=side)
    (finding,) = report.findings()
    assert words in finding
    assert "97.0%" in finding
    assert remedy in finding
    with pytest.raises(AuditFailed) as caught:
        report.require()
    assert finding in str(caught.value)


def test_causes_that_cannot_be_told_apart_are_all_named() -> None:
    (finding,) = failed(Cause("weights", "lm_head", 0.9), Cause("weights", "model.norm", 0.89)).findings()
    assert "older weights in lm_head or older weights in model.norm explains 90.0%" in finding


def test_a_template_is_a_finding_of_its_own() -> None:
    report = replace(REPORT, prompt_differences=(PromptDifference("e0-r1", 3, "<|user|>", "[user]"),))
    assert not report.passed
    (finding,) = report.findings()
    assert finding.startswith("template: prompt e0-r1 differs from token 3 on")
    assert "model.chat_template" in finding


def test_the_report_as_json() -> None:
    data = json.loads(json.dumps(failed(Cause("head", "bfloat16", 0.8)).as_json()))
    assert data["passed"] is False
    assert data["gaps"][0]["causes"][0]["about"] == "bfloat16"
    assert len(data["findings"]) == 1


def test_an_audit_starts_a_judge_only_if_it_plays_against_the_policy() -> None:
    players = "roles.environment.players={first: policy, second: judge}"
    judge = "roles.judge={model: {path: .cache/models/tiny-llama}, max_model_len: 128, max_tokens: 2}"
    alone = audited_roles(load_rollout_spec(SPECS / "tiny-judge.yaml"))
    assert alone == {"rollout", "environment", "policy"}
    assert audited_roles(load_rollout_spec(SPECS / "tiny-self-play.yaml", [players, judge])) == alone | {"judge"}


def test_an_audit_has_one_engine() -> None:
    changes = ["roles.rollout.workers=3", "roles.rollout.max_workers=4"]
    spec = one_engine(load_rollout_spec(SPECS / "tiny-grpo.yaml", changes))
    assert spec.roles.rollout.workers == 1


def test_offline_training_has_no_sampler(tmp_path: Path) -> None:
    spec = parse_spec(read_document(SPECS / "tiny-sft.yaml"))
    with pytest.raises(UsageError, match="no rollouts"):
        audit(RunRequest(spec, tmp_path, False, None), Console())


def test_a_run_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    spec = load_rollout_spec(SPECS / "tiny-grpo.yaml")
    with pytest.raises(UsageError, match="no valid checkpoint"):
        audit(RunRequest(spec, tmp_path, True, None), Console())


def test_a_draw_that_nothing_explains_is_told_from_a_gap_of_the_logprobs() -> None:
    (finding,) = failed(Cause("unexplained", "temperature 0.44, top_p 0.7", 0.0, samples_only=True)).findings()
    assert "the log-probs are right, but the tokens are not drawn from them" in finding
    assert "(the best candidates: temperature 0.44, top_p 0.7)" in finding


def test_an_adapter_that_the_engine_does_not_compute_with_is_named() -> None:
    found = failed(Cause("adapter", "doubled", 0.99)).findings()
    assert "rollout-0: an adapter that counts twice explains 99.0% of the gap" in found[0]
    assert "the engine does not compute with the adapter of this version" in found[0]
