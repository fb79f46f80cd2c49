"""Reward functions written for other frameworks: called by name, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.loading import RewardArgumentsError, load
from troupe.workers.rewards.runner import RewardProcess, RewardResult, Sample

FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["index"] == 3 and extra_info["split"] == "test"
    return {"score": float(solution_str == ground_truth), "extra": 1}


def two(solution_str, ground_truth, *, bonus=0.0):
    return (solution_str == ground_truth) + bonus


def swallows(solution_str, ground_truth, **kwargs):
    return float(sorted(kwargs) == ["data_source", "extra_info"])


async def waits(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)


def many(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(s == g)} for s, g in zip(solution_strs, ground_truths, strict=True)]


def needs_more(data_source, solution_str, ground_truth, extra_info, model):
    return 1.0


def half_verl(data_source, solution_str, label=None):
    return 1.0


def trl(prompts, completions, answer=None):
    return 1.0


def openrlhf(queries, prompts, labels):
    return 1.0


def swapped(answer, response, metadata):
    return 1.0


def free(text, gold, info):
    return float(text == gold)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "written_elsewhere.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def scored(name: str, metadata: dict[str, object], **fields: object) -> list[RewardResult]:
    """Outcomes of a right and a wrong response."""
    config = RewardFunctionConfig.model_validate({"name": f"written_elsewhere:{name}", "timeout_s": 120.0, **fields})
    process = RewardProcess(config, memory_limit_mib=4096)
    samples = [Sample(text, "7", json.dumps(metadata), 1, "stop", "[]") for text in ("7", "8")]
    try:
        return process.score(samples)
    finally:
        process.close()


ROW = {"data_source": "gsm8k", "extra_info.index": 3, "extra_info": {"split": "test"}}


@pytest.mark.parametrize(
    ("name", "fields", "rewards"),
    [
        ("compute_score", {}, [1.0, 0.0]),
        ("two", {"args": {"bonus": 0.5}}, [1.5, 0.5]),
        ("swallows", {}, [1.0, 1.0]),
        ("waits", {}, [1.0, 0.0]),
        ("many", {"batched": True}, [1.0, 0.0]),
        ("free", {}, [1.0, 0.0]),
    ],
)
def test_verls_parameters_are_bound_by_name(name: str, fields: dict[str, object], rewards: list[float]) -> None:
    assert scored(name, ROW, **fields) == [RewardResult(reward) for reward in rewards]


def test_a_data_source_that_is_missing_fails_the_sample() -> None:
    for outcome in scored("compute_score", {}):
        assert outcome.value is None and "data.train.metadata" in outcome.status


@pytest.mark.parametrize("name", ["needs_more", "half_verl", "trl", "openrlhf", "swapped"])
@pytest.mark.parametrize("batched", [False, True])
def test_parameters_that_would_get_something_else_are_refused(name: str, batched: bool) -> None:
    with pytest.raises(RewardArgumentsError, match="cannot be called as"):
        load(f"written_elsewhere:{name}", {}, batched)
