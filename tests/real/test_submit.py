"""Jobs on a Ray head node with the environment of a head pod: the hooks of its pods, `troupe submit`, and a job that is
scaled while it trains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from tests.orchestrator.platforms.kubernetes.manifests import documents
from tests.real import warm
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
from tests.real.test_platform_jobs import ENDLESS, SAVE_S, SFT, saved_step, steps
from troupe.orchestrator.platforms.kubernetes.documents import entrypoint
from troupe.orchestrator.platforms.kubernetes.pre_stop import has_actors, stop_jobs, wait_for_actors
from troupe.orchestrator.platforms.ray_jobs import JobServer, submit_when_ready, token_header
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long

STEPS_BETWEEN = 2
SCALING = (
    REWARD,
    "algorithm.kl.coef=0.001",
    "roles.reference={workers: 1, max_workers: 2, cpus: 0.25, threads: 1, micro_batch_tokens: 2048}",
    "roles.reward.max_workers=2",
    "schedule.steps=100000",  # the test stops the job
    "checkpoint.every_steps=0",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Command]]:
    """Ray as KubeRay starts it, with the environment of the head pod: URL of its job server, and its processes."""
    job, _ = documents(SFT, stop_s=int(SAVE_S))
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    port, name = free_port(), "RAY_JOB_STOP_WAIT_TIME_S"
    environment = {name: variables[name], "RAY_ADDRESS": f"127.0.0.1:{port}", **ENVIRONMENT, **warm.template()}
    with ray_head(tmp_path_factory.mktemp("head"), "--num-cpus=4", port=port, env=environment, forks=True) as head:
        yield head


@pytest.fixture(scope="module")
def head(node: tuple[str, Command]) -> str:
    """URL of the head node's job server."""
    return node[0]


@pytest.fixture(scope="module")
def stopped(node: tuple[str, Command], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose pods were deleted, and which has saved."""
    folder = tmp_path_factory.mktemp("stopped")
    out, spec = folder / "run", folder / "spec.yaml"
    spec.write_text(documents(SFT, *ENDLESS, root=str(Path.cwd()))[1]["data"]["spec.yaml"])
    command_line = entrypoint(str(out)).replace("/etc/troupe/spec.yaml", str(spec))
    url, cluster = node
    with ThreadPoolExecutor(1) as pool:

        def busy() -> bool:
            return has_actors([process for process in cluster.processes("ray::") if process.pid != os.getpid()])

        assert not busy()  # a node without a run
        client = JobSubmissionClient(url, headers=token_header())
        job = submit_when_ready(client, entrypoint=command_line)
        cluster.wait_until(lambda: len(steps(out)) > 2, "two steps")
        worker_hook = pool.submit(wait_for_actors, SAVE_S, busy)
        assert not worker_hook.done() and saved_step(out) == 0
        stop_jobs(JobServer(url), SAVE_S)
        assert client.get_job_status(job).value == "STOPPED"
        assert saved_step(out) == max(steps(out))
        assert worker_hook.result(60) is True
    return out


def test_pods_that_are_deleted_wait_until_the_run_has_saved(stopped: Path) -> None:
    assert saved_step(stopped) == max(steps(stopped)) > 0


def test_a_submitted_spec_runs_as_a_job_and_follow_prints_its_log(head: str, stopped: Path, tmp_path: Path) -> None:
    """It resumes the run of the deleted pods, whose steps are all done; the job of the next test trains."""
    done = saved_step(stopped)
    sets = [*ENDLESS, f"schedule.steps={done}", f"name={stopped.name}", f"output.folder={stopped.parent}"]
    options = [part for override in sets for part in ("--set", override)]
    with running(
        Command(tmp_path, troupe_command("submit", str(SFT), "--address", head, "--follow", *options))
    ) as command:
        assert command.wait() == 0, command.output
    assert "submitted " in command.stdout
    assert f"already complete in {stopped} (schedule.steps: {done})" in command.stdout
    assert command.stdout.rstrip().endswith("SUCCEEDED")


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
    """`troupe scale` scales references and rewards; test_cluster_demo.py scales engines."""
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
        scaled = run_troupe(tmp_path, "scale", str(out), "reference=2", "reward=2").splitlines()
        said = {line.split(",")[0].split(" (")[0] for line in scaled}
        assert said == {"rollout: 1 worker", "reference: 2 workers", "reward: 2 workers"}
        wait_for_workers(follower, out, reference=2, reward=2)
        follower.wait_until(lambda: "reward: 2 workers" in follower.stdout, "the log to say so")
        assert len(cluster.processes("ray::ReferenceWorker")) == 2
        run_troupe(tmp_path, "scale", str(out), "reference=1")
        wait_for_workers(follower, out, reference=1, reward=2)
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
    for line in lines:
        for row in trajectories(out, line["step"]).to_pylist():
            sample = (row["prompt_uid"], row["sample_index"])
            assert sample not in seen
            seen.add(sample)
            assert {span["version"] for span in row["weight_versions"]} == {line["step"] - 1}
    found = CheckpointStore(out / "checkpoints", keep=3).latest()
    assert found is not None and found.step == len(lines)
    assert found.state["ledger"]["trained"] == len(seen) == SAMPLES_PER_STEP * len(lines)
    saved = load_rollout_spec(out / "spec.yaml").roles.scaled()
    assert {role: config.workers for role, config in saved.items()} == {"rollout": 1, "reference": 1, "reward": 2}


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
