"""Every stall of the table in docs/guides/debugging.md, on real Ray, vLLM and DeepSpeed: `make test-faults`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.stalls import (
    OWN_SHARED_MEMORY,
    UNBOUNDED,
    fill_shared_memory,
    frozen,
    may_mount,
    order,
    own_disk,
    planted_environment,
    record,
    services,
    stopped,
    wait_for_stall,
    why,
    workers,
)
from tests.real.cluster_demo import free_port, node
from tests.real.commands import GRPO, Run, running

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not may_mount(), reason="needs the right to mount file systems"),
]
ENVIRONMENT = GRPO.with_name("tiny-environment.yaml")
SMALL = ("schedule.steps=100000", "schedule.prompts_per_step=2", "algorithm.group_size=4")
REWARD = "{name: 'stalling_user_code:letter_share', args: {control: CONTROL}, timeout_s: 500}"
LIMIT_S = 10.0
"""Longest time from the command to its answer."""


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run with two policy ranks and a user's reward function, its checkpoints on a disk of their own."""
    folder = tmp_path_factory.mktemp("stalls")
    control, out = folder / "bug", folder / "run"
    reward = REWARD.replace("CONTROL", str(control))
    overrides = (
        *(*SMALL, *UNBOUNDED, f"roles.reward.functions=[{reward}]", "roles.policy.workers=2"),
        *("checkpoint.every_steps=2", "checkpoint.keep=1", "roles.policy.learning_rate=1e-4"),
        "algorithm.kl_states=0",  # the first call that both ranks get in a step is the update
    )
    with own_disk(out / "checkpoints"):
        run = Run(
            folder, GRPO, *overrides, name="run", env=planted_environment(folder / "order"), within=OWN_SHARED_MEMORY
        )
        with running(run):
            run.wait_for_step(4)
            yield run


@contextlib.contextmanager
def recovers(run: Run) -> Iterator[None]:
    """After the block the run continues."""
    yield
    step = run.metrics[-1]["step"]
    run.wait_until(lambda: run.metrics[-1]["step"] > step, "the next step")


def test_engine_stopped(grpo: Run) -> None:
    with recovers(grpo), stopped(*workers(grpo, "VLLM::EngineCore")):
        wait_for_stall(grpo)
        answer = why(grpo)
    words = ("waits for rollout-0", "VLLM::EngineCore", "SIGSTOP")
    outcome = record("engine's process stopped (SIGSTOP)", answer, cause="worker_stopped", words=words)
    assert outcome.named and answer.seconds < LIMIT_S


def test_engine_loops(grpo: Run) -> None:
    (engine,) = workers(grpo, "VLLM::EngineCore")
    with recovers(grpo), order(grpo.out.parent / "order", "loop"):
        engine.send_signal(signal.SIGUSR2)
        wait_for_stall(grpo)
        answer = why(grpo)
    outcome = record("engine's process in a busy loop", answer, cause="user_code", words=("rollout-0", "planted_bug"))
    assert outcome.named and answer.seconds < LIMIT_S


@pytest.mark.parametrize(
    ("bug", "stall", "cause", "function"),
    [
        ("loop", "reward function in an endless loop", "user_code", "endless_loop"),
        ("sleep", "reward function that sleeps", "sleep", "oversleep"),
        ("deadlock", "deadlock of two locks in a reward function", "lock", "_take"),
    ],
)
def test_reward_function(grpo: Run, bug: str, stall: str, cause: str, function: str) -> None:
    with recovers(grpo):
        with order(grpo.out.parent / "bug", bug):
            wait_for_stall(grpo)
            answer = why(grpo)
        if bug == "deadlock":  # it would stay until the timeout of the function
            for process in workers(grpo, "troupe.workers.rewards.child"):
                process.kill()
    outcome = record(stall, answer, cause=cause, words=("reward-0 (score", function))
    assert outcome.named and answer.seconds < LIMIT_S


def test_rank_stopped(grpo: Run) -> None:
    with recovers(grpo), stopped(workers(grpo, "ray::PolicyWorker")[1]):
        wait_for_stall(grpo)
        answer = why(grpo)
    words = ("SIGSTOP", "the other 1 rank(s) of policy wait in a collective")
    outcome = record("one of two policy ranks stopped", answer, cause="worker_stopped", words=words)
    assert outcome.named and answer.seconds < LIMIT_S


def test_rank_missing(grpo: Run) -> None:
    with recovers(grpo), order(grpo.out.parent / "order", "sleep"):
        workers(grpo, "ray::PolicyWorker")[1].send_signal(signal.SIGUSR2)
        wait_for_stall(grpo)
        answer = why(grpo)
    words = ("planted_bug", "the other 1 rank(s) of policy wait in a collective")
    outcome = record("a rank missing from a collective", answer, cause="missing_rank|sleep", words=words)
    assert outcome.named and answer.seconds < LIMIT_S


def test_policy_stopped(grpo: Run) -> None:
    with recovers(grpo), stopped(*workers(grpo, "ray::PolicyWorker")):
        wait_for_stall(grpo)
        answer = why(grpo)
    words = ("policy-0", "SIGSTOP")
    outcome = record("all policy ranks stopped", answer, cause="worker_stopped", words=words)
    assert outcome.named and answer.seconds < LIMIT_S


def test_disk_hangs(grpo: Run) -> None:
    with recovers(grpo), frozen(grpo.out / "checkpoints"):
        wait_for_stall(grpo)
        answer = why(grpo)
    words = ("(save", "waits for the disk")
    outcome = record("disk of the checkpoints does not take a write", answer, cause="disk", words=words)
    assert outcome.named and answer.seconds < LIMIT_S


def test_event_loop_blocked(grpo: Run) -> None:
    with recovers(grpo), order(grpo.out.parent / "order", "loop"):
        os.kill(grpo.process.pid, signal.SIGUSR2)
        wait_for_stall(grpo)
        answer = why(grpo)
    outcome = record("driver's event loop blocked", answer, cause="driver_blocked", words=("planted_bug",))
    assert outcome.named and answer.seconds < LIMIT_S


def test_driver_stopped(grpo: Run) -> None:
    with recovers(grpo), stopped(psutil.Process(grpo.process.pid)):
        wait_for_stall(grpo)
        answer = why(grpo)
    outcome = record("driver stopped (SIGSTOP)", answer, cause="driver_stopped", words=(str(grpo.process.pid),))
    assert outcome.named and answer.seconds < LIMIT_S


def test_gcs_stopped(grpo: Run) -> None:
    with recovers(grpo), stopped(*services(grpo, "gcs_server")):
        answer = why(grpo)  # calls between workers do not need it: the run does not stall at once
    outcome = record("Ray's gcs_server stopped", answer, cause="ray_stopped", words=("gcs_server", "SIGSTOP"))
    assert outcome.named and answer.seconds < LIMIT_S


def test_raylet_stopped(grpo: Run) -> None:
    with recovers(grpo), stopped(*services(grpo, "raylet")):
        answer = why(grpo)  # at once: some seconds later Ray declares the node dead
    outcome = record("Ray's raylet stopped", answer, cause="ray_stopped", words=("raylet", "SIGSTOP"))
    assert outcome.named and answer.seconds < LIMIT_S


def test_shared_memory_full(grpo: Run) -> None:
    """The run continues, more slowly: weights go through a disk."""
    with recovers(grpo):
        assert fill_shared_memory(grpo)
        answer = why(grpo)
    outcome = record("/dev/shm full", answer, cause="full", words=("/dev/shm", "is full"))
    assert outcome.named and answer.seconds < LIMIT_S


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run with an environment of the user, and a short bound on a group."""
    folder = tmp_path_factory.mktemp("episodes")
    overrides = (
        *(*SMALL, *UNBOUNDED, "schedule.generate_timeout_s=100", "roles.environment.name=stalling_user_code:Stalling"),
        *(f"roles.environment.args={{control: {folder / 'bug'}}}", "roles.environment.turn_timeout_s=98"),
        *("roles.environment.episode_timeout_s=99",),
    )
    run = Run(folder, ENVIRONMENT, *overrides, name="run", env=planted_environment(folder / "order"))
    with running(run):
        run.wait_for_step(4)
        yield run


def test_environment_hangs(episodes: Run) -> None:
    """It is named on request, and by the run itself at half of the bound."""
    with recovers(episodes), order(episodes.out.parent / "bug", "sleep"):
        wait_for_stall(episodes)
        answer = why(episodes)
        episodes.wait_until(lambda: "of environment-0 sleeps in step" in episodes.stderr, "its own report", 90)
    words = ("rollout-0 (generate", "environment-0", "in step")
    outcome = record("environment that hangs", answer, cause="sleep", words=words)
    assert outcome.named and answer.seconds < LIMIT_S
    assert list((episodes.out / "why" / "reports").glob("*-sleep.txt"))


def test_driver_killed(episodes: Run) -> None:
    os.kill(episodes.process.pid, signal.SIGKILL)
    episodes.wait(30)
    answer = why(episodes)
    outcome = record("driver killed (SIGKILL)", answer, cause="driver_dead", words=("SIGKILL", "step"))
    assert outcome.named and answer.seconds < LIMIT_S


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, psutil.Process]]:
    """A run on two nodes, its engine on the second one, which is returned with it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    port = free_port()
    head = ("--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=2")
    overrides = (
        *(*SMALL, *UNBOUNDED, "roles.rollout.cpus=1", "roles.rollout.node_labels={part: engine}"),
        *("roles.policy.node_labels={part: keep}", "roles.reward.node_labels={part: keep}"),
    )
    with node("keep", *head), node("engine", f"--address=127.0.0.1:{port}", "--num-cpus=1") as second:
        run = Run(tmp_path, GRPO, *overrides, name="run", env={"RAY_ADDRESS": f"127.0.0.1:{port}"})
        with running(run):
            run.wait_for_step(4)
            yield run, second


def test_node_freezes_and_dies(two_nodes: tuple[Run, psutil.Process]) -> None:
    run, second = two_nodes
    processes = [second, *second.children(recursive=True)]
    with recovers(run), stopped(*processes):
        wait_for_stall(run)
        answer = why(run)
    words = ("rollout-0", "does not answer")
    froze = record("a node that does not answer", answer, cause="node_lost", words=words)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for_stall(run)
    dead = why(run)
    outcome = record("a node that is dead", dead, cause="node_lost", words=("rollout-0", "its node"))
    assert froze.named and outcome.named and max(answer.seconds, dead.seconds) < LIMIT_S


def test_policy_killed(tmp_path: Path) -> None:
    """Without restarts the run ends; its last report has the last error of the policy."""
    overrides = (*SMALL, *UNBOUNDED, "failures.trainer_restarts=0")
    with running(Run(tmp_path, GRPO, *overrides, name="run")) as run:
        run.wait_for_step(2)
        (policy,) = workers(run, "ray::PolicyWorker")
        policy.kill()
        run.wait(120)
        answer = why(run)
    words = ("policy-0", "it was killed (SIGKILL)")
    outcome = record("policy killed, no restarts left", answer, cause="run_failed", words=words)
    assert outcome.named and answer.seconds < LIMIT_S, run.output[-3000:]
