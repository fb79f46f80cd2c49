"""The advice on each algorithm: none is missing, and the names in it exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from docs.tooling.algorithm_reference import Curves, algorithm_reference
from troupe.orchestrator.algorithms.description import all_advice, description
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS, OfflineAlgorithmConfig
from troupe.orchestrator.algorithms.section import AlgorithmConfig
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.metrics import metric_sections

ADVICE = all_advice()
ROWS = (*ALGORITHMS, *OFFLINE_ALGORITHMS)
QUOTED = re.compile(r"`([^`]+)`")
METRICS = [metric for section in metric_sections().values() for metric in section]


def is_metric(name: str) -> bool:
    return any(metric.matches(name) for metric in METRICS)


def is_field(name: str) -> bool:
    section, _, rest = name.partition(".")
    if section == "algorithm":
        return rest.split(".")[0] in {*AlgorithmConfig.model_fields, *OfflineAlgorithmConfig.model_fields}
    return bool(rest) and section in RolloutSpec.model_fields


def trl_configs() -> dict[str, set[str]]:
    """The fields of TRL's configurations, from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    folder, found = Path(spec.origin).parent, dict[str, set[str]]()
    for path in (*folder.glob("trainer/*_config.py"), *folder.glob("experimental/*/*_config.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                found[node.name] = {field.id for field in fields if isinstance(field, ast.Name)}
    return found


def test_every_row_has_advice_and_no_other() -> None:
    assert set(ADVICE) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_the_advice_is_complete_and_shown(name: str) -> None:
    text, page = description(name), algorithm_reference()
    for given in asdict(ADVICE[name]).values():
        assert given.strip() and given in text and given in page
        assert "|" not in given, "it is a cell of a table"


@pytest.mark.parametrize("name", ROWS)
def test_what_to_watch_names_metrics_and_fields_that_exist(name: str) -> None:
    quoted = QUOTED.findall(ADVICE[name].watch)
    assert any(is_metric(one) for one in quoted)
    assert [one for one in quoted if not (is_metric(one) or is_field(one) or one in ROWS)] == []


@pytest.mark.parametrize("name", [name for name in ROWS if not ADVICE[name].trl.startswith("-")])
def test_options_of_trl_are_fields_of_its_configurations(name: str) -> None:
    configs = trl_configs()
    call = ast.parse(QUOTED.findall(ADVICE[name].trl)[0], mode="eval").body
    if not isinstance(call, ast.Call):
        assert ast.unparse(call) in configs
        return
    config = ast.unparse(call.func).split(".")[-1]
    assert {keyword.arg for keyword in call.keywords} <= configs[config]


def test_every_row_on_rollouts_is_grouped_by_its_ratio() -> None:
    lines = algorithm_reference().split("## Several updates on a batch")[1].split("\n## ")[0].splitlines()
    table = [line.rsplit("|", 2)[1] for line in lines if line.startswith("| ")][1:]
    assert sorted(name for cell in table for name in QUOTED.findall(cell)) == sorted(ALGORITHMS)


def test_the_page_shows_the_curves_that_there_are() -> None:
    page = algorithm_reference(Curves("the figure", {"grpo": "from 0 to 1"}))
    assert page.count("Runs of the shipped spec: from 0 to 1") == 1
    assert page.endswith("# Curves\n\nthe figure\n")
    assert "Runs of the shipped spec" not in algorithm_reference()
