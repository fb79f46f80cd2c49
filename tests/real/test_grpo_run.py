"""Whole runs of the shipped tiny GRPO spec with `troupe run`, on real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from pyarrow import compute, fs
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.real.commands import (
    GRPO,
    POLICY_METRICS,
    RUN_METRICS,
    RUN_TIMEOUT_S,
    SAMPLES_PER_STEP,
    Command,
    Run,
    checkpoint_weights,
    equal_steps,
    interrupt,
    kill_each,
    ledger_balances,
    metrics_lines,
    missing_metrics,
    replayed,
    running,
    trajectories,
    troupe_command,
)
from tests.real.poison import Canary
from tests.s3_server import Faults, s3_server
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.training.checkpoint import verify
from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints

LEARNING = ("policy/loss", "policy/grad_norm", "reward/mean", "response_tokens/mean", "policy/entropy")
"""Metrics that are equal in every run of the same spec and seed."""
RESUMED_STEPS = 10
OF_THE_MACHINE = re.compile(r"time|seconds/.*|utilisation/.*|memory/.*|.*_per_s|trainer_restarts|prompt_tokens/cached")
"""Metrics that differ from run to run, and the count of restarts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of the runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def canary(folder: Path) -> Path:
    """A file that a planted pickle would create."""
    return folder / "canary"


@pytest.fixture(scope="module")
def model(folder: Path, canary: Path, tiny_model: Path) -> Path:
    """A model with pickles beside its weights."""
    shutil.copytree(tiny_model, path := folder / "model")
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "vocab.pkl", "rng_state.pth"):
        (path / name).write_bytes(pickle.dumps(Canary(canary)))
    return path


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    """Ports beyond loopback by kind of process, of the first run."""
    return {}


@pytest.fixture(scope="module")
def grpo(folder: Path, model: Path, ports: dict[str, int]) -> Iterator[Run]:
    """An uninterrupted run of the shipped spec."""
    with running(Run(folder, GRPO, f"model.path={model}", name="grpo")) as run:
        run.wait_for_step(1)
        ports |= run.ports()
        assert run.wait() == 0, run.output
        yield run


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Iterator[Run]:
    """The same spec resumed in an empty folder after SIGKILL of the driver, from a copy of its checkpoint in a store.

    Checkpoints are written while training goes on. Then its policy is killed; until then it has saved nothing itself.
    """
    overrides = (f"schedule.steps={RESUMED_STEPS}", "checkpoint.keep=10", "checkpoint.async_save=true")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with s3_server() as (options, inject), pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        files, bucket = fs.FileSystem.from_uri(f"s3://runs?{options}&allow_bucket_creation=true")
        files.create_dir(bucket)
        url = f"s3://runs?{options}"
        stored = (*overrides, f"checkpoint.path={url}")
        killed = folder / "killed"
        with running(
            Run(folder, GRPO, *stored, "checkpoint.every_steps=1", name="resumed", out=killed, env=keys)
        ) as first:
            copies = RemoteCheckpoints(url, first.name, 10)
            first.wait_until(lambda: copies.steps()[-1:] >= [3], "a copy of step 3")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            assert first.leftover_processes() == []
            assert first.weight_files == []
        done = copies.steps()[-1]
        inject(Faults("GET", errors=2, cuts=2))
        again = Run(folder, GRPO, *stored, "checkpoint.every_steps=0", name="resumed", resume=True, env=keys)
        with running(again) as second:
            kill_each(second, (done + 1, "PolicyWorker"))
            assert second.wait() == 0, second.output
            assert second.leftover_processes() == []
            assert copies.steps()[-1] == RESUMED_STEPS
            yield second


def test_a_run_writes_metrics_of_every_step(grpo: Run) -> None:
    steps = load_rollout_spec(GRPO).schedule.steps
    assert grpo.steps() == list(range(1, steps + 1))
    for line in grpo.metrics:
        # Without a group of mixed rewards there is no update, and no metric of it.
        assert missing_metrics(line, RUN_METRICS + POLICY_METRICS * (line["groups/mixed"] > 0)) == []
        assert ledger_balances(line)
        assert line["staleness/max"] == 0
    last = grpo.metrics[-1]
    assert last["ledger/trained"] == last["ledger/dispatched"] == steps * SAMPLES_PER_STEP
    assert last["ledger/in_flight"] == last["ledger/dropped"] == last["ledger/retries"] == 0


def test_a_run_writes_the_trajectories_it_trained_on(grpo: Run) -> None:
    names = [path.name for path in sorted((grpo.out / "trajectories").iterdir())]
    assert names == [f"step-{step:06d}.parquet" for step in grpo.steps()]
    for line in grpo.metrics:
        table = trajectories(grpo.out, line["step"]).to_pylist()
        assert len({(row["prompt_uid"], row["sample_index"]) for row in table}) == SAMPLES_PER_STEP
        assert fmean(row["reward"] for row in table) == pytest.approx(line["reward/mean"])
        for row in table:
            assert row["status"] == "ok"
            assert len(row["response_ids"]) == len(row["rollout_logprobs"])
            span = {"version": line["step"] - 1, "start": 0, "end": len(row["response_ids"])}
            assert row["weight_versions"] == [span]


def test_the_samples_have_what_their_update_computed(grpo: Run) -> None:
    """Means over the samples are the metrics that the update reported itself."""
    for line in grpo.metrics:
        if not line["groups/mixed"]:
            continue
        rows = [row for row in trajectories(grpo.out, line["step"]).to_pylist() if row["logprobs"] is not None]
        assert {row["prompt_uid"] for row in rows if any(row["advantages"])} and all(row["trained"] for row in rows)
        entropy = fmean(value for row in rows for value in row["entropy"])
        pairs = [pair for row in rows for pair in zip(row["logprobs"], row["rollout_logprobs"], strict=True)]
        assert entropy == pytest.approx(line["policy/entropy"], rel=1e-4)
        gap = fmean(abs(trained - sampled) for trained, sampled in pairs)
        assert gap == pytest.approx(line["policy/rollout_logprob_gap"], rel=1e-3, abs=1e-8)


def test_a_run_records_its_timeline_and_its_events(grpo: Run) -> None:
    folder = RunFolder(grpo.out)
    assert list(folder.timeline_files()) == [0, *grpo.steps()]
    for step in grpo.steps():
        timeline = folder.timeline(step)
        assert {"driver-0", "rollout-0", "policy-0"} <= set(timeline["worker"].to_pylist())
        assert {"generate", "prepare", "update", "publish", "load"} <= set(timeline["phase"].to_pylist())
        assert set(timeline["status"].to_pylist()) == {"ok"}
    # The groups of a step may be scored, and its samples written, while the one before writes a checkpoint.
    timeline = folder.timeline()
    assert "reward-0" in timeline["worker"].to_pylist()
    calls = timeline.filter(compute.field("phase") == "score")["detail"].to_pylist()
    scored = [prompt for call in calls for prompt in call.split()]  # groups share calls
    assert len({*scored}) == len(scored) == len(grpo.steps()) * load_rollout_spec(GRPO).schedule.prompts_per_step
    digests = [(event["version"], event["engines"]) for event in folder.events("weights")]
    assert [version for version, _ in digests] == grpo.steps()
    assert all(event["digest"] in event["engines"].values() for event in folder.events("weights"))
    assert [event["how"] for event in folder.events("run_ended")] == ["finished"]
    assert {event["worker"] for event in folder.events("worker_started")} == {"rollout-0", "policy-0", "reward-0"}


def test_a_run_writes_valid_checkpoints_and_its_spec(grpo: Run, model: Path) -> None:
    spec = load_rollout_spec(GRPO, [f"model.path={model}"])
    found = sorted((grpo.out / "checkpoints").iterdir())
    assert len(found) == spec.checkpoint.keep
    assert [verify(path).step for path in found][-1] == spec.schedule.steps
    assert load_rollout_spec(grpo.out / "spec.yaml").model_dump(exclude={"name"}) == spec.model_dump(exclude={"name"})


def test_a_finished_run_has_no_processes_and_no_shared_memory(grpo: Run) -> None:
    assert grpo.leftover_processes() == []
    assert grpo.weight_files == []


def test_no_port_beyond_loopback_is_missing_in_the_table_of_ports(grpo: Run, ports: dict[str, int]) -> None:
    assert grpo.steps() and ports.keys() == table_of_ports().keys()
    assert not_in_the_table(ports) == {}


def test_pickles_in_the_models_folder_are_not_read(grpo: Run, canary: Path) -> None:
    assert grpo.steps() and not canary.exists()


def test_export_writes_the_checkpoint_as_a_transformers_model(grpo: Run, tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    subprocess.run(troupe_command("export", str(grpo.out), str(target)), cwd=ROOT, check=True, timeout=60)
    model = AutoModelForCausalLM.from_pretrained(target)
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    saved = checkpoint_weights(grpo.out, load_rollout_spec(GRPO).schedule.steps)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, saved[name]), name
        assert not torch.equal(tensor, start[name].to(tensor.dtype)), name
    text = AutoTokenizer.from_pretrained(target).apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert "1" in text


def test_grpo_increases_the_reward(grpo: Run) -> None:
    rewards = [line["reward/mean"] for line in grpo.metrics]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.05, rewards  # eight standard errors of a step's mean


@pytest.mark.long
def test_a_run_resumed_from_a_store_equals_an_uninterrupted_one(grpo: Run, resumed: Run, folder: Path) -> None:
    done = resumed.steps()[0] - 1
    assert resumed.steps() == list(range(done + 1, RESUMED_STEPS + 1))
    lines = [line for line in metrics_lines(folder / "killed") if line["step"] <= done] + resumed.metrics
    for expected, line in zip(grpo.metrics, lines, strict=False):
        assert {name: line[name] for name in LEARNING} == {name: expected[name] for name in LEARNING}
        assert ledger_balances(line)
    last = resumed.metrics[-1]
    assert last["ledger/trained"] == last["ledger/dispatched"] == RESUMED_STEPS * SAMPLES_PER_STEP
    assert resumed.weight_files == []
    expected, weights = checkpoint_weights(grpo.out, RESUMED_STEPS), checkpoint_weights(resumed.out, RESUMED_STEPS)
    assert [name for name in expected if not torch.equal(expected[name], weights[name])] == []


@pytest.mark.long
def test_a_dead_policy_is_brought_back_with_the_weights_it_had(grpo: Run, resumed: Run) -> None:
    """The metrics equal those of a run without a loss. Its weights do, too (the test above).

    The checkpoint is that of the process before; trainers that are lost again and again are in test_replay.py.
    """
    done = resumed.steps()[0] - 1
    assert f"policy restarted from the checkpoint of step {done}, " in resumed.stdout
    # Groups without a finished sample in the checkpoint are sampled again, and none because of a dead policy.
    again = {line["ledger/retries"] for line in resumed.metrics}
    assert len(again) == 1 and again <= set(range(load_rollout_spec(GRPO).schedule.prompts_per_step + 1))
    assert {line["ledger/dropped"] for line in resumed.metrics} == {0}
    for line, other in zip(
        resumed.metrics[:-1], grpo.metrics[done:], strict=False
    ):  # beside its last step, nothing in flight
        assert repeatable(line) | {"ledger/retries": 0} == repeatable(other)
    assert resumed.metrics[-1]["trainer_restarts"] == 1


@pytest.mark.long
def test_two_engines_and_two_policy_workers_give_the_same_updates_and_are_repeated(
    grpo: Run, resumed: Run, tiny_model: Path, folder: Path
) -> None:
    """Until Ctrl-C, with evaluations beside steps 1 and 3, which change no sample and are each of one version.

    The replay starts from the initial model and gathers the digests of parameters from both ranks.
    """
    overrides = ("roles.rollout.workers=2", "roles.policy.workers=2", "checkpoint.every_steps=1", "checkpoint.keep=10")
    overrides += ("roles.policy.zero_stage=3", "weight_sync.backend=gloo")
    held_out = "{kind: reasoning_gym, recipes: [{name: chain_sum}], size: 12, seed: 2}"
    overrides += (f"data.eval={held_out}", "evaluation={every_steps: 2, beside: true}")
    with running(Run(folder, GRPO, *overrides, name="two-workers")) as run:
        run.wait_for_step(3)
        found = run.ports()
        interrupt(run)
        assert run.wait() == 130, run.output
        assert "continue with --resume" in run.stdout
        assert run.leftover_processes() == []
    assert run.weight_files == []
    assert not_in_the_table(found) == {}, "the ranks' store, gloo and engines listen at loopback"
    saved = max(int(path.name.removeprefix("step-")) for path in (run.out / "checkpoints").iterdir())
    assert saved == max(run.steps()) < load_rollout_spec(GRPO).schedule.steps
    steps = range(1, saved + 1)  # an engine that evaluates beside a step samples nothing for it
    assert len({row["engine"] for step in steps for row in trajectories(run.out, step).to_pylist()}) == 2
    evaluated_beside_training(run)
    one, two = (by_sample(run_.out, 1) for run_ in (grpo, run))
    assert two == one
    for name in LEARNING:
        first = RunFolder(run.out).metrics()[1]
        assert first[name] == pytest.approx(grpo.metrics[0][name], rel=1e-4, abs=1e-6), name
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    one, two = checkpoint_weights(folder / "killed", 1), checkpoint_weights(run.out, 1)
    for name, tensor in one.items():
        moved = (tensor - start[name].float()).norm()
        # Adam's first step depends only on the sign of the gradient: round-off in tiny gradients becomes a full step.
        assert (two[name] - tensor).norm() < 0.05 * moved, name
    shutil.rmtree(run.out / "checkpoints")
    assert equal_steps(replayed(run.out, 3)) == [1, 2, 3]


def evaluated_beside_training(run: Run) -> None:
    """Every evaluation has ended (the engine's tokens were of one version), and is in the line of its step."""
    folder = RunFolder(run.out)
    assert [(event["of"], event["ok"]) for event in folder.events("evaluation")][:2] == [(0, True), (2, True)]
    assert folder.steps() == list(range(max(run.steps()) + 1))
    assert [folder.metrics()[step]["eval/prompts"] for step in (0, 2)] == [12, 12]


def test_troupe_eval_evaluates_a_run_on_several_sets_without_trainers(
    grpo: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set has its own sampling and rewards. A second evaluation takes the results of the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    spec, results = folder / "eval.yaml", folder / "results.json"
    document = json.loads(load_rollout_spec(GRPO).model_dump_json(exclude_unset=True))
    train = document["data"]["train"]
    sampling = {"temperature": 0.7, "top_k": 20, "samples": 3, "max_tokens": 9}
    document["data"]["eval"] = {
        "vowels": {**train, "seed": 2, "solved_at": 0.5, "sampling": {"temperature": 1.0, "samples": 4}},
        "sums": {**train, "seed": 3, "size": 6, "sampling": sampling, "rewards": [{"name": "numeric"}]},
        "greedy": {**train, "seed": 4, "rewards": [{"name": "regex", "args": {"pattern": "[aeiou]", "full": False}}]},
    }
    document["evaluation"] = {"prompts": 8}
    spec.write_text(json.dumps(document))
    arguments = ("eval", str(spec), "--model", str(grpo.out), "--output", str(results), "--json")
    with running(Command(folder, troupe_command(*arguments))) as command:
        seen: set[str] = set()
        command.wait_until(
            lambda: roles_seen(command, seen) or command.process.poll() is not None, "the end of the evaluation"
        )
        assert command.wait(RUN_TIMEOUT_S) == 0, command.output
        assert command.leftover_processes() == []
    assert seen == {"RolloutWorker", "RewardWorker"}
    metrics: dict[str, Any] = json.loads(command.stdout)
    sets = held_out_sets(load_rollout_spec(spec))
    found = {name for name in metrics if "/level/" not in name}
    missing = {name for one in sets for name in one.metric_names()} ^ found
    assert {name.rpartition("_")[0] for name in missing} <= {"eval/sums/reward", "eval/greedy/reward"}  # equal rewards
    for one, prompts in zip(sets, (8, 6, 8), strict=True):
        assert metrics[f"{one.prefix}prompts"] == prompts
        assert metrics[f"{one.prefix}failed_samples"] == metrics[f"{one.prefix}refused"] == 0
    # The untrained model has about the reward of the first step, give or take 0.03.
    assert metrics["eval/vowels/reward"] > grpo.metrics[0]["reward/mean"] + 0.1
    assert metrics["eval/vowels/reward_low"] <= metrics["eval/vowels/reward"] <= metrics["eval/vowels/reward_high"]
    assert metrics["eval/vowels/response_tokens"] <= 6 and metrics["eval/sums/response_tokens"] <= 9
    written = json.loads(results.read_text())
    assert written["sets"]["sums"]["sampling"]["top_k"] == 20
    estimates = written["evaluations"][0]["sets"]["vowels"]["estimates"]
    assert estimates["pass@4"]["value"] == metrics["eval/vowels/pass@4"]


def table_of_ports() -> dict[str, int]:
    """Most ports beyond loopback of each kind of process, by SECURITY.md."""
    rows = re.findall(r"^\| `(\w+)` \| (\d) \|", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    return {name: int(number) for name, number in rows}


def not_in_the_table(ports: dict[str, int]) -> dict[str, int]:
    """Processes with more ports than the table of ports has."""
    return {name: number for name, number in ports.items() if number > table_of_ports().get(name, 0)}


def roles_seen(command: Command, seen: set[str]) -> bool:
    """Add the worker classes that run now to `seen`. Returns False, so that polling continues to the end.

    A look at all processes takes as long as 50 ms of the processor, so there are few.
    """
    time.sleep(0.5)
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


def repeatable(line: dict[str, float]) -> dict[str, float]:
    """The metrics of a step that a loss does not change."""
    return {name: value for name, value in line.items() if not OF_THE_MACHINE.fullmatch(name)}
