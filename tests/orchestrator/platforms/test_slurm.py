"""`troupe deploy --slurm`: the script and its behaviour, with stubs for Slurm, Ray and Troupe."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.orchestrator.platforms.kubernetes.manifests import write_model
from tests.orchestrator.test_cli import troupe
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms.flags import NodeFlags, SlurmFlags
from troupe.orchestrator.platforms.manifest import Request, batch_script

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
PPO = ROOT / "deploy" / "specs" / "multinode-ppo.yaml"
LARGE: dict[str, Any] = {"nodes": 4, "gpus_per_node": 8, "cpus_per_node": 96}
OF_NODE = ("gpus_per_node", "cpus_per_node", "gib_per_node", "env")

# Shared by the stubs: log a line with the command, the mode of the token's file and its length.
TOKEN = '$(stat -c %a "$RAY_AUTH_TOKEN_PATH"):$(wc -c < "$RAY_AUTH_TOKEN_PATH")'
NOTE = f'echo "$(basename "$0") $* token={TOKEN}" >> "$LOG"\n'
STUBS = {
    "scontrol": '[[ $1 == show ]] || { echo "scontrol $*" >> "$LOG"; exit; }; printf "one\\ntwo\\n"',
    "getent": 'echo "10.0.0.$(printf %s "$2" | wc -c) STREAM $2"',
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": NOTE
    + 'cat "$RAY_AUTH_TOKEN_PATH" > "$SEEN"; for folder in "$@"; do [[ $folder == --temp-dir=* ]] && break; done; '
    + 'folder="${folder#--temp-dir=}"; echo "temp $(stat -c %a "$folder") $TMPDIR" >> "$LOG"; touch "$folder/socket"; '
    + "exec sleep 300",
    "python": "cat > /dev/null; sleep 0.2",
    "apptainer": 'echo "apptainer $*" >> "$LOG"; shift; while [[ $1 == --* ]]; do shift; done; shift; exec "$@"',
    "troupe": NOTE
    + 'echo "address $RAY_ADDRESS" >> "$LOG"; '
    + 'for _ in {1..300}; do (( $(grep -c "^temp " "$LOG") >= 2 )) && break; sleep 0.05; done; exit "$CODE"',
}


def script_of(request: Request, environment: Path = Path("/venv"), **flags: Any) -> str:
    """The script with these flags."""
    nodes = NodeFlags(**{name: value for name, value in flags.items() if name in OF_NODE})
    others = SlurmFlags(**{name: value for name, value in flags.items() if name not in OF_NODE})
    return batch_script(request, nodes, others, environment)[0]


def headers(text: str) -> list[str]:
    """The options in the script."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def temporary_folders(job: str = "77") -> list[Path]:
    return [*Path("/tmp").glob(f"ray-{job}-*"), *Path("/tmp").glob(f"troupe-{job}-*")]


def job(tmp_path: Path, flags: dict[str, Any] | None = None, **stubs: str) -> tuple[list[str], dict[str, str]]:
    """The command of a job on two nodes, and an environment in which it runs on this machine."""
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    for name, body in {**STUBS, **stubs}.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    script = tmp_path / "job.sh"
    size = {"nodes": 2, "cpus_per_node": 4, "requeues": 3}
    script.write_text(script_of(Request(GRPO), tmp_path / "venv", **size, **(flags or {})))
    job_id = str(os.getpid())  # names the temporary folders of this test alone
    path = os.environ["PATH"] if not flags else f"{bin_}:{os.environ['PATH']}"  # a container has programs of its own
    env = {"PATH": path, "SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "[one-two]", "CODE": "0"}
    return ["bash", str(script)], env | {"LOG": str(tmp_path / "log"), "SEEN": str(tmp_path / "seen")}


@pytest.mark.parametrize("path", [GRPO, PPO, CHAIN], ids=lambda path: path.stem)
def test_the_script_is_bash(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(script_of(Request(path, ("seed=5", "name=a-b"), out=Path("/scratch/my runs")), **LARGE))
    subprocess.run(["bash", "-n", str(file)], check=True)
    text = file.read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=a-b\n#SBATCH --nodes=4\n")
    assert "#SBATCH --gpus-per-node=8\n" in text and "#SBATCH --cpus-per-task=96\n" in text
    (run,) = (line for line in text.splitlines() if line.startswith("run=("))
    words = shlex.split(run.removeprefix("run=(").removesuffix(")"))
    given = [str(path), "--set", "seed=5", "--set", "name=a-b", "--out", "/scratch/my runs"]
    assert words == ["troupe", "run", *given, "--address", "auto", "--resume", "--supervise"]


def test_a_job_starts_ray_on_every_node_trains_and_cleans_up(tmp_path: Path) -> None:
    command, env = job(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = (tmp_path / "log").read_text()
    heads = [line for line in log.splitlines() if line.startswith("ray ")]
    assert len(heads) == 2 and all(line.endswith("token=600:64") for line in heads)
    port = 20000 + os.getpid() % 10000
    assert "--node-ip-address=10.0.0.3" in heads[0] and f"--head --port={port}" in heads[0]
    assert f"--address=10.0.0.3:{port}" in heads[1] and "--include-dashboard=false" in heads[0]
    assert f"address 10.0.0.3:{port}" in log and f"troupe run {GRPO} --address auto --resume --supervise" in log
    token = (tmp_path / "seen").read_text()
    assert len(token) == 64 and token not in log and token not in Path(command[1]).read_text()
    assert not list(tmp_path.glob(".troupe-*"))
    folders = [line.split() for line in log.splitlines() if line.startswith("temp ")]
    assert [mode for _, mode, _ in folders] == ["700", "700"] and len({path for _, _, path in folders}) == 2
    assert temporary_folders(env["SLURM_JOB_ID"]) == []


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_job_runs_in_a_container_on_every_node(runtime: str, tmp_path: Path) -> None:
    prologue = tmp_path / "prologue.sh"
    prologue.write_text("module() { echo module $* >> $LOG; }\nmodule load cuda")
    mount = ["/scratch", "/data:/inside"]
    flags = {runtime: "troupe.sif", "mount": mount, "prologue": prologue, "env": ["NCCL_DEBUG=a b"]}
    command, env = job(tmp_path, flags)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text, log = Path(command[1]).read_text(), (tmp_path / "log").read_text()
    assert "export NCCL_DEBUG='a b'\n" in text and log.startswith("module load cuda\n")
    assert f"{tmp_path}/venv" not in text, "the container has its own environment"
    assert len([line for line in log.splitlines() if line.startswith("ray start")]) == 2
    here, specs = str(tmp_path), str(GRPO.parent)
    if runtime == "pyxis":
        mounts = f"--container-mounts=/tmp:/tmp,/scratch:/scratch,/data:/inside,{specs}:{specs},{here}:{here}"
        inside = [line for line in log.splitlines() if f" --container-image=troupe.sif {mounts} " in line]
    else:
        binds = ["/tmp:/tmp", "/scratch:/scratch", "/data:/inside", f"{specs}:{specs}"]
        start = f"apptainer exec --bind={here}:{here} {' '.join(f'--bind={bind}' for bind in binds)} troupe.sif "
        inside = [line for line in log.splitlines() if line.startswith(start)]
    started = [line for line in inside if " troupe run " in line]
    assert len(started) == 1
    assert len([line for line in inside if (" bash -c" if runtime == "pyxis" else " ray start ") in line]) == 2
    assert any(" python - " in line for line in inside)
    assert not list(tmp_path.glob(".troupe-*")) and temporary_folders(env["SLURM_JOB_ID"]) == []


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"pyxis": "a", "apptainer": "b"}, "--apptainer: give either --pyxis or --apptainer"),
        ({"mount": ["/a"]}, "--mount: needs a container, --pyxis IMAGE or --apptainer IMAGE"),
        ({"pyxis": "a", "mount": ["b"]}, "--mount b: expected /FOLDER or /FOLDER:/INSIDE, absolute"),
        ({"pyxis": "a", "mount": ["/a,/b"]}, "--mount /a,/b: expected"),
        ({"prologue": Path("/nowhere/x.sh")}, "--prologue /nowhere/x.sh: No such file or directory"),
        ({"env": ["A"]}, "--env: expected NAME=VALUE"),
        ({"env": ["HF_TOKEN=x"]}, "--env HF_TOKEN: the value of a credential would stand in the file"),
    ],
)
def test_flags_of_containers_that_cannot_work_are_refused(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"^{why}"):
        script_of(Request(GRPO), **flags)


def test_the_token_is_readable_by_its_owner_only_and_is_no_argument() -> None:
    text = script_of(Request(GRPO))
    (made,) = (line for line in text.splitlines() if "/dev/urandom" in line)
    assert "umask 077" in made and made.rstrip(")").endswith('> "$RAY_AUTH_TOKEN_PATH"')
    assert "RAY_AUTH_MODE=token" in text and "unset RAY_AUTH_TOKEN" in text
    assert not any("AUTH_TOKEN" in line for line in text.splitlines() if "ray start" in line or "srun" in line)


def test_the_script_that_waits_for_the_nodes_is_valid_python() -> None:
    text = script_of(Request(GRPO))
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


SAVES = 'trap "sleep 0.5; echo saved >> $LOG; exit 130" TERM; echo running >> "$LOG"; while :; do sleep 0.1; done'


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while line not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def signalled(tmp_path: Path, number: signal.Signals, troupe_stub: str = SAVES, **env: str) -> tuple[int, str]:
    """A job that gets a signal while the run trains: its exit code and its log."""
    command, environment = job(tmp_path, troupe=troupe_stub)
    running = subprocess.Popen(command, cwd=tmp_path, env=environment | env, stdout=subprocess.DEVNULL)
    log = tmp_path / "log"
    wait_for_line(log, "running")
    running.send_signal(number)
    code = running.wait(60)
    assert temporary_folders(environment["SLURM_JOB_ID"]) == [] == list(tmp_path.glob(".troupe-*"))
    return code, log.read_text()


def test_a_signal_by_hand_lets_the_run_save_and_ends_the_job(tmp_path: Path) -> None:
    code, log = signalled(tmp_path, signal.SIGTERM)
    assert code == 130 and log.endswith("saved\n")


def test_a_job_whose_time_is_up_saves_and_is_queued_again(tmp_path: Path) -> None:
    code, log = signalled(tmp_path, signal.SIGUSR1, SLURM_RESTART_COUNT="2")
    assert code == 0 and log.endswith(f"saved\nscontrol requeue {os.getpid()}\n")


def test_a_job_is_queued_again_a_limited_number_of_times(tmp_path: Path) -> None:
    code, log = signalled(tmp_path, signal.SIGUSR1, SLURM_RESTART_COUNT="3")
    assert code == 130 and log.endswith("saved\n")


def test_a_signal_while_ray_starts_ends_the_job(tmp_path: Path) -> None:
    command, environment = job(tmp_path, python='cat > /dev/null; echo running >> "$LOG"; sleep 60')
    running = subprocess.Popen(command, cwd=tmp_path, env=environment)
    wait_for_line(tmp_path / "log", "running")
    running.send_signal(signal.SIGUSR1)
    assert running.wait(60) == 130
    assert temporary_folders(environment["SLURM_JOB_ID"]) == [] == list(tmp_path.glob(".troupe-*"))


def test_a_run_that_fails_instead_of_saving_is_not_queued_again(tmp_path: Path) -> None:
    code, log = signalled(tmp_path, signal.SIGUSR1, SAVES.replace("exit 130", "exit 1"))
    assert code == 1 and "scontrol" not in log


def test_slurm_signals_the_script_alone_and_may_queue_the_job_again() -> None:
    options = headers(script_of(Request(GRPO)))
    assert "--signal=B:USR1@300" in options and "--requeue" in options and "--open-mode=append" in options


# Memory


def test_a_node_has_the_memory_that_the_plan_adds_up(tmp_path: Path) -> None:
    model = write_model(tmp_path / "7b", "7b")
    text = script_of(Request(GRPO, (f"model.path={model}",)))
    (memory,) = (option for option in headers(text) if option.startswith("--mem="))
    # A policy and an engine in float32 or bfloat16, and the optimizer: more than 7.6 billion numbers of 16 bytes.
    assert int(memory.removeprefix("--mem=").removesuffix("G")) > 7.6 * 16


def test_exclusive_nodes_give_all_their_memory_unless_it_is_set() -> None:
    options = headers(script_of(Request(PPO), **LARGE, exclusive=True))
    assert "--exclusive" in options and "--mem=0" in options
    options = headers(script_of(Request(PPO), **LARGE, exclusive=True, gib_per_node=900))
    assert "--mem=900G" in options
    assert "--exclusive" not in headers(script_of(Request(PPO), **LARGE))


def test_memory_that_is_not_known_is_not_asked_for_and_reported() -> None:
    text, notes = batch_script(Request(PPO), NodeFlags(gpus_per_node=8, cpus_per_node=96), SlurmFlags(nodes=4))
    assert not any(option.startswith("--mem") for option in headers(text))
    (note,) = notes
    assert note.startswith("memory is not planned (/models/")
    assert note.endswith(
        ": the job asks for no memory (set --gib-per-node or --exclusive, or deploy where the model is)"
    )


def test_a_run_that_needs_more_memory_than_its_nodes_have_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "7b", "7b")
    with pytest.raises(UsageError, match=r"node-0 needs \d+\.\d GiB of host memory and has 20\.0"):
        script_of(Request(GRPO, (f"model.path={model}",)), gib_per_node=20)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(script_of(Request(PPO), **LARGE))
    done = subprocess.run(["shellcheck", "--severity=warning", str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (LARGE | {"nodes": 3}, r"no room for [a-z]+(-\d)?: it asks for .*, or add nodes"),
        (
            LARGE | {"gpus_per_node": 0},
            "no node is large enough for .*, and the largest has 96 CPU 0 GPU; use larger nodes",
        ),
        ({"nodes": 0}, "--nodes: must be between 1 and 100000, got 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node: must be between 0 and 100000, got -1"),
        ({"cpus_per_node": 0}, "--cpus-per-node: must be between 1 and 100000, got 0"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        script_of(Request(PPO), **flags)


def test_node_labels_are_refused() -> None:
    with pytest.raises(UsageError, match=r"roles\.policy\.node_labels: Slurm nodes have no Ray labels"):
        script_of(Request(PPO, ("roles.policy.node_labels={zone: a}",)), **LARGE)
    assert script_of(Request(PPO, ("roles.policy.accelerator=H200", "roles.rollout.strategy=spread")), **LARGE)


def test_a_name_cannot_add_a_line_to_the_script() -> None:
    with pytest.raises(UsageError, match="--name: only letters"):
        script_of(Request(GRPO, name="a\n#SBATCH --uid=0"))


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    answer = troupe("deploy", str(PPO), "--slurm", "--nodes", "2", "--gpus-per-node", "8", "-o", str(file))
    assert (answer.code, len(answer.errors), answer.heavy, file.exists()) == (2, 1, [], False)
    answer = troupe(
        "deploy", str(PPO), "--slurm", "--nodes", "4", "--gpus-per-node", "8", "--exclusive", "-o", str(file)
    )
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
