"""Updates of several backward passes on real DeepSpeed, with and without offload, compared with plain torch.

DeepSpeed has lost gradients in this pattern (pull requests 7981 and 7985): each ZeRO stage accumulates in its own way.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.real.models import save_llama
from tests.real.ranks import rank_context, wait_for_ranks
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.models.modeling import ModelModule, load_causal
from troupe.workers.training.deepspeed_engine import TrainEngine
from troupe.workers.training.group import join_group, leave_group, open_store

pytestmark = pytest.mark.real

UPDATES, PASSES, RANKS = 3, 4, (1, 2)
LEARNING_RATE, WEIGHT_DECAY, CLIP, BETAS, EPS = 1e-2, 0.1, 0.5, (0.9, 0.95), 1e-2
CASES = [
    (stage, dtype, offload)
    for dtype in ("float32", "bfloat16")
    for stage in range(4)
    for offload in (False, True)
    if stage > 0 or not offload
]
TIMEOUT_S = 300.0
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest gap. In bfloat16 a rounding error of a gradient moves some weights to their neighbours."""


def rows(update: int) -> torch.Tensor:
    """Token ids of one update: eight rows that differ in size of their gradient, int64 [8, 6]."""
    return torch.randint(3, 4096, (PASSES * 2, 6), generator=torch.Generator().manual_seed(update))


def recomputed(dtype: str, offload: bool) -> bool:
    """Whether layers compute again all but their products, under every ZeRO stage."""
    return dtype == "float32" and not offload


class Logits(ModelModule):
    """The module that is trained: ids to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


def loss_of(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    """The rows' share of the mean loss of an update."""
    logits = forward(ids)[:, :-1].float()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.sum() / (PASSES * 2 * (ids.shape[1] - 1))


def load(path: str, dtype: str) -> Any:
    return load_causal(ModelConfig(path=path, dtype=dtype, float32_head=False))  # pyright: ignore[reportArgumentType]


def plain_torch(path: str, dtype: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same updates in plain torch: weights and gradients in float32 beside a model of type `dtype`."""
    model = load(path, dtype)
    module = Logits(model)
    masters = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    decayed = [master for master in masters.values() if master.ndim >= 2]
    vectors = [master for master in masters.values() if master.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
    )
    norms = []
    for update in range(UPDATES):
        gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
        for ids in rows(update).split(2):
            model.zero_grad()
            loss_of(module, ids).backward()
            for name, parameter in model.named_parameters():
                gradients[name] += parameter.grad.float()
        for name, master in masters.items():
            master.grad = gradients[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), CLIP)))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def train(path: str, stage: int, dtype: str, offload: bool, rank: int, world: int, out: Path) -> None:
    """Train on this rank's share of the rows; rank 0 writes weights and gradient norms."""
    model = load(path, dtype)
    config = TrainerConfig(
        learning_rate=LEARNING_RATE,
        adam_betas=BETAS,
        adam_eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        offload_optimizer=offload,
        gradient_checkpointing=recomputed(dtype, offload),
        recompute_products=False,
    )
    engine = TrainEngine(Logits(model), model, config, UPDATES, "cpu", getattr(torch, dtype))
    norms = []
    for update in range(UPDATES):
        passes = rows(update).split(2 // world)[rank::world]
        norms.append(engine.update(passes, loss_of).grad_norm)
    weights = {name: tensor.clone().contiguous() for name, tensor in engine.named_weights()}
    if rank == 0:
        name = f"{stage}-{dtype}-{offload}-{world}"
        save_file(weights, out / f"{name}.safetensors")
        (out / f"{name}.json").write_text(json.dumps(norms))
    engine.close()


def rank_main(path: str, rank: int, world: int, port: int, out: Path) -> None:
    """Entry of the process of one rank."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "compiled")
    try:
        torch.set_num_threads(1)
        join_group(Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=world), "cpu")
        for case in CASES:
            train(path, *case, rank=rank, world=world, out=out)
        leave_group()
    except BaseException:
        (out / f"error-{world}-{rank}.txt").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose matrices are large enough for ZeRO-3 to partition them."""
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_llama(tmp_path_factory.mktemp("model"), vocab_size=4096, **sizes, initializer_range=0.1)


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and gradient norms of every case, on one rank and on two."""
    out = tmp_path_factory.mktemp("trained")
    context = rank_context()
    stores = {world: open_store("127.0.0.1") for world in RANKS}
    ranks = [
        context.Process(target=rank_main, args=(model, rank, world, stores[world].port, out))
        for world in RANKS
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    wait_for_ranks(ranks, out, TIMEOUT_S)
    return out


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    return {dtype: plain_torch(model, dtype) for dtype in TOLERANCE}


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """Distance of two results relative to the distance from the start."""
    assert one.keys() == other.keys() == start.keys()
    parts = [(one[name].double() - other[name].double(), other[name].double() - start[name].double()) for name in one]
    apart, moved = (torch.stack([part[side].norm() for part in parts]).norm() for side in (0, 1))
    return float(apart / moved)


@pytest.fixture(scope="module")
def starts(model: str) -> dict[str, dict[str, torch.Tensor]]:
    """The weights before training, by type."""
    return {dtype: {key: value.detach() for key, value in load(model, dtype).named_parameters()} for dtype in TOLERANCE}


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize(("stage", "dtype", "offload"), CASES)
def test_several_passes_give_the_update_of_plain_torch(
    stage: int,
    dtype: str,
    offload: bool,
    world: int,
    trained: Path,
    expected: dict[str, Any],
    starts: dict[str, dict[str, torch.Tensor]],
) -> None:
    name = f"{stage}-{dtype}-{offload}-{world}"
    weights, norms = expected[dtype]
    found = load_file(trained / f"{name}.safetensors")
    assert gap(found, weights, starts[dtype]) < TOLERANCE[dtype]
    assert json.loads((trained / f"{name}.json").read_text()) == pytest.approx(norms, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_changes_no_weight(
    stage: int, dtype: str, world: int, trained: Path, starts: dict[str, dict[str, torch.Tensor]]
) -> None:
    kept, offloaded = (
        load_file(trained / f"{stage}-{dtype}-{offload}-{world}.safetensors") for offload in (False, True)
    )
    assert gap(offloaded, kept, starts[dtype]) < TOLERANCE[dtype]
