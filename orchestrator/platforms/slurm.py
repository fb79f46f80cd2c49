"""A spec as an sbatch script that starts Ray on the job's nodes and trains. Pure: starts no process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.capacity.placement import Node
from orchestrator.capacity.plan import plan
from orchestrator.errors import UsageError
from orchestrator.spec.load import RunSpec

_LARGEST = 100_000
"""Upper limit of every resource number: a larger one is a typing error."""


@dataclass(frozen=True)
class Options:
    """Resources of the Slurm job. Raises UsageError for a number out of range."""

    environment: Path
    """Virtual environment with Troupe, at the same path on every node."""
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int = 128
    join_timeout_s: int = 600
    """Longest wait for the nodes to join, in seconds."""
    notice_s: int = 300
    """Seconds before the time limit at which Slurm signals the run to save and exit."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise UsageError(problem)


def _problems(options: Options) -> Iterator[str]:
    numbers = {
        "--nodes": (options.nodes, 1),
        "--gpus-per-node": (options.gpus_per_node, 0),
        "--cpus-per-node": (options.cpus_per_node, 1),
    }
    for flag, (number, least) in numbers.items():
        if not least <= number <= _LARGEST:
            yield f"{flag}: must be between {least} and {_LARGEST}, got {number}"


def script(name: str, command: Sequence[str], specs: Sequence[RunSpec], options: Options) -> str:
    """Build the sbatch script.

    Args:
        name: Name of the Slurm job.
        command: Arguments of `troupe run` without the address: the spec's absolute path and the overrides.
        specs: Every run of the file.
        options: Resources of the job.

    Raises:
        UsageError: The name is invalid, a role requires node labels, or the nodes cannot hold a run (the message is
            that of `troupe plan`).
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        raise UsageError("--name: only letters, digits, '.', '_' and '-' are allowed, starting with a letter or digit")
    for spec in specs:
        _require_room(spec, options)
    gpus = f"#SBATCH --gpus-per-node={options.gpus_per_node}\n" if options.gpus_per_node else ""
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name={name}\n"
        f"#SBATCH --nodes={options.nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH --cpus-per-task={options.cpus_per_node}\n"
        f"{gpus}"
        f"#SBATCH --signal=B:TERM@{options.notice_s}\n"
        "#SBATCH --output=%x-%j.log\n"
        "# Written by `troupe deploy --slurm`. Pass account, partition and time to sbatch:\n"
        "#   sbatch --partition=... --time=... THIS-FILE\n"
        f"environment={shlex.quote(str(options.environment))}\n"
        f"cpus={options.cpus_per_node} gpus={options.gpus_per_node} join_timeout_s={options.join_timeout_s}\n"
        f"run=(troupe run {shlex.join(command)} --address auto --resume)\n"
        f"{_BODY}"
    )


def _require_room(spec: RunSpec, options: Options) -> None:
    for role, resources in spec.roles.present().items():
        if resources.node_labels:
            why = "Slurm nodes have no Ray labels; select nodes with sbatch --constraint"
            raise UsageError(f"roles.{role}.node_labels: {why}")
    size = (float(options.cpus_per_node), float(options.gpus_per_node))
    if misfit := plan(spec, [Node(f"node-{i}", *size) for i in range(options.nodes)], advise=True).misfit:
        raise UsageError(misfit)


_BODY = r"""
set -euo pipefail
export PATH="$environment/bin:$PATH" RAY_USAGE_STATS_ENABLED=0
fail() { echo "error: $*" >&2; exit 1; }

# The cluster's token: created here, readable by its owner only, read from its file by every process; never an argument.
secrets=$(mktemp -d "$PWD/.troupe-$SLURM_JOB_ID-XXXXXX")
cleanup() { rm -rf "$secrets"; kill $(jobs -p) 2>/dev/null || true; }
trap cleanup EXIT
unset RAY_AUTH_TOKEN RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$secrets/token"
(umask 077; head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

# Ray listens on each node's address in the job's network: what its name resolves to, unless that is a loopback address.
address_of() {
  local address
  address=$(getent ahostsv4 "$1" | awk '$1 !~ /^127\./ && !found { print $1; found = 1 }') || true
  [[ -n $address ]] || address=$(srun --nodes=1 --ntasks=1 --nodelist="$1" hostname -I | awk '{ print $1 }')
  [[ -n $address ]] || fail "node $1 has no address"
  echo "$address"
}
start_ray() {  # start_ray NODE ADDRESS ARGUMENT...: Ray on one node, until the job ends
  srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --nodelist="$1" \
    ray start --block --disable-usage-stats --temp-dir="/tmp/ray-$SLURM_JOB_ID" --node-ip-address="$2" \
    --num-cpus="$cpus" --num-gpus="$gpus" "${@:3}" &
}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
addresses=()
for node in "${nodes[@]}"; do addresses+=("$(address_of "$node")"); done
port=$((20000 + SLURM_JOB_ID % 10000))
head="${addresses[0]}:$port"
start_ray "${nodes[0]}" "${addresses[0]}" --head --port="$port" --include-dashboard=false

# The run starts only if all nodes join within the timeout.
wait_for() {  # wait_for COUNT: until that many nodes have joined
  timeout "$join_timeout_s" python - "$head" "$1" <<'PYTHON' || fail "fewer than $1 nodes joined in $join_timeout_s s"
import socket
import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
host, port = address.rsplit(":", 1)
while True:
    try:
        socket.create_connection((host, int(port)), 5).close()
        break
    except OSError:
        time.sleep(1)
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < wanted:
    time.sleep(1)
PYTHON
}
wait_for 1
for ((i = 1; i < ${#nodes[@]}; i++)); do start_ray "${nodes[i]}" "${addresses[i]}" --address="$head"; done
wait_for "${#nodes[@]}"

# Slurm's signal before the time limit, or one sent by hand, lets the run save and exit. The script exits with the run's
# exit code, and all processes that it started end with it.
RAY_ADDRESS="$head" "${run[@]}" &
running=$!
trap 'kill -TERM "$running" 2>/dev/null || true' TERM INT
code=0
wait "$running" || code=$?
while kill -0 "$running" 2>/dev/null; do
  code=0
  wait "$running" || code=$?
done
exit "$code"
"""
