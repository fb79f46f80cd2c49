"""A resumed run that evaluates in another way: held-out results before and after the change are not compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import fake_spec
from troupe.orchestrator.insight.report.overview import overview
from troupe.orchestrator.insight.verdicts.apply import comparable_history, report_of
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS
from troupe.orchestrator.spec.derived.digests import evaluation_digest, reward_digest
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.reward_config import RewardModelConfig

STEPS = 12
Json = dict[str, Any]


def write(folder: Path, metrics: Json, starts: list[Json], settings: dict[int, str] | None = None) -> RunFolder:
    """A run folder with these metrics (a function of the step each), starts and evaluations by step."""
    lines = [{"step": step, **{name: of(step) for name, of in metrics.items()}} for step in range(STEPS + 1)]
    events = [{"event": "run_started", **start} for start in starts]
    for name, rows in (("metrics", lines), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if settings is not None:
        made = [{"step": step, "sets": {}, "settings": of} for step, of in settings.items()]
        (folder / EVALUATIONS).write_text(json.dumps({"format": 1, "sets": {}, "evaluations": made}))
    return RunFolder(folder)


def evaluated(run: RunFolder) -> set[int]:
    """Steps whose held-out results are compared."""
    history = comparable_history(run, History.of(run.metrics(), {}, run.events()))
    return {step for series in history.named("eval/") for step in series.steps}


def test_a_harder_evaluation_after_a_resumption_is_no_loss_of_quality(tmp_path: Path) -> None:
    """From step 7 on, harder prompts: the held-out reward falls from 0.9 to 0.3 and rises again. Nothing is hacked."""
    metrics = {
        "reward/mean": lambda step: 0.3 + 0.05 * step,
        "eval/reward": lambda step: 0.3 + 0.02 * step if step > 6 else 0.9,
    }
    run = write(tmp_path, metrics, [], {step: "hard" if step > 6 else "easy" for step in range(STEPS + 1)})
    assert evaluated(run) == set(range(7, STEPS + 1))
    assert "reward-hacking" not in {verdict.name for verdict in report_of(run).verdicts}
    page = overview(run)
    assert page["outcome"]["held_out"] == {"name": "eval/reward", "first": 0.3 + 0.02 * 7, "last": 0.3 + 0.02 * 12}
    assert "reward-hacking" not in {verdict["name"] for verdict in page["verdicts"]}
    assert page["metrics"]["eval/reward"]["steps"][0] == 0  # the curve shows all of them


@pytest.mark.parametrize(("before", "overfits"), [("a", True), ("b", False), (None, True)])
def test_offline_training_is_judged_on_one_evaluation(tmp_path: Path, before: str | None, overfits: bool) -> None:
    """The held-out loss is higher on the examples since the resumption at step 6, and falls there and before.

    Where the record does not say how an evaluation was made, it is compared.
    """
    starts = [
        {"resume_at": 0} | ({} if before is None else {"evaluation": before}),
        {"resume_at": 6, "evaluation": "a"},
    ]
    run = write(tmp_path, {"eval/loss": lambda step: (2.0 if step > 6 else 1.0) - 0.01 * step}, starts)
    assert ("overfitting" in {verdict.name for verdict in report_of(run).verdicts}) is overfits
    assert evaluated(run) == set(range(STEPS + 1) if overfits else range(7, STEPS + 1))


def test_an_evaluation_belongs_to_the_last_process_that_made_its_step(tmp_path: Path) -> None:
    """Tried in another way from step 3 on, and then from there as before; the other way is overwritten."""
    starts = [
        {"resume_at": at, "evaluation": digest} for at, digest in ((0, "a"), (3, "b"), (3, "a"), (9, "c"), (11, "a"))
    ]
    run = write(tmp_path, {"eval/loss": lambda step: 1.0}, starts)
    assert evaluated(run) == {*range(10), 12}


def test_rewards_of_another_kind_do_not_fall(tmp_path: Path) -> None:
    """The run resumes at step 6 with a stricter reward, which rises from 0.2; before, rewards were about 0.8."""
    metrics = {
        "reward/mean": lambda step: 0.2 + 0.001 * (step - 6) if step > 6 else 0.8,
        "reward/std": lambda step: 0.1,
        "groups/mixed": lambda step: 0.9 if step > 6 else 0.0,
    }
    starts: list[Json] = [{"resume_at": 0, "rewards": "a"}, {"resume_at": 6, "rewards": "a"}]
    same = write(tmp_path, metrics, starts)
    assert {"reward-falls", "no-signal"} <= {verdict.name for verdict in report_of(same).verdicts}
    starts[1]["rewards"] = "b"
    changed = write(tmp_path, metrics, starts)
    assert not {"reward-falls", "no-signal"} & {verdict.name for verdict in report_of(changed).verdicts}
    assert overview(changed)["outcome"]["learned"]["first"] == pytest.approx(0.202)


def test_the_digest_of_rewards_is_that_of_what_they_are(tmp_path: Path) -> None:
    base = fake_spec()
    reward = base.roles.reward

    def digest(**changed: Any) -> str:
        functions = tuple(one.model_copy(update=changed) for one in reward.functions)
        roles = base.roles.model_copy(update={"reward": reward.model_copy(update={"functions": functions})})
        return reward_digest(base.model_copy(update={"roles": roles}))

    assert digest() == digest(timeout_s=77.0) == reward_digest(base)
    assert len({digest(), digest(weight=0.5), digest(args={"letters": "x"})}) == 3
    models = [RewardModelConfig(path="m", adapter=adapter) for adapter in (None, "a", "b")]
    models += [RewardModelConfig(path="m", offset=1.0), RewardModelConfig(path="m", level="min")]
    rewards = [reward.model_copy(update={"model": model}) for model in models]
    rewards += [reward.model_copy(update={"models": {"x": model}}) for model in models]
    specs = [base.model_copy(update={"roles": base.roles.model_copy(update={"reward": one})}) for one in rewards]
    for of in (reward_digest, evaluation_digest):
        assert len({*map(of, specs), of(base)}) == len(specs) + 1
    assert digest(normalize=True) == digest(), "what rewards are, not what is trained on"


def test_a_damaged_file_of_evaluations_hides_none(tmp_path: Path) -> None:
    run = write(tmp_path, {"eval/reward": lambda step: 1.0}, [])
    for evaluations in ('[{"step": 0}, 3]', '[{"settings": "a"}]', "{}", "[]"):
        (tmp_path / EVALUATIONS).write_text(f'{{"format": 1, "sets": {{}}, "evaluations": {evaluations}}}')
        assert evaluated(run) == set(range(STEPS + 1))
