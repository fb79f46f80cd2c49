"""`troupe deploy --slurm`: a spec as an sbatch script that starts Ray on the job's nodes and trains. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.placement import Node
from orchestrator.plan import plan
from orchestrator.spec_any import AnySpec


@dataclass(frozen=True)
class Options:
    """What a job asks for. Raises UsageError where that is nothing."""

    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    environment: Path
    """Virtual environment with Troupe, at the same place on every node."""
    join_timeout_s: int = 600
    """Longest wait for the nodes to join."""
    notice_s: int = 300
    """How long before its time is up the run is told to save and leave."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise UsageError(problem)


def _problems(options: Options) -> Iterator[str]:
    least = {"--nodes": (options.nodes, 1), "--gpus-per-node": (options.gpus_per_node, 0)}
    least["--cpus-per-node"] = (options.cpus_per_node, 1)
    for flag, (number, bound) in least.items():
        if not bound <= number <= 100_000:
            yield f"{flag} {number}: expected a whole number from {bound} on"


def script(name: str, command: Sequence[str], specs: Sequence[AnySpec], options: Options) -> str:
    """The sbatch script.

    :param command: arguments of `troupe run` without the address: the spec's absolute path, overrides
    :param specs: every run of the file
    Raises UsageError, in the words of `troupe plan` where the nodes have no room.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        raise UsageError("--name: may hold letters, digits, '.', '_' and '-'")
    nodes = [
        Node(f"node-{i}", float(options.cpus_per_node), float(options.gpus_per_node)) for i in range(options.nodes)
    ]
    for spec in specs:
        for role, asked in spec.roles.present().items():
            if asked.node_labels:
                why = "the nodes of the job have no labels; choose them by sbatch (--constraint)"
                raise UsageError(f"roles.{role}.node_labels: {why}")
        if misfit := plan(spec, nodes).misfit:
            raise UsageError(misfit)
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
        "# Written by `troupe deploy --slurm`. Account, partition and time belong to sbatch:\n"
        "#   sbatch --partition=... --time=... THIS-FILE\n"
        f"environment={shlex.quote(str(options.environment))}\n"
        f"cpus={options.cpus_per_node} gpus={options.gpus_per_node} join_timeout_s={options.join_timeout_s}\n"
        f"run=(troupe run {shlex.join(command)} --address auto --resume)\n"
        f"{_BODY}"
    )


_BODY = r"""
set -euo pipefail
export PATH="$environment/bin:$PATH" RAY_USAGE_STATS_ENABLED=0
fail() { echo "error: $*" >&2; exit 1; }

# The cluster's token: made here, for its owner's eyes, read from its file by every process; in no argument.
secrets=$(mktemp -d "$PWD/.troupe-$SLURM_JOB_ID-XXXXXX")
leave() { rm -rf "$secrets"; kill $(jobs -p) 2>/dev/null || true; }
trap leave EXIT
unset RAY_AUTH_TOKEN RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$secrets/token"
(umask 077; head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

# Ray listens at each node's address in the job's network: what its name resolves to, where that is no loopback.
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

# Every node, or none: within the bound, all have joined.
wait_for() {  # wait_for COUNT: that many nodes
  timeout "$join_timeout_s" python - "$head" "$1" <<'PYTHON' || fail "$1 nodes did not join within $join_timeout_s s"
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

# A warning before the time is up (or a signal by hand) lets the run save and leave; the script ends as the run ends,
# and with the script everything that it started.
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
