"""Expert parallelism on gloo ranks: what ranks train that divide the experts is what plain torch trains.

Two ranks have a half of the experts each; of four ranks two have the same half, partitioned between them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.conftest import ROOT
from tests.real.commands import metrics_lines
from tests.real.ranks import rank_context, reported, wait_for_ranks
from tests.real.rollout_helpers import save_model
from tests.real.test_accumulation import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    TOLERANCE,
    UPDATES,
    WEIGHT_DECAY,
    Logits,
    gap,
    load,
    loss_of,
    plain_torch,
    rows,
)
from tests.real.test_trainer import grouped
from troupe.orchestrator.runs.session import RunRequest
from troupe.orchestrator.runs.training import train
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.telemetry.console import Console
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, ModelModule, RewardScores, load_causal, load_value
from troupe.workers.models.route_replay import RouteReplay
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.training.deepspeed_engine import TrainEngine
from troupe.workers.training.group import join_group, leave_group, open_store, sequence_group
from troupe.workers.training.master_weights import own_part

pytestmark = pytest.mark.real

RANKS = (2, 4)
DIVIDED = 2
"""Ranks that divide the experts."""
TIMEOUT_S = 900.0
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "pad_token_id": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
EIGHT: dict[str, Any] = SIZES | EXPERTS | {"head_dim": 32, "num_experts": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    # Its router does not divide by the sum of the chosen weights, unlike AutoEP's by default.
    "qwen3": Qwen3MoeConfig(**EIGHT, norm_topk_prob=False),
    "qwen2": Qwen2MoeConfig(**SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=64),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "sparse": Qwen3MoeConfig(**EIGHT, mlp_only_layers=[0]),
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "float32", {}),
    "qwen2": ("qwen2", "float32", {}),
    "mixtral": ("mixtral", "float32", {}),
    "a dense layer": ("sparse", "float32", {}),
    "bfloat16": ("qwen3", "bfloat16", {}),
    "offload": ("qwen3", "float32", {"offload_optimizer": True}),
    "recompute": ("qwen3", "float32", {"gradient_checkpointing": True}),
    "keep products": ("qwen3", "float32", {"gradient_checkpointing": True, "recompute_products": False}),
}
ALIKE = {"float16": 0.05, "shared rows": 1e-5, "values": 1e-5}
OF_FOUR = ("qwen3", "shared rows")
"""What four ranks train; two train all cases."""
"""What is compared with the same updates without divided experts, and the largest gap."""
DECAY = 0.5
ROUTES = torch.randint(0, 8, (2, 6, 2, 2), generator=torch.Generator().manual_seed(3))
ROUTES[..., 1] = (ROUTES[..., 0] + 3) % 8
"""Two experts for each of two layers and 6 tokens of two rows."""


def trainer(**changes: Any) -> TrainerConfig:
    given: dict[str, Any] = {"expert_parallel_size": DIVIDED} | changes
    return TrainerConfig(
        learning_rate=LEARNING_RATE,
        adam_betas=BETAS,
        adam_eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        zero_stage=3,
        **given,
    )


class Scenario:
    """What one rank does; rank 0 writes what the tests compare."""

    def __init__(self, models: Path, out: Path, rank: int, world: int) -> None:
        self.models, self.out, self.rank, self.world = models, out, rank, world
        self.found: dict[str, Any] = {}

    def engine(self, case: str, **changes: Any) -> TrainEngine:
        family, dtype, settings = CASES[case]
        model = load(str(self.models / family), dtype)
        config = trainer(**settings, **changes)
        return TrainEngine(Logits(model), model, config, UPDATES + 1, "cpu", getattr(torch, dtype))

    def update(self, engine: TrainEngine, number: int) -> float:
        return engine.update(rows(number).split(1)[self.rank :: self.world], loss_of).grad_norm

    def write(self, name: str, engine: TrainEngine) -> None:
        weights = {name: tensor.clone().contiguous() for name, tensor in engine.named_weights()}
        if self.rank == 0:
            save_file(weights, self.out / f"{name}.safetensors")

    def train(self, case: str) -> None:
        """Every case trains as plain torch does."""
        engine = self.engine(case)
        self.write(f"{case}-start", engine)
        self.found[case] = [self.update(engine, number) for number in range(UPDATES)]
        self.write(case, engine)
        engine.close()

    def state(self) -> None:
        """What follows from an update: the average, digests, exports, a refused step, checkpoints."""
        engine = self.engine("qwen3", ema_decay=DECAY)
        self.found["shapes"] = [(name, str(dtype), shape) for name, dtype, shape in engine.weight_shapes()]
        self.found["held"] = sum(part.numel() for part in own_part(engine._engine, 3))
        self.update(engine, 0)
        self.write("first", engine)
        with engine.averaged():
            self.write("average", engine)
        digest, snapshot = engine.digest(), engine.snapshot_weights()
        source = ModelConfig(path=str(self.models / "qwen3"), dtype="float32")
        engine.export(str(self.out / "export"), source)
        engine.try_save(str(self.out / "trial"), source)
        engine.save(str(self.out / "checkpoint"))
        passes = rows(1).split(1)[self.rank :: self.world]
        # Only the last rank has an infinite loss, and it holds other experts than the first.
        bad = engine.update(passes, lambda *given: loss_of(*given) * (1.0 if self.rank + 1 < self.world else torch.inf))
        self.found["refused"] = [bad.skipped, engine.digest() == digest]
        engine.load(str(self.out / "checkpoint"))
        self.update(engine, 1)
        moved = engine.digest()
        self.write("second", engine)
        snapshot.shorten(0.0)
        self.found["restored"] = [moved != digest, engine.digest() == digest]
        engine.load(str(self.out / "checkpoint"))
        engine.offload_states()
        self.update(engine, 1)
        self.found["resumed"] = engine.digest() == moved
        replay = RouteReplay(cast(Logits, engine.module).model)
        engine.load(str(self.out / "checkpoint"))
        replay.set(ROUTES)
        with torch.no_grad():
            self.found["replayed"] = engine.module(rows(7)[:2]).tolist()
        engine.close()

    def alike(self, name: str, divided: int) -> None:
        """Updates with and without divided experts: in float16, of rows that two ranks share, of scores."""
        config = ModelConfig(path=str(self.models / "qwen3"), dtype="float16" if name == "float16" else "float32")
        sharing = 2 if name == "shared rows" else 1
        model = load_value(config) if name == "values" else load_causal(config)
        module: ModelModule = RewardScores(model) if name == "values" else CausalLogprobs(model, 0.7, chunks=3)
        packs = adapt(module, model, "cpu", packing=True, sequence=sequence_group(sharing))
        settings = trainer(expert_parallel_size=divided, sequence_parallel_size=sharing)
        engine = TrainEngine(module, model, settings, UPDATES, "cpu", model.dtype)
        table, first = TokenTable(grouped()), self.rank // sharing
        passes = [table.packed_batch((row % 6,), shared=True) for row in range(first, first + 4)]
        assert packs

        def loss(forward: Any, batch: Any) -> torch.Tensor:
            values = forward(batch=batch)[0].float()
            return (values * torch.linspace(-1.0, 2.0, len(values))).sum() / 8

        found = [engine.update(passes, loss) for _ in range(UPDATES)]
        self.found[f"{name}-{divided}"] = [step.grad_norm for step in found if not step.skipped]
        self.write(f"{name}-{divided}", engine)
        engine.close()

    def other_size(self, saved: Path) -> None:
        """The checkpoint of another number of ranks."""
        engine = self.engine("qwen3", ema_decay=DECAY)
        before = engine.digest()
        with pytest.raises(ValueError, match="divided experts are not resharded"):
            engine.load(str(saved))
        self.found["unchanged"] = engine.digest() == before
        engine.close()


def of_ranks(names: Iterable[str], world: int) -> list[str]:
    """Those of the names that so many ranks train."""
    return [name for name in names if world == RANKS[0] or name in OF_FOUR]


def trained_by(names: Iterable[str]) -> list[Any]:
    """(number of ranks, name) as parameters of a test."""
    return [pytest.param(world, name, id=f"{world}-{name}") for world in RANKS for name in of_ranks(names, world)]


def rank_main(models: Path, root: Path, rank: int, world: int, port: int) -> None:
    """Entry of the process of one rank."""
    out = root / str(world)
    with reported(rank, out):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(root / "compiled")
        torch.set_num_threads(1)
        join_group(Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=world), "cpu")
        scenario = Scenario(models, out, rank, world)
        for case in of_ranks(CASES, world):
            scenario.train(case)
        scenario.state()
        for name in of_ranks(ALIKE, world):
            for divided in (1, DIVIDED):
                scenario.alike(name, divided)
        if world > RANKS[0]:
            scenario.other_size(root / str(RANKS[0]) / "checkpoint")
        leave_group()
        (out / f"{rank}.json").write_text(json.dumps(scenario.found))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both groups have written, one after the other."""
    root, context = tmp_path_factory.mktemp("trained"), rank_context()
    for world in RANKS:
        (root / str(world)).mkdir()
        store = open_store("127.0.0.1")
        places = [(rank, world, store.port) for rank in range(world)]
        ranks = [context.Process(target=rank_main, args=(models, root, *place)) for place in places]
        for process in ranks:
            process.start()
        wait_for_ranks(ranks, root / str(world), TIMEOUT_S)
    return root


@pytest.fixture(params=RANKS)
def out(request: pytest.FixtureRequest, trained: Path) -> Path:
    return trained / str(request.param)


def of_rank(out: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((out / f"{rank}.json").read_text())


def every(out: Path, name: str) -> list[Any]:
    """What each rank has found."""
    return [of_rank(out, rank)[name] for rank in range(int(out.name))]


@pytest.mark.parametrize(("world", "case"), trained_by(CASES))
def test_several_passes_give_the_update_of_plain_torch(world: int, case: str, trained: Path, models: Path) -> None:
    (family, dtype, _), out = CASES[case], trained / str(world)
    path = str(models / family)
    start = {name: parameter.detach() for name, parameter in load(path, dtype).named_parameters()}
    found = load_file(out / f"{case}-start.safetensors")
    assert found.keys() == start.keys()
    assert all(torch.equal(found[name], start[name]) for name in start)
    weights, norms = plain_torch(path, dtype)
    assert gap(load_file(out / f"{case}.safetensors"), weights, start) < TOLERANCE[dtype]
    assert every(out, case) == [pytest.approx(norms, rel=TOLERANCE[dtype])] * int(out.name)


@pytest.mark.parametrize(("world", "name"), trained_by(ALIKE))
def test_updates_are_those_without_divided_experts(world: int, name: str, trained: Path) -> None:
    out = trained / str(world)
    start = load_file(out / "qwen3-start.safetensors")
    whole, divided = (load_file(out / f"{name}-{size}.safetensors") for size in (1, DIVIDED))
    common = start.keys() & whole.keys()
    assert gap(*({key: weights[key] for key in common} for weights in (divided, whole, start))) < ALIKE[name]
    norms = of_rank(out)[f"{name}-1"]
    assert norms
    assert every(out, f"{name}-{DIVIDED}") == [pytest.approx(norms, rel=ALIKE[name])] * int(out.name)


def test_tensors_have_the_names_types_and_shapes_of_the_model_in_its_order(out: Path, models: Path) -> None:
    own = load(str(models / "qwen3"), "float32").named_parameters()
    expected = [[name, str(parameter.dtype), list(parameter.shape)] for name, parameter in own]
    assert every(out, "shapes") == [expected] * int(out.name)


def test_the_digests_of_the_ranks_cover_every_number_of_the_model_once(out: Path, models: Path) -> None:
    own = load(str(models / "qwen3"), "float32").parameters()
    assert sum(every(out, "held")) == sum(parameter.numel() for parameter in own)


def test_the_average_is_of_all_experts(out: Path) -> None:
    start, first, average = (load_file(out / f"{name}.safetensors") for name in ("qwen3-start", "first", "average"))
    for name, weights in average.items():
        torch.testing.assert_close(weights, DECAY * start[name] + (1 - DECAY) * first[name])
    assert any(not torch.equal(start[name], first[name]) for name in first if "experts" in name)


def test_an_infinite_loss_of_one_rank_changes_no_expert_of_any(out: Path) -> None:
    assert every(out, "refused") == [[True, True]] * int(out.name)


def test_a_step_can_be_taken_back_and_is_repeated_bit_for_bit_after_a_resume(out: Path) -> None:
    assert every(out, "restored") == [[True, True]] * int(out.name)
    assert every(out, "resumed") == [True] * int(out.name)


def test_transformers_reads_the_export(out: Path, models: Path) -> None:
    expected = load(str(models / "qwen3"), "float32")
    expected.load_state_dict(load_file(out / "first.safetensors"))
    read = AutoModelForCausalLM.from_pretrained(out / "export")
    with torch.no_grad():
        assert torch.equal(read(rows(5)).logits, expected(rows(5)).logits)


def test_routes_are_replayed_on_all_ranks(out: Path, models: Path) -> None:
    model = load(str(models / "qwen3"), "float32")
    model.load_state_dict(load_file(out / "first.safetensors"))
    chosen = Logits(model)(rows(7)[:2])
    replay = RouteReplay(model)
    replay.set(ROUTES)
    with torch.no_grad():
        expected = Logits(model)(rows(7)[:2])
    assert (chosen - expected).abs().max() > 1e-3
    for found in every(out, "replayed"):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_another_number_of_ranks_cannot_resume(trained: Path) -> None:
    assert every(trained / "4", "unchanged") == [True] * 4


@pytest.mark.long
def test_engines_sample_from_divided_experts(tiny_model: Path, tmp_path: Path) -> None:
    """A whole run: after every update the engine has the trainers' weights, and its log-probs are theirs."""
    config = Qwen3MoeConfig(**EIGHT, norm_topk_prob=True, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = save_model(AutoModelForCausalLM.from_config(config), tiny_model, tmp_path / "model")
    ranks = {"workers": 2, "zero_stage": 3, "expert_parallel_size": DIVIDED}
    changes = [
        f"model.path={model}",
        "schedule.steps=3",
        *(f"roles.policy.{name}={value}" for name, value in ranks.items()),
    ]
    planned = plan_runs(read_document(ROOT / "deploy/specs/tiny-grpo.yaml", changes))[0]
    outcome = train(RunRequest(planned.spec, tmp_path / "run", False, None), Console(io.StringIO()))
    gaps = [line["policy/rollout_logprob_gap"] for line in metrics_lines(tmp_path / "run")]
    assert outcome.steps_done == len(gaps) == 3 and max(gaps) < 1e-5
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-000003/model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert weights.keys() == start.keys() and not any(torch.equal(weights[name], start[name]) for name in start)
