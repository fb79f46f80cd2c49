"""Tables of groups in a checkpoint: what is read is what was written, within the bound."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest

from troupe.workers.contract.messages import REWARDS, ROLLOUTS, SQUARE_SUMS, TEACHER_TOKENS, KeepRequest, token_scores
from troupe.workers.data.kept_tables import keep_groups, read_group


def rollouts(uid: str, attempt: int = 0, samples: int = 2, tokens: int = 3) -> pa.Table:
    """A group whose samples have two segments each."""
    rows = [
        {
            "prompt_uid": uid,
            "sample_index": index,
            "segment": segment,
            "attempt": attempt,
            "prompt_ids": [1, 2],
            "response_ids": list(range(tokens)),
            "loss_mask": [True] * tokens,
            "rollout_logprobs": [math.nan, *[-0.5] * (tokens - 1)],
            "weight_versions": [{"version": 3, "start": 0, "end": tokens}],
            "turns": [{"name": "assistant", "start": 0, "end": tokens}],
            "finish_reason": "stop",
            "episode_status": "ok",
            "response": "é\n",
            "messages": "[]",
            "conversation": "",
            "turn_rewards": [{"end": 1, "reward": 0.25}],
            "answer": "",
            "metadata": "{}",
            "engine": "rollout-0",
            "generate_s": 0.5,
            "first_token_s": 0.25,
        }
        for index in range(samples)
        for segment in range(2)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def rewards(uid: str, attempt: int = 0) -> pa.Table:
    rows = [
        {
            "prompt_uid": uid,
            "sample_index": index,
            "attempt": attempt,
            "status": "ok" if index else "failed",
            "reward": 0.5 if index else None,
            "components": [{"name": "a", "value": 1.0}],
            "reward_spans": [],
        }
        for index in range(2)
    ]
    return pa.Table.from_pylist(rows, schema=REWARDS)


def wave(*groups: tuple[str, int]) -> pa.Table:
    """Token scores of several groups, as a rank returns them."""
    rows = [
        {"prompt_uid": uid, "sample_index": i, "attempt": attempt, "segment": s, "ref_logprobs": [-1.0, -2.0, -3.0]}
        for i in range(2)
        for uid, attempt in groups
        for s in range(2)
    ]
    return pa.Table.from_pylist(rows, schema=token_scores("ref_logprobs"))


def equal(table: pa.Table, other: pa.Table) -> bool:
    """Also where numbers are NaN."""
    assert table.schema.equals(other.schema, check_metadata=True)
    return repr(table.to_pylist()) == repr(other.to_pylist())


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """The scores of a wave are divided over its groups; those of an abandoned attempt are left out."""
    scored, partial = ("a", 1), ("b", 0)
    tables = [wave(("a", 0), ("c", 0)), rollouts("b"), rewards("a", 1), rollouts("a", 1), wave(scored, ("c", 1))]
    kept = keep_groups(tmp_path / "samples", KeepRequest(7, (scored, partial), 1 << 20), tables)
    assert [sorted(group) for group in kept] == [["ref_logprobs", "rewards", "rollouts"], ["rollouts"]]
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {
        *("ref_logprobs-007.parquet", "rewards-007.parquet", "rollouts-007.parquet")
    }
    for group, kind, table in (
        (0, "rollouts", rollouts("a", 1)),
        (0, "rewards", rewards("a", 1)),
        (0, "ref_logprobs", wave(scored)),
        (1, "rollouts", rollouts("b")),
    ):
        assert equal(read_group(tmp_path / "samples", kept[group][kind]), table)


def test_a_teachers_tokens_are_kept_beside_its_log_probs(tmp_path: Path) -> None:
    rows = wave(("a", 0)).rename_columns([*wave().column_names[:-1], "teacher.math"])
    for field in TEACHER_TOKENS:
        rows = rows.append_column(field, pa.array([[1, 2, 3]] * len(rows), field.type))
    (kept,) = keep_groups(tmp_path, KeepRequest(0, (("a", 0),), 1 << 20), [rows, rollouts("a")])
    assert read_group(tmp_path, kept["teacher.math"]).to_pylist() == rows.to_pylist()
    rows = wave(("a", 0)).rename_columns([*wave().column_names[:-1], "old_logprobs"])
    rows = rows.append_column(SQUARE_SUMS, pa.array([[0.5, 0.25]] * len(rows), SQUARE_SUMS.type))
    (kept,) = keep_groups(tmp_path, KeepRequest(1, (("a", 0),), 1 << 20), [rows, rollouts("a")])
    assert read_group(tmp_path, kept["old_logprobs"]).to_pylist() == rows.to_pylist()


def test_rows_of_two_tables_are_kept_once(tmp_path: Path) -> None:
    """A group that was resumed has a table, and its engine's table has its rows too."""
    tables = [rollouts("a"), pa.concat_tables([rollouts("a"), rollouts("b")])]
    kept = keep_groups(tmp_path / "samples", KeepRequest(0, (("a", 0), ("b", 0)), 1 << 20), tables)
    for group, uid in zip(kept, "ab", strict=True):
        assert equal(read_group(tmp_path / "samples", group["rollouts"]), rollouts(uid))


def test_groups_beyond_the_bound_are_left_out(tmp_path: Path) -> None:
    tables = [rollouts(uid, samples=8, tokens=500) for uid in "abcd"]
    bound = int(2.5 * tables[0].nbytes)
    request = KeepRequest(0, tuple((uid, 0) for uid in "abcd"), bound)
    kept = keep_groups(tmp_path / "samples", request, tables)
    assert len(kept) == 2
    assert sum(path.stat().st_size for path in (tmp_path / "samples").iterdir()) < bound


def test_a_table_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is neither a rollouts"):
        keep_groups(tmp_path / "samples", KeepRequest(0, (("a", 0),), 100), [pa.table({"x": [1]})])
