"""Chains whose stages run several times, and stages that train on the samples of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.chain import PlannedRun, results_folder
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs

ROUNDS = """\
name: rounds
rounds: 3
model: {path: base, dtype: float32}
roles: {policy: {micro_batch_tokens: 2048}}
stages:
  sample:
    roles: {rollout: {}, reward: {functions: [{name: exact_match}]}}
    algorithm: {name: grpo}
    schedule: {steps: 1, prompts_per_step: 8}
    data: {train: {kind: jsonl, path: prompts.jsonl}}
  reward_model:
    model: {path: base}
    schedule: {steps: 2, examples_per_step: 8}
    data: {train: {kind: jsonl, path: "stage:sample", answers: answers, scores: scores}}
  dpo:
    roles: {reference: {colocate_with: policy}}
    schedule: {steps: 4, examples_per_step: 8}
    data: {train: {kind: jsonl, path: "stage:sample", answers: answers, scores: scores}}
  sft:
    model: {path: "stage:dpo"}
    schedule: {steps: 5, examples_per_step: 8}
    data: {train: {kind: jsonl, path: "stage:sample", where: reward > 0}}
"""


def planned(text: str, *overrides: str) -> dict[str, PlannedRun]:
    runs = plan_runs(yaml_reader.override(yaml_reader.parse(text, "rounds.yaml"), list(overrides)))
    return {str(run.out.relative_to("runs/rounds")): run for run in runs}


def test_every_round_starts_from_the_last_policy_and_trains_on_its_own_samples() -> None:
    runs = planned(ROUNDS)
    stages = ("sample", "reward_model", "dpo", "sft")
    assert [*runs] == [f"round-000{number}/{stage}" for number in (1, 2, 3) for stage in stages]
    model = {name: run.spec.model.path for name, run in runs.items()}
    folder = "runs/rounds/round-0001"
    assert model["round-0001/sample"] == model["round-0001/dpo"] == "base"
    assert model["round-0001/sft"] == f"{folder}/dpo/checkpoints/step-000004/model"
    assert model["round-0002/sample"] == model["round-0002/dpo"] == f"{folder}/sft/checkpoints/step-000005/model"
    assert model["round-0003/dpo"] == "runs/rounds/round-0002/sft/checkpoints/step-000005/model"
    assert model["round-0003/reward_model"] == "base", "its own model, not the file's"
    data = {name: run.spec.model_dump()["data"]["train"]["path"] for name, run in runs.items()}
    for number in (1, 2, 3):
        samples = f"runs/rounds/round-000{number}/sample"
        assert data[f"round-000{number}/dpo"] == f"{samples}/ranked.jsonl"
        assert data[f"round-000{number}/sft"] == f"{samples}/best.jsonl"
        assert runs[f"round-000{number}/dpo"].samples_of == (Path(samples),)
        assert runs[f"round-000{number}/sample"].samples_of == ()
    assert len({run.spec.name for run in runs.values()}) == 12, "their checkpoints in an object store do not mix"
    assert results_folder([*runs.values()]) == Path("runs/rounds")


def test_a_stage_that_names_itself_goes_on_from_its_model_of_the_round_before() -> None:
    own = 'stages.reward_model.model={path: "stage:reward_model"}'
    runs = planned(ROUNDS, "model.revision=main", own)
    models = [run.spec.model for name, run in runs.items() if name.endswith("reward_model")]
    step = "reward_model/checkpoints/step-000002/model"
    before = [f"runs/rounds/round-000{number}/{step}" for number in (1, 2)]
    assert [model.path for model in models] == ["base", *before]
    assert models[0].revision == "main" and models[0].dtype == "float32", "the first one is the shared model"
    borrowed = ["model.path" in run.borrowed for name, run in runs.items() if name.endswith("reward_model")]
    assert borrowed == [False, True, True], "what the first round starts from has to exist"
    assert planned(ROUNDS, "rounds=1", own)["reward_model"].spec.model.path == "base"
    with pytest.raises(SpecError, match="no earlier stage 'reward_model'"):
        planned(ROUNDS.replace("rounds: 3\n", ""), own)


def test_a_stage_that_is_invalid_is_not_taken_for_one_of_another_kind() -> None:
    text = ROUNDS.replace("functions: [{name: exact_match}]", 'model: {path: "stage:reward_model"}')
    order = ["reward_model", "sample"]
    data = yaml_reader.parse(text, "rounds.yaml").data["stages"]
    stages = {name: data[name] for name in order}
    stages["reward_model"] |= {"schedule": {"steps": 0, "examples_per_step": 8}}
    stages["reward_model"]["data"]["train"] = {"kind": "jsonl", "path": "pairs.jsonl"}
    with pytest.raises(SpecError) as caught:
        planned(text, f"stages={json.dumps(stages)}")
    assert [problem.path for problem in caught.value.problems] == ["stages.reward_model.schedule.steps"]


def test_every_round_draws_what_the_rounds_before_have_not_drawn() -> None:
    """Of the same samples, the stages of a round draw from the start: those are new."""
    runs = planned(ROUNDS, "stages.sample.data.skip=3", "stages.sample.schedule.steps=2")
    skipped = {name: run.spec.data.skip for name, run in runs.items()}
    assert [skipped[f"round-000{number}/sample"] for number in (1, 2, 3)] == [3, 3 + 16, 3 + 32]
    assert {skip for name, skip in skipped.items() if "sample" not in name} == {0}
    continued = {name: run.continues for name, run in runs.items() if run.continues is not None}
    before = {f"round-000{number}/sample": Path(f"runs/rounds/round-000{number - 1}/sample") for number in (2, 3)}
    assert continued == before, "what these have drawn is known once they have ended"
    own = {"kind": "jsonl", "path": "texts.jsonl"}
    runs = planned(ROUNDS, f"stages.sft.data.train={json.dumps(own)}")
    assert [run.spec.data.skip for name, run in runs.items() if name.endswith("sft")] == [0, 40, 80]


def test_one_round_is_the_chain() -> None:
    text = ROUNDS.replace("rounds: 3\n", "")
    assert [*planned(text)] == [*planned(text, "rounds=1")] == ["sample", "reward_model", "dpo", "sft"]
    assert planned(text)["dpo"].spec.name == "rounds-dpo"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rounds: 3", "rounds: 0", "rounds: expected a whole number from 1 to 100, got '0'"),
        ("rounds: 3", "rounds: true", "rounds: expected a whole number from 1 to 100, got 'True'"),
        ('{kind: jsonl, path: "stage:sample", where', '{kind: json, path: "stage:sample", where',
         "stages.sft.data.train.path: samples of a stage are read with kind: jsonl"),
        ("algorithm: {name: grpo}", "algorithm: {name: grpo}\n    output: {trajectories: false}",
         "stages.dpo.data.train.path: stage sample keeps no samples"),
        ('path: "stage:sample", where', 'path: "stage:dpo", where',
         "stages.sft.data.train.path: stage dpo has no rollouts"),
        ('path: "stage:sample", where', 'path: "stage:smaple", where', "did you mean 'sample'?"),
    ],
)  # fmt: skip
def test_mistakes_are_said_once_with_their_field(old: str, new: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        planned(ROUNDS.replace(old, new))
    lines = str(caught.value).splitlines()
    assert any(said in line for line in lines) and len(lines) == len(set(lines)), lines


def test_rounds_without_a_policy_are_refused() -> None:
    text = """\
name: rounds
rounds: 2
model: {path: base}
roles: {policy: {}}
stages:
  reward_model:
    schedule: {steps: 2, examples_per_step: 8}
    data: {train: {kind: jsonl, path: pairs.jsonl}}
"""
    with pytest.raises(SpecError, match=r"rounds.yaml:2: rounds: no stage trains a policy"):
        planned(text)
