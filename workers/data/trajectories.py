"""Samples with their rewards, written to Parquet files for inspection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from troupe.workers.contract.atomic_file import replacing
from troupe.workers.contract.messages import (
    IDENTITY_NAMES,
    REWARDS,
    ROLLOUTS,
    SEGMENT,
    TEACHER_TOKENS,
    TEACHER_WEIGHTS,
    TOKEN_RECORDS,
    TRAIN,
    Identity,
    Unscored,
    identities,
)
from troupe.workers.contract.samples import SAMPLES, TRAINED, conform

_RECORDED = TOKEN_RECORDS.names[-2:]
_TEACHERS = frozenset(field.name for field in (*TEACHER_TOKENS, TEACHER_WEIGHTS))
_SCORES = tuple(name for name in REWARDS.names if name not in IDENTITY_NAMES)
READABLE = (
    *("prompt_uid", "sample_index", "messages", "conversation", "response", "answer", "finish_reason"),
    *("status", "reward", "components", "source"),
)
"""Columns of the samples of an evaluation."""


def join_rewards(tables: Sequence[pa.Table]) -> pa.Table:
    """Join ROLLOUTS and REWARDS tables by (prompt_uid, sample_index, attempt): each row of ROLLOUTS, in order, with
    its sample's status, reward, components and reward_spans. Raises ValueError for another table, an identity
    that occurs twice, or a sample without rewards."""
    rollouts: list[pa.Table] = []
    rewards: list[pa.Table] = []
    for table in tables:
        kinds = [(ROLLOUTS, rollouts), (REWARDS, rewards)]
        found = [parts for schema, parts in kinds if set(schema.names) <= set(table.column_names)]
        if len(found) != 1:
            raise ValueError(f"neither a rollouts nor a rewards table: it has the columns {table.column_names}")
        found[0].append(table)
    samples = pa.concat_tables(rollouts) if rollouts else ROLLOUTS.empty_table()
    scored = pa.concat_tables(rewards) if rewards else REWARDS.empty_table()
    rows: dict[Identity, int] = {identity: row for row, identity in enumerate(identities(scored))}
    wanted = identities(samples)
    segments = samples.column(SEGMENT.name).to_pylist()
    if len(rows) != scored.num_rows or len(set(zip(wanted, segments, strict=True))) != len(wanted):
        raise ValueError("a sample occurs twice")
    if missing := [identity for identity in wanted if identity not in rows]:
        raise ValueError(f"{len(missing)} samples have no reward row; the first is {missing[0]}")
    scored = scored.take(pa.array([rows[identity] for identity in wanted], pa.int64()))
    for name in _SCORES:
        samples = samples.append_column(scored.schema.field(name), scored[name])
    return samples


def join_samples(
    step: int, unscored: Unscored, tables: Sequence[pa.Table], *, teacher_tokens: bool = False
) -> pa.Table:
    """The SAMPLES table, a row per row of ROLLOUTS, of it, REWARDS, TRAIN and TOKEN_RECORDS (the last of a row
    counts) tables in any order, with the teachers' tokens or without. Raises as `join_rewards`."""
    kinds = {"train": TRAIN, "records": TOKEN_RECORDS}
    found: dict[str, list[pa.Table]] = {"train": [], "records": [], "rest": []}
    for table in tables:
        names = set(table.column_names)
        found[next((kind for kind, schema in kinds.items() if set(schema.names) <= names), "rest")].append(table)
    samples = join_rewards(found["rest"])
    if unscored:
        samples = _without_rewards(samples, unscored)
    train = pa.concat_tables(found["train"]) if found["train"] else TRAIN.empty_table()
    records = pa.concat_tables(found["records"]) if found["records"] else TOKEN_RECORDS.empty_table()
    keys = _row_keys(samples)
    trained, recorded = _places(keys, train), _places(keys, records)
    columns = {"trained": trained.is_valid()}
    columns |= {name: records[name].take(recorded) for name in _RECORDED}
    others = columns.keys() if teacher_tokens else columns.keys() | _TEACHERS
    columns |= {field.name: train[field.name].take(trained) for field in TRAINED if field.name not in others}
    for name, column in columns.items():
        samples = samples.append_column(name, column)
    return conform(samples, SAMPLES, step=step)


def _without_rewards(samples: pa.Table, unscored: Unscored) -> pa.Table:
    """The samples; a sample of `unscored` has its status there, and no reward."""
    statuses = pa.array([unscored.get((uid, index)) for uid, index, _ in identities(samples)], pa.string())
    scored = pc.call_function("is_null", [statuses])
    for name, other in (("status", statuses), ("reward", pa.scalar(None, pa.float64()))):
        column = samples.schema.get_field_index(name)
        chosen = pc.call_function("if_else", [scored, samples[name], other])
        samples = samples.set_column(column, samples.schema.field(column), chosen)
    return samples


def _row_keys(table: pa.Table) -> list[tuple[Identity, int]]:
    return list(zip(identities(table), table[SEGMENT.name].to_pylist(), strict=True))


def _places(keys: Sequence[tuple[Identity, int]], table: pa.Table) -> pa.Array:
    """For each key the number of the table's last row with it; null if it has none."""
    rows = {key: row for row, key in enumerate(_row_keys(table))}
    return pa.array([rows.get(key) for key in keys], pa.int64())


def write_trajectories(
    path: str | Path, step: int, unscored: Unscored, tables: Sequence[pa.Table], *, teacher_tokens: bool = False
) -> int:
    """Write the samples of a step to one Parquet file, atomically; returns its number of rows. Raises as
    `join_samples`, and OSError if the file cannot be written."""
    return _write(Path(path), join_samples(step, unscored, tables, teacher_tokens=teacher_tokens))


def write_evaluation(path: str | Path, step: int, tables: Sequence[pa.Table]) -> int:
    """Write the samples of an evaluation for reading: the step and the columns `READABLE`, with the names they have in
    trajectories, without those with an entry for each token. Raises as `join_rewards`, and OSError if the file cannot
    be written."""
    table = join_rewards(tables).select(READABLE)
    return _write(Path(path), table.add_column(0, "step", pa.repeat(pa.scalar(step, pa.int64()), table.num_rows)))


def _write(path: Path, table: pa.Table) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")
    return table.num_rows
