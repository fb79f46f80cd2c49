"""The roofline: what a phase has to do at least, by hand, and which operators took its time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.roofline import (
    BOUND,
    DECODE,
    GB_S,
    GFLOP_S,
    KINDS,
    PRODUCTS,
    PROMPT,
    READS,
    RESPONSE,
    REST,
    UPDATE,
    Work,
    at_the_peak,
    decoding,
    kind_of_operator,
    seconds_by_kind,
    training,
)
from benchmarks.support.harness import Turn
from tests.conftest import ROOT
from troupe.orchestrator.model_facts.model_size import read_size

SMOLLM2 = ROOT / ".cache/models/smollm2-135m-instruct"
BODY, HEAD, LAYERS, WIDTH, KV = 106_203_456, 49_152 * 576, 30, 576, 192
"""Parameters of SmolLM2's layers and norms, its head, layers, hidden size and size of the keys."""


def test_the_work_of_an_update_is_that_of_its_products() -> None:
    tokens = 16 * (PROMPT + RESPONSE)
    attention = LAYERS * 2 * WIDTH * tokens * (PROMPT + RESPONSE) / 2
    products = BODY * tokens + HEAD * 16 * RESPONSE + attention
    found = training(read_size(SMOLLM2), 16, 3)
    assert found.gflop == pytest.approx(6 * products / 1e9) and found.gigabytes == 0
    assert training(read_size(SMOLLM2), 16, 1).gflop == pytest.approx(found.gflop / 3)


def test_decoding_reads_all_weights_for_each_token_and_the_cache_of_each_sequence() -> None:
    """Behind prompts of 10 tokens, 4 tokens attend to 12 on average, and the first comes from its prompt's pass."""
    found, spans = decoding(read_size(SMOLLM2), 4, 8, 8, 10, 4), 64 * 4 * 12
    assert found.gigabytes == pytest.approx((4 * 4 * (BODY + HEAD) + LAYERS * 4 * 2 * KV * spans) / 1e9)
    prompts = 8 * (BODY * 10 + 2 * LAYERS * WIDTH * 10 * 10 / 2)
    products = 2 * (BODY * 64 * 3 + HEAD * 64 * 4 + prompts) + 4 * LAYERS * WIDTH * spans
    assert found.gflop == pytest.approx(products / 1e9, rel=1e-3)


def test_the_slower_of_products_and_memory_bounds_a_phase() -> None:
    assert Work(100.0, 1.0).seconds(gflop_s=50.0, gb_s=10.0) == 2.0
    assert Work(100.0, 40.0).seconds(gflop_s=50.0, gb_s=10.0) == 4.0


def test_the_ratio_is_the_share_of_the_peak_of_the_same_round() -> None:
    taken = {
        PRODUCTS: [Turn(9.0, 1.0, 1.0, 0.0, figures={GFLOP_S: rate}) for rate in (100.0, 200.0)],
        READS: [Turn(9.0, 1.0, 1.0, 0.0, figures={GB_S: 10.0})] * 2,
        UPDATE: [Turn(4.0, 1.0, 1.0, 0.0, {"products": 3.0})] * 2,
        DECODE: [Turn(4.0, 1.0, 1.0, 0.0)] * 2,
    }
    found = at_the_peak(taken, {UPDATE: Work(200.0), DECODE: Work(1.0, 20.0)})
    assert [turn.rate for turn in found[UPDATE]] == [0.5, 0.25] and [turn.rate for turn in found[PRODUCTS]] == [1, 1]
    assert [turn.rate for turn in found[DECODE]] == [0.5, 0.5] and [turn.rate for turn in found[READS]] == [1, 1]
    assert found[UPDATE][0].figures == {GFLOP_S: 50.0, BOUND: 0.0} and found[UPDATE][0].phases == {"products": 3.0}
    assert found[DECODE][0].figures[BOUND] == 2.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::copy_", "conversions and copies"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::mul", "element-wise and sums"),
        ("aten::sum", "element-wise and sums"),
        ("autograd::engine::evaluate_function: MulBackward0", None),
    ],
)
def test_operators_have_a_kind(name: str, kind: str | None) -> None:
    assert kind_of_operator(name) == kind


def test_a_profile_has_the_seconds_of_each_kind_and_the_rest() -> None:
    given, weight = torch.randn(512, 512), torch.randn(512, 512)
    found = seconds_by_kind(lambda: [given @ weight for _ in range(20)])
    assert list(found) == [*KINDS, REST] and all(seconds >= 0 for seconds in found.values())
    assert found["products"] > 5 * found["element-wise and sums"]
