"""Tables of a plan: no number is cut, whatever the width of the terminal, and what is nearly full is said."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from tests.conftest import ROOT
from troupe.orchestrator.commands.plan_table import notes, render_memory, show
from troupe.orchestrator.model_facts.model_size import ModelSize
from troupe.orchestrator.plan.memory import Sizes
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.plan import Plan, as_json, described_nodes, plan
from troupe.orchestrator.spec.load import plan_runs, read_document

SIZE = ModelSize(
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152_064,
    backbone=7_070_619_136,
    head=544_997_376,
    largest=544_997_376,
)


def planned(name: str, nodes: list[Node], *changes: str) -> Plan:
    spec = plan_runs(read_document(ROOT / "deploy" / "specs" / name, ["model.path=given", *changes]))[0].spec
    return plan(spec, nodes, Sizes({"given": SIZE}))


def shown(found: Plan, width: int) -> str:
    output = io.StringIO()
    show(found, Console(file=output, width=width))
    return output.getvalue()


def numbers(text: str) -> list[str]:
    """Numbers with a decimal point: memory in GiB."""
    return sorted(re.findall(r"\d+\.\d+", text))


SPECS = {
    "node-8gpu-grpo.yaml": described_nodes("1x8xH100", 128, 900),
    "tiny-ppo.yaml": [Node("this machine", 8.0, 0.0, 2**36)],
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_number_is_cut(name: str, width: int) -> None:
    found = planned(name, SPECS[name])
    narrow = shown(found, width)
    assert all(len(line) <= width for line in narrow.splitlines())
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow
    # Every part and total of every worker, wherever it stands.
    wide = [numbers("\n".join(line for line in shown(found, 500).splitlines())), numbers(narrow)]
    assert wide[0] == wide[1]
    workers = {row.worker for row in found.rows}
    assert workers <= set(re.findall(r"[a-z]+-\d+", narrow))


@pytest.mark.parametrize("width", [40, 80, 100, 140])
def test_lines_below_the_tables_begin_at_the_margin_and_continue_behind_it(width: int) -> None:
    found = planned("tiny-ppo.yaml", SPECS["tiny-ppo.yaml"])
    said = [f"requested: {found.asked['CPU']:g} CPU, 0 GPU; the cluster has 8 CPU, 0 GPU", *notes(found.memory)]
    lines = shown(found, width).splitlines()
    below = lines[next(n for n, line in enumerate(lines) if line.startswith("requested")) :]
    assert "\n".join(below).replace("\n  ", " ").splitlines() == said
    assert (len(below) > len(said)) == any(len(line) > width for line in said)


def test_the_form_depends_on_the_width() -> None:
    found = planned("node-8gpu-grpo.yaml", SPECS["node-8gpu-grpo.yaml"])
    assert [column.header for column in render_memory(found.memory, "gpu", 40).columns] == ["worker", "", ""]
    assert len(render_memory(found.memory, "gpu", 120).columns) > 8


def test_what_is_nearly_full_is_a_warning() -> None:
    need = next(m.total for m in planned("node-8gpu-grpo.yaml", []).memory.workers if m.worker == "policy-1")
    for share, warned in ((0.85, False), (0.95, True)):
        gpu = int(need / share)
        nodes = [Node("node-0", 128.0, 8.0, gpu_memory=gpu)]
        found = planned("node-8gpu-grpo.yaml", nodes, "weight_sync.backend=shm")
        assert found.misfit == ""
        assert any(line.startswith("policy-") for line in found.memory.warnings) is warned
        assert not any(line.startswith("rollout") for line in found.memory.warnings), "a cache takes what is left"
        told = json.loads(json.dumps(as_json("run", found)))["warnings"]
        assert told == list(found.memory.warnings)
    line = next(note for note in notes(found.memory) if note.startswith("warning: "))
    assert re.match(
        r"warning: policy-0( \(and \d more\))?: only [5-9]% \([\d.]+ of [\d.]+ GiB\) are left of a GPU", line
    )


def test_a_node_that_is_nearly_full_is_a_warning() -> None:
    (free,) = planned("tiny-ppo.yaml", [Node("n", 8.0, 0.0)]).memory.nodes
    for share, warned in ((0.85, 0), (0.95, 1), (1.05, 0)):
        found = planned("tiny-ppo.yaml", [Node("n", 8.0, 0.0, int(free.total / share))])
        assert len(found.memory.warnings) == warned
        assert bool(found.misfit) is (share > 1)
