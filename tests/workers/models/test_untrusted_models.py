"""A model folder with pickles and Python files in it: none of them is run, and weights come from safetensors only."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.data.tokenizer import copy_tokenizer, load_tokenizer
from troupe.workers.engine.settings import engine_args
from troupe.workers.models.modeling import load_causal, load_value
from troupe.workers.rewards.model import RewardModel

PICKLES = (
    *("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    *("model.pt", "consolidated.00.pth", "vocab.pkl", "tokenizer.pkl", "spiece.pkl", "head.bin"),
)
LOADERS: dict[str, Callable[[ModelConfig], object]] = {
    "causal": load_causal,
    "value": load_value,
    "tokenizer": load_tokenizer,
    "reward": lambda config: RewardModel(config, 64, "cpu"),
}


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, canary: Path) -> Path:
    """A copy of the tiny model, with pickles besides."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    torch.save({"model.embed_tokens.weight": Canary(canary)}, folder / "pytorch_model.bin")
    for name in ("sitecustomize.py", "setup.py", "__init__.py", "tokenization_own.py", "modeling_own.py"):
        (folder / name).write_text(f"import pathlib; pathlib.Path({str(canary)!r}).touch()\n")
    return folder


def attempt(kind: str, folder: Path) -> str:
    """What loading says; empty: it loaded."""
    try:
        LOADERS[kind](ModelConfig(path=str(folder), dtype="float32"))
    except (OSError, ValueError, KeyError) as error:  # what the workers report as an error of the model
        return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize("kind", ["causal", "value", "tokenizer"])
def test_pickles_beside_the_weights_are_not_read(folder: Path, canary: Path, kind: str) -> None:
    assert attempt(kind, folder) == ""
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["causal", "value", "reward"])
def test_pickles_in_the_place_of_the_weights_are_refused(folder: Path, canary: Path, kind: str) -> None:
    (folder / "model.safetensors").unlink()
    if kind == "reward":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    assert "safetensors" in attempt(kind, folder)
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["causal", "value"])
def test_an_index_that_names_a_pickle_runs_nothing(folder: Path, canary: Path, kind: str) -> None:
    weights = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), "pytorch_model.bin")
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        said = attempt(kind, folder)
    except pickle.UnpicklingError as error:  # torch's restricted unpickler
        said = str(error)
    assert said
    assert not canary.exists()


@pytest.mark.parametrize("kind", list(LOADERS))
def test_code_of_a_model_is_not_run(folder: Path, canary: Path, kind: str) -> None:
    own = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    own["AutoModelForSequenceClassification"] = "modeling_own.M"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | named))
    assert attempt(kind, folder)
    assert not canary.exists()


def test_a_chat_template_cannot_leave_its_sandbox(folder: Path, canary: Path) -> None:
    reach = f"''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os'].system('touch {canary}')"
    (folder / "chat_template.jinja").write_text("{{ " + reach + " }}")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    with pytest.raises(Exception, match=r"unsafe|undefined|has no attribute"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert not canary.exists()


def test_an_export_takes_no_pickle_along(folder: Path, tmp_path: Path) -> None:
    (export := tmp_path / "export").mkdir()
    copy_tokenizer(ModelConfig(path=str(folder)), export)
    assert {path.suffix for path in export.iterdir()} <= {".json", ".jinja", ".txt", ".model", ".py"}


def test_the_engine_loads_safetensors_only(tiny_model: Path) -> None:
    config = RolloutConfig(
        model=ModelConfig(path=str(tiny_model), dtype="float32"),
        engine=EngineConfig(max_num_seqs=4, max_model_len=64, enforce_eager=True),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )
    assert engine_args(config).create_load_config().load_format == "safetensors"


def test_an_ordinary_load_would_make_the_canary(canary: Path) -> None:
    """The other tests can fail."""
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()
