"""New weights on their way to engines on three other nodes over links of limited speed: what changed, or all of them.

    python -m benchmarks.delta_nodes                          # 1e-6 and 1e-4, at 1 Gbit/s: about 12 minutes
    python -m benchmarks.delta_nodes --rates 1e-5 --gbit 10

Four Ray nodes on this machine, each in a network namespace with a host name and a /dev/shm of its own, are joined by
links whose speed the kernel limits (tc). `troupe run` trains the model of `deploy/specs/laptop-grpo.yaml` in bfloat16
on the first one, with an engine on each of the others: for each learning rate once with `weight_sync.delta: auto` and
once with `off`. Needs root, and `ip`, `tc`,
`unshare` and `nsenter`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.harness import SKIPPED, NotCorrect, Spread, command_parser, machine, progress, versions
from benchmarks.support.network_nodes import PORT, lacking, network, ray_node
from troupe.orchestrator.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "deploy" / "specs" / "laptop-grpo.yaml"
NEAR, FAR = "near", ("far1", "far2", "far3")
MODES = ("off", "auto")
SETTINGS = (
    "model.dtype=bfloat16",
    "roles.policy.schedule=constant",
    "roles.policy.min_lr_ratio=0",
    "roles.policy.cpus=1",
    "roles.policy.node_labels={part: near}",
    "roles.reward.node_labels={part: near}",
    "roles.reward.workers=1",
    f"roles.rollout.workers={len(FAR)}",
    "roles.rollout.cpus=1",
    "roles.rollout.threads=1",
    "roles.rollout.node_labels={part: far}",
    "roles.rollout.kv_cache_gib=0.1",
    "roles.reward.functions=[{name: letter_share, args: {letters: aeiou}}]",  # every group has a signal
    "schedule.prompts_per_step=3",
    "evaluation=null",
    "data.eval=null",
)
FIRST = 3
"""The first version that counts: the second is the first one of which only what changed can travel."""
LONGEST_S = 900.0


@dataclass(frozen=True)
class Sent:
    """A version, as a run recorded it."""

    version: int
    digest: str
    nbytes: int
    to_nodes: int
    """Bytes that were sent to other nodes, all together."""
    seconds: float
    """From the start of publishing until every engine has acknowledged."""


@dataclass(frozen=True)
class Cluster:
    """The nodes, as a run joins them."""

    on_head: Sequence[str]
    """The beginning of a command that runs on the host of the head."""
    environment: Mapping[str, str]
    folder: Path
    """Of the runs."""


def train(cluster: Cluster, rate: str, mode: str, steps: int) -> list[Sent]:
    """A run on the nodes; returns its versions.

    Raises:
        NotCorrect: The run failed, or an engine acknowledged other weights than were published.
    """
    changes = (*SETTINGS, f"roles.policy.learning_rate={rate}", f"schedule.steps={steps}", f"weight_sync.delta={mode}")
    sets = [part for change in (*changes, f"name={mode}-{rate}") for part in ("--set", change)]
    out = cluster.folder / f"{mode}-{rate}"
    command = [sys.executable, "-m", "troupe", "run", str(SPEC), "--out", str(out), *sets]
    done = subprocess.run(
        [*cluster.on_head, *command],
        cwd=ROOT,
        env=dict(cluster.environment),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    if done.returncode:
        raise NotCorrect(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: list[Sent] = []
    for event in RunFolder(out).events("weights"):
        if set(event["engines"].values()) != {event["digest"]} or len(event["engines"]) != len(FAR):
            raise NotCorrect(f"version {event['version']}: {event['engines']} acknowledged, not {event['digest']}")
        if found and event["digest"] == found[-1].digest:
            raise NotCorrect(f"version {event['version']} has the weights of the version before")
        found.append(Sent(event["version"], event["digest"], event["bytes"], event["to_nodes"], event["seconds"]))
    return [sent for sent in found if sent.version >= FIRST]


def table(found: Mapping[tuple[str, str], Sequence[Sent]]) -> str:
    """A row for each run: medians of its versions."""
    head = ("learning rate", "delta", "MB to three nodes", "times fewer bytes", "seconds", "of all weights'")
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for (rate, mode), versions_sent in found.items():
        dense = Spread.of([sent.seconds for sent in found[rate, MODES[0]]])
        seconds = Spread.of([sent.seconds for sent in versions_sent])
        nbytes = Spread.of([float(sent.to_nodes) for sent in versions_sent])
        whole = len(FAR) * versions_sent[0].nbytes
        cells = (rate, mode, f"{nbytes.median / 1e6:.2f}", f"{whole / nbytes.median:.0f}", seconds.text(2))
        lines.append(" | ".join((*cells, f"{seconds.median / dense.median:.3f}")))
    return "\n".join(f"| {line} |" for line in lines)


def measure(given: argparse.Namespace) -> dict[tuple[str, str], list[Sent]]:
    """Start the nodes, and run every learning rate with and without differences.

    Raises:
        NoNetwork: The nodes cannot be made here.
        NotCorrect: See `train`.
    """
    environment = dict(os.environ) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    found: dict[tuple[str, str], list[Sent]] = {}
    with ExitStack() as stack:
        near, *far = stack.enter_context(network((NEAR, *FAR), given.gbit))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-nodes-")))
        progress("starting four Ray nodes")
        on_head = stack.enter_context(ray_node(near, near, 2, NEAR, environment))
        for host in far:
            stack.enter_context(ray_node(host, near, 1, "far", environment))
        cluster = Cluster(on_head, environment | {"RAY_ADDRESS": f"{near.address}:{PORT}"}, folder)
        for rate in given.rates:
            for mode in MODES:
                progress(f"learning rate {rate}, weight_sync.delta: {mode}")
                found[rate, mode] = sent = train(cluster, rate, mode, given.steps)
                progress(", ".join(f"{one.to_nodes / 1e6:.2f} MB in {one.seconds:.2f} s" for one in sent))
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("delta_nodes", __doc__)
    add = parser.add_argument
    add("--rates", nargs="+", default=["1e-6", "1e-4"], help="learning rates (default: 1e-6 1e-4)")
    add("--gbit", type=float, default=1.0, help="speed of each node's link in Gbit/s (default: 1)")
    add("--steps", type=int, default=8, help="updates of a run, of which the first two do not count (default: 8)")
    add("--json", type=Path, help="results file (default: none)")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the benchmark."""
    given = parse(sys.argv[1:])
    if why := lacking():
        print(f"skipped: {why}")
        sys.exit(SKIPPED)
    found = measure(given)
    sys.stdout.write(f"{table(found)}\n")
    if given.json:
        runs: list[dict[str, Any]] = [
            {"rate": rate, "delta": mode, "versions": [vars(sent) for sent in sent_versions]}
            for (rate, mode), sent_versions in found.items()
        ]
        document = {"benchmark": "delta_nodes", "gbit": given.gbit, "machine": machine(), "versions": versions()}
        given.json.write_text(json.dumps(document | {"runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
