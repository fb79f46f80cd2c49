"""Wrong command lines, files and machines: one line that names the file or the flag, the right exit code, no traceback.

Most commands run in this process, in a folder of prepared mistakes; those that need a broken machine run in another.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from tests.conftest import ROOT
from tests.orchestrator.commands.test_json import commands
from tests.orchestrator.spec.test_bad_specs import CASES
from troupe.orchestrator.cli import app, main

USAGE, FAILED = 2, 1
SERVER = "--address http://127.0.0.1:1"

# (command, exit code, words of its line). Files are in `workspace`.
COMMANDS = [
    # Words that are no command, no option or no value.
    ("frobnicate", USAGE, "No such command 'frobnicate'; see `troupe --help`"),
    ("vaildate good.yaml", USAGE, "Did you mean 'validate'?"),
    ("--frobnicate", USAGE, "No such option: --frobnicate"),
    ("env chek", USAGE, "Did you mean 'check'?"),
    ("run", USAGE, "Missing argument 'SPEC'; see `troupe run --help`"),
    ("run good.yaml extra", USAGE, "(extra)"),
    ("run good.yaml --steps 3", USAGE, "No such option: --steps"),
    ("run good.yaml --set", USAGE, "'--set' requires an argument"),
    ("demo --steps 0", USAGE, "'--steps': Input should be greater than or equal to 1"),
    ("demo --steps x", USAGE, "'--steps': Input should be a valid integer"),
    ("init --steps 0", USAGE, "'--steps'"),
    ("init --gpus -1", USAGE, "'--gpus'"),
    ("plan good.yaml --cpus-per-node 0", USAGE, "'--cpus-per-node'"),
    ("schema spec extra", USAGE, "(extra)"),
    ("logs", USAGE, "Missing argument 'JOB'"),
    ("jobs", USAGE, "Missing option '--address', the URL of the job server, such as http://HEAD:8265; RAY_API_SERVER"),
    ("submit good.yaml", USAGE, "Missing option '--address'"),
    (f"stop j {SERVER} --timeout-s x", USAGE, "'--timeout-s'"),
    (f"stop j {SERVER} --timeout-s -1", USAGE, "'--timeout-s'"),
    ("scale", USAGE, "Missing argument 'RUN'"),
    ("env check", USAGE, "Missing argument 'SPEC'"),
    ("env check good.yaml --episodes 0", USAGE, "'--episodes'"),
    ("run good.yaml --address ''", USAGE, "'--address': is empty"),
    # Files that are no spec.
    ("run none.yaml", USAGE, "none.yaml: no such file"),
    ("run folder", USAGE, "folder: is a folder, not a spec"),
    ("run tiny-grpo", USAGE, "tiny-grpo: no such file (did you mean examples:tiny-grpo?)"),
    ("run good.yaml --set seed 5", USAGE, "a change of the spec is --set FIELD=VALUE"),
    ("run good.yaml --set data.train.path=*.jsonl", USAGE, "text with special characters is in quotes"),
    ("run good.yaml --set algorithm.name=gpro", USAGE, "no algorithm 'gpro' (did you mean 'grpo'?)"),
    ("run good.yaml --set output.trackers=[wandb]", USAGE, "output.trackers: unknown field (did you mean 'sinks'?)"),
    ("run good.yaml --set model.name=x", USAGE, "model.name: unknown field (did you mean 'path'?)"),
    ("run good.yaml --set roles.actor.workers=2", USAGE, "roles.actor: unknown field (did you mean 'policy'?)"),
    ("run good.yaml --set roles.policy.name=x", USAGE, "it belongs at name or algorithm.name"),
    ("run ''", USAGE, ".: is a folder"),
    ("run empty.yaml", USAGE, "empty.yaml:1: the file is empty"),
    ("run binary.yaml", USAGE, "binary.yaml:2: is not UTF-8 text"),
    ("run pipe", USAGE, "pipe: is not a regular file"),
    ("run loop", USAGE, "loop: cannot be read (Too many levels of symbolic links)"),
    ("run dangling", USAGE, "dangling: no such file"),
    ("run good.yaml/x", USAGE, "good.yaml/x: cannot be read (Not a directory)"),
    ("run cyclic.yaml", USAGE, "cyclic.yaml:15: stages.sft.model.path: "),
    ("run examples:none", USAGE, "examples:none: no such example"),
    ("eval none.yaml", USAGE, "none.yaml: no such file"),
    ("validate folder", USAGE, "folder: is a folder"),
    ("validate binary.yaml", USAGE, "binary.yaml:2:"),
    ("plan none.yaml", USAGE, "none.yaml"),
    ("plan empty.yaml", USAGE, "empty.yaml:1:"),
    (f"submit none.yaml {SERVER}", USAGE, "none.yaml"),
    ("apply none.yaml", USAGE, "none.yaml"),
    ("deploy none.yaml", USAGE, "none.yaml"),
    ("deploy binary.yaml --slurm", USAGE, "binary.yaml:2:"),
    ("env check none.yaml", USAGE, "none.yaml"),
    ("env check good.yaml", USAGE, "there is no roles.environment to check"),
    ("demo --spec none", USAGE, "examples:none: no such example"),
    # Values of --set, and what they name.
    ("run good.yaml --set seed", USAGE, "--set: expected FIELD.PATH=VALUE, got 'seed'"),
    ("validate good.yaml --set a=b", USAGE, "--set: a: unknown field"),
    ("run good.yaml --set model.path=folder", USAGE, "model.path: folder is not a model folder: it has no config.json"),
    ("run good.yaml --set model.path=file", USAGE, "model.path: no such folder: file"),
    ("run good.yaml --set data.train.path=folder", USAGE, "data.train.path: no such file: folder"),
    ("run good.yaml --set data.train.path=pipe", USAGE, "data.train.path: no such file: pipe"),
    ("validate good.yaml --set data.train.path=loop", USAGE, "data.train.path: no such file: loop"),
    ("validate good.yaml --set data.train.path=file", USAGE, "no row can be used"),
    ("validate good.yaml --set data.train.prompt=question", USAGE, "no column 'question'"),
    ("validate good.yaml --set 'data.train={kind: parquet, path: file}'", USAGE, "file: cannot be read"),
    ("validate good.yaml --set 'data.train={kind: csv, path: binary.yaml}'", USAGE, "binary.yaml: cannot be read"),
    ("validate good.yaml --set 'data.train={kind: datasets, path: folder}'", USAGE, "folder: cannot be read"),
    ("eval good.yaml --model none", USAGE, "no such folder: none"),
    ("eval good.yaml --model file", USAGE, "no such folder: file"),
    ("eval good.yaml", USAGE, "there is nothing to evaluate on"),
    ("eval two.yaml", USAGE, "a file with stages is several runs"),
    ("sweep none.yaml", USAGE, "none.yaml: no such file"),
    ("sweep two.yaml --set stages.sft.schedule.steps=1,x", USAGE, "stages.sft.schedule.steps: expected a whole number"),
    ("sweep two.yaml --set stages.ppo.seed=1,2", USAGE, "a sweep sets it in each trial"),
    ("sweep good.yaml --set seed", USAGE, "--set: expected FIELD=VALUE,VALUE,..., got 'seed'"),
    ("sweep good.yaml --set schedule.steps=1,x", USAGE, "--set: schedule.steps: expected a whole number, got 'x'"),
    ("sweep good.yaml --set schedule.steps=1..2", USAGE, "is a range: --random N draws from it"),
    ("sweep good.yaml --set schedule.steps=1,2 --random 2", USAGE, "there are 2 settings"),
    ("sweep good.yaml --set seed=1,2", USAGE, "a sweep sets it in each trial"),
    ("sweep good.yaml --seeds 0", USAGE, "'--seeds'"),
    ("sweep good.yaml --at-once 0", USAGE, "'--at-once'"),
    ("sweep good.yaml --halve 2", USAGE, "name the --metric"),
    ("sweep good.yaml --metric eval/acuracy", USAGE, "there is no such metric"),
    ("sweep good.yaml --out s3://bucket/sweep", USAGE, "'--out'"),
    ("sweep good.yaml --set data.train.path=file", USAGE, "no row can be used"),
    ("bench none.yaml", USAGE, "none.yaml: no such file"),
    ("bench two.yaml", USAGE, "a file with stages is several runs"),
    ("bench good.yaml -o folder", USAGE, "--output folder is a folder"),
    ("bench good.yaml -o s3://bucket/bench.json", USAGE, "--output s3:/bucket/bench.json is a URL"),
    ("bench good.yaml --sweep seed", USAGE, "--sweep: expected FIELD=VALUE,VALUE,..., got 'seed'"),
    (
        "bench good.yaml --sweep roles.rollout.worker=1,2",
        USAGE,
        "--sweep: roles.rollout.worker: unknown field",
    ),
    ("bench good.yaml --set data.train.path=file", FAILED, "no row can be used"),
    # Run folders.
    ("run good.yaml --out file", FAILED, "file: File exists; use another path"),
    ("run good.yaml --out file/x", FAILED, "file/x: Not a directory; use another path"),
    ("run good.yaml --out /proc/x", FAILED, "/proc/x: "),
    ("run good.yaml --out no-checkpoints", FAILED, "no-checkpoints/checkpoints: File exists; use another path"),
    ("run good.yaml --out damaged", USAGE, "damaged/checkpoints: none of the checkpoints (1) is valid"),
    ("run good.yaml --out damaged --resume", USAGE, "move the folder away"),
    ("export none out", FAILED, "none/checkpoints: no valid checkpoint"),
    ("export file out", FAILED, "file/checkpoints: no valid checkpoint"),
    ("export damaged out", FAILED, "damaged/checkpoints: no valid checkpoint"),
    ("export damaged out --step 3", FAILED, "step-000003: invalid checkpoint: manifest.json cannot be read"),
    ("export damaged out --step 7", FAILED, "step-000007: no such checkpoint; steps with one: "),
    ("export damaged out --step -1", USAGE, "'--step'"),
    ("export damaged", USAGE, "Missing argument 'FOLDER'"),
    ("export saved folder", FAILED, "folder: File exists; use another path"),
    ("export saved file/out", FAILED, "file/out: Not a directory; use another path"),
    ("export saved out --average", FAILED, "the checkpoint has no folder model-average"),
    ("scale none", USAGE, "none: no such folder; RUN is a run folder"),
    ("scale file", USAGE, "file: no such folder"),
    ("scale folder", USAGE, "folder: no active run"),
    ("scale dead", USAGE, "dead: its run has ended: process 99999999 on "),
    ("scale odd", USAGE, "odd: no active run"),
    ("scale dead rollout", USAGE, "rollout: expected ROLE=WORKERS"),
    ("scale dead rollout=x", USAGE, "rollout=x: expected ROLE=WORKERS"),
    ("scale dead rollout=2 --timeout-s -1", USAGE, "'--timeout-s'"),
    ("apply good.yaml --out none", USAGE, "none/spec.yaml: no such file"),
    ("apply good.yaml --out file", USAGE, "file/spec.yaml: cannot be read (Not a directory)"),
    ("apply good.yaml --out odd --dry-run", USAGE, "odd/spec.yaml"),
    ("apply good.yaml --out dead", USAGE, "dead: its run has ended: process 99999999 on "),
    ("apply two.yaml --out dead", USAGE, "two.yaml: only a run with rollouts and without stages can change"),
    ("samples none", USAGE, "none"),
    ("samples file", USAGE, "file"),
    ("samples saved", USAGE, "saved"),
    ("samples saved --where 'reward <'", USAGE, ""),
    ("samples saved --step -1", USAGE, "'--step'"),
    ("samples saved --limit 0", USAGE, ""),
    # Clusters and job servers.
    ("plan good.yaml --cluster x", USAGE, "--cluster: 'x' is not NODESxGPUS"),
    ("plan good.yaml --cluster 1x8xZZ", USAGE, "--cluster: no GPU type 'ZZ'"),
    ("plan good.yaml --cluster 2x8 --gib-per-node nan", USAGE, "--gib-per-node: must be between 0 and 1000000"),
    ("plan good.yaml --cluster 2x8 --gib-per-node -1", USAGE, "--gib-per-node"),
    (f"submit good.yaml {SERVER}", FAILED, "--address http://127.0.0.1:1: "),
    ("submit good.yaml --address 127.0.0.1:1", USAGE, "expected the job server's URL"),
    ("submit good.yaml --address 'http://a b'", FAILED, "--address http://a b: "),
    (f"submit good.yaml {SERVER} --working-dir none", USAGE, "--working-dir: no such folder: none"),
    (f"submit good.yaml {SERVER} --working-dir file", USAGE, "--working-dir: no such folder: file"),
    (f"submit good.yaml {SERVER} --requirements none", USAGE, "--requirements: no such file: none"),
    (f"submit good.yaml {SERVER} --requirements binary.yaml", USAGE, "binary.yaml cannot be read"),
    (f"submit good.yaml {SERVER} --requirements password.txt", USAGE, "password.txt:1: a URL with a password"),
    (f"jobs {SERVER}", FAILED, "--address http://127.0.0.1:1: "),
    ("jobs --address ftp://x", USAGE, "--address ftp://x: expected the job server's URL"),
    (f"status j {SERVER}", FAILED, "--address http://127.0.0.1:1: "),
    (f"logs j {SERVER}", FAILED, "--address http://127.0.0.1:1: "),
    (f"logs j {SERVER} --follow", FAILED, "--address http://127.0.0.1:1: "),
    (f"stop j {SERVER}", FAILED, "--address http://127.0.0.1:1: "),
    # Deployment.
    ("deploy good.yaml -o folder", USAGE, "--output folder: Is a directory"),
    ("deploy good.yaml -o none/x", USAGE, "--output none/x: No such file or directory"),
    ("deploy good.yaml --slurm --image x", USAGE, "--image: not available with --slurm"),
    ("deploy good.yaml --nodes 3", USAGE, "--nodes: requires --slurm"),
    ("deploy good.yaml --slurm --nodes 0", USAGE, "--nodes: must be between"),
    (
        "deploy good.yaml --label a=b",
        USAGE,
        "; kustomize sets any other field of a manifest; see `troupe",
    ),
    ("deploy good.yaml --pvc x", USAGE, "--pvc x: expected CLAIM:/FOLDER"),
    ("deploy good.yaml --env x", USAGE, "--env: expected NAME=VALUE"),
    ("deploy good.yaml --secret-env x", USAGE, "--secret-env: expected NAME=SECRET:KEY"),
    ("deploy good.yaml --shm-gib -1", USAGE, "--shm-gib: must be between"),
    ("deploy good.yaml --namespace 'A B'", USAGE, "--namespace A B: not a DNS label"),
    ("deploy good.yaml --name 'A B'", USAGE, "set one with --name"),
    ("run good.yaml --out s3://bucket/runs", USAGE, "'--out': is not a folder: a run writes to a disk"),
    ("demo --out gs://bucket/runs", USAGE, "'--out': is not a folder: a run writes to a disk"),
    ("deploy good.yaml --out s3://bucket/runs", USAGE, "'--out': is not a folder: a run writes to a disk"),
    # The other commands.
    ("init", USAGE, "--model and --data: required where there is no terminal to ask"),
    ("init --model none --data none.jsonl", USAGE, "--data: no such file: none.jsonl"),
    ("init --model file --data rows.jsonl -o new.yaml", USAGE, "model.path: no such folder: file"),
    ("init --from none", USAGE, "examples:none: no such example"),
    ("init --recipe gsm", USAGE, "examples:recipes/gsm: no such example (did you mean 'recipes/gsm8k'?)"),
    ("init --recipe gsm8k --from tiny-grpo", USAGE, "--from and --recipe name different specs"),
    ("skill tune", USAGE, "no skill 'tune' (known: read-a-run, "),
    ("schema wrong", USAGE, "'wrong' is not one of 'spec', 'error', 'report'"),
    ("init --from tiny-grpo --model x", USAGE, "--from: writes the example as it is; drop --model"),
    ("init --from tiny-grpo -o folder --force", USAGE, "--output: folder: Is a directory"),
    ("init --from tiny-grpo -o good.yaml", USAGE, "good.yaml exists; --force overwrites it"),
    ("init --from tiny-grpo -o none/x.yaml", USAGE, "--output: none/x.yaml: No such file or directory"),
    ("init --data reasoning_gym:nothing --model folder", USAGE, "--data: reasoning-gym has no task 'nothing'"),
    ("init --data rows.jsonl --model folder --algorithm zzz", USAGE, "--algorithm: no algorithm 'zzz'"),
    ("init --data rows.jsonl --model folder --gpus 1 --gpu-type X9", USAGE, "--gpu-type: no GPU type 'X9'"),
    ("demo --models file/x --prepare", FAILED, "file/x: Not a directory; use another path"),
    ("demo laptop-ppo", USAGE, "; --spec chooses the example; see `troupe demo --help`"),
    ("algorithms zzz", USAGE, "no algorithm 'zzz'"),
    ("report none", USAGE, "none is not the folder of a run: there is no such folder"),
    ("trace none", USAGE, "none is not the folder of a run"),
    ("why none", USAGE, "none: no such folder"),
    ("replay none --step 1", USAGE, "none"),
    ("audit two.yaml", USAGE, "two.yaml: cannot audit a file with stages"),
    ("doctor --fix", USAGE, "No such option: --fix"),
    ("algorithms --check", USAGE, "--check is for a custom algorithm"),
    ("algorithms grpo --check", USAGE, "--check is for a custom algorithm"),
    ("algorithms no.such:thing", USAGE, "cannot import no.such"),
    ("algorithms os:path --check", USAGE, "os:path is a module"),
    ("algorithms os:getcwd --args [", USAGE, "--args: expected a YAML mapping"),
    ("algorithms os:getcwd --args '[1]'", USAGE, "--args: expected a YAML mapping"),
    ("algorithms os:getcwd --args '!!python/name:os.system x'", USAGE, "--args: expected a YAML mapping"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with one good spec and many mistakes."""
    folder = tmp_path_factory.mktemp("workspace")
    document = yaml.safe_load((ROOT / "deploy" / "specs" / "tiny-grpo.yaml").read_text())
    document["model"]["path"], document["data"] = str(tiny_model), {"train": {"kind": "jsonl", "path": "rows.jsonl"}}
    good = yaml.safe_dump(document)
    chain = (ROOT / "deploy" / "specs" / "tiny-three-stage.yaml").read_text()
    since = "2026-11-28T00:00:00+00:00"
    here = {"user": "me", "host": socket.gethostname(), "namespace": os.stat("/proc/self/ns/pid").st_ino}
    dead = here | {"pid": 99999999, "started": 1, "since": since, "command": "troupe run good.yaml"}
    cyclic = chain.replace("  sft:\n", '  sft:\n    model: {path: "stage:ppo"}\n')
    for name, text in {
        "good.yaml": good,
        "rows.jsonl": "".join(
            json.dumps({"prompt": f"What follows {i}?", "answer": str(i + 1)}) + "\n" for i in range(8)
        ),
        "two.yaml": chain,
        "cyclic.yaml": cyclic,
        "empty.yaml": "",
        "file": "x",
        "password.txt": "--index-url https://user:password@host/simple\n",
        "no-checkpoints/checkpoints": "",
        "dead/spec.yaml": good,
        "dead/control/x": "",
        "dead/run.lock": json.dumps(dead),
        "odd/control/x": "",
        "odd/run.lock": "{",
        "folder/empty": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(bytes(range(256)) * 40)
    step = folder / "damaged" / "checkpoints" / "step-000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_bytes(b"\xff\x00")
    save_checkpoint(folder / "saved")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    return folder


def save_checkpoint(run: Path) -> None:
    """A run folder with one valid checkpoint."""
    from troupe.orchestrator.training.checkpoint import CheckpointStore

    store = CheckpointStore(run / "checkpoints", keep=1)
    path = store.begin(1)
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    store.commit(path, {"step": 1})


@pytest.fixture
def inside(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(workspace)
    before = sorted(path.name for path in workspace.iterdir())
    yield workspace
    assert sorted(path.name for path in workspace.iterdir()) == before, "a refused command has left something"


def ended_with(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[object, list[str]]:
    """(exit code, lines of standard error) of a command, run in this process without a terminal."""
    monkeypatch.setattr(sys, "argv", ["troupe", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, [line for line in capsys.readouterr().err.splitlines() if line.strip()]


def test_there_are_enough_of_them() -> None:
    assert len({line for line, _, _ in COMMANDS}) == len(COMMANDS) >= 120


@pytest.mark.parametrize(("line", "code", "words"), COMMANDS, ids=[line for line, _, _ in COMMANDS])
def test_a_bad_command_gives_one_line(
    inside: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: int,
    words: str,
) -> None:
    ended, errors = ended_with(shlex.split(line), capsys, monkeypatch)
    assert (ended, len(errors)) == (code, 1), errors
    assert words in errors[0] and "Traceback" not in errors[0]


JSON = {name for name, one in commands(get_command(app)) if any("--json" in each.opts for each in one.params)}
"""Commands that print JSON."""


def command_of(line: str) -> str:
    return next((name for name in JSON if f"{line} ".startswith(f"{name} ")), "")


JSON_COMMANDS = [
    *(one for one in COMMANDS if (name := command_of(one[0])) and name != "demo"),
    ("demo", USAGE, "--json is for --list"),
    (f"submit good.yaml {SERVER} --follow", USAGE, "--json prints one object"),
]


def test_every_command_that_prints_json_is_refused_once() -> None:
    assert {command_of(line) for line, _, _ in JSON_COMMANDS} == JSON


@pytest.mark.parametrize(("line", "code", "words"), JSON_COMMANDS, ids=[line for line, _, _ in JSON_COMMANDS])
def test_with_json_the_error_is_an_object_on_standard_output(
    inside: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: int,
    words: str,
) -> None:
    name = command_of(line)
    monkeypatch.setattr(sys, "argv", shlex.split(f"troupe {name} --json {line.removeprefix(name)}"))
    with pytest.raises(SystemExit) as ended:
        main()
    said = json.loads(capsys.readouterr().out)
    assert (ended.value.code, said["exit_code"]) == (code, code) and words.removeprefix("error: ") in said["error"]


# Machines that lack something: (how, command, exit code, words).
MACHINES = [
    ("ulimit -f 0", "init --from tiny-grpo -o new.yaml", USAGE, "--output: new.yaml: File too large"),
    ("mkdir gone && cd gone && rmdir ../gone", "validate x.yaml", USAGE, "x.yaml: no such file"),
    ("mkdir gone && cd gone && rmdir ../gone", "doctor", FAILED, "the current folder does not exist any more"),
    ("export PYTHONPATH=broken:$PYTHONPATH", f"jobs {SERVER}", FAILED, "`troupe --version` lists the packages"),
    ("export PYTHONPATH=broken:$PYTHONPATH", "run good.yaml", FAILED, "`troupe --version` lists the packages"),
]
READ_ONLY, FULL = (
    "mount -t tmpfs -o ro tmpfs disk",
    "mount -t tmpfs -o size=64k tmpfs disk; head -c 1M /dev/zero > disk/x",
)
MOUNTS = [
    ("mount -t tmpfs -o ro tmpfs /dev/shm", "run good.yaml", FAILED, "/dev/shm is missing or cannot be written"),
    (FULL.replace("disk", "/dev/shm"), "run good.yaml", FAILED, "Ray cannot start: /dev/shm has 0 MiB free; its "),
    (READ_ONLY, "run good.yaml --out disk/run", FAILED, "disk/run: Read-only file system; use a path on another disk"),
    (READ_ONLY, "export saved disk/model", FAILED, "disk/model: Read-only file system; use a path on another disk"),
    (READ_ONLY, "init --from tiny-grpo -o disk/x.yaml", USAGE, "--output: disk/x.yaml: Read-only file system"),
    (READ_ONLY, "deploy good.yaml -o disk/x.yaml", USAGE, "--output disk/x.yaml: Read-only file system"),
    (FULL, "run good.yaml --out disk/run", FAILED, "No space left on device; free some space, or use another disk"),
    (FULL, "export saved disk/model", FAILED, "No space left on device; free some space, or use another disk"),
    (FULL, "deploy good.yaml -o disk/y.yaml", USAGE, "--output disk/y.yaml: No space left on device"),
]


def test_a_machine_without_memory_gives_one_line(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("troupe.orchestrator.spec.load.read_document", exhausted)
    assert ended_with(["plan", "good.yaml"], capsys, monkeypatch) == (
        FAILED,
        ["error: this machine has no memory left for the command"],
    )


def test_a_bad_spec_gives_one_line_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for case in CASES:
        Path("spec.yaml").write_text(case.text)
        expected = (USAGE, [f"spec.yaml:{case.line}"])
        assert ended_with(["validate", "spec.yaml"], capsys, monkeypatch) == expected, case.name


@pytest.mark.parametrize(("how", "line", "code", "words"), MACHINES, ids=[f"{one[0]}-{one[1]}" for one in MACHINES])
def test_a_machine_that_lacks_something_gives_one_line(
    workspace: Path, tmp_path: Path, how: str, line: str, code: int, words: str
) -> None:
    assert_one_line(["bash", "-c", f"{how}; {shell(line)}"], workspace, tmp_path, code, words)


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("how", "line", "code", "words"), MOUNTS, ids=[f"{one[0]}-{one[1]}" for one in MOUNTS])
def test_a_disk_that_cannot_be_written_gives_one_line(
    workspace: Path, tmp_path: Path, how: str, line: str, code: int, words: str
) -> None:
    if not may_mount():
        pytest.skip("may not mount file systems")
    assert_one_line(["unshare", "-m", "bash", "-c", f"({how}) 2>&-; {shell(line)}"], workspace, tmp_path, code, words)


def shell(line: str) -> str:
    return f"exec {shlex.quote(sys.executable)} -m troupe {line}"


def assert_one_line(command: list[str], workspace: Path, folder: Path, code: int, words: str) -> None:
    """Run a command in a folder with a good spec, a saved run, a mount point and a package that cannot be imported."""
    for name in ("good.yaml", "rows.jsonl"):
        (folder / name).write_bytes((workspace / name).read_bytes())
    (folder / "saved").symlink_to(workspace / "saved")
    for name in ("disk", "broken"):
        (folder / name).mkdir()
    (folder / "broken" / "ray.py").write_text("raise ImportError('no package ray')\n")
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    errors = [text for text in done.stderr.splitlines() if text.strip()]
    assert (done.returncode, len(errors)) == (code, 1), done.stderr
    assert words in errors[0]
