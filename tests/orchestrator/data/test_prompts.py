"""The prompt pool (rows that are read and refused) and the order in which prompts are drawn."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import (
    PromptSource,
    evaluation_picks,
    load_pool,
    load_pools,
    permutation,
)
from troupe.orchestrator.data.readers import json_safe, shares, task_seed
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.sections import DataConfig
from troupe.orchestrator.spec.sources import DataSource
from troupe.workers.contract.messages import PROMPTS

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def source(**fields: Any) -> DataSource:
    return TypeAdapter(DataSource).validate_python(fields)


def jsonl(folder: Path, *rows: Any, **fields: Any) -> DataSource:
    """A JSONL source of rows; bytes are written unchanged."""
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return source(kind="jsonl", path=str(path), **fields)


def gym(**fields: Any) -> DataSource:
    given = {"recipes": [{"name": "chain_sum", "args": SUMS}], "size": 12, "seed": 1}
    return source(kind="reasoning_gym", **(given | fields))


def texts(pool: Pool, column: str) -> list[str]:
    return [str(text) for text in pool.table.column(column).to_pylist()]


def said(pool: Pool) -> list[list[dict[str, str]]]:
    return [json.loads(text) for text in texts(pool, "messages")]


def pool_of(rows: int) -> Pool:
    text = pa.array([str(row) for row in range(rows)], pa.string())
    nulls = [pa.nulls(rows, PROMPTS.field(name).type) for name in ("candidates", "source")]
    columns = [pa.array(range(rows), pa.int64()), *[text] * 4, *nulls]
    return Pool(pa.table(columns, schema=PROMPTS), digest=f"digest-{rows}")


# What is read


def test_jsonl_rows_become_prompts(tmp_path: Path) -> None:
    rows = (
        {"prompt": "one {x}", "answer": "1", "level": 3, "tags": ["a", None]},
        b"",
        {"prompt": "two\u2028\u0000", "answer": 2.5, "level": None, "tags": {}},
    )
    pool = load_pool(jsonl(tmp_path, *rows, metadata=["level", "tags"], template="Q: {prompt} {y}", system="Be brief."))
    assert pool.table.schema.equals(PROMPTS, check_metadata=True)
    assert said(pool)[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: one {x} {y}"}]
    assert said(pool)[1][1]["content"] == "Q: two\u2028\u0000 {y}"
    assert pool.table.column("row").to_pylist() == [0, 1]
    assert texts(pool, "answer") == ["1", "2.5"]
    assert [json.loads(text) for text in texts(pool, "metadata")] == [
        {"level": 3, "tags": ["a", None]},
        {"level": None, "tags": {}},
    ]
    assert texts(pool, "origin") == ["rows.jsonl:1", "rows.jsonl:3"]
    assert (pool.bad_rows, pool.problems, pool.left_out) == (0, (), 0)


def test_messages_pass_through_and_the_template_applies_to_the_last(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c", "name": None},
    ]
    pool = load_pool(jsonl(tmp_path, {"prompt": talk}, answer=None, system="Other.", template="<{prompt}>"))
    assert [m["content"] for m in said(pool)[0]] == ["Own.", "a", "b", "<c>"]
    assert texts(pool, "answer") == [""]


def test_prompts_may_be_sharegpt_conversations_and_must_be_text_without_a_chat_template(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    rows = jsonl(tmp_path, {"prompt": talk}, {"prompt": "text"}, answer=None)
    assert [[m["role"] for m in messages] for messages in said(load_pool(rows))] == [
        ["user", "assistant", "user"],
        ["user"],
    ]
    plain = load_pool(rows, plain=True)
    assert [m["content"] for m in said(plain)[0]] == ["text"]
    assert plain.problems == (
        "rows.jsonl:1: a list of messages needs a chat template, and model.chat_template is none",
    )


def test_columns_and_limit(tmp_path: Path) -> None:
    rows = [{"q": str(i), "a": None} for i in range(5)]
    pool = load_pool(jsonl(tmp_path, *rows, prompt="q", answer="a", limit=3))
    assert pool.rows == 3
    assert texts(pool, "answer") == [""] * 3


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    talk = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": ""}]]
    pq.write_table(pa.table({"prompt": talk, "answer": [7, 8], "other": [1, 2]}), path)
    pool = load_pool(source(kind="parquet", path=str(path)))
    assert said(pool) == [[{"role": "user", "content": "hi"}]]
    assert texts(pool, "answer") == ["7"]
    assert pool.problems == ("rows.parquet:2: the prompt is empty",)
    assert load_pool(source(kind="parquet", path=str(path), limit=1)).bad_rows == 0


def test_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(str(tmp_path / "two"))
    pool = load_pool(source(kind="datasets", path=str(tmp_path / "one")))
    assert texts(pool, "origin") == ["one:1", "one:2"]
    assert load_pool(source(kind="datasets", path=str(tmp_path / "two"), split="test")).rows == 1
    for fields, message in (
        ({"path": str(tmp_path / "two")}, r"two: set data\.train\.split to one of its splits: train, test$"),
        ({"path": str(tmp_path / "one"), "split": "x"}, r"one: has no splits; remove data\.train\.split$"),
        (
            {"path": str(tmp_path / "one"), "prompt": "promt"},
            r"no column 'promt' \(data\.train\.prompt\); .*'prompt'\?",
        ),
        ({"path": str(tmp_path)}, r"cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            load_pool(source(kind="datasets", **fields))


def test_candidates_are_read_and_are_part_of_the_digest(tmp_path: Path) -> None:
    rows = ({"prompt": "a", "answer": "", "given": ["x", "y"]}, {"prompt": "b", "answer": "", "given": None})
    pool = load_pool(jsonl(tmp_path, *rows, candidates="given"))
    assert pool.table.column("candidates").to_pylist() == [["x", "y"], None]
    without = load_pool(jsonl(tmp_path, *rows))
    assert without.table.column("candidates").to_pylist() == [None, None]
    other = load_pool(jsonl(tmp_path, rows[0] | {"given": ["x", "z"]}, rows[1], candidates="given"))
    empty = load_pool(jsonl(tmp_path, rows[0] | {"given": []}, rows[1], candidates="given"))
    assert len({pool.digest, without.digest, other.digest}) == 3
    assert empty.digest == without.digest


def test_the_digest_of_a_pool_is_pinned(tmp_path: Path) -> None:
    """A checkpoint of an older version must find its data."""
    assert load_pool(jsonl(tmp_path, {"prompt": "a", "answer": "b"})).digest == "029f930ae8871a70cd91e3162601a68a"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("x", "the candidates are not a list of texts"),
        ([1], "the candidates are not a list of texts"),
        (["x", " "], "the candidates are not a list of texts"),
        (["x", "y" * 101], "candidate 1 has 101 characters, more than max_chars 100"),
        (["\ud800"], "candidate 0 has half a surrogate pair, which no tokenizer takes"),
    ],
)
def test_bad_candidates_make_a_bad_row(tmp_path: Path, given: Any, reason: str) -> None:
    good = {"prompt": "fine", "answer": "", "given": ["yes"]}
    pool = load_pool(jsonl(tmp_path, good, good | {"given": given}, candidates="given", max_chars=100))
    assert pool.rows == 1
    assert pool.problems == (f"rows.jsonl:2: {reason}",)


# What is refused


BAD_ROWS = [
    ({"prompt": "", "answer": ""}, "the prompt is empty"),
    ({"prompt": " \n\t", "answer": ""}, "the prompt is empty"),
    ({"prompt": None, "answer": ""}, "the prompt is empty"),
    ({"prompt": [], "answer": ""}, "the prompt is empty"),
    ({"prompt": 5, "answer": ""}, "the prompt is neither text nor messages"),
    ({"prompt": {"role": "user"}, "answer": ""}, "the prompt is neither text nor messages"),
    ({"prompt": ["hi"], "answer": ""}, "message 0 is not an object with role and content"),
    ({"prompt": [{"role": "user"}], "answer": ""}, "message 0 must have role and content, both text"),
    (
        {"prompt": [{"role": "user", "content": "a", "tool": "x"}], "answer": ""},
        "message 0 has tool, which is not read: it must have role and content",
    ),
    (
        {"prompt": [{"role": "robot", "content": "a"}], "answer": ""},
        "message 0 has role 'robot'; known: system, user, assistant, tool",
    ),
    (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": ""},
        "the last message is the assistant's, so there is nothing to respond to",
    ),
    ({"prompt": "x" * 101, "answer": ""}, "the prompt has 101 characters, more than max_chars 100"),
    ({"prompt": "x", "answer": "y" * 101}, "the answer has 101 characters, more than max_chars 100"),
    ({"prompt": "x", "answer": {"y": 1}}, "the answer is not text, a number or a list of these"),
    ({"prompt": "x", "answer": ["y", ["z"]]}, "the answer is not text, a number or a list of these"),
    ({"prompt": "x", "answer": []}, "the list of answers is empty"),
    ({"prompt": "x", "answer": ["y", None]}, "the list of answers has a null"),
    ({"prompt": "x", "answer": float("nan")}, "the answer is not a number (NaN)"),
    ({"prompt": "x", "answer": float("-inf")}, "the answer is infinite"),
    ({"prompt": "x", "answer": [1.5, float("nan")]}, "the answer is not a number (NaN)"),
    ({"prompt": "x"}, "no column 'answer'"),
    ({"prompt": "a\ud800b", "answer": ""}, "the prompt has half a surrogate pair, which no tokenizer takes"),
    ({"prompt": "x", "answer": "\udc00"}, "the answer has half a surrogate pair, which no tokenizer takes"),
    (
        {"prompt": "x", "answer": "", "extra": "\udc00"},
        "the metadata has half a surrogate pair, which no tokenizer takes",
    ),
    (b'{"prompt": "x", "answer": "", "extra": NaN}', "the metadata cannot be held as JSON"),
    (["x"], "not a JSON object"),
    (b"null", "not a JSON object"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not UTF-8 text"),
    (b"[" * 200_000, "not JSON"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_reported_and_the_others_stay(tmp_path: Path, row: Any, reason: str) -> None:
    good = {"prompt": "fine", "answer": "yes", "extra": None}
    if isinstance(row, dict):
        row = {"extra": None} | row
    rows = jsonl(tmp_path, good, row, good, max_chars=100, metadata=["extra"])
    pool = load_pool(rows)
    assert texts(pool, "origin") == ["rows.jsonl:1", "rows.jsonl:3"]
    assert pool.bad_rows == len(pool.problems) == 1
    assert pool.problems[0].startswith(f"rows.jsonl:2: {reason}")
    assert "\n" not in pool.problems[0]
    with pytest.raises(DataError) as caught:
        load_pool(rows, "stop")
    assert str(caught.value) == pool.problems[0]


def test_a_line_too_long_to_hold_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.orchestrator.data.readers.MAX_LINE_BYTES", 64)
    good = {"prompt": "fine", "answer": ""}
    pool = load_pool(jsonl(tmp_path, good, {"prompt": "x" * 1000, "answer": ""}, good))
    assert texts(pool, "origin") == ["rows.jsonl:1", "rows.jsonl:3"]
    assert pool.problems[0].startswith("rows.jsonl:2: the line is longer than")


def test_many_bad_rows_are_counted_and_the_first_are_reported(tmp_path: Path) -> None:
    pool = load_pool(jsonl(tmp_path, {"prompt": "a", "answer": ""}, *[{"prompt": "", "answer": ""}] * 50))
    assert (pool.rows, pool.bad_rows, len(pool.problems)) == (1, 50, 20)


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([], {}, "data.train: there are no rows"),
        (
            [{"prompt": "", "answer": ""}],
            {},
            "data.train: no row can be used (1 bad; the first: rows.jsonl:1: the prompt is empty)",
        ),
        (
            [{"question": "q", "answer": ""}],
            {},
            "rows.jsonl:1: no column 'prompt' (data.train.prompt); columns there: question, answer",
        ),
        (
            [{"prompt": "q", "answers": ""}],
            {},
            "rows.jsonl:1: no column 'answer' (data.train.answer); columns there: prompt, answers "
            "(did you mean 'answers'?)",
        ),
        (
            [{"prompt": "q", "answer": ""}],
            {"metadata": ["level"]},
            "rows.jsonl:1: no column 'level' (data.train.metadata.0); columns there: prompt, answer",
        ),
    ],
)
def test_an_unusable_source_is_refused_in_one_line(
    tmp_path: Path, rows: list[Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_pool(jsonl(tmp_path, *rows, **fields))
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"none: cannot be read \(.*\); see data\.train\.path$"):
        load_pool(source(kind=kind, path=str(tmp_path / "none")))
    if kind == "parquet":
        (tmp_path / "broken").write_bytes(b"PAR1 nothing PAR1")
        with pytest.raises(DataError, match=r"broken: cannot be read"):
            load_pool(source(kind=kind, path=str(tmp_path / "broken")))


# reasoning-gym


def test_gym_rows_carry_what_the_family_s_own_scorer_needs() -> None:
    recipes = [{"name": "chain_sum", "args": SUMS}, {"name": "countdown"}, {"name": "spell_backward"}]
    pool = load_pool(gym(recipes=recipes, size=12, template="{prompt} Go."))
    for answer, text in zip(texts(pool, "answer"), texts(pool, "metadata"), strict=True):
        metadata = json.loads(text)
        score: Any = reasoning_gym.get_score_answer_fn(metadata["recipe"])
        assert metadata["entry"]["answer"] == answer
        assert score(answer, metadata["entry"]) == 1.0
        assert score("wrong", metadata["entry"]) < 1.0
    assert said(pool)[0][0]["content"].endswith(" Go.")


def test_gym_tasks_follow_from_the_seed_and_share_nothing_with_the_next() -> None:
    """reasoning-gym generates task i from seed + i: unless seeds are spread, seed 2 is seed 1 shifted by one."""
    wide = [{"name": "chain_sum", "args": {"min_digits": 5, "max_digits": 8}}]
    first = load_pool(gym(recipes=wide, size=50, seed=1))
    assert load_pool(gym(recipes=wide, size=50, seed=1)).digest == first.digest
    second = load_pool(gym(recipes=wide, size=50, seed=2))
    assert not set(texts(first, "messages")) & set(texts(second, "messages"))


@given(st.integers(0, 2**31 - 1), st.integers(0, 5))
def test_task_seeds_leave_room_for_every_task(seed: int, index: int) -> None:
    assert 0 <= task_seed(seed, index, "chain_sum") < 2**31 - 10_000_000
    assert task_seed(seed, index, "chain_sum") != task_seed(seed, index + 1, "chain_sum")


def test_gym_recipes_share_by_weight_and_alternate() -> None:
    recipes = [{"name": "chain_sum", "weight": 3}, {"name": "gcd", "weight": 1}]
    pool = load_pool(gym(recipes=recipes, size=40))
    names = [origin.partition(":")[0] for origin in texts(pool, "origin")]
    assert names.count("reasoning_gym/gcd") == 10
    assert all("reasoning_gym/gcd" in names[at : at + 5] for at in range(0, 40, 5))


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), st.integers(0, 200))
def test_shares_add_up_and_are_at_least_one(weights: list[float], more: int) -> None:
    counts = shares(len(weights) + more, weights)
    assert sum(counts) == len(weights) + more
    assert min(counts) >= 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - 1 - more * weight / sum(weights)) < 1


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"name": "chain_sums"}, "data.train.recipes.0.name: reasoning-gym has no task 'chain_sums' "),
        ({"name": "zzzz"}, "data.train.recipes.0.name: reasoning-gym has no task 'zzzz'"),
        (
            {"name": "chain_sum", "args": {"min_term": 2}},
            "data.train.recipes.0.args.min_term: chain_sum has no such setting (did you mean 'min_terms'?)",
        ),
        (
            {"name": "chain_sum", "args": {"zzz": 2}},
            "data.train.recipes.0.args.zzz: chain_sum has no such setting (it has: min_terms, max_terms, ",
        ),
        (
            {"name": "chain_sum", "args": {"min_terms": 5, "max_terms": 2}},
            "data.train.recipes.0.args: chain_sum rejects its settings: max_terms must be >= min_terms",
        ),
        (
            {"name": "chain_sum", "args": {"min_terms": "many"}},
            "data.train.recipes.0.args: chain_sum rejects its settings: '>' not supported",
        ),
    ],
)
def test_gym_errors_name_the_field(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_pool(gym(recipes=[recipe]))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_json_safe_keeps_json_and_makes_the_rest_json() -> None:
    value = {1: (1, 2.5), "s": {"b", "a"}, (1, 2): None, "p": Path("x"), "n": {"t": (True,)}}
    assert json_safe(value) == {"1": [1, 2.5], "s": ["a", "b"], "(1, 2)": None, "p": "x", "n": {"t": [True]}}


# Held-out prompts


def test_evaluation_prompts_that_are_trained_on_are_left_out(tmp_path: Path) -> None:
    data = {"train": gym(size=40), "eval": gym(size=200, seed=2)}
    train, pools = load_pools(DataConfig.model_validate(data))
    held = pools["eval"]
    assert held.left_out > 0
    assert held.rows + held.left_out == 200
    assert not set(texts(train, "messages")) & set(texts(held, "messages"))
    assert held.table["row"].to_pylist() == list(range(held.rows))
    _, whole = load_pools(DataConfig.model_validate(data | {"held_out": False}))
    assert whole["eval"].rows == 200
    with pytest.raises(DataError, match=r"data\.eval: every prompt is also in the training data"):
        load_pools(DataConfig.model_validate({"train": gym(), "eval": gym()}))
    assert load_pools(DataConfig.model_validate({"train": gym()}))[1] == {}


def test_named_evaluation_sets_have_a_pool_each() -> None:
    """The prompts of training are left out of every one of them, and their uids say which set they belong to."""
    sets = {"easy": gym(size=30, seed=2).model_dump(), "hard": gym(size=20, seed=3).model_dump()}
    train, pools = load_pools(DataConfig.model_validate({"train": gym(size=40), "eval": sets}))
    assert list(pools) == ["eval.easy", "eval.hard"]
    assert [pool.rows + pool.left_out for pool in pools.values()] == [30, 20]
    for pool in pools.values():
        assert not set(texts(train, "messages")) & set(texts(pool, "messages"))
    uids = [pick.prompt_uid for pick in evaluation_picks(pools["eval.hard"], 7, 3, "hard")]
    rows = [pick.row for pick in evaluation_picks(pools["eval.hard"], 7, 3)]
    assert uids == [f"eval-hard-r{row}" for row in rows]


def test_evaluation_picks_are_the_same_every_time_and_distinct() -> None:
    pool = pool_of(50)
    picks = evaluation_picks(pool, 3, 20)
    assert picks == evaluation_picks(pool, 3, 20) != evaluation_picks(pool, 4, 20)
    assert len({pick.row for pick in picks}) == len({pick.prompt_uid for pick in picks}) == 20
    assert len(evaluation_picks(pool, 3)) == len(evaluation_picks(pool, 3, 1000)) == 50


# Order


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(0, 2**31 - 1), st.integers(0, 150), st.integers(0, 100))
def test_a_restored_source_resumes_at_the_same_position(rows: int, seed: int, before: int, after: int) -> None:
    whole = PromptSource(pool_of(rows), seed)
    expected = [whole.next() for _ in range(before + after)]
    source = PromptSource(pool_of(rows), seed)
    drawn = [source.next() for _ in range(before)]
    state = json.loads(json.dumps(source.state()))
    resumed = PromptSource(pool_of(rows), seed)
    resumed.restore(state)
    assert resumed.state() == source.state()
    assert drawn + [resumed.next() for _ in range(after)] == expected


@given(st.integers(1, 40), st.integers(0, 2**31 - 1), st.integers(1, 4))
def test_every_epoch_has_every_row_once_with_a_unique_id(rows: int, seed: int, epochs: int) -> None:
    source = PromptSource(pool_of(rows), seed)
    picks = [source.next() for _ in range(rows * epochs)]
    assert len({pick.prompt_uid for pick in picks}) == len(picks)
    for epoch in range(epochs):
        part = picks[epoch * rows : (epoch + 1) * rows]
        assert sorted(pick.row for pick in part) == list(range(rows))
        assert all(pick.prompt_uid == f"e{epoch}-r{pick.row}" for pick in part)
    assert [pick.draw for pick in picks] == list(range(1, len(picks) + 1))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(100, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_pinned() -> None:
    """A checkpoint of an older version must resume in the same order."""
    assert permutation(8, 17, 0).tolist() == [6, 0, 4, 5, 3, 2, 7, 1]
    assert permutation(8, 17, 1).tolist() == [4, 0, 6, 2, 7, 5, 3, 1]


def test_the_order_is_uniform() -> None:
    """Each row comes first equally often: chi-square over 4000 epochs, 9 degrees of freedom, p about 1e-6."""
    first = np.bincount([permutation(10, 5, epoch)[0] for epoch in range(4000)], minlength=10)
    assert ((first - 400.0) ** 2 / 400.0).sum() < 45.0


def test_the_state_is_small_whatever_the_pool() -> None:
    source = PromptSource(pool_of(5000), 1)
    assert len(json.dumps(source.state())) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "other"}, "the training data are not the checkpoint's"),
        ({"rows": 9}, "the training data are not the checkpoint's"),
        ({"seed": 2}, "the seed is not the checkpoint's"),
        ({"epoch": -1}, r"the order's state is damaged \(epoch -1\)"),
        ({"position": True}, r"the order's state is damaged \(position True\)"),
        ({"position": "3"}, r"the order's state is damaged \(position '3'\)"),
        ({"position": 11}, "position 11 is past the pool's 10 rows"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    source = PromptSource(pool_of(10), 1)
    source.next()
    before = source.state()
    with pytest.raises(DataError, match=f"cannot resume: {message}"):
        source.restore(before | change)
    assert source.state() == before


def test_pools_with_different_content_have_different_digests(tmp_path: Path) -> None:
    digests = {
        load_pool(jsonl(tmp_path, *rows)).digest
        for rows in (
            [{"prompt": "a", "answer": "b"}],
            [{"prompt": "a", "answer": "c"}],
            [{"prompt": "ab", "answer": ""}],
            [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b"}],
        )
    }
    assert len(digests) == 4


LETTER = "How  much is 2 + caf\u00e9?\nSay it."
ALIKE = [
    LETTER.replace("  ", " "),
    LETTER + " ",
    " " + LETTER,
    LETTER.replace("\n", "\r\n"),
    LETTER.replace("is 2", "is\u00a02"),
    LETTER.replace("\n", " \n\n"),
    LETTER.upper(),
    unicodedata.normalize("NFD", LETTER),
]
OTHERS = ["How much is 3 + caf\u00e9? Say it.", r"What is \nabla f?", r"What is \tabla f?", "What is f?"]


def test_prompts_are_the_same_whatever_their_spaces_case_and_composition(tmp_path: Path) -> None:
    path, other = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    for file, prompts in ((path, [LETTER]), (other, [*ALIKE, *OTHERS])):
        file.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in prompts))
    train = load_pool(source(kind="jsonl", path=str(path)))
    left = load_pool(source(kind="jsonl", path=str(other)), without=train)
    assert (left.left_out, left.rows) == (len(ALIKE), len(OTHERS))
    once = load_pool(source(kind="jsonl", path=str(other), dedupe=True))
    assert (once.deduped, once.rows) == (len(ALIKE) - 1, len(OTHERS) + 1)
    counted = load_pool(source(kind="jsonl", path=str(other)))
    assert counted.repeated == len(ALIKE) - 1


def test_prompts_in_another_case_are_the_same_only_if_their_answers_are(tmp_path: Path) -> None:
    """How many a are in Anna? is another question than the one about ANNA."""
    rows = [("How many a are in Anna?", "1"), ("How many a are in anna?", "2"), ("how many A are in anna?", "2")]
    given = [{"prompt": prompt, "answer": answer} for prompt, answer in rows]
    once = load_pool(jsonl(tmp_path, *given, dedupe=True))
    assert (texts(once, "answer"), once.deduped, once.contradicted) == (["1", "2"], 1, 0)
    (tmp_path / "eval").mkdir()
    train, held_out = load_pool(jsonl(tmp_path, given[0])), jsonl(tmp_path / "eval", *given, given[0] | {"answer": "7"})
    left = load_pool(held_out, without=train)
    assert (texts(left, "answer"), left.left_out) == (["2", "2"], 2)


OPTIONS = ["9", "red", "7", "B"]


@pytest.mark.parametrize(
    ("answer", "options", "letter"),
    [
        *((given, OPTIONS, "B") for given in ("red", 1, "1", " red ")),
        (3, OPTIONS, "D"),
        ("A", OPTIONS, "A"),
        ("20", ["10", "20"], "B"),
        (6, [1, 6], "B"),
        (2.5, [1.5, 2.5], "B"),
    ],
)
def test_an_answer_among_options_is_a_letter(answer: Any, options: list[Any], letter: str, tmp_path: Path) -> None:
    row = {"prompt": "Which?", "answer": answer, "all": options}
    pool = load_pool(jsonl(tmp_path, row, options="all", template="{prompt} Now."))
    listed = "\n".join(f"{name}. {text}" for name, text in zip("ABCD", options, strict=False))
    assert said(pool)[0][-1]["content"] == f"Which?\n\n{listed} Now."
    assert texts(pool, "answer") == [letter]


@pytest.mark.parametrize(
    ("answer", "options", "why"),
    [
        ("B", OPTIONS, "the answer, 'B', names several of the options"),  # the second option, or the fourth
        ("1", ["1", "2"], "the answer, '1', names several"),
        ("blue", OPTIONS, "the answer, 'blue', is none of the options"),
        (None, OPTIONS, "the answer, None, is none"),
        (True, OPTIONS, "the answer, True, is none"),
        ("a", ["a", "a"], "the options are not 2 to 26 different texts"),
        ("a", ["a", None], "the options are not"),
        ("a", "ab", "the options are not"),
    ],
)
def test_a_question_whose_right_option_is_not_known_is_a_bad_row(
    answer: Any, options: Any, why: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "Which?", "answer": one, "all": all_} for one, all_ in (("x", ["x", "y"]), (answer, options))]
    pool = load_pool(jsonl(tmp_path, *rows, options="all"))
    assert (pool.rows, pool.bad_rows) == (1, 1) and why in pool.problems[0]


def test_options_that_are_counted_from_1_refuse_the_file(tmp_path: Path) -> None:
    """Read as counted from 0, every answer would be the wrong one."""
    rows = [{"prompt": f"{n}?", "answer": str(n), "all": ["a", "b"]} for n in (1, 2)]
    with pytest.raises(
        DataError, match=r"data\.train\.answer: does not fit 1 rows; .*option 2 of 2, which are counted"
    ):
        load_pool(jsonl(tmp_path, *rows, options="all"))


def test_the_right_option_of_several_columns_is_not_always_the_first(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}?", "answer": f"good {n}", **{f"bad {k}": f"bad {k} {n}" for k in range(3)}} for n in range(80)
    ]
    columns = ["answer", "bad 0", "bad 1", "bad 2"]
    pool = load_pool(jsonl(tmp_path, *rows, options=columns))
    found = texts(pool, "answer")
    assert all(9 < found.count(letter) < 31 for letter in "ABCD")
    for number, (messages, letter) in enumerate(zip(said(pool), found, strict=True)):
        assert f"\n{letter}. good {number}" in messages[-1]["content"]
    assert texts(load_pool(jsonl(tmp_path, *rows[40:], options=columns)), "answer") == found[40:]
