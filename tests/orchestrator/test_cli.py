"""The command line: what it refuses, in one line and without starting anything, and what it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from orchestrator.checkpoint import CheckpointStore
from orchestrator.cli import app
from orchestrator.run import RunRequest
from orchestrator.spec import load_spec
from orchestrator.spec_offline import OfflineSpec
from tests.conftest import ROOT

GRPO = ROOT / "deploy" / "tiny-grpo.yaml"
DPO = ROOT / "deploy" / "tiny-dpo.yaml"

PROBE = """
import sys
from orchestrator.cli import main
sys.argv = ["troupe", *sys.argv[1:]]
try:
    main()
finally:
    print("HEAVY", *(name for name in ("ray", "torch", "vllm", "deepspeed") if name in sys.modules), file=sys.stderr)
"""


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    stdout: str
    errors: list[str]
    """Lines of standard error."""
    heavy: list[str]
    """Heavy libraries that were imported."""


def troupe(*arguments: str) -> Answer:
    """Run the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    heavy = [line.split()[1:] for line in lines if line.startswith("HEAVY")]
    return Answer(done.returncode, done.stdout, [line for line in lines if not line.startswith("HEAVY")], heavy[0])


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The tiny GRPO spec on a file of prompts, with a model folder that is there."""
    document = yaml.safe_load(GRPO.read_text())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_text("")
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
def test_a_spec_that_cannot_work_costs_one_line_and_exit_code_2(spec: Path, override: str, error: str) -> None:
    answer = troupe("run", str(spec), "--out", str(spec.parent / "out"), "--set", override)
    assert (answer.code, len(answer.errors), answer.heavy) == (2, 1, [])
    assert error in answer.errors[0]
    assert not (spec.parent / "out").exists()


def test_a_spec_that_is_not_there_costs_one_line_and_exit_code_2(tmp_path: Path) -> None:
    answer = troupe("run", str(tmp_path / "none.yaml"))
    assert (answer.code, len(answer.errors), answer.heavy) == (2, 1, [])
    assert "none.yaml" in answer.errors[0]


def test_a_missing_data_column_is_told_before_ray_starts(spec: Path) -> None:
    override = "data.train.prompt=question"
    answer = troupe("run", str(spec), "--out", str(spec.parent / "out"), "--set", override)
    assert answer.code == 1
    assert "question" in answer.errors[-1] and answer.errors[-1].startswith("error: ")
    assert not any("Traceback" in line for line in answer.errors)
    assert "Starting" not in answer.stdout


def test_a_run_folder_in_use_is_not_written_over(spec: Path) -> None:
    out = spec.parent / "out"
    store = CheckpointStore(out / "checkpoints", keep=1)
    store.prepare()
    store.commit(store.begin(3), {"step": 3})
    answer = troupe("run", str(spec), "--out", str(out))
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert "holds a run already (step 3)" in answer.errors[0] and "--resume" in answer.errors[0]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nowhere:port"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_cluster_that_is_not_there_costs_one_line(spec: Path, command: str, address: str) -> None:
    answer = troupe(command, str(spec), "--address", address)
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert answer.errors[0].startswith(f"error: --address {address}: ")


def test_validate_says_what_a_spec_is(spec: Path) -> None:
    answer = troupe("validate", str(spec))
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    assert "tiny-grpo is valid: grpo, 64 samples a step" in answer.stdout


def test_every_shipped_spec_has_a_plan(tmp_path: Path) -> None:
    clusters = {"node-8gpu-grpo.yaml": "1x8", "multinode-ppo.yaml": "4x8"}
    for path in sorted((ROOT / "deploy").glob("*.yaml")):
        if "roles" not in (yaml.safe_load(path.read_text()) or {}):
            continue
        described = ["--cluster", clusters[path.name]] if path.name in clusters else []
        answer = troupe("plan", str(path), *described)
        assert (answer.code, answer.errors, answer.heavy) == (0, [], []), path
        roles = yaml.safe_load(path.read_text())["roles"]
        for role, section in roles.items():
            if "colocate_with" in section:
                assert re.search(rf"{role} .* inside {section['colocate_with']} ", answer.stdout)
            else:
                seated = re.findall(rf"{role}-\d+ ", answer.stdout)
                assert len(set(seated)) == section.get("workers", 1), (path, role)


def test_a_plan_without_room_says_what_to_change() -> None:
    answer = troupe("plan", str(ROOT / "deploy" / "multinode-ppo.yaml"), "--cluster", "3x8")
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert re.search(r"no room for [a-z]+(-\d+)?: it asks for .* lower roles\.[a-z]+\.workers", answer.errors[0])
    assert "no room" in answer.stdout


@pytest.mark.parametrize("cluster", ["8", "0x8", "2x", "axb"])
def test_a_cluster_that_cannot_be_read_costs_one_line(cluster: str) -> None:
    answer = troupe("plan", str(GRPO), "--cluster", cluster)
    message = f"error: --cluster: '{cluster}' is not NODESxGPUS, as in 2x8, or NODESxGPUSxTYPE, as in 2x8xH200"
    assert (answer.code, answer.errors) == (2, [message])


def test_a_gpu_type_that_is_not_known_costs_one_line() -> None:
    answer = troupe("plan", str(GRPO), "--cluster", "1x8xH1000")
    assert (answer.code, len(answer.errors)) == (2, 1)
    assert answer.errors[0].startswith("error: --cluster: no GPU type 'H1000' (there are: T4, ")


def test_a_plan_tells_memory_for_a_terminal_of_100_columns_and_as_json(tiny_model: Path) -> None:
    arguments = ("plan", str(ROOT / "deploy" / "node-8gpu-grpo.yaml"), "--cluster", "1x8xH100")
    known = ("--set", f"model.path={tiny_model}", "--gib-per-node", "512")
    answer = troupe(*arguments, *known)
    assert (answer.code, answer.errors, answer.heavy) == (0, [], [])
    assert "memory of each GPU, GiB" in answer.stdout and "host memory, GiB" in answer.stdout
    assert re.search(r"rollout-0\.\.3: a KV cache of [\d.]+ GiB holds \d+ sequences of 4096 tokens", answer.stdout)
    assert re.search(r"node-0, host: [\d.]+ of 512.0 GiB = policy ", answer.stdout)
    (run,) = json.loads(troupe(*arguments, *known, "--json").stdout)
    assert run["misfit"] is None and len(run["memory"]) == 4 + 4 + 4 + 4 + 8
    without = troupe(*arguments)
    assert without.code == 0 and "sizes unknown of models/policy-7b-instruct" in without.stdout


def test_a_plan_that_does_not_fit_is_json_too() -> None:
    answer = troupe("plan", str(ROOT / "deploy" / "multinode-ppo.yaml"), "--cluster", "3x8", "--json")
    (run,) = json.loads(answer.stdout)
    assert answer.code == 1 and run["misfit"] in answer.errors[0]


def test_the_schema_takes_the_shipped_spec() -> None:
    answer = troupe("schema")
    assert (answer.code, answer.heavy) == (0, [])
    # As the spec is read: YAML 1.1 takes 2e-3 for text, Troupe for the number that it is everywhere else.
    spec = load_spec(GRPO).model_dump(mode="json", exclude_unset=True)
    jsonschema.validate(spec, json.loads(answer.stdout))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec | {"seed": "x"}, json.loads(answer.stdout))


def test_exporting_from_a_folder_without_a_run_costs_one_line(tmp_path: Path) -> None:
    answer = troupe("export", str(tmp_path / "none"), str(tmp_path / "model"))
    assert (answer.code, len(answer.errors)) == (1, 1)
    assert "no valid checkpoint" in answer.errors[0]
    assert not (tmp_path / "model").exists()


def test_evaluating_a_spec_without_held_out_prompts_costs_one_line(spec: Path) -> None:
    answer = troupe("eval", str(spec))
    assert (answer.code, len(answer.errors)) == (2, 1)
    assert "no evaluation section" in answer.errors[0]


def test_evaluating_given_examples_without_held_out_ones_costs_one_line(spec: Path) -> None:
    document = yaml.safe_load(DPO.read_text())
    del document["data"]["eval"], document["evaluation"]
    document["model"]["path"] = str(spec.parent / "model")
    offline = spec.parent / "dpo.yaml"
    offline.write_text(yaml.safe_dump(document))
    answer = troupe("eval", str(offline))
    assert (answer.code, len(answer.errors), answer.stdout) == (2, 1, "")
    assert answer.errors[0] == "error: the spec has no data.eval: there are no held-out examples to evaluate on"


def test_another_model_is_compared_with_the_reference_of_its_training(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunRequest] = []

    def evaluated(request: RunRequest, *_: object) -> dict[str, float]:
        asked.append(request)
        return {"eval/loss": 0.5}

    monkeypatch.setattr("orchestrator.run.evaluate", evaluated)
    monkeypatch.chdir(ROOT)
    (base := spec.parent / "base").symlink_to(trained := spec.parent / "model")
    arguments = ["eval", str(DPO), "--set", f"model.path={base}", "--model", str(trained)]
    answer = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(answer.stdout) == {"eval/loss": 0.5}
    config = asked[0].spec.trainer_config() if isinstance(asked[0].spec, OfflineSpec) else None
    assert config is not None and config.reference_model is not None
    assert (config.model.path, config.reference_model.path) == (str(trained), str(base))
    assert config.reference_model.dtype == config.model.dtype == "float32"
