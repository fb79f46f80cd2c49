"""What a model can do is found in float32, also where the process multiplies in TF32."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.models.test_modeling import FAMILIES, save_model
from troupe.workers.models import attention
from troupe.workers.models.attention import choose_attention
from troupe.workers.models.capabilities import computes_the_same
from troupe.workers.models.exact import ieee_float32
from troupe.workers.models.modeling import load_causal

BACKENDS: Any = torch.backends
MATMUL: Any = torch.backends.cuda.matmul
SETTINGS: dict[str, Callable[[], Any]] = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "cuda": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


def settings() -> tuple[str, ...]:
    return MATMUL.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision, BACKENDS.fp32_precision


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = settings()
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision, BACKENDS.fp32_precision = before


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers with TF32's 10 bits of mantissa, as a GPU multiplies them where TF32 is on."""
    if MATMUL.fp32_precision != "tf32":
        return tensor
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with products of rounded numbers: those of sdpa are not those of eager attention."""
    sdpa, matmul = nn.functional.scaled_dot_product_attention, torch.matmul

    def fused(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> torch.Tensor:
        return sdpa(rounded(query), rounded(key), rounded(value), *rest, **named)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(torch, "matmul", lambda one, other: matmul(rounded(one), rounded(other)))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", SETTINGS)
def test_attention_is_compared_in_float32(tmp_path: Path, name: str) -> None:
    save_model(FAMILIES["llama"], tmp_path)
    SETTINGS[name]()
    before = settings()
    assert choose_attention(str(tmp_path), trust_remote_code=False) is None
    assert settings() == before


@pytest.mark.usefixtures("emulated")
def test_without_it_tf32_would_be_taken_for_another_attention(tmp_path: Path) -> None:
    save_model(FAMILIES["llama"], tmp_path)
    torch.set_float32_matmul_precision("high")
    small = next(attention.proxy_configs(FAMILIES["llama"]))
    compare: Any = attention._compare
    assert compare(small, False)[1] < 5e-6 < 5e-5 < compare.__wrapped__(small, False)[1]


def test_kernels_are_compared_in_float32(tmp_path: Path) -> None:
    """So is all that is tried out on a model: inside every trial a product is one of float32."""
    model = load_causal(save_model(FAMILIES["llama"], tmp_path))
    seen: list[str] = []
    model.base_model.register_forward_pre_hook(lambda *_: seen.append(MATMUL.fp32_precision))
    torch.set_float32_matmul_precision("high")
    assert computes_the_same(model, lambda _: None)
    assert set(seen) == {"ieee"} and torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_consistent_inside_and_restored(name: str) -> None:
    """torch refuses a product on a GPU if its two settings contradict each other."""
    SETTINGS[name]()
    before = settings()
    with pytest.raises(ZeroDivisionError), ieee_float32():
        assert settings()[:2] == ("ieee", "ieee") and not MATMUL.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
        raise ZeroDivisionError
    assert settings() == before


def test_the_environment_decides_only_the_default() -> None:
    code = (
        "import torch; from troupe.workers.models.exact import ieee_float32\n"
        "state = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.matmul.allow_tf32)\n"
        "print(*state())\nwith ieee_float32(): print(*state())\nprint(*state())"
    )
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tf32", "True", "ieee", "False", "tf32", "True"]
