"""Names on the hub, from the command line to the requests that a hub receives, against a local server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forked_commands import Finished, run_command
from tests.hub_server import HubServer
from troupe.orchestrator.hub.resolve import NoFiles, choose_files
from troupe.orchestrator.live.diff import compare
from troupe.orchestrator.spec.checks.machine import missing
from troupe.orchestrator.spec.derived.paths import absolute_paths, hub_data, path_fields, with_pins
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import HubFiles

SPEC = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
TOKEN = "hf_test_token_of_the_reader"
CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    }
).encode()
WEIGHTS = bytes(range(256)) * 4096
MODEL = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
OTHERS = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx", "modeling.py": b"code"}
DOWNLOAD = """
from troupe.orchestrator.hub.client import Repo, Snapshot, download, resolve
from troupe.orchestrator.hub.resolve import _MODEL_FILES, _NOT_LOADED
repo = Repo("model", "acme/tiny")
print(download(Snapshot(repo, resolve(repo, None), _MODEL_FILES, _NOT_LOADED)))
"""


@dataclass(frozen=True)
class Hub:
    """The server, and the commands of a user of it with an empty cache."""

    server: HubServer
    home: Path

    @property
    def env(self) -> dict[str, str]:
        """Variables of a process that uses the hub."""
        return {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.server.url,
            "PYTHONPATH": str(ROOT),
        }

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs Python with these arguments."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | self.env | env,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def troupe(self, command: str, *overrides: str, **env: str) -> Finished:
        """Runs a command on the tiny spec with its model on the hub."""
        sets = [part for one in ("model.path=acme/tiny", *overrides) for part in ("--set", one)]
        return run_command(command, str(SPEC), *sets, env=self.env | env)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = HubServer().start()
    server.add("acme/tiny", MODEL | OTHERS, token=TOKEN)
    yield Hub(server, tmp_path / "home")
    server.stop()


def test_validate_looks_a_model_up_and_downloads_no_weights(hub: Hub) -> None:
    done = hub.troupe("validate")
    assert done.returncode == 0, done.stderr
    commit = hub.server.repositories["models", "acme/tiny"].branches["main"]
    assert f"model: acme/tiny at commit {commit[:12]} (1.0 MiB to download)" in done.stdout
    files = {request.path.rpartition("/")[2] for request in hub.server.requests if "/resolve/" in request.path}
    assert files == {"config.json"}
    assert {request.token for request in hub.server.requests if "acme" in request.path} == {TOKEN}


def test_a_first_spec_is_written_for_a_dataset_with_its_held_out_split(
    hub: Hub, tiny_model: Path, tmp_path: Path
) -> None:
    rows = b'{"question": "Two and two?", "answer": "2 + 2 = 4. #### 4"}\n' * 3
    files = {f"{subset}/{split}.jsonl": rows for subset in ("main", "socratic") for split in ("train", "test")}
    hub.server.add("acme/sums", files, kind="datasets", token=TOKEN)
    init = ("-m", "troupe", "init", "--model", str(tiny_model), "-o", str(tmp_path / "run.yaml"), "--data")
    several = hub.run(*init, "acme/sums")
    assert several.returncode == 2 and "write --data acme/sums:SUBSET" in several.stderr
    done = hub.run(*init, "acme/sums:main")
    assert done.returncode == 0, done.stderr
    spec = load_rollout_spec(tmp_path / "run.yaml")
    assert isinstance(spec.data.train, HubFiles) and isinstance(spec.data.eval, HubFiles)
    assert (spec.data.train.split, spec.data.eval.split, spec.data.eval.subset) == ("train", "test", "main")
    assert [function.name for function in spec.roles.reward.functions] == ["last_number"]


def test_passes_over_a_dataset_are_counted_at_the_commit_that_the_run_reads(hub: Hub) -> None:
    rows = b'{"prompt": "Two and two?", "response": "4"}\n' * 3
    hub.server.add("acme/sums", {"data/train-0.jsonl": rows, "data/train-1.jsonl": rows}, kind="datasets", token=TOKEN)
    fixed = ("schedule={data_epochs: 2, examples_per_step: 4}", "data.train={kind: hub, name: acme/sums}")
    sets = [part for one in fixed for part in ("--set", one)]
    done = run_command("validate", "examples:tiny-sft", *sets, env=hub.env)
    assert done.returncode == 0, done.stderr
    assert "tiny-sft: 3 steps (data_epochs 2 x 6 rows / examples_per_step 4)" in done.stdout + done.stderr
    commit = hub.server.repositories["datasets", "acme/sums"].branches["main"]
    assert f"data.train: acme/sums at commit {commit[:12]} (in the cache)" in done.stdout
    gone = run_command("validate", "examples:tiny-sft", *sets, "--set", "data.train.name=acme/none", env=hub.env)
    assert gone.returncode == 2
    assert "there is no dataset acme/none" in gone.stderr


@pytest.mark.parametrize(
    ("overrides", "env", "field", "words"),
    [
        (["model.path=acme/none"], {}, "model.path", "there is no model acme/none .* no folder .*check the name"),
        ([], {"HF_TOKEN": ""}, "model.path", "if it is private, set HF_TOKEN"),
        ([], {"HF_TOKEN": "hf_other"}, "model.path", r"refuses the token \(401\): set HF_TOKEN to a valid one"),
        (
            ["model.path=acme/gated"],
            {},
            "model.path",
            "is gated: accept its terms at http.*/acme/gated and set HF_TOKEN",
        ),
        (["model.revision=v9"], {}, "model.revision", "no branch, tag or commit 'v9'"),
        (["model.path=acme/pickle"], {}, "model.path", r"has no \*.safetensors: other formats can hold code"),
        ([], {"HF_HUB_OFFLINE": "1"}, "model.path", "neither a folder here nor complete in the cache.*HF_HUB_OFFLINE"),
        ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "model.path", "cannot be reached .*check the network, HF_ENDPOINT"),
        (["roles.rollout.max_model_len=512"], {}, "roles.rollout.max_model_len", "more than the model's 256 positions"),
        (["data.train={kind: hub, name: acme/none}"], {}, "data.train.name", "there is no dataset acme/none"),
        (["data.train={kind: hub, name: acme/words, split: dev}"], {}, "data.train.split", "no file of acme/words has"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_its_field_and_its_remedy(
    hub: Hub, overrides: list[str], env: dict[str, str], field: str, words: str
) -> None:
    hub.server.add("acme/pickle", {"config.json": CONFIG, "pytorch_model.bin": b"x", "tokenizer.json": b"{}"})
    hub.server.add("acme/gated", MODEL).gated = True
    hub.server.add("acme/words", {"data/train.jsonl": b"{}"}, kind="datasets")
    done = hub.troupe("validate", *overrides, **env)
    assert done.returncode == 2, done.stdout
    problems = [line for line in done.stderr.splitlines() if f": {field}: " in line]
    assert len(problems) == 1, done.stderr
    assert re.search(words, problems[0]), problems[0]
    assert TOKEN not in done.stderr + done.stdout


def test_plan_reads_the_configuration_only(hub: Hub) -> None:
    done = hub.troupe("plan")
    assert done.returncode == 0, done.stderr
    assert "not known" not in done.stdout
    assert {r.path.rpartition("/")[2] for r in hub.server.requests if "/resolve/" in r.path} == {"config.json"}


@pytest.mark.parametrize("cuts", [0, 3])
def test_a_download_holds_no_pickle_survives_being_cut_off_and_is_not_repeated(hub: Hub, cuts: int) -> None:
    hub.server.cuts = {"model.safetensors": cuts}
    done = hub.run("-c", DOWNLOAD)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == MODEL
    got = [r for r in hub.server.requests if r.method == "GET" and r.path.endswith("model.safetensors")]
    assert len(got) == cuts + 1
    hub.server.stop()
    again = hub.run("-c", DOWNLOAD)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    validated = hub.troupe("validate")
    assert validated.returncode == 0, validated.stderr
    assert "(in the cache)" in validated.stdout
    assert "Could not reach the Hub" in validated.stderr


def test_a_folder_comes_before_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_rollout_spec(SPEC, ["model.path=acme/tiny"])
    assert missing(spec) == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert [path for path, _ in missing(spec)] == ["model.path"]


@pytest.mark.parametrize("path", ["models/tiny", "./acme/tiny", "/acme/tiny", "acme/tiny/step", "tiny", "../tiny"])
def test_other_paths_are_folders(path: str) -> None:
    assert [field for field, _ in missing(load_rollout_spec(SPEC, [f"model.path={path}"]))] == ["model.path"]


def test_names_on_the_hub_are_no_paths(tmp_path: Path) -> None:
    document = load_rollout_spec(SPEC, ["model.path=acme/tiny"]).model_dump(mode="json")
    document["data"]["train"] = {"kind": "jsonl", "path": "data/train.jsonl"}
    sent = absolute_paths(document, tmp_path)
    assert sent["model"]["path"] == "acme/tiny"
    assert sent["data"]["train"]["path"] == str(tmp_path / "data" / "train.jsonl")
    assert "model.path" not in dict(path_fields(sent))


def test_a_source_of_a_mixture_is_pinned_in_its_place() -> None:
    words = "{{name: words, kind: hub, dataset: acme/words, revision: {}, files: {}}}"
    other = "{name: other, kind: jsonl, path: other.jsonl}"
    commit = "a" * 40

    def spec(revision: str, files: str) -> RolloutSpec:
        return load_rollout_spec(SPEC, [f"data.train=[{other}, {words.format(revision, files)}]"])

    pinned = spec(commit, "[data/train.jsonl]")
    assert {path: source.dataset_name for path, source in hub_data(pinned).items()} == {"data.train.1": "acme/words"}
    assert with_pins(spec("main", "[]"), pinned) == pinned


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ("[]", True),
        ("['data/*.parquet']", True),
        ("[data/b.parquet, data/a.parquet]", True),
        ("['data/[b].parquet', data/a.parquet]", True),
        ("['*']", True),
        ("[data/a.parquet]", False),  # fewer files
        ("['data/*.parquet', data/c.parquet]", False),  # others
        ("['data/*.jsonl']", False),
    ],
)
def test_files_by_patterns_or_in_another_order_stay_pinned(files: str, kept: bool) -> None:
    def spec(revision: str, files: str) -> RolloutSpec:
        data = f"data.train={{kind: hub, name: acme/words, revision: {revision}, files: {files}}}"
        return load_rollout_spec(SPEC, [data])

    pinned, again = spec("a" * 40, "[data/a.parquet, data/b.parquet]"), spec("main", files)
    assert with_pins(again, pinned) == (pinned if kept else again)


def test_a_resumed_run_keeps_its_commits(tmp_path: Path) -> None:
    data = "data.train={{kind: hub, name: acme/words, revision: {}, files: {}}}"
    commit, other = "a" * 40, "b" * 40
    pinned = load_rollout_spec(
        SPEC, ["model.path=acme/tiny", f"model.revision={commit}", data.format(commit, "[data/train.jsonl]")]
    )
    for revision in ("main", "null"):
        again = load_rollout_spec(
            SPEC, ["model.path=acme/tiny", f"model.revision={revision}", data.format("null", "[]")]
        )
        assert with_pins(again, pinned) == pinned
    moved = load_rollout_spec(SPEC, ["model.path=acme/tiny", f"model.revision={other}", data.format(other, "[]")])
    assert with_pins(moved, pinned) == moved
    renamed = load_rollout_spec(SPEC, ["model.path=acme/other", data.format("null", "['*.csv']")])
    assert with_pins(renamed, pinned) == renamed
    (tmp_path / "spec.yaml").write_text(json.dumps(pinned.model_dump(mode="json")))
    assert compare(tmp_path, again).lines() == ["no differences"]


FILES = ["README.md", "main/test-00000.parquet", "main/train-00000.parquet", "socratic/train-00000.parquet"]


@pytest.mark.parametrize(
    ("names", "options", "chosen"),
    [
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"], {}, [0, 1]),
        (["data.jsonl"], {}, [0]),
        (["train.jsonl", "test.jsonl"], {"split": "test"}, [1]),
        (["train.csv", "train.parquet", "constrained.parquet"], {}, [1]),
        (["train/a.jsonl.gz", "train/b.jsonl.gz", "validation/a.jsonl.gz"], {}, [0, 1]),
        (["train.json", "test.json", "dataset_infos.json"], {}, [0]),
        (["data.json.gz", "dataset_infos.json"], {}, [0]),
        (["train.json", "train.csv"], {}, [1]),
        (["dataset_infos.json"], {}, "name"),
        (FILES, {"subset": "main"}, [2]),
        (FILES, {"files": ["socratic/*"]}, [3]),
        (FILES, {}, "subset"),
        (FILES, {"subset": "maim"}, "subset"),
        (FILES, {"subset": "socratic", "split": "test"}, "split"),
        (["test.jsonl"], {}, "split"),
        (FILES, {"files": ["*.csv"]}, "files"),
        (["README.md", "model.pkl"], {}, "name"),
    ],
)
def test_a_split_is_the_files_that_have_its_name(names: list[str], options: dict[str, object], chosen: object) -> None:
    source = HubFiles.model_validate({"kind": "hub", "name": "acme/words"} | options)
    if isinstance(chosen, list):
        assert choose_files(source, names) == [names[index] for index in chosen]
        return
    with pytest.raises(NoFiles) as raised:
        choose_files(source, names)
    assert raised.value.field == chosen
