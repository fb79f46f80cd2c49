"""`troupe deploy --slurm`: the script and its behaviour, with stubs for Slurm, Ray and Troupe."""

from __future__ import annotations

import ast
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.platforms.flags import SlurmFlags
from orchestrator.platforms.manifest import Request, batch_script
from tests.conftest import ROOT
from tests.orchestrator.test_cli import troupe

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
PPO = ROOT / "deploy" / "specs" / "multinode-ppo.yaml"
LARGE = {"nodes": 4, "gpus_per_node": 8, "cpus_per_node": 96}
CLUSTER = SlurmFlags(**LARGE)

# Shared by the stubs: log a line with the command, the mode of the token's file and its length.
TOKEN = '$(stat -c %a "$RAY_AUTH_TOKEN_PATH"):$(wc -c < "$RAY_AUTH_TOKEN_PATH")'
NOTE = f'echo "$(basename "$0") $* token={TOKEN}" >> "$LOG"\n'
STUBS = {
    "scontrol": "printf 'one\\ntwo\\n'",
    "getent": 'echo "10.0.0.$(printf %s "$2" | wc -c) STREAM $2"',
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": NOTE + 'cat "$RAY_AUTH_TOKEN_PATH" > "$SEEN"; exec sleep 300',
    "python": "cat > /dev/null; sleep 0.2",
    "troupe": NOTE + 'echo "address $RAY_ADDRESS" >> "$LOG"; exit "$CODE"',
}


def job(tmp_path: Path, **stubs: str) -> tuple[list[str], dict[str, str]]:
    """The command of a job on two nodes, and an environment in which it runs on this machine."""
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    for name, body in {**STUBS, **stubs}.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    script = tmp_path / "job.sh"
    flags = SlurmFlags(nodes=2, gpus_per_node=0, cpus_per_node=4)
    script.write_text(batch_script(Request(GRPO), flags, tmp_path / "venv"))
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "[one-two]", "CODE": "0"}
    return ["bash", str(script)], env | {"LOG": str(tmp_path / "log"), "SEEN": str(tmp_path / "seen")}


@pytest.mark.parametrize("path", [GRPO, PPO, CHAIN], ids=lambda path: path.stem)
def test_the_script_is_bash(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(batch_script(Request(path, ("seed=5", "name=a-b"), out=Path("/scratch/my runs")), CLUSTER))
    subprocess.run(["bash", "-n", str(file)], check=True)
    text = file.read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=a-b\n#SBATCH --nodes=4\n")
    assert "#SBATCH --gpus-per-node=8\n" in text and "#SBATCH --cpus-per-task=96\n" in text
    (run,) = (line for line in text.splitlines() if line.startswith("run=("))
    words = shlex.split(run.removeprefix("run=(").removesuffix(")"))
    given = [str(path), "--set", "seed=5", "--set", "name=a-b", "--out", "/scratch/my runs"]
    assert words == ["troupe", "run", *given, "--address", "auto", "--resume"]


def test_a_job_starts_ray_on_every_node_trains_and_cleans_up(tmp_path: Path) -> None:
    command, env = job(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = (tmp_path / "log").read_text()
    heads = [line for line in log.splitlines() if line.startswith("ray ")]
    assert len(heads) == 2 and all(line.endswith("token=600:64") for line in heads)
    assert "--node-ip-address=10.0.0.3" in heads[0] and "--head --port=20077" in heads[0]
    assert "--address=10.0.0.3:20077" in heads[1] and "--include-dashboard=false" in heads[0]
    assert "address 10.0.0.3:20077" in log and f"troupe run {GRPO} --address auto --resume" in log
    token = (tmp_path / "seen").read_text()
    assert len(token) == 64 and token not in log and token not in Path(command[1]).read_text()
    assert not list(tmp_path.glob(".troupe-*"))


def test_the_token_is_readable_by_its_owner_only_and_is_no_argument() -> None:
    text = batch_script(Request(GRPO), SlurmFlags())
    (made,) = (line for line in text.splitlines() if "/dev/urandom" in line)
    assert "umask 077" in made and made.rstrip(")").endswith('> "$RAY_AUTH_TOKEN_PATH"')
    assert "RAY_AUTH_MODE=token" in text and "unset RAY_AUTH_TOKEN" in text
    assert not any("AUTH_TOKEN" in line for line in text.splitlines() if "ray start" in line or "srun" in line)


def test_the_script_that_waits_for_the_nodes_is_valid_python() -> None:
    text = batch_script(Request(GRPO), SlurmFlags())
    _, _, rest = text.partition("<<'PYTHON'")
    ast.parse(rest.partition("\n")[2].partition("\nPYTHON\n")[0])


def test_the_script_exits_with_the_runs_exit_code(tmp_path: Path) -> None:
    command, env = job(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env | {"CODE": "130"}, capture_output=True, timeout=60)
    assert done.returncode == 130


def test_nodes_that_do_not_join_end_the_job(tmp_path: Path) -> None:
    command, env = job(tmp_path, python="sleep 0.5; exit 124")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: fewer than 1 nodes joined in 600 s\n")
    assert "troupe run" not in (tmp_path / "log").read_text()
    assert not list(tmp_path.glob(".troupe-*"))


def test_slurms_signal_lets_the_run_save_and_exit(tmp_path: Path) -> None:
    saves = 'trap "sleep 0.5; echo saved >> $LOG; exit 130" TERM; echo running >> "$LOG"; while :; do sleep 0.1; done'
    command, env = job(tmp_path, troupe=saves)
    running = subprocess.Popen(command, cwd=tmp_path, env=env)
    deadline = time.monotonic() + 60
    while "running" not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 130
    assert (tmp_path / "log").read_text().endswith("saved\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (LARGE | {"nodes": 3}, r"no room for [a-z]+(-\d)?: it asks for .*, or add nodes"),
        (LARGE | {"gpus_per_node": 0}, "no room for policy: it asks for 8 bundle"),
        ({"nodes": 0}, "--nodes: must be between 1 and 100000, got 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node: must be between 0 and 100000, got -1"),
        ({"cpus_per_node": 0}, "--cpus-per-node: must be between 1 and 100000, got 0"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(flags: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        batch_script(Request(PPO), SlurmFlags(**flags))


def test_node_labels_are_refused() -> None:
    with pytest.raises(UsageError, match=r"roles\.policy\.node_labels: Slurm nodes have no Ray labels"):
        batch_script(Request(PPO, ("roles.policy.node_labels={zone: a}",)), CLUSTER)
    assert batch_script(Request(PPO, ("roles.policy.accelerator=H200", "roles.rollout.strategy=spread")), CLUSTER)


def test_a_name_cannot_add_a_line_to_the_script() -> None:
    with pytest.raises(UsageError, match="--name: only letters"):
        batch_script(Request(GRPO, name="a\n#SBATCH --uid=0"), SlurmFlags())


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    answer = troupe("deploy", str(PPO), "--slurm", "--nodes", "2", "--gpus-per-node", "8", "-o", str(file))
    assert (answer.code, len(answer.errors), answer.heavy, file.exists()) == (2, 1, [], False)
    answer = troupe("deploy", str(PPO), "--slurm", "--nodes", "4", "--gpus-per-node", "8", "-o", str(file))
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
