"""The command line: its output, and its one-line errors before anything starts."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.conftest import NO_WEIGHTS, ROOT
from tests.forked_commands import run_command
from troupe.orchestrator.cli import COMMANDS, _Plain, app, load
from troupe.orchestrator.roles.settings import offline_config
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
DPO = ROOT / "deploy" / "specs" / "tiny-dpo.yaml"


@dataclass(frozen=True)
class Answer:
    """Outcome of a command."""

    code: int
    stdout: str
    errors: list[str]
    """Lines of standard error."""
    heavy: list[str]
    """Heavy libraries that were imported."""


def troupe(*arguments: str) -> Answer:
    """Run the command in its own process."""
    done = run_command(*arguments)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Answer(done.returncode, done.stdout, lines, done.heavy)


@pytest.fixture
def spec(tmp_path: Path, tiny_model: Path) -> Path:
    """The tiny GRPO spec with a prompt file and a model folder that has a tokenizer and no weights."""
    document = yaml.safe_load(GRPO.read_text())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).symlink_to(tiny_model / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) + "\n" for i in range(8)))
    document["model"]["path"] = str(model)
    document["data"] = {"train": {"kind": "jsonl", "path": str(prompts)}}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("model.path=/no/such/model", "model.path: no such folder: /no/such/model"),
        ("data.train.path=/no/such.jsonl", "data.train.path: no such file: /no/such.jsonl"),
        ("roles.policy.wrkers=2", "roles.policy.wrkers: unknown field (did you mean 'workers'?)"),
        ("roles.policy.workers=two", "roles.policy.workers: expected a whole number, got 'two'"),
        ("roles.policy.workers", "roles.policy.workers"),
        ("schedule.steps=0", "schedule.steps: must be at least 1, got 0"),
    ],
)
def test_an_invalid_spec_gives_one_line_and_exit_code_2(spec: Path, override: str, error: str) -> None:
    answer = troupe("run", str(spec), "--out", str(spec.parent / "out"), "--set", override)
    assert (answer.code, len(answer.errors), answer.heavy) == (2, 1, [])
    assert error in answer.errors[0]
    assert not (spec.parent / "out").exists()


def test_a_missing_spec_gives_one_line_and_exit_code_2(tmp_path: Path) -> None:
    answer = troupe("run", str(tmp_path / "none.yaml"))
    assert (answer.code, len(answer.errors), answer.heavy) == (2, 1, [])
    assert "none.yaml" in answer.errors[0]


def test_a_missing_data_column_is_reported_before_ray_starts(spec: Path) -> None:
    override = "data.train.prompt=question"
    answer = troupe("run", str(spec), "--out", str(spec.parent / "out"), "--set", override)
    assert answer.code == 1
    assert "question" in answer.errors[-1] and answer.errors[-1].startswith("error: ")
    assert not any("Traceback" in line for line in answer.errors)
    assert "Starting" not in answer.stdout


def test_a_run_folder_in_use_is_not_overwritten(spec: Path) -> None:
    out = spec.parent / "out"
    store = CheckpointStore(out / "checkpoints", keep=1)
    store.prepare()
    store.commit(store.begin(3), {"step": 3})
    answer = troupe("run", str(spec), "--out", str(out))
    assert (answer.code, len(answer.errors)) == (2, 1)
    assert "already contains a run (step 3)" in answer.errors[0] and "--resume" in answer.errors[0]


def test_a_run_whose_checkpoints_are_in_an_object_store_is_not_started_again(spec: Path) -> None:
    """Its own folder is empty, as on a new machine; with --resume, the newest checkpoint is fetched into it."""
    url = f"file://{spec.parent}/bucket"
    store = CheckpointStore(spec.parent / "elsewhere", keep=1)
    saved = store.commit(store.begin(3), {"step": 3})
    name = load_rollout_spec(spec).name
    RemoteCheckpoints(url, name, keep=1).upload(saved.path)
    out = spec.parent / "out"
    options = ("--out", str(out), "--set", f"checkpoint.path={url}")
    answer = troupe("run", str(spec), *options)
    assert (answer.code, len(answer.errors)) == (2, 1)
    assert f"{url} (checkpoint.path) already contains the run (step 3): use --resume" in answer.errors[0]
    answer = troupe("run", str(spec), *options, "--resume")
    assert answer.code == 1 and "state.json is not the state of this kind of run" in answer.errors[-1]
    assert (out / "checkpoints" / "step-000003" / "manifest.json").is_file()


def test_a_supervisor_does_not_resume_a_run_that_it_did_not_start(spec: Path) -> None:
    out = spec.parent / "out"
    store = CheckpointStore(out / "checkpoints", keep=1)
    store.prepare()
    saved = store.commit(store.begin(3), {"step": 3})
    shutil.copytree(saved.path, saved.path.with_name("step-000003-backup"))
    restarts = ("--set", "failures.run_restarts=1")
    answer = troupe("run", str(spec), "--out", str(out), "--supervise", *restarts)
    assert (answer.code, len(answer.errors), answer.heavy) == (2, 1, [])
    assert "already contains a run (step 3)" in answer.errors[0]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nowhere:port"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_missing_cluster_gives_one_line(spec: Path, command: str, address: str) -> None:
    answer = troupe(command, str(spec), "--address", address)
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert re.match(rf"error: --address {re.escape(address)}(:| is not the address of a Ray head:) ", answer.errors[0])


def test_validate_describes_the_spec(spec: Path) -> None:
    answer = troupe("validate", str(spec))
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    assert "tiny-grpo is valid: grpo, 15 steps of 64 samples\n  data.train: 8 rows\n" in answer.stdout


def test_what_is_known_of_a_valid_spec_as_json(spec: Path) -> None:
    answer = troupe("validate", str(spec), "--json")
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    (found,) = json.loads(answer.stdout)
    known = {"name": "tiny-grpo", "algorithm": "grpo", "batch": "64 samples", "data": ["data.train: 8 rows"]}
    assert found | known == found


def test_every_shipped_spec_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    clusters = {"node-8gpu-grpo.yaml": "1x8", "multinode-ppo.yaml": "4x8"}
    for path in sorted((ROOT / "deploy" / "specs").glob("*.yaml")):
        if "roles" not in (yaml.safe_load(path.read_text()) or {}):
            continue
        # The models of these are on no machine that runs the tests.
        described = ["--cluster", clusters[path.name], "--allow-unknown"] if path.name in clusters else []
        answer = CliRunner().invoke(app, ["plan", str(path), *described])
        assert (answer.exit_code, answer.stderr) == (0, ""), path
        roles: dict[str, Any] = yaml.safe_load(path.read_text())["roles"]
        if "name" not in (named := roles.get("environment", {"name": ""})):
            del roles["environment"]
            roles |= {rf"environment\.{name}": section for name, section in named.items()}
        for role, section in roles.items():
            if "colocate_with" in section:
                assert re.search(rf"{role} .* inside {section['colocate_with']} ", answer.stdout)
            else:
                placed = re.findall(rf"{role}-\d+ ", answer.stdout)
                assert len(set(placed)) == section.get("workers", 1), (path, role)


def test_a_plan_of_a_chain_covers_every_stage() -> None:
    answer = troupe("plan", str(CHAIN), "--json")
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    stages = ("sft", "reward-model", "ppo")
    assert [run["name"] for run in json.loads(answer.stdout)] == [f"tiny-three-stage-{stage}" for stage in stages]


def test_a_plan_that_does_not_fit_suggests_a_change() -> None:
    answer = troupe("plan", str(ROOT / "deploy" / "specs" / "multinode-ppo.yaml"), "--cluster", "3x8")
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert re.search(r"no room for [a-z]+(-\d+)?: it asks for .* lower roles\.[a-z]+\.workers", answer.errors[0])
    assert "no room" in answer.stdout


@pytest.mark.parametrize("cluster", ["8", "0x8", "2x", "axb"])
def test_a_malformed_cluster_gives_one_line(cluster: str) -> None:
    answer = troupe("plan", str(GRPO), "--cluster", cluster)
    message = f"error: --cluster: '{cluster}' is not NODESxGPUS, as in 2x8, or NODESxGPUSxTYPE, as in 2x8xH200"
    assert (answer.code, answer.errors) == (2, [message])


def test_an_unknown_gpu_type_gives_one_line() -> None:
    answer = troupe("plan", str(GRPO), "--cluster", "1x8xH1000")
    assert (answer.code, len(answer.errors)) == (2, 1)
    assert answer.errors[0].startswith("error: --cluster: no GPU type 'H1000' (known: T4, ")


def test_a_plan_shows_memory_as_tables_and_as_json(tiny_model: Path) -> None:
    arguments = ("plan", str(ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"), "--cluster", "1x8xH100")
    known = ("--set", f"model.path={tiny_model}", "--gib-per-node", "512")
    answer = troupe(*arguments, *known)
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    assert "memory of each GPU, GiB" in answer.stdout and "host memory, GiB" in answer.stdout
    assert re.search(r"rollout-0\.\.3: a KV cache of [\d.]+ GiB holds \d+ sequences of 4096 tokens", answer.stdout)
    assert re.search(r"node-0, host: [\d.]+ of 512.0 GiB = policy ", answer.stdout)
    (run,) = json.loads(troupe(*arguments, *known, "--json").stdout)
    assert run["misfit"] is None and len(run["memory"]) == 4 + 4 + 4 + 4 + 8
    assert run["warnings"] == [] and run["remedies"] == []


def test_a_plan_with_a_model_of_unknown_size_fails_unless_it_is_allowed() -> None:
    arguments = ("plan", str(ROOT / "deploy" / "specs" / "node-8gpu-grpo.yaml"), "--cluster", "1x8xH100")
    without, allowed = troupe(*arguments), troupe(*arguments, "--allow-unknown")
    assert (without.code, len(without.errors)) == (1, 1)
    assert "model.path: the size of models/policy-7b-instruct is not known: " in without.errors[0]
    assert "No such file" in without.errors[0] and without.errors[0].endswith(
        "--allow-unknown plans without its workers"
    )
    assert (allowed.code, allowed.errors) == (0, [])
    assert "warning: model.path: the size of models/policy-7b-instruct is not known" in allowed.stdout


def test_a_chain_names_the_model_of_unknown_size_once(tmp_path: Path) -> None:
    answer = troupe("plan", str(CHAIN), "--set", f"model.path={tmp_path / 'none'}")
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert f"model.path: the size of {tmp_path / 'none'} is not known: " in answer.errors[0]
    assert " ".join(answer.stdout.split()).count("is not known: it is trained from ") == 3


def test_a_plan_that_does_not_fit_is_also_available_as_json() -> None:
    answer = troupe("plan", str(ROOT / "deploy" / "specs" / "multinode-ppo.yaml"), "--cluster", "3x8", "--json")
    (run,) = json.loads(answer.stdout)
    assert answer.code == 1 and run["misfit"] in answer.errors[0]


def test_the_schema_accepts_the_shipped_spec() -> None:
    answer = troupe("schema")
    assert (answer.code, answer.heavy) == (0, [])
    # The spec as Troupe reads it: YAML 1.1 parses 2e-3 as text, Troupe as a number.
    spec = load_rollout_spec(GRPO).model_dump(mode="json", exclude_unset=True)
    schema = jsonschema.Draft202012Validator(json.loads(answer.stdout))
    assert schema.is_valid(spec) and not schema.is_valid(spec | {"seed": "x"})


def test_exporting_from_a_folder_without_a_run_gives_one_line(tmp_path: Path) -> None:
    answer = troupe("export", str(tmp_path / "none"), str(tmp_path / "model"))
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert "no valid checkpoint" in answer.errors[0]
    assert not (tmp_path / "model").exists()


def test_evaluating_without_held_out_prompts_gives_one_line(spec: Path) -> None:
    answer = troupe("eval", str(spec))
    assert (answer.code, len(answer.errors)) == (2, 1)
    assert "no evaluation section" in answer.errors[0]


def test_evaluating_without_held_out_examples_gives_one_line(spec: Path) -> None:
    document = yaml.safe_load(DPO.read_text())
    del document["data"]["eval"], document["evaluation"]
    document["model"]["path"] = str(spec.parent / "model")
    offline = spec.parent / "dpo.yaml"
    offline.write_text(yaml.safe_dump(document))
    answer = troupe("eval", str(offline))
    assert (answer.code, len(answer.errors), answer.stdout) == (2, 1, "")
    assert answer.errors[0] == "error: the spec has no data.eval: there are no held-out examples to evaluate on"


def test_evaluating_another_model_keeps_the_reference_of_its_training(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunRequest] = []

    async def evaluated(request: RunRequest, *_: object) -> dict[str, float]:
        asked.append(request)
        return {"eval/loss": 0.5}

    monkeypatch.setattr("troupe.orchestrator.runs.evaluation.evaluate_offline", evaluated)
    monkeypatch.chdir(ROOT)
    (base := spec.parent / "base").symlink_to(trained := spec.parent / "model")
    arguments = ["eval", str(DPO), "--set", f"model.path={base}", "--model", str(trained)]
    answer = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert json.loads(answer.stdout) == {"eval/loss": 0.5}
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).stdout == "eval/loss  0.5\n"
    config = offline_config(asked[0].spec) if isinstance(asked[0].spec, OfflineSpec) else None
    assert config is not None and config.reference_model is not None
    assert (config.model.path, config.reference_model.path) == (str(trained), str(base))
    assert config.reference_model.dtype == config.model.dtype == "float32"


def test_a_misspelt_command_names_the_nearest_and_exits_with_code_2() -> None:
    answer = troupe("vaildate", str(GRPO))
    assert (answer.code, answer.stdout, answer.heavy) == (2, "", [])
    assert "No such command 'vaildate'. Did you mean 'validate'?" in " ".join(answer.errors)


def test_the_versions_are_printed_without_importing_the_packages() -> None:
    answer = troupe("--version")
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    lines = dict(line.split(" ", 1) for line in answer.stdout.splitlines())
    assert {"troupe", "python", "torch", "deepspeed", "ray", "transformers"} <= set(lines)
    assert lines["ray"] == version("ray") and lines["torch"] == version("torch")


def test_a_command_that_ends_collects_nothing() -> None:
    """What would be found in its thousands of modules ends with the process."""
    code = """
import gc, os, sys
from troupe.orchestrator.cli import main
gc.disable()
class Kept:
    def __del__(self): os.write(1, b"collected")
kept = Kept()
kept.itself = kept
del kept
sys.argv = ["troupe", "--version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "troupe" in done.stdout and "collected" not in done.stdout, done.stderr


def test_the_shell_completes_commands() -> None:
    environment = {"_TROUPE_COMPLETE": "complete_bash", "COMP_WORDS": "troupe va", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['troupe']; from troupe.orchestrator.cli import app; app(prog_name='troupe')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["validate"], done.stderr


def test_doctor_prints_the_same_findings_as_text_and_as_json() -> None:
    answer, text = troupe("doctor", "--json"), troupe("doctor")
    assert (answer.errors, answer.heavy, text.heavy) == ([], [], [])
    document = json.loads(answer.stdout)
    assert answer.code == text.code == (0 if document["healthy"] else 1)
    checks = [one["check"] for one in document["findings"]]
    assert {"engine", "memory", "shm", "disk"} <= set(checks)
    assert [line.split()[1] for line in text.stdout.splitlines()[:-1] if not line.startswith(" ")] == checks


def test_init_writes_a_spec_that_validate_and_plan_accept(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    data = ("--data", "reasoning_gym:chain_sum")
    arguments = ("init", "--model", str(tiny_model), *data, "-o", str(output))
    answer = troupe(*arguments)
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    assert answer.stdout.splitlines()[-1] == f"wrote {output}; next: troupe validate {output}"
    assert [troupe(command, str(output)).code for command in ("validate", "plan")] == [0, 0]
    again = troupe(*arguments)
    assert (again.code, len(again.errors)) == (2, 1) and "--force" in again.errors[0]


def test_with_json_an_error_is_an_object_as_well(spec: Path) -> None:
    number = 1 + spec.read_text().splitlines().index("seed: 7")
    spec.write_text(spec.read_text().replace("seed: 7", "seed: x"))
    answer = troupe("validate", str(spec), "--set", "algorithm.name=gpro", "--json")
    found = json.loads(answer.stdout)
    assert answer.code == found["exit_code"] == 2 and found["error"].splitlines() == answer.errors
    unknown = "no algorithm 'gpro' (did you mean 'grpo'?)"
    assert sorted(found["problems"], key=lambda one: one["file"]) == [
        {"file": "--set", "line": None, "field": "algorithm.name", "code": "unknown-value", "message": unknown,
         "suggestion": "grpo"},
        {"file": str(spec), "line": number, "field": "seed", "code": "wrong-type",
         "message": "expected a whole number, got 'x'", "suggestion": None},
    ]  # fmt: skip
    jsonschema.validate(found, json.loads(troupe("schema", "error").stdout))
    answer = troupe("samples", "none", "--json")
    told = "none is not the folder of a run: there is no such folder"
    assert json.loads(answer.stdout) == {"error": told, "exit_code": 2, "problems": []}


def test_help_has_a_short_flag_a_command_and_no_type_of_a_flag() -> None:
    texts = {troupe(*arguments).stdout for arguments in (["run", "-h"], ["help", "run"], ["run", "--help"])}
    (text,) = texts
    assert "--resume" in text and " PATH " in text and "<" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_text_is_wrapped_once_and_names_types_in_words(name: str) -> None:
    command = load(name, COMMANDS[name].home)
    for one in (command, *getattr(command, "commands", {}).values()):
        assert all("\n" not in paragraph for paragraph in one.help.split("\n\n")), one.help
        text = one.get_help(typer.Context(one))
        assert not re.search(r"<\w|\brange\b|\{|\blist\[", text), text


def test_commands_that_ask_a_job_server_read_rays_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    assert "--address http://127.0.0.1:1: " in troupe("jobs").errors[0]
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:2")
    assert "--address http://127.0.0.1:2: " in troupe("jobs").errors[0]


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    for stage in ("ppo", "sft"):
        (tmp_path / "job" / stage).mkdir(parents=True)
        (tmp_path / "job" / stage / "spec.yaml").touch()
    runs = f"{tmp_path}/job is no run; the runs in it: {tmp_path}/job/ppo, {tmp_path}/job/sft"
    for command in (["scale"], ["report"], ["why"], ["samples"], ["replay"], ["trace", "-o", "x"]):
        answer = troupe(*command, str(tmp_path / "job"))
        assert answer.code == 2 and answer.errors == [f"error: {runs}"], command


def test_log_lines_name_other_libraries_only() -> None:
    shown = _Plain().format
    record = logging.LogRecord("troupe.orchestrator.cli", logging.WARNING, "", 1, "stopping: %s", ("saving",), None)
    assert shown(record) == "WARNING stopping: saving"
    record.name = "ray.worker"
    assert shown(record) == "WARNING ray.worker: stopping: saving"
