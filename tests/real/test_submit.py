"""`troupe submit` to a Ray head node started with `ray start`, and a job that is scaled while it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real.cluster_demo import free_port
from tests.real.commands import (
    EXIT_TIMEOUT_S,
    GRPO,
    SAMPLES_PER_STEP,
    Command,
    ledger_balances,
    metrics_lines,
    run_troupe,
    running,
    trajectories,
    troupe_command,
)
from tests.real.patient import ENVIRONMENT, REWARD
from tests.real.ray_nodes import ray_head
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long

SFT = ROOT / "deploy" / "specs" / "tiny-sft.yaml"
STEPS_BETWEEN = 2
SCALING = (
    REWARD,
    "algorithm.kl.coef=0.001",
    "roles.reference={workers: 1, max_workers: 2, cpus: 0.25, threads: 1, micro_batch_tokens: 2048}",
    "roles.reward.max_workers=2",
    "roles.rollout.max_workers=2",
    "schedule.steps=100000",  # the test stops the job
    "checkpoint.every_steps=0",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Command]]:
    """A Ray head node that only these tests use: URL of its job server, and its processes."""
    with ray_head(tmp_path_factory.mktemp("head"), "--num-cpus=4", port=free_port(), env=ENVIRONMENT) as head:
        yield head


@pytest.fixture(scope="module")
def head(node: tuple[str, Command]) -> str:
    """URL of the head node's job server."""
    return node[0]


def test_a_submitted_spec_runs_as_a_job_and_follow_prints_its_log(head: str, tmp_path: Path) -> None:
    sets = [f"name=submitted-{free_port()}", "schedule.steps=2", f"output.folder={tmp_path}/runs"]
    options = [part for override in sets for part in ("--set", override)]
    with running(
        Command(tmp_path, troupe_command("submit", str(SFT), "--address", head, "--follow", *options))
    ) as command:
        assert command.wait() == 0, command.output
    assert "submitted " in command.stdout
    assert "step 2/2" in command.stdout
    assert "32 dispatched, 32 trained, 0 dropped" in command.stdout
    assert command.stdout.rstrip().endswith("SUCCEEDED")
    (run,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]  # step 0 is the evaluation before training


def wait_for_workers(job: Command, out: Path, **workers: int) -> None:
    """Wait until each role has this number of workers, and then for `STEPS_BETWEEN` more steps."""

    def scaled() -> bool:
        last = metrics_lines(out)[-1]
        return all(last[f"workers/{role}"] == number for role, number in workers.items())

    job.wait_until(scaled, f"workers {workers}")
    reached = len(metrics_lines(out))
    job.wait_until(lambda: len(metrics_lines(out)) >= reached + STEPS_BETWEEN, "further steps")


def test_a_job_is_followed_scales_while_it_trains_and_saves_when_it_is_stopped(
    node: tuple[str, Command], tmp_path: Path
) -> None:
    """References, rewards and engines are scaled by `troupe scale`."""
    head, cluster = node
    job = f"endless-{free_port()}"
    sets = [f"name={job}", f"output.folder={tmp_path}/runs", *SCALING]
    options = [part for override in sets for part in ("--set", override)]
    answer = run_troupe(tmp_path, "submit", str(GRPO), "--address", head, "--submission-id", job, *options)
    assert f"troupe logs {job} --address {head} --follow" in answer
    assert (
        f"writes to {tmp_path}/runs/{job} on the cluster" in answer and f"troupe stop {job} --address {head}" in answer
    )
    out = tmp_path / "runs" / job
    with running(Command(tmp_path, troupe_command("logs", job, "--address", head, "--follow"))) as follower:
        follower.wait_until(lambda: len(metrics_lines(out)) > 1, "two steps")
        state, step = run_troupe(tmp_path, "status", job, "--address", head).splitlines()
        assert f"{job} ({job}): RUNNING" in state and "reward" in step
        told = json.loads(run_troupe(tmp_path, "status", job, "--address", head, "--json"))
        assert (told["job"], told["status"]) == (job, "RUNNING") and told["line"].startswith("step ")
        assert f"{job} ({job}): RUNNING" in run_troupe(tmp_path, "jobs", "--address", head).splitlines()[0]

        first = metrics_lines(out)[0]
        assert [first[f"workers/{role}"] for role in ("reference", "reward")] == [1, 1]
        wanted = {"reference": 2, "reward": 2, "rollout": 2}
        scaled = run_troupe(tmp_path, "scale", str(out), *(f"{role}={n}" for role, n in wanted.items())).splitlines()
        assert {line.split(",")[0].split(" (")[0] for line in scaled} == {f"{role}: 2 workers" for role in wanted}
        wait_for_workers(follower, out, reference=2, reward=2, rollout=2)
        follower.wait_until(lambda: "rollout: 2 workers" in follower.stdout, "the log to say so")
        assert len(cluster.processes("ray::ReferenceWorker")) == 2
        run_troupe(tmp_path, "scale", str(out), "reference=1")
        wait_for_workers(follower, out, reference=1, reward=2, rollout=2)
        cluster.wait_until(lambda: len(cluster.processes("ray::ReferenceWorker")) == 1, "the end of a reference worker")

        assert f"{job} ({job}): STOPPED" in run_troupe(tmp_path, "stop", job, "--address", head)
        assert follower.wait() == 1
    assert "step 1/100000" in follower.stdout and follower.stdout.rstrip().endswith("STOPPED")
    assert "step 1/100000" in run_troupe(tmp_path, "logs", job, "--address", head)
    for title in ("PolicyWorker", "ReferenceWorker", "RewardWorker", "RolloutWorker", "EngineCore"):
        cluster.wait_until(lambda title=title: not cluster.processes(title), f"the end of {title}", EXIT_TIMEOUT_S)
    assert list(Path("/dev/shm").glob(f"troupe-{job}-*")) == []
    assert_trained_once(out)


def assert_trained_once(out: Path) -> None:
    """Check that the scaled run lost and repeated no sample, and that its checkpoint and its spec say what it did."""
    lines = metrics_lines(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert ledger_balances(line)
        assert line["ledger/trained"] == SAMPLES_PER_STEP * line["step"]
        assert line["ledger/dropped"] == line["ledger/retries"] == 0
    seen: set[tuple[str, int]] = set()
    engines: set[str] = set()
    for line in lines:
        for row in trajectories(out, line["step"]).to_pylist():
            sample = (row["prompt_uid"], row["sample_index"])
            assert sample not in seen
            seen.add(sample)
            engines.add(row["engine"])
            # The engine that was added later sampled with the weights of its step, never with older ones.
            assert {span["version"] for span in row["weight_versions"]} == {line["step"] - 1}
    assert engines == {"rollout-0", "rollout-1"}
    found = CheckpointStore(out / "checkpoints", keep=3).latest()
    assert found is not None and found.step == len(lines)
    assert found.state["ledger"]["trained"] == len(seen) == SAMPLES_PER_STEP * len(lines)
    saved = load_rollout_spec(out / "spec.yaml").roles.scaled()
    assert {role: config.workers for role, config in saved.items()} == {"rollout": 2, "reference": 1, "reward": 2}


def test_follow_exits_with_1_for_a_failed_job(head: str, tmp_path: Path) -> None:
    options = ["--set", "model.path=/no/such/model"]
    with running(
        Command(tmp_path, troupe_command("submit", str(GRPO), "--address", head, "--follow", *options))
    ) as command:
        assert command.wait() == 1, command.output
    assert "model.path: no such folder: /no/such/model" in command.stdout
    assert "FAILED" in command.stdout


def test_a_wrong_token_is_a_one_line_error(head: str, tmp_path: Path) -> None:
    wrong = {"RAY_AUTH_TOKEN": "0" * 64}
    with running(Command(tmp_path, troupe_command("jobs", "--address", head), wrong)) as command:
        assert command.wait() == 1, command.output
    assert command.stderr.count("\n") == 1, command.stderr
    line = command.stderr
    assert line.startswith(f"error: --address {head}: ") and "token" in line
