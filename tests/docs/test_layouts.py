"""The page of layouts: its rows are what `troupe init` writes and `troupe plan` predicts; memory adds up by hand."""

from __future__ import annotations

import re

import pytest

from docs.tooling import layouts
from docs.tooling.layouts import GPUS, MODELS, Layout, layout, line, size
from tests.orchestrator.plan.test_speed import planned
from troupe.orchestrator.commands.plan_table import predictions
from troupe.workers.contract.units import GIB

PAGE = layouts.PAGE.read_text(encoding="utf-8")
QUICK = [("1.5B", 1), ("1.5B", 8), ("7B", 1), ("7B", 8), ("32B", 8), ("671B-A37B", 8)]


@pytest.mark.parametrize(("model", "gpus"), QUICK)
def test_a_row_is_the_layout_of_today(model: str, gpus: int) -> None:
    assert line(model, gpus) in PAGE.splitlines(), "run `python -m docs.tooling.layouts`"


@pytest.mark.long
def test_the_page_has_the_layouts_of_today() -> None:
    assert layouts.written(PAGE) == PAGE, "run `python -m docs.tooling.layouts`"
    found = [layout(model, gpus) for model in MODELS for gpus in GPUS]
    for one in (one for one in found if isinstance(one, Layout)):
        assert one.states == pytest.approx(one.by_hand, rel=1e-3), (one.model, one.gpus)


def test_every_model_and_cluster_has_a_row() -> None:
    rows = re.findall(r"^\| (\S+) \| (\d+) \|", PAGE, re.MULTILINE)
    assert rows == [(model, str(gpus)) for model in MODELS for gpus in GPUS]


@pytest.mark.parametrize(("model", "gpus"), [("1.5B", 8), ("7B", 8)])
def test_the_states_add_up_by_hand(model: str, gpus: int) -> None:
    found = layout(model, gpus)
    assert isinstance(found, Layout)
    assert found.states == pytest.approx(found.by_hand, abs=100)
    assert found.memory("rollout").total == pytest.approx(0.9 * 79.6 * GIB + 2 * 2 * size(model).largest, rel=0.01)


def test_pages_show_the_prediction_of_today() -> None:
    lines = [*predictions(planned("7B", "1x8xH100", advise=True))]
    guide = (layouts.ROOT / "docs" / "guides" / "memory.md").read_text(encoding="utf-8")
    assert all(one in guide.splitlines() for one in lines) and lines[1] in PAGE.splitlines(), lines
