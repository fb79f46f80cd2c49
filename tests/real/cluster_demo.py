"""A run that scales on a cluster of four Ray nodes on this machine: `make cluster-demo`.

Starts a head and three nodes with room for one engine each, submits deploy/specs/tiny-grpo.yaml as a job, scales its
engines from 1 to 3 while it trains, kills one of the nodes with its engine, and scales the remaining two back to 1.
Training continues throughout. Then it kills the head, and with it the run; submitted again to a new cluster, the spec
resumes from the last checkpoint. Last it stops the job, which saves a checkpoint, and prints the ledger: how every
sample ended. No process is left running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.real.patient import ENVIRONMENT, REWARD
from tests.real.warm_nodes import TEMPLATE, ray_command

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
WAIT_S = 600.0
"""Timeout of every wait and command."""
STEPS_BETWEEN = 2
"""Steps to train before every change."""
OBJECT_STORE_BYTES = 200_000_000
_FIRST_PORT = 20_000
"""Above the ports that Ray gives to its workers by default."""
_PORT_TRIES = 1000
_STARTED = "Ray runtime started."
_SLOW_START = "timed out during startup"
"""Ray's message when its processes do not start within 30 s, a limit that cannot be changed."""


class Stuck(RuntimeError):
    """A step of the demo failed or timed out."""


def main() -> None:
    """Run the demo; exits with code 1 if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder for the run (default: runs)")
    given = parser.parse_args()
    # One token for all nodes and commands keeps other users of this machine out.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} | ENVIRONMENT
    os.environ.pop("RAY_ADDRESS", None)
    try:
        demonstrate(given.runs.resolve(), f"cluster-demo-{os.getpid()}")
    except Stuck as error:
        sys.exit(f"error: {error}")


def demonstrate(runs: Path, name: str) -> None:
    """Run all steps of the demo. Raises Stuck."""
    out = runs / name
    with cluster(3) as (url, head, *engines):
        submit(url, runs, name, name)
        until(lambda: len(lines(out)) >= STEPS_BETWEEN, "the first steps")
        tell(out)
        scale(out, 3)
        say("killing a node with the engine on it")
        end(engines[-1])
        until(lambda: lines(out)[-1]["workers/rollout"] == 2, "the run to notice the loss")
        train_on(out)
        scale(out, 1)
        say("killing the head, with the driver and the policy on it")
        end(head)
    reached = lines(out)[-1]["step"]
    with cluster(1) as (url, *_):
        job = f"{name}-again"
        submit(url, runs, name, job)
        until(lambda: lines(out)[-1]["step"] > reached, "the steps after the loss")
        tell(out)
        say(troupe("stop", job, "--address", url))
    last = lines(out)[-1]
    if last["ledger/dispatched"] != last["ledger/trained"] + last["ledger/dropped"] + last["ledger/in_flight"]:
        raise Stuck(f"the ledger does not balance: {ledger(last)}")
    say(f"{len(lines(out))} steps, {ledger(last)}; the run is in {out}")


@contextmanager
def cluster(engines: int) -> Iterator[tuple[str, psutil.Process, *tuple[psutil.Process, ...]]]:
    """A Ray cluster: URL of its job server, the head, and so many nodes for engines. All end with the block."""
    with ExitStack() as nodes:
        say(f"starting a Ray head and {engines} node(s)")
        port, dashboard = free_port(), free_port()
        url = f"http://127.0.0.1:{dashboard}"
        first = ("--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2")
        head = nodes.enter_context(node("keep", *first))
        until(lambda: answers(url), "the head's job server")
        further = (f"--address=127.0.0.1:{port}", "--num-cpus=1")
        yield url, head, *(nodes.enter_context(node("engine", *further)) for _ in range(engines))


def submit(url: str, runs: Path, name: str, job: str) -> None:
    """Submit the spec as a job; engines run on separate nodes, the other workers on the head node."""
    overrides = (
        f"name={name}",
        f"output.folder={runs}",
        "schedule.steps=100000",  # the demo stops it at the end
        REWARD,
        "roles.rollout.cpus=1",
        "roles.rollout.max_workers=3",
        "roles.rollout.node_labels={part: engine}",
        "roles.policy.node_labels={part: keep}",
        "roles.reward.node_labels={part: keep}",
        "failures.engine_restarts=0",  # no node is left for another engine
        "failures.health_interval_s=5",
    )
    sets = [part for override in overrides for part in ("--set", override)]
    say(troupe("submit", str(SPEC), "--address", url, "--submission-id", job, *sets).splitlines()[0])


def scale(out: Path, engines: int) -> None:
    """Scale to this number of engines and train some steps with them."""
    say(f"troupe scale {out.name} rollout={engines}")
    troupe("scale", str(out), f"rollout={engines}")
    until(lambda: lines(out)[-1]["workers/rollout"] == engines, f"{engines} engine(s)")
    train_on(out)


def train_on(out: Path) -> None:
    """Wait for some steps, then print the state of the run."""
    before = len(lines(out))
    until(lambda: len(lines(out)) >= before + STEPS_BETWEEN, "further steps")
    tell(out)


def tell(out: Path) -> None:
    """Print the state of the run."""
    last = lines(out)[-1]
    say(f"step {last['step']}: {last['workers/rollout']:.0f} engine(s); {ledger(last)}")


def ledger(line: dict[str, Any]) -> str:
    """The ledger's counts in a line of metrics."""
    names = ("dispatched", "trained", "dropped", "in_flight", "retries")
    return ", ".join(f"{line[f'ledger/{name}']:.0f} {name.replace('_', ' ')}" for name in names)


def lines(out: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl so far."""
    file = out / "metrics.jsonl"
    whole = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in whole if line.endswith("\n")]


@contextmanager
def node(part: str, *arguments: str, tries: int = 3) -> Iterator[psutil.Process]:
    """Start a Ray node with the label `part`, and kill it on exit.

    Args:
        part: Value of the label `part`.
        arguments: Further arguments of `ray start`.
        tries: Number of attempts, because a node may start more slowly than Ray waits.

    Raises:
        Stuck: The node did not start.
    """
    command = [*ray_command(forks=TEMPLATE in os.environ), "start", "--block", "--disable-usage-stats"]
    # Nodes on one machine must not use the same ports: 0 or free ports instead of Ray's fixed ones.
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
    command += [f"--labels=part={part}", f"--object-store-memory={OBJECT_STORE_BYTES}", *arguments]
    with (
        # Each node needs a separate folder, because each unpacks a job's files and would replace the others'.
        # The folder contains sockets, whose paths must be short.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch,
        tempfile.NamedTemporaryFile("w+") as output,
        subprocess.Popen(
            [*command, f"--temp-dir={scratch}"],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        found = psutil.Process(process.pid)
        try:
            until(lambda: process.poll() is not None or _STARTED in Path(output.name).read_text(), "a node to start")
            if process.poll() is None:
                yield found
                return
            message = Path(output.name).read_text()
        finally:
            end(found)
    if tries == 1 or _SLOW_START not in message:
        raise Stuck(f"a node did not start:\n{message}")
    say("a node took longer to start than Ray waits; trying again")
    with node(part, *arguments, tries=tries - 1) as another:
        yield another


def end(node: psutil.Process) -> None:
    """Kill a node and all its processes, as when a machine fails."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [node, *node.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def troupe(*arguments: str) -> str:
    """Run a troupe command and return its output. Raises Stuck if it fails."""
    command = [sys.executable, "-m", "troupe", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if done.returncode:
        raise Stuck(done.stderr.strip())
    return done.stdout.strip()


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until `condition` holds. Raises Stuck after WAIT_S seconds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.2)


def free_port() -> int:
    """A free port that stays free until it is used: the system assigns no port below its ephemeral ones."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = range(_FIRST_PORT, first) if first > _FIRST_PORT + _PORT_TRIES else range(last + 1, 2**16)
    for port in random.sample(ports, k=min(_PORT_TRIES, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise Stuck(f"no free port outside the ephemeral range {first} to {last}")


def answers(url: str) -> bool:
    """Whether the job server is up; without a token it answers with an HTTP error."""
    try:
        urllib.request.urlopen(f"{url}/api/version", timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    main()
