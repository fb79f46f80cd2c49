"""Run folders for the tests of the report: a real run's metrics, with samples, spans and events of any number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.orchestrator.insight.verdicts.cases import RECORDED, recorded_spec
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, EvaluationLog
from troupe.orchestrator.rollouts.held_out import PromptResult, summarize
from troupe.orchestrator.telemetry.timeline import Span, timeline_table
from troupe.workers.contract.samples import SAMPLES

GROUP = 8
WORDS = ("The answer", " is", " seven", " because", " four", " and", " three", " make", " seven", ".")

Text = Callable[[int, int], str]
"""Text of a sample by step and row."""


def write_run(folder: Path, steps: int = 4, rows: int = 16, text: Text | None = None, tokens: int = 12) -> Path:
    """A run folder: metrics and spec of a recorded PPO run, and made samples, spans and events.

    With `tokens=0` no tokenizer is loaded for its report, which takes seconds.
    """
    folder.mkdir(parents=True)
    recorded_spec("healthy-ppo").write(folder / "spec.yaml")
    lines = (RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[:steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events(steps)))
    for step in range(1, steps + 1):
        write_samples(folder, step, [sample(step, row, text or _plain, tokens) for row in range(rows)])
        write_spans(folder, step)
    return folder


def sample(step: int, row: int, text: Text, tokens: int) -> dict[str, Any]:
    """A row of SAMPLES."""
    noise = np.random.default_rng(1000 * step + row)
    ids = noise.integers(100, 2000, tokens).tolist()
    sampled = (-noise.exponential(1.0, tokens)).tolist()
    failed = row % 11 == 10
    return {
        "step": step,
        "prompt_uid": f"e0-r{row // GROUP}",
        "sample_index": row % GROUP,
        "attempt": 0,
        "segment": 0,
        "prompt_ids": [1, 2, 3],
        "response_ids": ids,
        "rollout_logprobs": sampled,
        "loss_mask": [True] * tokens,
        "weight_versions": [{"version": step - 1, "start": 0, "end": tokens}],
        "turns": [{"name": "assistant", "start": 0, "end": tokens}],
        "finish_reason": "stop",
        "episode_status": "ok",
        "response": text(step, row),
        "conversation": "",
        "messages": json.dumps([{"role": "user", "content": f"What is {row} + {step}?"}]),
        "turn_rewards": [],
        "answer": str(row + step),
        "metadata": "{}",
        "engine": "rollout-0",
        "generate_s": 0.2,
        "first_token_s": 0.01,
        "status": "error: no number" if failed else "ok",
        "reward": None if failed else row / 10,
        "reward_spans": [],
        "trained": not failed,
        "components": [{"name": "correct", "value": row / 10}, {"name": "format", "value": 1.0}],
        "advantages": noise.normal(0, 1, tokens).tolist(),
        "old_logprobs": (np.asarray(sampled) + noise.normal(0, 0.01, tokens)).tolist(),
        "values": noise.normal(0.5, 0.1, tokens).tolist(),
        "entropy": noise.exponential(0.5, tokens).tolist(),
    }


def write_samples(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """The samples of a step."""
    columns = {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in SAMPLES}
    file = folder / "trajectories" / f"step-{step:06d}.parquet"
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), file)


def write_spans(folder: Path, step: int) -> None:
    """The spans of a step of three seconds: 1.2 s of generation, 1.5 s of updates, 0.3 s of weight sync."""
    at = 1_800_000_000.0 + 3 * step
    spans = [
        *(
            Span("rollout-0", "generate", at, at + 1.2, "ok", "e0-r0"),
            Span("reward-0", "score", at + 1, at + 1.1, "ok", ""),
        ),
        *(
            Span("policy-0", "update", at + 1.2, at + 2.7, "ok", ""),
            Span("critic-0", "update", at + 1.2, at + 2, "ok", ""),
        ),
        *(Span("policy-0", "publish_weights", at + 2.7, at + 2.9, "ok", f"version {step}"),),
        *(Span("rollout-0", "update_weights", at + 2.9, at + 3.0, "ok", ""),),
        *(
            Span("driver-0", "generate", at, at + 1.2, "ok", ""),
            Span("driver-0", "update", at + 1.2, at + 2.7, "ok", ""),
        ),
        Span("driver-0", "sync", at + 2.7, at + 3.0, "ok", ""),
    ]
    file = folder / "timeline" / f"step-{step:06d}.parquet"
    file.parent.mkdir(exist_ok=True)
    pq.write_table(timeline_table(step, spans), file)


def events(steps: int) -> list[dict[str, Any]]:
    """A start, a weight update for each step, a drop, and the end."""
    found: list[dict[str, Any]] = [{"time": 1.8e9, "step": 0, "event": "run_started", "resume_at": 0}]
    for step in range(1, steps + 1):
        digest = f"{step:032x}"
        weights = {"version": step, "digest": digest, "bytes": 12_879_104, "seconds": 0.05}
        found.append(
            {"time": 1.8e9 + 3 * step, "step": step, "event": "weights", **weights, "engines": {"rollout-0": digest}}
        )
    found.append({"time": 1.8e9 + 9, "step": 2, "event": "dropped", "reason": "no number", "samples": 2})
    found.append({"time": 1.8e9 + 3 * steps, "step": steps, "event": "run_ended", "how": "finished"})
    return found


def _plain(step: int, row: int) -> str:
    return "".join(WORDS[: 2 + (row + step) % 8])


def write_evaluations(folder: Path) -> None:
    """Three evaluations on two sets: one with levels, and one whose samples fail at first."""
    settings = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "samples": 4, "max_tokens": 64}
    described = {"digest": "d", "sampling": settings, "rewards": [{"name": "numeric"}], "solved_at": 1.0}
    sets = {"math": described, "<b>form</b>": described | {"environment": "guess"}}
    log = EvaluationLog(folder / EVALUATIONS, sets, 0)
    for step, right in ((0, 1), (2, 2), (4, 3)):
        rows = [[float(place < right) for place in range(4)], [float(place < right - 1) for place in range(4)]]
        prompts = [PromptResult(tuple(row), (9,) * 4, 1, (0, 0, 1, 2), str(level)) for level, row in enumerate(rows)]
        failed = [PromptResult((None,) * 4, (9,) * 4, 0)] if step == 0 else prompts
        options: dict[str, Any] = {"samples": 4, "solved_at": 1.0, "average": "avg", "pass_at": [2, 4]}
        results = [summarize(found, refused=1, **options) for found in (prompts, failed)]
        log.add(step, dict(zip(("math", "<b>form</b>"), results, strict=True)))
