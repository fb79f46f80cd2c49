"""Every pair of features of a run, in a few dozen runs of two steps (`docs/reference/combinations.md`).

Some rows run with `make test`, because no other test of it has their features. `make pairs` runs all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.pairs.features import Matrix
from tests.pairs.matrices import OFFLINE, ROLLOUTS
from tests.pairs.runs import check, run_row, shared_cluster

SUITE: dict[str, list[dict[str, str]]] = {
    "rollouts": [{"algorithm": "ppo", "trainers": "sequence"}],
    "offline": [
        {"trainers": "two", "weights": "adapters"},
        {"trainers": "sequence", "weights": "given adapters"},
    ],
}
"""Values of rows that run with `make test`, the first with each: a critic and divided rows; adapters on two ranks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, shared_cluster():
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, str]:
    """An adapter and a reward model for the tiny model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(str(folder / "adapter"))
    scored = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    scored.save_pretrained(folder / "reward")
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, folder / "reward")
    return {"ADAPTER": str(folder / "adapter"), "REWARD_MODEL": str(folder / "reward")}


def rows(matrix: Matrix) -> list[Any]:
    """The rows of a matrix as parameters of a test."""
    suite = [next(row for row in matrix.rows if values.items() <= row.items()) for values in SUITE[matrix.name]]
    return [
        pytest.param(
            matrix,
            row,
            id=f"{matrix.name}-{number}",
            marks=pytest.mark.real if row in suite else pytest.mark.pairs,
        )
        for number, row in enumerate(matrix.rows, 1)
    ]


@pytest.mark.parametrize(("matrix", "row"), [*rows(ROLLOUTS), *rows(OFFLINE)])
def test_the_features_of_a_row_work_together(
    matrix: Matrix, row: dict[str, str], cluster: None, places: dict[str, str], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    check(run_row(matrix, row, tmp_path / "run", places | {"STORE": str(store)}))
