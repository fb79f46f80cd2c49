"""The page on shared GPUs: its numbers are those of `troupe plan`, and those of a formula that is not."""

from __future__ import annotations

import pytest

from docs.tooling import shared_gpus
from docs.tooling.shared_gpus import GPUS, QWEN, SLEEPS, Row, rows, size
from troupe.workers.contract.units import GIB

H100 = 79.6
CONTEXT, BUCKET = 800 / 1024, 2 * 500_000_000 / GIB


def test_the_page_has_the_numbers_of_the_plan() -> None:
    page = shared_gpus.PAGE.read_text(encoding="utf-8")
    assert page == shared_gpus.written(page), "run `python -m docs.tooling.shared_gpus`"


def test_the_sizes_are_those_that_qwen_names() -> None:
    assert [size(model).parameters for model in QWEN] == [7_615_616_512, 32_763_876_352, 72_706_203_648]


def shared() -> list[Row]:
    """Rows in which workers share GPUs."""
    return [row for row in rows() if "shared" in row.layout and "none" not in row.layout]


@pytest.mark.parametrize("model", QWEN)
def test_the_periods_add_up_by_hand(model: str) -> None:
    found = [row for row in shared() if row.model == model]
    assert found
    for row in found:
        _assert_periods(row)


def _assert_periods(row: Row) -> None:
    """Check the periods of a row against those by hand."""
    numbers, ranks = size(row.model).parameters, row.gpus
    weights, engine = 2 * numbers / GIB, 2 * numbers / row.ranks / GIB
    caches = row.plan.memory.caches["rollout-0"].bytes > 0
    periods = {period: needs / GIB for period, needs in row.use.periods.items()}
    if not row.offloads:
        policy = weights / ranks + BUCKET + CONTEXT
        if caches:
            assert periods["sampling"] == pytest.approx(row.share * H100 + policy, abs=0.01)
        rests = 1 + CONTEXT  # graphs, CUDA
        bucket = 2 * size(row.model).largest / GIB
        if row.layout.endswith("weights"):
            assert periods["transfer"] == pytest.approx(policy + engine + rests + 2 * 2 * bucket, abs=0.01)
            states = 16 * numbers / ranks / GIB
            assert periods["update"] > policy + states + rests
        else:
            with_weights = next(
                r for r in shared() if (r.model, r.gpus) == (row.model, ranks) and "weights" in r.layout
            )
            if (with_weights.offloads, with_weights.ranks) == (row.offloads, row.ranks):
                kept = periods["update"] - with_weights.use.periods["update"] / GIB
                assert engine < kept < engine + 6, "the weights, and activations that vLLM keeps"
    assert row.use.most == max(row.use.periods.values()) < row.use.alone


def test_every_layout_is_there_and_sharing_makes_more_fit() -> None:
    found = {(row.model, row.gpus, row.layout.split(" ")[0].strip(",")) for row in rows()}
    assert found == {(model, gpus, "shared") for model in QWEN for gpus in GPUS} | {
        (model, gpus, "apart") for model in QWEN for gpus in GPUS if gpus > 1
    }
    fitting = {
        sleep: {(r.model, r.gpus) for r in rows() if r.layout.endswith(f", {sleep}") and r.fits} for sleep in SLEEPS
    }
    assert fitting["none"] <= fitting["kv_cache"] <= fitting["weights"]
    assert {("32B", 8), ("72B", 16)} <= fitting["weights"], "by engines over several of the GPUs"
    assert {("72B", 8), ("72B", 16)} <= fitting["kv_cache"] - fitting["none"]
