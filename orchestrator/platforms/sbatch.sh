# From here on the same in every script: the lines above set environment, inside, container, cpus, gpus, join_timeout_s,
# requeues and run.
set -euo pipefail
export PATH="${environment:+$environment/bin:}$PATH" RAY_USAGE_STATS_ENABLED=0
fail() { echo "error: $*" >&2; exit 1; }

# The cluster's token: created here, readable by its owner only, read from its file by every process; never an argument.
secrets=$(mktemp -d "$PWD/.troupe-$SLURM_JOB_ID-XXXXXX")
temporary=$(mktemp -d "/tmp/troupe-$SLURM_JOB_ID-XXXXXX")
cleanup() {  # end Ray on all nodes, which remove their temporary folders, within a minute
  trap '' TERM INT USR1
  local pids
  mapfile -t pids < <(jobs -p)
  if ((${#pids[@]})); then
    kill "${pids[@]}" 2>/dev/null || true
    for ((i = 0; i < 600; i++)); do
      [[ -n $(jobs -pr) ]] || break
      sleep 0.1
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
  fi
  rm -rf "$secrets" "$temporary"
}
trap cleanup EXIT
trap 'exit 130' TERM INT USR1  # while Ray starts there is nothing to save
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
ray_on_node() {  # ray_on_node ARGUMENT...: Ray with a private temporary folder, which is removed when it ends
  local folder ray="" stopped=""
  trap 'stopped=1; [[ -z $ray ]] || kill "$ray" 2>/dev/null' TERM INT
  folder=$(mktemp -d "/tmp/ray-$SLURM_JOB_ID-XXXXXX")
  if [[ -z $stopped ]]; then
    TMPDIR="$folder" "${inside[@]}" ray start --block --disable-usage-stats --temp-dir="$folder" "$@" &
    ray=$!
    [[ -z $stopped ]] || kill "$ray" 2>/dev/null  # the signal came before the script knew the process
    until wait "$ray" || ! kill -0 "$ray" 2>/dev/null; do :; done
  fi
  rm -rf "$folder"
}
start_ray() {  # start_ray NODE ADDRESS ARGUMENT...: Ray on one node, until the job ends
  srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --nodelist="$1" "${container[@]}" \
    bash -c "$(declare -p inside; declare -f ray_on_node)"$'\nray_on_node "$@"' ray_on_node --node-ip-address="$2" \
    --num-cpus="$cpus" --num-gpus="$gpus" "${@:3}" &
}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# The script itself runs outside of a container: what it starts on this node goes into one.
if ((${#inside[@]})); then inside=("${inside[@]:0:2}" --bind="$PWD:$PWD" "${inside[@]:2}"); fi  # behind `apptainer exec`
here=("${inside[@]}")
if ((${#container[@]})); then
  container=("${container[0]}" "${container[1]},$PWD:$PWD" --container-workdir="$PWD")
  here=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${container[@]}")
fi
addresses=()
for node in "${nodes[@]}"; do addresses+=("$(address_of "$node")"); done
port=$((20000 + SLURM_JOB_ID % 10000))
head="${addresses[0]}:$port"
start_ray "${nodes[0]}" "${addresses[0]}" --head --port="$port" --include-dashboard=false

# The run starts only if all nodes join within the timeout.
wait_for() {  # wait_for COUNT: until that many nodes have joined
  timeout "$join_timeout_s" "${here[@]}" python - "$head" "$1" <<'PYTHON' &
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
  wait $! || fail "fewer than $1 nodes joined in $join_timeout_s s"
}
wait_for 1
for ((i = 1; i < ${#nodes[@]}; i++)); do start_ray "${nodes[i]}" "${addresses[i]}" --address="$head"; done
wait_for "${#nodes[@]}"

# SIGUSR1, Slurm's signal before the time limit, and SIGTERM, a signal sent by hand, let the run save and exit. The
# script exits with the run's exit code, and all processes that it started end with it.
RAY_ADDRESS="$head" TMPDIR="$temporary" "${here[@]}" "${run[@]}" &
running=$!
time_is_up=
stop() { kill -TERM "$running" 2>/dev/null || true; }
trap stop TERM INT
trap 'time_is_up=yes; stop' USR1
code=0
wait "$running" || code=$?
while kill -0 "$running" 2>/dev/null; do
  code=0
  wait "$running" || code=$?
done

# A run that has saved because its time is up (exit code 130) is queued again and resumes.
if [[ -n $time_is_up && $code == 130 ]] && ((${SLURM_RESTART_COUNT:-0} < requeues)); then
  cleanup
  trap - EXIT
  echo "time is up: queued again (${SLURM_RESTART_COUNT:-0} times so far)"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
