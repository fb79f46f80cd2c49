"""Engines on another host get what changed, while each process that takes part in an update is killed within one.

Two Ray nodes on this machine, of which the second has a host name, an /etc/hosts and a /dev/shm of its own.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.faults.stalls import deadly_environment, may_mount
from tests.real import warm
from tests.real.cluster_demo import free_port
from tests.real.commands import GRPO, Run, ledger_balances, running, trajectories
from tests.real.ray_nodes import START_S, ray_node
from troupe.orchestrator.telemetry.run_folder import RunFolder

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(not may_mount(), reason="a host of its own needs the rights to mount"),
]

STEPS = 11
OBJECTS = "--object-store-memory=200000000"
ANOTHER_HOST = (
    *("unshare", "--uts", "--mount", "sh", "-c"),
    "hostname far && mount -t tmpfs -o size=1g tmpfs /dev/shm && "
    'printf "127.0.0.1 localhost far\\n" > "$0" && mount --bind "$0" /etc/hosts && exec "$@"',
)
"""Starts a command on a host of its own; a file follows, then the command."""
SPEC = (
    *("model.dtype=bfloat16", f"schedule.steps={STEPS}", "checkpoint.every_steps=3"),
    *("roles.policy.learning_rate=1e-6", "roles.rollout.node_labels={part: far}"),
    *("roles.policy.node_labels={part: near}", "roles.reward.node_labels={part: near}"),
)


def test_every_process_of_an_update_dies_within_one_and_the_next_versions_are_whole(tmp_path: Path) -> None:
    marks = {name: tmp_path / name for name in ("applying", "loading", "encoding", "driver")}
    delta, receiver = "troupe.workers.weights.delta", "troupe.workers.weights.vllm_transfer:FileWeightTransferEngine"
    far = deadly_environment(
        (f"{delta}:_read", 2, marks["applying"]), (f"{receiver}.receive_weights", 3, marks["loading"])
    )
    near = warm.template() | deadly_environment((f"{delta}:ChangedWords.encode", 6, marks["encoding"]))
    driver = deadly_environment(("troupe.orchestrator.rollouts.weight_sync:FileSync._change", 6, marks["driver"]))
    port = free_port()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    head = ("--head", f"--port={port}", "--include-dashboard=false", "--labels=part=near", "--num-cpus=2", OBJECTS)
    with ray_node(tmp_path, *head, env=near | token, forks=True) as first:
        first.wait_until(lambda: "Ray runtime started" in first.stdout, "the head", START_S)
        joined = (f"--address=127.0.0.1:{port}", "--labels=part=far", "--num-cpus=1", OBJECTS)
        host = (*ANOTHER_HOST, str(tmp_path / "hosts"))
        with ray_node(tmp_path, *joined, env=far | token, within=host, forks=True) as second:
            second.wait_until(lambda: "Ray runtime started" in second.stdout, "the other node", START_S)
            address = token | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
            with running(Run(tmp_path, GRPO, *SPEC, name="delta", env=address | driver)) as run:
                assert run.wait() == -9, run.output
            assert all(mark.exists() for mark in marks.values()), run.output
            assert "rollout-0 is lost" in run.output and "policy-0 is lost" in run.output
            before = run.steps()
            with running(Run(tmp_path, GRPO, *SPEC, name="delta", env=address, resume=True)) as again:
                assert again.wait() == 0, again.output
    assert before and again.steps()[-1] == STEPS
    assert all(ledger_balances(line) for line in again.metrics)
    events = [event for event in RunFolder(again.out).events() if event["event"] == "weights"]
    assert all(set(event["engines"].values()) <= {event["digest"]} for event in events)
    sizes = [event["to_nodes"] / event["bytes"] for event in events]
    assert sum(0 < size < 0.2 for size in sizes) > 4, "most versions travelled as what had changed"
    assert any(size == 1.0 for size in sizes)
    for number in range(1, STEPS + 1):
        versions = {
            span["version"] for row in trajectories(again.out, number).to_pylist() for span in row["weight_versions"]
        }
        assert versions == {number - 1}
