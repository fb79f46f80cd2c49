"""Reads the samples of an earlier run as examples: their tokens as they are, and the scores of its teachers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from troupe.orchestrator.data.bad_rows import BadRow, SkippedRow, WrongForm
from troupe.orchestrator.data.readers import RawValues
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.offline import SAMPLE_COLUMNS, OfflineSpec
from troupe.orchestrator.spec.sources import ExampleSource, TableFile
from troupe.orchestrator.telemetry.run_folder import TRAJECTORIES, RunFolder
from troupe.workers.contract.config import SamplingConfig
from troupe.workers.contract.offline_messages import SAMPLED, TEACHER_SCORES

_LOGPROBS, *_TOP_TOKENS = TEACHER_SCORES.names
_TOKENS = ("prompt_ids", "response_ids", "loss_mask")


def sample_reader(spec: OfflineSpec, source: ExampleSource) -> Callable[[RawValues], dict[str, Any]]:
    """Reads a row of SAMPLES as EXAMPLE_TEXTS has it; raises BadRow, and SkippedRow for one that was not trained on.
    Without a reference the row needs the teacher's scores that the loss compares with."""
    distill, scores, unfit = spec.algorithm.distillation, list[str](), ""
    if spec.roles.reference is None:
        scores = _TOP_TOKENS if distill.coef else [_LOGPROBS]
        unfit = _other_temperature(source, truncated=not distill.coef)

    def read(raw: RawValues) -> dict[str, Any]:
        row = raw.values
        if missing := [name for name in SAMPLE_COLUMNS if row.get(name) is None]:
            raise WrongForm("path", f"no row of a run's samples: it has no {missing[0]}")
        if not row["trained"]:
            raise SkippedRow("rows that the run did not train on")
        _require_scores(row, scores, distill.k)
        if unfit:
            raise WrongForm("path", unfit)
        tokens = {field.name: _numbers(row, field) for field in SAMPLED if field.name in {*_TOKENS, *scores}}
        if len(tokens["loss_mask"]) != len(tokens["response_ids"]) or not all(map(len, tokens.values())):
            raise BadRow("a list of tokens is empty, or has another length than the response")
        turn = [{"role": "assistant", "content": row["response"]}]
        texts = {"messages": row["messages"], "responses": [json.dumps(turn, ensure_ascii=False)], "tools": None}
        labels = {"scores": [], "margin": 0.0, "desirable": True, "origin": raw.origin, "source": None}
        return {**texts, **labels, **tokens}

    return read


def _require_scores(row: Mapping[str, Any], scores: Sequence[str], k: int) -> None:
    """Raises WrongForm for a row without these scores of a teacher, or with another number of likeliest tokens, and
    SkippedRow for one of a source without a teacher."""
    compute = "roles.reference computes them here"
    if absent := [name for name in scores if row.get(name) is None]:
        keeps = "a run with a reference has them" if absent == [_LOGPROBS] else "output.teacher_tokens keeps them"
        raise WrongForm("path", f"the samples have no {absent[0]}: {keeps}, and {compute}")
    if scores == _TOP_TOKENS:
        if not any(row["teacher_weights"]):
            raise SkippedRow("rows that no teacher has scored")
        ids, tokens, teachers = (len(row[name]) for name in ("teacher_ids", "response_ids", "teacher_weights"))
        if ids != tokens * teachers * k:
            there = f"the samples have the teacher's {ids / max(tokens * teachers, 1):g} likeliest tokens"
            raise WrongForm("path", f"{there}, and algorithm.distill.k is {k}: set it to that, or {compute}")


def _numbers(row: Mapping[str, Any], field: pa.Field) -> np.ndarray:
    """The list of a row in the type of its column. Raises BadRow."""
    try:
        return np.asarray(row[field.name], field.type.value_type.to_pandas_dtype())
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRow(f"{field.name} is no list of numbers: {error}") from error


def _other_temperature(source: ExampleSource, *, truncated: bool) -> str:
    """Why the recorded log-probs of a teacher are not its model's at temperature 1, or empty if they are. `truncated`:
    whether they are among the tokens that the sampler left."""
    folder = Path(source.path).parent if isinstance(source, TableFile) else Path()
    compute = "set roles.reference to compute them here"
    try:
        found = RunFolder(folder.parent).spec if folder.name == TRAJECTORIES else {}
        sampling = SamplingConfig.model_validate(found["sampling"])
    except (UsageError, KeyError, ValueError):
        where = f"the path is none of RUN/{TRAJECTORIES}/*.parquet with a spec.yaml in RUN"
        return f"the teacher's log-probs are at the run's temperature, and {where}: {compute}"
    if sampling.temperature == 1.0 and not (truncated and sampling.truncates):
        return ""
    how = f"temperature {sampling.temperature:g}" + (", among the sampler's tokens" if sampling.truncates else "")
    return f"the teacher's log-probs are at {how}, and kd compares log-probs at 1: {compute}"
