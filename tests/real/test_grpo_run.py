"""Whole runs of the shipped tiny GRPO spec, started as a user starts them: real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.checkpoint import verify
from orchestrator.spec import load_spec
from tests.conftest import ROOT
from tests.real.helpers import (
    EXPECTED,
    GRPO,
    POLICY,
    RUN_TIMEOUT_S,
    SAMPLES,
    Command,
    Run,
    absent,
    balanced,
    interrupt,
    running,
    trajectories,
    troupe,
    weights,
)

LEARNING = ("policy/loss", "policy/grad_norm", "reward/mean", "response_tokens/mean", "policy/entropy")
"""Figures that are the same in every run of one spec and seed."""
CHAIN_STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are written."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def grpo(folder: Path) -> Iterator[Run]:
    """The shipped spec, to its end."""
    with running(Run(folder, GRPO, name="grpo")) as run:
        assert run.wait() == 0, run.told
        yield run


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Iterator[Run]:
    """The same, but interrupted twice: by Ctrl-C after step 1, and by kill -9 of the driver after step 3."""
    overrides = (f"schedule.steps={CHAIN_STEPS}", "checkpoint.every_steps=1", "checkpoint.keep=10")
    with running(Run(folder, GRPO, *overrides, name="resumed")) as first:
        first.until_step(1)
        interrupt(first)
        assert first.wait() == 130, first.told
        assert "--resume goes on" in first.stdout
        assert first.left_over() == []
        assert first.weight_files == []
        saved = max(int(path.name.removeprefix("step-")) for path in (first.out / "checkpoints").iterdir())
        assert saved == first.steps()[-1] < CHAIN_STEPS
    with running(Run(folder, GRPO, *overrides, name="resumed", resume=True)) as second:
        second.until_step(3)
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        assert second.left_over() == []
        assert second.weight_files == []
    with running(Run(folder, GRPO, *overrides, name="resumed", resume=True)) as third:
        assert third.wait() == 0, third.told
        yield third


def test_a_run_leaves_its_metrics(grpo: Run) -> None:
    steps = load_spec(GRPO).schedule.steps
    assert grpo.steps() == list(range(1, steps + 1))
    for line in grpo.metrics:
        # Without a mixed group there is nothing to learn from, and no update.
        assert absent(line, EXPECTED + POLICY * (line["groups/mixed"] > 0)) == []
        assert balanced(line)
        assert line["staleness/max"] == 0
    last = grpo.metrics[-1]
    assert last["ledger/trained"] == last["ledger/dispatched"] == steps * SAMPLES
    assert last["ledger/in_flight"] == last["ledger/dropped"] == last["ledger/retries"] == 0


def test_a_run_leaves_the_samples_it_trained_on(grpo: Run) -> None:
    names = [path.name for path in sorted((grpo.out / "trajectories").iterdir())]
    assert names == [f"step-{step:06d}.parquet" for step in grpo.steps()]
    for line in grpo.metrics:
        table = trajectories(grpo.out, line["step"]).to_pylist()
        assert len({(row["prompt_uid"], row["sample_index"]) for row in table}) == SAMPLES
        assert fmean(row["reward"] for row in table) == pytest.approx(line["reward/mean"])
        for row in table:
            assert row["status"] == "ok"
            assert len(row["response_ids"]) == len(row["rollout_logprobs"])
            span = {"version": line["step"] - 1, "start": 0, "end": len(row["response_ids"])}
            assert row["weight_versions"] == [span]


def test_a_run_leaves_checkpoints_that_verify_and_a_spec_that_loads(grpo: Run) -> None:
    spec = load_spec(GRPO)
    found = sorted((grpo.out / "checkpoints").iterdir())
    assert len(found) == spec.checkpoint.keep
    assert [verify(path).step for path in found][-1] == spec.schedule.steps
    assert load_spec(grpo.out / "spec.yaml").model_dump(exclude={"name"}) == spec.model_dump(exclude={"name"})


def test_a_run_leaves_nothing_running_and_nothing_in_shared_memory(grpo: Run) -> None:
    assert grpo.left_over() == []
    assert grpo.weight_files == []


def test_what_is_exported_is_the_checkpoint_as_a_plain_model(grpo: Run, tmp_path: Path, tiny_model: Path) -> None:
    target = tmp_path / "model"
    subprocess.run(troupe("export", str(grpo.out), str(target)), cwd=ROOT, check=True, timeout=60)
    model = AutoModelForCausalLM.from_pretrained(target)
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    saved = weights(grpo.out, load_spec(GRPO).schedule.steps)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, saved[name]), name
        assert not torch.equal(tensor, start[name].to(tensor.dtype)), name
    text = AutoTokenizer.from_pretrained(target).apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert "1" in text


def test_grpo_learns(grpo: Run) -> None:
    rewards = [line["reward/mean"] for line in grpo.metrics]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.05, rewards  # eight standard errors of a step


@pytest.mark.long
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(grpo: Run, resumed: Run) -> None:
    assert resumed.steps() == list(range(1, CHAIN_STEPS + 1))
    for whole, parts in zip(grpo.metrics, resumed.metrics, strict=False):
        assert {name: parts[name] for name in LEARNING} == {name: whole[name] for name in LEARNING}
        assert balanced(parts)
    last = resumed.metrics[-1]
    assert last["ledger/trained"] == last["ledger/dispatched"] == CHAIN_STEPS * SAMPLES
    assert resumed.left_over() == []
    assert resumed.weight_files == []
    whole, parts = weights(grpo.out, CHAIN_STEPS), weights(resumed.out, CHAIN_STEPS)
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []


@pytest.mark.long
def test_twice_the_workers_train_the_same(grpo: Run, resumed: Run, folder: Path, tiny_model: Path) -> None:
    overrides = ("roles.rollout.workers=2", "roles.policy.workers=2", "schedule.steps=2", "checkpoint.every_steps=1")
    with running(Run(folder, GRPO, *overrides, name="twice")) as run:
        assert run.wait() == 0, run.told
        assert len({row["engine"] for row in trajectories(run.out, 1).to_pylist()}) == 2
        one, two = (by_sample(run_.out, 1) for run_ in (grpo, run))
        assert two == one
        for name in LEARNING:
            assert run.metrics[0][name] == pytest.approx(grpo.metrics[0][name], rel=1e-4, abs=1e-6), name
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    one, two = weights(resumed.out, 1), weights(run.out, 1)
    for name, tensor in one.items():
        moved = (tensor - start[name].float()).norm()
        # Adam's first step is the gradient's sign: it turns round-off in the smallest gradients into whole steps.
        assert (two[name] - tensor).norm() < 0.05 * moved, name


def test_a_model_is_evaluated_alone(grpo: Run, folder: Path) -> None:
    spec = folder / "eval.yaml"
    document = json.loads(load_spec(GRPO).model_dump_json(exclude_unset=True))
    document["data"]["eval"] = {**document["data"]["train"], "seed": 2}
    document["evaluation"] = {"prompts": 8, "sampling": {"temperature": 1.0, "samples": 4}}
    spec.write_text(json.dumps(document))
    trained = grpo.out / "checkpoints" / f"step-{load_spec(GRPO).schedule.steps:06d}" / "model"
    with running(Command(folder, troupe("eval", str(spec), "--model", str(trained)))) as command:
        seen: set[str] = set()
        command.until(lambda: roles_seen(command, seen) or command.process.poll() is not None, "done")
        assert command.wait(RUN_TIMEOUT_S) == 0, command.told
        assert command.left_over() == []
    assert seen == {"RolloutWorker", "RewardWorker"}
    figures: dict[str, Any] = json.loads(command.stdout)
    assert figures["eval/prompts"] == 8
    assert figures["eval/failed_samples"] == figures["eval/refused"] == 0
    assert figures["eval/reward"] > 2 * grpo.metrics[0]["reward/mean"]
    assert {"eval/pass@2", "eval/pass@4"} <= figures.keys()


def roles_seen(command: Command, seen: set[str]) -> bool:
    """Add the worker classes that run now; never true, so that it is called until the end."""
    for process in command.processes("Worker"):
        try:
            title = process.cmdline()[0]
        except (psutil.Error, IndexError):
            continue
        if title.startswith("ray::"):
            seen.add(title.removeprefix("ray::").split(".")[0])
    return False


def by_sample(out: Path, step: int) -> dict[tuple[str, int], tuple[list[int], float]]:
    """Response and reward of every sample of a step."""
    rows = trajectories(out, step).to_pylist()
    return {(row["prompt_uid"], row["sample_index"]): (row["response_ids"], row["reward"]) for row in rows}
