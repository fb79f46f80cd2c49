"""The table of samples: what was sampled, rewarded and trained, joined by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from troupe.workers.contract.messages import REWARDS, ROLLOUTS, TOKEN_RECORDS, TRAIN, RankPlan
from troupe.workers.contract.samples import SAMPLES
from troupe.workers.data.trajectories import join_samples, write_trajectories
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.training.meter import TokenRecorder

Row = tuple[str, int, int, list[int]]
"""prompt_uid, sample_index, segment, response_ids"""
ROWS: Sequence[Row] = (
    *(("p0", 0, 0, [10, 11]), ("p0", 1, 0, [20, 21, 22]), ("p0", 1, 1, [25])),
    *(("p1", 0, 0, [30]), ("p1", 1, 0, [40, 41])),
)


def table(schema: pa.Schema, rows: Sequence[Row], **columns: Any) -> pa.Table:
    """A table of the schema for these rows; columns that are not given have a neutral value."""
    neutral = {"string": "", "int32": 0, "double": 0.0, "float": 0.0}

    def values(field: pa.Field) -> list[Any]:
        known = {"prompt_uid": [row[0] for row in rows], "sample_index": [row[1] for row in rows]}
        known |= {"segment": [row[2] for row in rows], "response_ids": [row[3] for row in rows]}
        known |= {"prompt_ids": [[1, 2, 3] if row[0] == "p0" else [4] for row in rows]}
        known |= {name: [[0.5] * len(row[3]) for row in rows] for name in ("rollout_logprobs", "advantages")}
        known |= {"loss_mask": [[True] * len(row[3]) for row in rows]} | columns
        if field.name in known:
            return known[field.name]
        return [None if field.nullable else neutral.get(str(field.type), [])] * len(rows)

    return pa.Table.from_arrays([pa.array(values(field), field.type) for field in schema], schema=schema)


def rewards(rows: Sequence[Row], **columns: Any) -> pa.Table:
    """A REWARDS table with the samples of these rows."""
    first = [row for row in rows if row[2] == 0]
    given = {"status": ["ok"] * len(first), "reward": [float(i) for i in range(len(first))]} | columns
    return table(REWARDS, first, **given)


def test_rows_that_were_trained_have_what_was_computed_and_the_others_null() -> None:
    trained = [ROWS[3], ROWS[0], ROWS[2], ROWS[1]]  # p1[1] has no reward
    train = table(
        TRAIN, trained, advantages=[[3.0], [0.1, 0.2], [2.5], [2.1, 2.2, 2.3]], values=[[7.0], None, None, None]
    )
    records = table(
        TOKEN_RECORDS, [ROWS[0], ROWS[0]], logprobs=[[-9.0, -9.0], [-1.0, -2.0]], entropy=[[0.0, 0.0], [1.0, 2.0]]
    )
    judged = rewards(ROWS, status=["ok", "ok", "ok", "raised"], reward=[1.0, 2.0, 3.0, None])
    samples = join_samples(12, {}, [judged, records, table(ROLLOUTS, ROWS), train])
    assert samples.column_names == SAMPLES.names
    assert samples["step"].to_pylist() == [12] * 5
    assert samples["trained"].to_pylist() == [True, True, True, True, False]
    expected = [[0.1, 0.2], [2.1, 2.2, 2.3], [2.5], [3.0], None]
    assert samples["advantages"].to_pylist() == pa.array(expected, pa.list_(pa.float32())).to_pylist()
    assert samples["values"].to_pylist() == [None, None, None, [7.0], None]
    assert samples["logprobs"].to_pylist() == [[-1.0, -2.0], None, None, None, None]  # of the last update
    assert samples["entropy"].to_pylist()[0] == [1.0, 2.0]
    assert samples["reward"].to_pylist() == [1.0, 2.0, 2.0, 3.0, None]


def test_the_teachers_tokens_are_kept_if_the_run_asks_for_them(tmp_path: Path) -> None:
    scores = {"teacher_ids": [[7, 8]], "teacher_logprobs": [[-1.0, -0.5] * 2], "teacher_weights": [[0.5]]}
    tables = [rewards(ROWS), table(ROLLOUTS, ROWS), table(TRAIN, ROWS[:1], advantages=[[0.0, 0.0]], **scores)]
    for kept in (True, False):
        write_trajectories(path := tmp_path / f"{kept}.parquet", 1, {}, tables, teacher_tokens=kept)
        written = pq.read_table(path)
        for name, (value,) in scores.items():
            assert written[name].to_pylist() == [value if kept else None, None, None, None, None]


def test_a_sample_without_a_finite_score_has_the_reason_as_its_status() -> None:
    """In every row of it; what its functions gave stays in `components`."""
    unscored = {("p1", 0): "reference: not finite", ("p0", 1): "policy: not finite"}
    samples = join_samples(1, unscored, [rewards(ROWS), table(ROLLOUTS, ROWS)])
    assert samples["status"].to_pylist() == ["ok", *["policy: not finite"] * 2, "reference: not finite", "ok"]
    assert samples["reward"].to_pylist() == [0.0, None, None, None, 3.0]


def test_a_step_without_training_tables_is_written_with_null(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    assert write_trajectories(path, 1, {}, [table(ROLLOUTS, ROWS), rewards(ROWS)]) == 5
    written = pq.read_table(path)
    assert written.schema.names == SAMPLES.names and written["entropy"].null_count == 5
    assert written["trained"].to_pylist() == [False] * 5


def test_the_numbers_of_shared_micro_batches_return_to_their_rows() -> None:
    train = table(TRAIN, ROWS)
    tokens, recorder = TokenTable(train), TokenRecorder()
    plan = RankPlan((), 0, 0, packed=True, shared=True)
    for rows in ([1, 0], [4, 3], []):
        batch = tokens.cut(rows, plan)
        recorder.note(batch, batch.targets.float(), batch.targets.float() / 10)
    recorder.end_update(train)
    batch = tokens.batch([0])
    recorder.note(batch, torch.tensor([5.0, 6.0]), torch.zeros(2))
    recorder.end_update(train)
    samples = join_samples(1, {}, [table(ROLLOUTS, ROWS), rewards(ROWS), train, recorder.take()])
    assert samples["logprobs"].to_pylist() == [[5.0, 6.0], [20.0, 21.0, 22.0], None, [30.0], [40.0, 41.0]]
    assert samples["entropy"].to_pylist()[3] == [3.0]
    assert recorder.take().num_rows == 0
