"""Offsets of reward models are measured once in a run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.fakes import FakeReward, FakeTable, FaultyWorker, fake_spec
from tests.orchestrator.test_controller import pool_of
from tests.orchestrator.test_run import session_of
from troupe.orchestrator.data.summary import RunData
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.runs.rollouts import train_on_rollouts
from troupe.orchestrator.spec.derived.sampling import measured_offsets
from troupe.workers.contract.messages import REFERENCES, ReferenceScores, RewardRequest, ScoredGroups

MODEL = {"path": "scorer", "offset": "answer"}
TEXTS = [str(n) * (n % 7 + 1) for n in range(37)]
MEAN = sum(len(text) / 3 for text in TEXTS) / 37


class Scorer(FakeReward):
    """Scores a third of a reference's length, or none of a blank one; keeps what it is asked."""

    def __init__(self) -> None:
        self.references: list[str] = []
        self.offsets: set[tuple[tuple[str, float], ...]] = set()

    async def score_references(self, model: str, references: pa.Table) -> ReferenceScores:
        texts = references["response"].to_pylist()
        self.references += texts
        blank = [row["origin"] for row in references.to_pylist() if not row["response"]]
        return ReferenceScores(tuple(len(text) / 3 for text in texts), f"{blank[0]}: not a number" if blank else "")

    async def score_groups(self, asked: Any, *rollouts: FakeTable) -> tuple[ScoredGroups, Any]:
        self.offsets |= {tuple(one.offsets.items()) for one in asked if isinstance(one, RewardRequest)}
        return await super().score_groups(asked, *rollouts)


def trained(out: Path, steps: int, texts: list[str], **model: Any) -> tuple[Scorer, list[dict[str, Any]]]:
    """The worker and the metrics of a run, which resumes if its folder has a checkpoint."""
    spec = fake_spec(schedule={"steps": steps}, roles={"reward": {"functions": (), "model": MODEL | model}})
    (offset,) = measured_offsets(spec)
    rows = [{"messages": "[]", "response": text, "origin": f"rows:{n}"} for n, text in enumerate(texts)]
    data = RunData(pool_of(12), {}, references={offset: pa.Table.from_pylist(rows, schema=REFERENCES)})
    session, scorer = session_of(out, spec, data), Scorer()
    workers = Workers({**session.workers.by_role, "reward": [FaultyWorker("reward-0", scorer)]})
    asyncio.run(train_on_rollouts(replace(session, workers=workers)))
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    return scorer, [line for line in map(json.loads, lines) if line["step"]]


def test_the_offset_is_measured_once_and_stays_when_the_run_resumes(tmp_path: Path) -> None:
    first, metrics = trained(tmp_path, 2, TEXTS)
    assert sorted(first.references) == sorted(TEXTS)
    assert [line["reward/reward_model/offset"] for line in metrics] == [pytest.approx(MEAN, rel=1e-12)] * 2
    (subtracted,) = first.offsets
    assert subtracted == (("reward_model", metrics[0]["reward/reward_model/offset"]),)
    second, metrics = trained(tmp_path, 4, ["other"])
    assert second.references == [] and second.offsets == {subtracted}
    assert {line["reward/reward_model/offset"] for line in metrics} == {subtracted[0][1]} and len(metrics) == 4


def test_another_model_is_measured_anew(tmp_path: Path) -> None:
    trained(tmp_path, 2, TEXTS)
    second, metrics = trained(tmp_path, 4, ["other"], path="another")
    assert second.references == ["other"] and second.offsets == {(("reward_model", 5 / 3),)}
    assert metrics[-1]["reward/reward_model/offset"] == 5 / 3 != metrics[0]["reward/reward_model/offset"]


def test_another_model_in_the_same_folder_is_measured_anew(tmp_path: Path) -> None:
    folder = tmp_path / "scorer"
    folder.mkdir()
    for steps, weights, measured in ((2, "one", ["first"]), (4, "one", []), (6, "two", ["third"])):
        (folder / "model.safetensors").write_text(weights)
        scorer, _ = trained(tmp_path, steps, measured or ["second"], path=str(folder))
        assert scorer.references == measured


def test_a_reference_without_a_score_is_an_error_of_the_field(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^roles\.reward\.model\.offset: rows:1: not a number$"):
        trained(tmp_path, 2, ["some", "", "more"])
