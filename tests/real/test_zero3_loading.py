"""ZeRO-3 loading on two ranks: partitioned while it is read, compared with a model that every rank loads whole.

Both ranks run all cases in one process group; the tests read what they found.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.real.models import save_llama
from tests.real.ranks import reported, wait_for_ranks
from tests.token_batches import batch_of
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.config_base import Dtype, ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.units import MIB
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import (
    CausalLogprobs,
    ModelModule,
    TokenValues,
    load_causal,
    load_value,
    torch_dtype,
)
from troupe.workers.models.partitioned import is_partitioned
from troupe.workers.training.deepspeed_engine import TrainEngine
from troupe.workers.training.group import import_deepspeed, join_group, leave_group, open_store
from troupe.workers.training.zero3 import ZeroPartitioner, partitioner_for, place_frozen

pytestmark = pytest.mark.long

WORLD = 2
TIMEOUT_S = 300.0
VOCABULARY = 512
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CASES: dict[str, tuple[str, Dtype]] = {
    "tied": ("tied", "float32"),
    "untied in bfloat16": ("untied", "bfloat16"),
    "bfloat16 files in float32": ("narrow", "float32"),
    "fused experts": ("experts", "float32"),
    "two heads in the files": ("both", "float32"),
    "critic": ("untied", "float32"),
    "saved critic": ("scored", "bfloat16"),
}
"""Model and type of the weights; critics compute values."""
TRAINED = ("tied", "critic")
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
LARGE_NUMBERS = 2 * 1024 * VOCABULARY + 4 * (4 * 1024**2 + 3 * 1024 * 4096)
"""Of the large model, without vectors."""
WIDEST = 1024 * 4096
"""Numbers of its largest tensor."""


def save_models(folder: Path) -> None:
    """Write the models of all cases."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig

    save_llama(folder / "tied", vocab_size=VOCABULARY, **SIZES, tie_word_embeddings=True)
    untied = save_llama(folder / "untied", vocab_size=VOCABULARY, **SIZES)
    save_llama(folder / "large", vocab_size=VOCABULARY, **LARGE, num_hidden_layers=4)
    AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).save_pretrained(folder / "narrow")
    # The configuration ties the head to the embedding, and the files hold two different weights.
    both = AutoModelForCausalLM.from_pretrained(untied)
    both.save_pretrained(folder / "both")
    config = json.loads((folder / "both/config.json").read_text())
    (folder / "both/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    scored = AutoModelForSequenceClassification.from_pretrained(untied, num_labels=1)
    nn.init.normal_(scored.get_submodule("score").weight)
    scored.save_pretrained(folder / "scored")
    shape: dict[str, Any] = SIZES | {"head_dim": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    shape |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    experts = Qwen3MoeConfig(**shape, pad_token_id=2)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(experts).save_pretrained(folder / "experts")


def resident(field: str) -> int:
    """A field of this process's memory in bytes: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Scenario:
    """The cases, on one rank."""

    def __init__(self, models: Path, out: Path, rank: int) -> None:
        self.models, self.out, self.rank = models, out, rank
        self.trainer = TrainerConfig(
            zero_stage=3, learning_rate=1e-2, adam_eps=1e-2, warmup_updates=0, weight_decay=0.1, max_grad_norm=0.5,
            gradient_checkpointing=True, threads=1,
        )  # fmt: skip
        self.facts: dict[str, Any] = {}

    def load(self, name: str, partitioned: bool) -> tuple[ModelModule, Any]:
        """(module, model), as a policy or a critic builds them."""
        folder, dtype = CASES[name]
        config = ModelConfig(path=str(self.models / folder), dtype=dtype)
        partitioner = partitioner_for(config, self.trainer) if partitioned else None
        if name.endswith("critic"):
            model = load_value(config, partitioner)
            return TokenValues(model), model
        model = load_causal(config, partitioner)
        return CausalLogprobs(model, temperature=0.9, chunks=2), model

    def tried(self, name: str, partitioned: bool) -> tuple[ModelModule, Any]:
        """As `load`; records what the trials found."""
        torch.manual_seed(3)
        module, model = self.load(name, partitioned)
        other = [key for key, parameter in model.named_parameters() if is_partitioned(parameter) != partitioned]
        found: dict[str, Any] = {"adapt": adapt(module, model, "cpu", packing=True), "other": other}
        found |= {"split": getattr(module, "split_head", None), "masks": module.masks_padding}
        found["random"] = float(torch.rand(1))
        self.facts[f"trials {name} {partitioned}"] = found
        return module, model

    def loaded(self, name: str) -> None:
        """Compare every weight and buffer of the two ways to load."""
        zero = import_deepspeed().zero
        _, whole = self.tried(name, False)
        _, model = self.tried(name, True)
        wanted, differs = dict(whole.named_parameters()), []
        for key, parameter in model.named_parameters():
            with zero.GatheredParameters([parameter]):
                same = torch.equal(parameter, wanted.pop(key)) and parameter.dtype == model.dtype
            differs += [] if same else [key]
        buffers = dict(whole.named_buffers())
        differs += [key for key, buffer in model.named_buffers() if not torch.equal(buffer, buffers.pop(key))]
        self.facts[f"differs {name}"] = [*differs, *wanted, *buffers]

    def engine(self, name: str, partitioned: bool) -> TrainEngine:
        module, model = self.tried(name, partitioned)
        return TrainEngine(module, model, self.trainer, 4, "cpu", model.dtype)

    def update(self, engine: TrainEngine, number: int) -> float:
        """One update on this rank's rows; returns the norm of the gradient."""
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        rows = [torch.randint(3, VOCABULARY, (2, 7), generator=generator) for _ in range(2)]

        def loss(forward: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
            output = forward(batch=batch_of(ids, torch.arange(6)))
            return output[0].sum() if isinstance(output, tuple) else (output - 1.0).square().sum()

        return engine.update(rows, loss).grad_norm

    def trained(self, name: str) -> None:
        """Train twice on each path, and from the checkpoint of the whole model's first update on the other."""
        results: dict[bool, tuple[dict[str, torch.Tensor], list[float]]] = {}
        for partitioned in (False, True):
            engine = self.engine(name, partitioned)
            starts = {key: value.clone().contiguous() for key, value in engine.named_weights()}
            norms = [self.update(engine, 0)]
            if not partitioned:
                engine.save(str(self.out / f"checkpoint-{name}"))
            norms.append(self.update(engine, 1))
            ends = {f"end.{key}": value.clone().contiguous() for key, value in engine.named_weights()}
            results[partitioned] = ({f"start.{key}": value for key, value in starts.items()} | ends, norms)
            if partitioned:
                config = ModelConfig(path=str(self.models / CASES[name][0]))
                engine.export(str(self.out / f"export-{name}"), config)
                engine.load(str(self.out / f"checkpoint-{name}"))
                self.update(engine, 1)
                resumed = {f"end.{key}": value.clone().contiguous() for key, value in engine.named_weights()}
                self.facts[f"resumed {name}"] = all(torch.equal(resumed[key], ends[key]) for key in ends)
            engine.close()
        for partitioned, (weights, norms) in results.items():
            self.facts[f"norms {name} {partitioned}"] = norms
            if self.rank == 0:
                save_file(weights, self.out / f"{name}-{partitioned}.safetensors")

    def large(self, dtype: Dtype, partitioned: bool) -> CausalLogprobs:
        """The large model, partitioned in either way; records how much the peak of resident memory grows."""
        config = ModelConfig(path=str(self.models / "large"), dtype=dtype)
        partitioner = ZeroPartitioner(self.trainer, torch_dtype(dtype))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
        before = resident("VmRSS")
        model = load_causal(config, partitioner if partitioned else None)
        if not partitioned:
            partitioner.finish(model)
        self.facts[f"peak {dtype} {partitioned}"] = resident("VmHWM") - before
        return CausalLogprobs(model, temperature=0.9)

    def frozen(self) -> None:
        """Peak memory of loading, and log-probs of a frozen model."""
        found = []
        for partitioned in (True, False):
            self.large("bfloat16", partitioned)
            module = self.large("float32", partitioned)
            placed = place_frozen(module, self.trainer, torch.device("cpu"))
            found.append(self.scored(placed.module))
            self.facts[f"held {partitioned}"] = sum(parameter.numel() for parameter in placed.module.parameters())
        whole = load_causal(ModelConfig(path=str(self.models / "large"), dtype="float32"))
        placed = place_frozen(CausalLogprobs(whole, temperature=0.9), self.trainer, torch.device("cpu"))
        self.facts["frozen"] = [*found, self.scored(placed.module)]

    def scored(self, module: ModelModule) -> list[float]:
        """Log-probs of the second of two passes."""
        batch = batch_of(torch.arange(3, 17).view(2, 7), torch.arange(6))
        with torch.no_grad():
            module(batch=batch)
            logprobs, _ = module(batch=batch)
        return logprobs.tolist()

    def run(self) -> None:
        for name in CASES:
            if name in TRAINED:
                self.trained(name)
            else:
                self.loaded(name)
        self.frozen()  # at the end: no import counts as memory of the model


def rank_main(models: Path, out: Path, rank: int, port: int) -> None:
    """Entry of the process of one rank."""
    with reported(rank, out):
        torch.set_num_threads(1)
        join_group(Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=WORLD), "cpu")
        scenario = Scenario(models, out, rank)
        scenario.run()
        (out / f"facts-{rank}.json").write_text(json.dumps(scenario.facts))
        leave_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what both ranks wrote."""
    models, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    save_models(models)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "compiled")
    context = multiprocessing.get_context("spawn")
    store = open_store("127.0.0.1")
    ranks = [
        context.Process(target=rank_main, args=(models, folder, rank, store.port), daemon=True) for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    wait_for_ranks(ranks, folder, TIMEOUT_S)
    return folder


@pytest.fixture(scope="module")
def facts(out: Path) -> dict[str, Any]:
    """Of rank 0."""
    found = json.loads((out / "facts-0.json").read_text())
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_bitwise_that_of_a_model_loaded_whole(name: str, out: Path, facts: dict[str, Any]) -> None:
    whole, partitioned = (load_file(out / f"{name}-{kind}.safetensors") for kind in (False, True))
    assert whole.keys() == partitioned.keys()
    assert [key for key in whole if not torch.equal(whole[key], partitioned[key])] == []
    assert facts[f"norms {name} False"] == facts[f"norms {name} True"]
    assert any(not torch.equal(whole[f"start.{key[4:]}"], whole[key]) for key in whole if key.startswith("end."))


@pytest.mark.parametrize("name", [name for name in CASES if name not in TRAINED])
def test_every_weight_and_buffer_is_that_of_a_model_loaded_whole(name: str, facts: dict[str, Any]) -> None:
    assert facts[f"differs {name}"] == []


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_partitioned_and_the_trials_find_the_same(name: str, facts: dict[str, Any]) -> None:
    assert facts[f"trials {name} True"] == facts[f"trials {name} False"]
    assert facts[f"trials {name} True"]["other"] == []


@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_of_a_model_loaded_whole_is_resumed_bitwise(name: str, facts: dict[str, Any]) -> None:
    assert facts[f"resumed {name}"]


def test_what_is_exported_is_what_was_trained(out: Path) -> None:
    trained = load_file(out / "tied-True.safetensors")
    again = load_causal(ModelConfig(path=str(out / "export-tied"), dtype="float32"))
    assert all(torch.equal(value, trained[f"end.{key}"]) for key, value in again.named_parameters())


def test_a_frozen_model_scores_as_a_whole_one_and_holds_nothing_between_passes(facts: dict[str, Any]) -> None:
    read, loaded, whole = facts["frozen"]
    assert read == loaded == pytest.approx(whole, abs=1e-5)
    assert max(facts["held True"], facts["held False"]) < LARGE_NUMBERS / 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_rank_holds_the_whole_model_while_it_is_loaded(dtype: str, facts: dict[str, Any]) -> None:
    width = 4 if dtype == "float32" else 2
    one_tensor = (4 + width) * WIDEST  # as it is in the file, and converted
    limit = width * LARGE_NUMBERS / WORLD + one_tensor + 16 * MIB
    assert facts[f"peak {dtype} True"] < limit < 0.85 * width * LARGE_NUMBERS
    assert facts[f"peak {dtype} False"] > 0.95 * width * LARGE_NUMBERS
