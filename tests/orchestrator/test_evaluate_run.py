"""`troupe eval` of adapters: engines get the model that they are merged with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from troupe.orchestrator.hub.resolve import LocalFiles
from troupe.orchestrator.runs import evaluation
from troupe.orchestrator.spec.derived.paths import without_adapters
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.telemetry.console import Console

TINY = Path(__file__).resolve().parents[2] / "deploy" / "specs" / "tiny-grpo.yaml"


@pytest.fixture
def merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path | None]]:
    """(adapters, model below) of every merge, into the test's folder."""
    found: list[tuple[Path, Path | None]] = []

    def merge(source: Path, target: Path, base: Path | None = None) -> Path:
        found.append((source, base))
        target.mkdir()
        return target

    monkeypatch.setattr(evaluation, "write_merged", merge)
    monkeypatch.setenv("TROUPE_MODELS", str(tmp_path / "cache" / "models"))
    return found


@pytest.mark.parametrize("adapter", [Path("runs/demo/adapter"), None])
def test_adapters_are_merged_with_the_model_of_the_spec_while_it_is_evaluated(
    tmp_path: Path, merges: list[tuple[Path, Path | None]], adapter: Path | None
) -> None:
    spec = without_adapters(load_rollout_spec(TINY, ["roles.policy.lora={}", "model.adapter=start"]))
    with evaluation._whole_model(LocalFiles(spec), adapter, Console(io.StringIO())) as whole:
        if adapter is None:
            assert (whole.spec, merges) == (spec, [])
            return
        model = Path(whole.spec.model.path)
        assert (whole.spec.model.adapter, merges) == (None, [(adapter, Path(spec.model.path))])
        assert model.is_dir() and model.is_relative_to(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
