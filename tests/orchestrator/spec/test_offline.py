"""Offline specs and chains of stages: what they become, and the messages that refuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from troupe.orchestrator import cli
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS, OfflineAlgorithmConfig
from troupe.orchestrator.roles.settings import offline_config, scorer_configs
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import ChainDocument
from troupe.orchestrator.spec.derived.paths import absolute_paths
from troupe.orchestrator.spec.derived.sampling import evaluation_metrics
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import parse_spec, plan_runs
from troupe.orchestrator.spec.offline import OfflineSpec, columns, data_format
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.offline_config import DpoLossConfig, KdLossConfig, KtoLossConfig, RewardLossConfig

DPO = """\
name: base
seed: 3
model: {path: models/m}
roles:
  policy:
    learning_rate: 1e-5
  reference: {colocate_with: policy}
algorithm:
  name: dpo
  beta: 0.2
schedule:
  steps: 4
  examples_per_step: 8
data:
  train:
    kind: jsonl
    path: train.jsonl
  max_length: 512
"""

CHAIN = """\
name: chain
model: {path: models/m}
roles:
  policy: {micro_batch_tokens: 2048}
data: {max_length: 512}
stages:
  sft:
    schedule: {steps: 4, examples_per_step: 8}
    data:
      train: {kind: jsonl, path: a.jsonl}
  reward_model:
    model: {path: "stage:sft"}
    schedule: {steps: 6, examples_per_step: 8}
    data:
      train: {kind: parquet, path: b.parquet}
  again:
    algorithm: {name: dpo}
    model: {path: "stage:sft"}
    roles: {reference: {}}
    schedule: {steps: 2, examples_per_step: 8}
    data:
      train: {kind: jsonl, path: b.jsonl}
"""


def parse(text: str) -> RunSpec:
    return parse_spec(yaml_reader.parse(text, "spec.yaml"))


def offline(text: str = DPO) -> OfflineSpec:
    spec = parse(text)
    assert isinstance(spec, OfflineSpec)
    return spec


def refused(text: str) -> list[str]:
    """The problems of a file, without its name."""
    with pytest.raises(SpecError) as caught:
        plan_runs(yaml_reader.parse(text, "spec.yaml"))
    return [str(problem).removeprefix("spec.yaml:") for problem in caught.value.problems]


def test_the_algorithm_decides_the_kind_of_spec() -> None:
    config = offline_config(offline())
    assert config.loss == DpoLossConfig(beta=0.2)
    assert (config.total_updates, config.examples.max_length, config.reference_model) == (4, 512, config.model)
    online = (ROOT / "deploy" / "specs" / "tiny-grpo.yaml").read_text()
    assert isinstance(parse(online), RolloutSpec)


def test_a_resolved_spec_is_a_good_spec() -> None:
    dumped = offline().model_dump_json()
    assert OfflineSpec.model_validate_json(dumped, strict=True) == offline()


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("seed: 3", "sampling: {max_tokens: 3}", "2: sampling: unknown field (fields of a spec: "),
        ("  beta: 0.2", "  clip_range: 0.2", "10: algorithm.clip_range: unknown field (fields of algorithm: name, "),
        ("  beta: 0.2", "  level: token", "10: algorithm.level: dpo does not use it; remove it"),
        (
            "  beta: 0.2",
            "  preference: bounded",
            "10: algorithm.preference: expected 'logistic' or 'fidelity', got 'bounded'",
        ),
        ("  beta: 0.2", "  label_smoothing: 0.5", "10: algorithm.label_smoothing: must be less than 0.5, got 0.5"),
        ("    path: train", "    margin: x\n    path: train", "17: data.train.margin: dpo on pairs does not use it"),
        ("  name: dpo", "  name: orpo", "7: roles.reference: orpo has no reference; remove the role"),
        (
            "  reference: {colocate_with: policy}\n",
            "",
            "4: roles.reference: is required: dpo compares with a reference",
        ),
        (
            "    path: train",
            "    messages: m\n    path: train",
            "17: data.train.messages: dpo on pairs does not use it; remove it",
        ),
        (
            "    path: train",
            "    loss_on: last\n    path: train",
            "17: data.train.loss_on: has no effect without messages; remove it",
        ),
        ("    path: train", "    loss_on: lst\n    path: train", "17: data.train.loss_on: expected 'all' or 'last'"),
        (
            "    path: train",
            "    message: m\n    path: train",
            "17: data.train.message: unknown field (did you mean 'messages'?)",
        ),
        ("steps: 4", "stps: 4", "12: schedule.stps: unknown field (did you mean 'steps'?)"),
        ("examples_per_step: 8", "prompts_per_step: 8", "13: schedule.prompts_per_step: unknown field"),
        (
            "    path: train",
            "    answers: x\n    chosen: y\n    path: train",
            "18: data.train.chosen: dpo on ranked does not use it; remove it",
        ),
        (
            "kind: jsonl",
            "kind: reasoning_gym",
            "16: data.train.kind: expected one of 'jsonl', 'json', 'parquet', 'csv', 'datasets', 'hub'",
        ),
        (
            "max_length: 512",
            "max_length: 4096",
            "5: roles.policy.micro_batch_tokens: 4096 cannot hold the two rows of an example of data.max_length, 4096",
        ),
        (
            "examples_per_step: 8",
            "examples_per_step: 1\n  minibatches: 2",
            "13: schedule.examples_per_step: 1 examples",
        ),
        ("seed: 3", "evaluation: {every_steps: 1}", "2: evaluation: needs data.eval"),
        ("{colocate_with: policy}", "{colocate_with: policy, cpus: 3}", "7: roles.reference.cpus: has no effect"),
        (
            "{colocate_with: policy}",
            "{colocate_with: policy, strategy: spread}",
            "7: roles.reference.strategy: has no effect",
        ),
        ("name: dpo", "name: dop", "9: algorithm.name: no algorithm 'dop' (did you mean 'dpo'?)"),
        ("beta: 0.2", "beta: 0", "10: algorithm.beta: must be greater than 0, got 0"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_their_line(old: str, new: str, line: str) -> None:
    assert old in DPO
    found = refused(DPO.replace(old, new, 1))
    assert any(problem.startswith(line) for problem in found), found


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_loss_by_token_takes_pairs(split: str) -> None:
    text = DPO.replace("dpo\n  beta: 0.2", "reward_model\n  level: token")
    text = text.replace("  reference: {colocate_with: policy}\n", "")
    text = text.replace("train:", "eval: {kind: jsonl, path: eval.jsonl}\n  train:")
    config = offline_config(offline(text))
    assert config.loss == RewardLossConfig(level="token")
    ranked = {
        "train": text.replace("    path: train", "    answers: x\n    path: train"),
        "eval": text.replace("eval.jsonl", "eval.jsonl, answers: x"),
    }[split]
    assert refused(ranked) == [f"9: algorithm.level: token compares pairs, but data.{split} has ranked answers"]


KD = DPO.replace("name: dpo\n  beta: 0.2", "name: kd\n  distill: {k: 8}")
ALONE = KD.replace("  reference: {colocate_with: policy}\n", "")


def test_a_teacher_is_in_the_samples_or_is_the_reference() -> None:
    recorded, scored = offline_config(offline(ALONE)), offline(KD.replace("colocate_with: policy", "threads: 1"))
    assert recorded.loss == KdLossConfig(distill=DistillConfig(coef=1.0, k=8)) and recorded.reference_model is None
    assert recorded.examples.sampled and scorer_configs(scored)["reference"].top_k == 8
    sampled = offline(ALONE.replace("distill: {k: 8}", "compares: sampled"))
    assert offline_config(sampled).loss == KdLossConfig(compares="sampled")
    assert not sampled.algorithm.distillation.coef


@pytest.mark.parametrize(
    ("text", "old", "new", "line"),
    [
        (
            ALONE,
            "k: 8",
            "support: full",
            "roles.reference: is required: algorithm.distill.support full needs the teach",
        ),
        (KD, "k: 8", "coef: 0", "algorithm.distill.coef: must be above 0: kd has no other loss"),
        (KD, "k: 8", "alpha: 0.2", "algorithm.distill.alpha: has no effect with the other fields of algorithm.distill"),
        (
            KD,
            "k: 8}",
            "k: 8}\n  compares: sampled",
            "algorithm.distill: has no effect with compares: sampled; remove it",
        ),
        (
            KD.replace("colocate_with: policy", "threads: 1"),
            "k: 8",
            "support: student_top_k",
            "roles.reference.colocate_with: algorithm.distill.support student_top_k needs the teacher's logits in the",
        ),
        (
            KD,
            "train.jsonl",
            "train.jsonl\n    template: '{prompt}!'",
            "data.train.template: kd on samples does not use",
        ),
        (KD, "train.jsonl", "train.jsonl\n    response: text", "data.train.response: kd on samples does not use it"),
    ],
)
def test_settings_of_a_teacher_that_cannot_work_are_refused(text: str, old: str, new: str, line: str) -> None:
    (problem,) = refused(text.replace(old, new))
    assert problem.partition(": ")[2].startswith(line)


def test_every_row_makes_a_loss_and_reads_only_its_own_options() -> None:
    for name, row in OFFLINE_ALGORITHMS.items():
        config = OfflineAlgorithmConfig(name=name)
        assert config.loss_config() == row.loss
        assert config.unused() == []
    config = OfflineAlgorithmConfig.model_validate(
        {"name": "kto", "beta": 0.3, "undesirable_weight": 2.0, "label_smoothing": 0.1}
    )
    assert config.loss_config() == KtoLossConfig(beta=0.3, undesirable_weight=2.0)
    assert config.unused() == ["label_smoothing"]


@pytest.mark.parametrize("name", ["healthy-sft", "healthy-dpo"])
def test_evaluations_report_what_the_spec_says(name: str) -> None:
    """Against the metrics of recorded runs; and every algorithm says what it reports."""
    recorded = ROOT / "tests" / "orchestrator" / "insight" / "verdicts" / "recorded" / name
    lines = recorded.with_suffix(".jsonl").read_text().splitlines()
    reported = {metric for line in lines for metric in json.loads(line) if metric.startswith("eval/")}
    spec = parse_spec(yaml_reader.read_file(recorded.with_suffix(".yaml")))
    assert set(evaluation_metrics(spec)) == reported
    for algorithm, row in OFFLINE_ALGORITHMS.items():
        names = OfflineAlgorithmConfig(name=algorithm).reported
        assert names[0] == "loss" and len(set(names)) == len(names)
        assert ("lm_loss" in names) == (dict(row.loss).get("lm_coef", 0) > 0)


def test_columns_follow_from_the_format() -> None:
    text = DPO.replace("    path", "    margin: m\n    path").replace("name: dpo", "name: reward_model")
    spec = offline(text.replace("  beta: 0.2\n", "").replace("  reference: {colocate_with: policy}\n", ""))
    source: Any = spec.data.train
    assert data_format(spec.row.formats, source) == "pairs"
    assert columns("pairs", source) == {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "margin": "m"}
    ranked = source.model_copy(update={"answers": "best_first"})
    assert data_format(spec.row.formats, ranked) == "ranked"
    assert columns("ranked", ranked) == {"prompt": "prompt", "answers": "best_first"}


def test_an_unknown_algorithm_gives_one_line() -> None:
    """Not one for every field that a spec of the other kind has."""
    lists = "`troupe algorithms` lists those on rollouts, such as grpo, and on offline data, such as dpo"
    assert refused(DPO.replace("name: dpo", "name: zzz")) == [f"9: algorithm.name: no algorithm 'zzz' ({lists})"]


# Chains


def test_a_stage_is_the_shared_part_with_its_own_section_over_it() -> None:
    sft, reward_model, again = plan_runs(yaml_reader.parse(CHAIN, "spec.yaml"), Path("out"))
    assert [run.spec.name for run in (sft, reward_model, again)] == ["chain-sft", "chain-reward-model", "chain-again"]
    assert [run.spec.algorithm.name for run in (sft, reward_model, again)] == ["sft", "reward_model", "dpo"]
    assert sft.spec.roles.policy.micro_batch_tokens == 2048
    assert sft.out == Path("out/sft")
    assert reward_model.spec.model.path == again.spec.model.path == "out/sft/checkpoints/step-000004/model"
    assert [problem.path for problem in reward_model.missing()] == ["stages.reward_model.data.train.path"]


def test_a_field_of_one_stage_is_set_by_its_path() -> None:
    document = yaml_reader.override(yaml_reader.parse(CHAIN, "spec.yaml"), ["stages.sft.schedule.steps=9"])
    sft, reward_model, _ = plan_runs(document)
    assert (sft.spec.schedule.steps, reward_model.spec.schedule.steps) == (9, 6)
    assert reward_model.spec.model.path == "runs/chain/sft/checkpoints/step-000009/model"


@pytest.mark.parametrize(
    ("override", "own"),
    [
        (
            "schedule.steps=9",
            "stages.sft.schedule.steps, stages.reward_model.schedule.steps, stages.again.schedule.steps",
        ),
        ("schedule={steps: 9, examples_per_step: 9}", "stages.sft.schedule, stages.reward_model.schedule"),
        ("data.train={kind: csv, path: c.csv}", "stages.sft.data.train, stages.reward_model.data.train"),
        ("data.train.path=c.jsonl", "stages.sft.data.train.path, stages.reward_model.data.train.path"),
        ("data.train={limit: 5}", "stages.sft.data.train, "),  # a section of another kind is replaced whole
        ("schedule=null", "stages.sft.schedule, "),
    ],
)
def test_a_shared_field_that_every_stage_has_is_set_in_the_stages(override: str, own: str) -> None:
    with pytest.raises(SpecError) as error:
        plan_runs(yaml_reader.override(yaml_reader.parse(CHAIN, "spec.yaml"), [override]))
    field = override.partition("=")[0]
    assert f"--set: {field}: has no effect: every stage has its own; set {own}" in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        *("seed=3", "name=other", "model.path=models/other", "algorithm.name=sft", "data={}", "data.max_length=64"),
        *("roles.policy={micro_batch_tokens: 4096, workers: 2}", "schedule={steps: 9, minibatches: 2}"),
        *("output.folder=other", "stages.sft.schedule.steps=9", "data.train.kind=parquet"),
    ],
)
def test_a_shared_field_that_a_stage_takes_over_may_be_set(override: str) -> None:
    assert len(plan_runs(yaml_reader.override(yaml_reader.parse(CHAIN, "spec.yaml"), [override]))) == 3


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('reward_model:\n    model: {path: "stage:sft"}', 'reward_model:\n    model: {path: "stage:stf"}',
         "12: stages.reward_model.model.path: no earlier stage 'stf' (did you mean 'sft'?)"),
        ('again:\n    algorithm: {name: dpo}\n    model: {path: "stage:sft"}',
         'again:\n    algorithm: {name: dpo}\n    model: {path: "stage:reward_model"}',
         "18: stages.again.model.path: stage reward_model trains a reward model; here a language model is needed"),
        ("path: b.jsonl", 'path: "stage:sft"',
         "22: stages.again.data.train.path: stage sft has no rollouts, and so no samples"),
        ("micro_batch_tokens: 2048", "micro_batch_token: 2048",
         "4: stages.again.roles.policy.micro_batch_token: unknown field (did you mean 'micro_batch_tokens'?)"),
        ("schedule: {steps: 6", "schedule: {steps: 0",
         "13: stages.reward_model.schedule.steps: must be at least 1, got 0"),
        ("  again:", "  A b:", "16: stages.A b: may hold lowercase letters, digits and, between them, '_' and '-'"),
        ("  sft:\n", "  sft:\n    name: x\n", "8: stages.sft.name: a stage is named by its key; remove it"),
        ("  sft:\n", "  sft:\n    output: {folder: elsewhere}\n",
         "8: stages.sft.output.folder: has no effect: stages are written to the chain's folder; set output.folder "
         "beside `stages`"),
        ("name: chain\n", "", "1: name: is required: lowercase letters, digits and, between them, '-'"),
    ],
)  # fmt: skip
def test_a_chain_is_checked_whole_before_anything_starts(old: str, new: str, line: str) -> None:
    assert old in CHAIN
    found = refused(CHAIN.replace(old, new, 1))
    assert line in found, found


def test_a_chain_that_is_sent_elsewhere_keeps_its_references() -> None:
    document = ChainDocument("chain", yaml_reader.parse(CHAIN, "spec.yaml").data)
    sent = absolute_paths(document.model_dump(mode="json"))
    assert sent["stages"]["again"]["model"]["path"] == "stage:sft"
    assert sent["model"]["path"] == str(Path("models/m").absolute())
    assert sent["output"]["folder"] == str(Path("runs").absolute())


def test_the_commands_take_a_chain() -> None:
    """Every stage is validated and planned; a submitted chain is one job."""
    chain, runner = str(ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"), CliRunner()
    validated = runner.invoke(cli.app, ["validate", chain], catch_exceptions=False)
    assert [line.split(": ", 1)[1] for line in validated.stdout.splitlines() if not line.startswith(" ")] == [
        "tiny-three-stage-sft is valid: sft, 8 steps of 16 examples",
        "tiny-three-stage-reward-model is valid: reward_model, 6 steps of 16 examples",
        "tiny-three-stage-ppo is valid: ppo, 4 steps of 16 samples",
    ]
    planned = runner.invoke(cli.app, ["plan", chain], catch_exceptions=False)
    assert planned.exit_code == 0
    # Once among the placements and once among the memories of every stage that has it.
    assert [planned.stdout.count(worker) for worker in ("policy-0", "critic-0")] == [6, 2]


@pytest.mark.parametrize("value", ["null", "true"])
def test_a_spec_of_a_run_before_rows_were_packed_is_read(value: str) -> None:
    spec = offline(DPO.replace("  beta: 0.2\n", f"  beta: 0.2\n  packing: {value}\n"))
    assert spec == offline() and spec.roles.policy.packing


def test_packing_is_turned_off_in_the_role() -> None:
    with pytest.raises(SpecError, match=r"algorithm\.packing: unknown field \(set roles\.policy\.packing instead\)"):
        offline(DPO.replace("  beta: 0.2\n", "  beta: 0.2\n  packing: false\n"))
