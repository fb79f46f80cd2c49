"""Several sources in one order: proportions, passes, resumption, and what each row belongs to."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.data.test_prompts import gym, jsonl, pool_of, said, texts
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.mixture import PromptMixture, drawn_rows, prompt_order, source_seed
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptOrder, PromptSource, load_pool, load_pools, load_train_pool
from troupe.orchestrator.data.summary import RunData, data_metrics, describe
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.errors import Source
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.sections import CurriculumConfig, DataConfig
from troupe.orchestrator.spec.sources import SourceShare
from troupe.orchestrator.spec.yaml_reader import Document
from troupe.workers.contract.messages import PROMPTS, RewardSummary

SIZES = (5, 7, 3)
REWARD = {"functions": [{"name": "exact_match"}]}
NAMES = ("a", "b", "c")


def shares(*weights: float, **fields: Any) -> list[SourceShare]:
    return [SourceShare(name=name, weight=weight, **fields) for name, weight in zip(NAMES, weights, strict=False)]


def mixture(own: list[SourceShare], seed: int = 3, curriculum: Curriculum | None = None) -> PromptMixture:
    return PromptMixture([pool_of(size) for size in SIZES[: len(own)]], own, seed, curriculum)


def drawn(order: PromptMixture, count: int) -> list[str]:
    """The sources of the next draws."""
    return [order.next().prompt_uid.partition("-")[0] for _ in range(count)]


def data_of(*sources: dict[str, Any], **others: Any) -> DataConfig:
    return DataConfig.model_validate({"train": list(sources), **others})


def test_sources_alternate_smoothly_by_their_weights() -> None:
    # Draws of a are due at 1/4, 3/4, 5/4, ..., those of b at 1/2, 3/2, ...
    assert drawn(mixture(shares(2, 1)), 9) == list("abaabaaba")
    assert drawn(mixture(shares(1, 1, 1)), 6) == list("abcabc")


@given(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=3), st.integers(0, 200), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_stretch_of_the_order_has_the_proportions_of_the_weights(
    weights: list[float], before: int, count: int
) -> None:
    order = mixture(shares(*weights))
    drawn(order, before)
    counts = Counter(drawn(order, count))
    for name, weight in zip(NAMES, weights, strict=False):
        assert abs(counts[name] - count * weight / sum(weights)) < len(weights) + 1


def test_each_source_has_passes_of_its_own_that_do_not_depend_on_the_others() -> None:
    order = mixture(shares(2, 1))
    picks = [order.next() for _ in range(30)]
    for name, start, size in (("a", 0, 5), ("b", 5, 7)):
        alone = PromptSource(pool_of(size), source_seed(3, name))
        expected = [alone.next() for _ in range(30)]
        own = [pick for pick in picks if pick.prompt_uid.startswith(name)]
        assert [pick.row - start for pick in own] == [pick.row for pick in expected[: len(own)]]
        assert [pick.prompt_uid for pick in own] == [f"{name}-{pick.prompt_uid}" for pick in expected[: len(own)]]
    assert len({pick.prompt_uid for pick in picks}) == 30


def test_sources_of_equal_size_are_not_permuted_alike() -> None:
    pools, own = [pool_of(40), pool_of(40)], shares(1, 1)
    order = PromptMixture(pools, own, 3)
    picks = [order.next().row for _ in range(80)]
    assert [row for row in picks if row < 40] != [row - 40 for row in picks if row >= 40]


@given(st.integers(0, 60), st.sampled_from([0, 2]))
@settings(max_examples=30, deadline=None)
def test_a_resumed_mixture_draws_what_the_uninterrupted_one_draws(before: int, repeats: int) -> None:
    own = [*shares(2, 1, 0.7)[:2], SourceShare(name="c", weight=0.7, repeats=repeats)]
    whole, first, second = mixture(own), mixture(own), mixture(own)
    for _ in range(before):
        assert first.next() == whole.next()
    second.restore(json.loads(json.dumps(first.state())))
    picks = [second.next() for _ in range(40)]
    assert picks == [whole.next() for _ in range(40)]
    assert [pick.draw for pick in picks] == list(range(before + 1, before + 41))


ROUND = {"name": "one", "model": {"path": "m"}, "schedule": {"steps": 1, "prompts_per_step": 4}}
"""A run on prompts, or with other sections on examples."""


@pytest.mark.parametrize("names", [("train",), NAMES])
@pytest.mark.parametrize("kind", ["prompts", "examples"])
def test_a_run_that_skips_draws_what_another_draws_after_so_many(kind: str, names: tuple[str, ...]) -> None:
    """Also resumed: the position in a checkpoint counts from the start of the order."""
    files = [{"kind": "jsonl", "path": "x"} | ({"name": name} if len(names) > 1 else {}) for name in names]
    own: dict[str, Any] = {
        "prompts": {"algorithm": {"name": "grpo"}, "roles": {"rollout": {}, "policy": {}, "reward": REWARD}},
        "examples": {
            "algorithm": {"name": "sft"},
            "roles": {"policy": {}},
            "schedule": {"steps": 1, "examples_per_step": 4},
        },
    }[kind]

    def order(skip: int) -> PromptOrder:
        data = {"train": files if len(names) > 1 else files[0], "skip": skip}
        spec: Any = parse_spec(Document(ROUND | own | {"data": data}, Source("spec.yaml", {})))
        parts = {name: pool_of(size) for name, size in zip(NAMES, SIZES, strict=True)}
        return prompt_order(spec, replace(pool_of(sum(SIZES)), parts=parts))

    whole, later, resumed = order(0), order(17), order(17)
    before = [whole.next() for _ in range(17)]
    assert [later.next() for _ in range(20)] == [whole.next() for _ in range(20)] and len(set(before)) == 17
    resumed.restore(json.loads(json.dumps(later.state())))
    assert [resumed.next() for _ in range(5)] == [whole.next() for _ in range(5)]


def test_a_source_that_has_had_its_passes_is_not_drawn_again_and_the_others_keep_their_proportions() -> None:
    own = [SourceShare(name="a", weight=5.0, repeats=2), *shares(1, 2, 1)[1:]]
    found = drawn(mixture(own), 100)
    assert found.count("a") == 2 * SIZES[0]
    last = max(n for n, name in enumerate(found) if name == "a")
    assert last < 20
    rest = Counter(found[last + 1 :])
    assert abs(rest["b"] - 2 * rest["c"]) <= 2


def resumed(before: PromptMixture, own: list[SourceShare]) -> PromptMixture:
    """A mixture with other shares, which continues from the state of one."""
    order = mixture(own)
    order.restore(json.loads(json.dumps(before.state())))
    return order


def test_a_source_that_gets_further_passes_in_a_resumption_makes_up_for_nothing() -> None:
    first = mixture([SourceShare(name="a", repeats=1), SourceShare(name="b")])
    assert drawn(first, 60)[-10:] == ["b"] * 10
    assert Counter(drawn(resumed(first, shares(1, 1)), 20)) == {"a": 10, "b": 10}


def test_another_weight_counts_from_the_next_draw_of_a_resumption_on() -> None:
    first = mixture(shares(0.01, 1))  # the first draw of a would be the 51st
    assert drawn(first, 20) == ["b"] * 20
    assert Counter(drawn(resumed(first, shares(1, 1)), 20)) == {"a": 10, "b": 10}
    assert Counter(drawn(resumed(mixture(shares(0.01, 1)), shares(1, 1)), 20)) == {"a": 10, "b": 10}


def test_the_order_of_a_checkpoint_without_weights_and_time_resumes() -> None:
    first = mixture(shares(2, 1))
    drawn(first, 7)
    state = first.state()
    sources = {name: {k: v for k, v in own.items() if k != "weight"} for name, own in state["sources"].items()}
    order = mixture(shares(2, 1))
    order.restore({"sources": sources})
    assert drawn(order, 20) == drawn(first, 20)


def test_without_any_pass_left_the_order_ends_with_an_error() -> None:
    order = mixture(shares(1, 1, repeats=1))
    assert len(drawn(order, 12)) == 12
    with pytest.raises(DataError, match="has had its passes"):
        order.next()


def test_an_order_of_other_sources_or_rows_is_not_resumed() -> None:
    state = mixture(shares(1, 1)).state()
    with pytest.raises(DataError, match=r"the sources of data\.train are not the checkpoint's \(a, b\)"):
        mixture(shares(1, 1, 1)).restore(state)
    other = PromptMixture([pool_of(5), pool_of(8)], shares(1, 1), 3)
    with pytest.raises(DataError, match="the training data are not the checkpoint's"):
        other.restore(state)
    with pytest.raises(DataError, match="one without a name"):
        mixture(shares(1, 1)).restore(PromptSource(pool_of(5), 3).state())
    for due in (None, "1", -1.0, float("nan")):
        damaged = {**state, "sources": {**state["sources"], "b": state["sources"]["b"] | {"due": due}}}
        with pytest.raises(DataError, match="damaged"):
            mixture(shares(1, 1)).restore(damaged)
        with pytest.raises(DataError, match="damaged"):
            mixture(shares(1, 1)).restore({**state, "time": due})


def test_a_row_belongs_to_the_source_that_has_it() -> None:
    table = RowTable.of(SIZES, NAMES)
    assert "".join(table[row] for row in range(15)) == "aaaaabbbbbbbccc"


# Curriculum


def rewards(*values: float) -> RewardSummary:
    return RewardSummary("p", 0, ("ok",) * len(values), values, {})


def test_each_source_says_itself_when_a_sample_is_solved() -> None:
    learned = Curriculum(CurriculumConfig(decay=1.0), 3, RowTable.of(SIZES[:2], (1.0, 0.5)))
    learned.observe(0, rewards(0.5, 0.5))  # of a, where 1 is solved
    learned.observe(5, rewards(0.5, 0.5))  # of b
    learned.mark_trained()
    assert learned.state()["results"] == [[0, 0.0, 2.0], [5, 2.0, 2.0]]


# What is read


def test_a_mixture_is_one_pool_whose_rows_name_their_source(tmp_path: Path) -> None:
    tasks = gym(size=4).model_dump() | {"name": "sums", "system": "Add."}
    facts = jsonl(tmp_path, *({"q": f"f{n}"} for n in range(3)), prompt="q", answer=None).model_dump()
    data = data_of(tasks, facts | {"name": "facts", "system": "Tell."})
    pool = load_train_pool(data)
    assert pool.table.schema.equals(PROMPTS, check_metadata=True)
    assert pool.table.column("row").to_pylist() == list(range(7))
    assert texts(pool, "source") == ["sums"] * 4 + ["facts"] * 3
    assert [messages[0]["content"] for messages in said(pool)] == ["Add."] * 4 + ["Tell."] * 3
    assert [part.rows for part in pool.parts.values()] == [4, 3]
    assert load_train_pool(data).digest == pool.digest
    # The digest of a source is that of the source alone, which names nothing.
    alone = load_pool(data.mixture[0])
    assert pool.parts["sums"].digest == alone.digest
    assert alone.table.column("source").null_count == 4
    assert describe(RunData(pool, {}).pools) == ["data.train.0 (sums): 4 rows", "data.train.1 (facts): 3 rows"]
    metrics = data_metrics(RunData(pool, {}).pools)
    assert (metrics["data/train_rows"], metrics["source/sums/rows"], metrics["source/facts/rows"]) == (7, 4, 3)
    state = PromptMixture(list(pool.parts.values()), data.mixture, 1).state()
    assert [(path, digest) for path, _, digest in drawn_rows("data.train", pool, state)] == [
        ("data.train.0", alone.digest),
        ("data.train.1", pool.parts["facts"].digest),
    ]


def test_a_source_of_a_mixture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = gym(size=4).model_dump() | {"name": "sums"}
    bad = jsonl(tmp_path, {"prompt": ""}, answer=None).model_dump() | {"name": "facts"}
    with pytest.raises(DataError, match=r"^data\.train\.1: no row can be used"):
        load_train_pool(data_of(good, bad))


def test_prompts_of_every_source_are_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": ""} for text in "abc"]
    first = jsonl(tmp_path, rows[0]).model_dump() | {"name": "one"}
    (tmp_path / "other").mkdir()
    second = jsonl(tmp_path / "other", rows[1]).model_dump() | {"name": "two"}
    (tmp_path / "eval").mkdir()
    held = jsonl(tmp_path / "eval", *rows).model_dump()
    _, pools = load_pools(data_of(first, second, eval=held))
    assert [messages[0]["content"] for messages in said(pools["eval"])] == ["c"]


def test_repeated_prompts_are_counted_and_left_out_on_request(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": str(n)} for n, text in enumerate("abacab")]
    counted = load_pool(jsonl(tmp_path, *rows))
    assert (counted.rows, counted.repeated, counted.deduped) == (6, 3, 0)
    other = "3 have another answer than an earlier row with the same prompt"
    line = f"data.train: 6 rows, 3 repeat an earlier one, spaces aside (dedupe: true leaves them out), {other}"
    assert describe(RunData(counted, {}).pools) == [line]
    once = load_pool(jsonl(tmp_path, *rows, dedupe=True))
    assert (once.rows, once.repeated, once.deduped) == (3, 0, 3)
    assert texts(once, "answer") == ["0", "1", "3"]  # the first row with each prompt
    line = f"data.train: 3 rows, 3 that repeat an earlier one left out (dedupe), {other}"
    assert describe(RunData(once, {}).pools) == [line]


def test_rows_that_are_repeated_across_sources_are_of_both(tmp_path: Path) -> None:
    row = jsonl(tmp_path, {"prompt": "a", "answer": ""}, dedupe=True).model_dump()
    pool = load_train_pool(data_of(row | {"name": "one"}, row | {"name": "two"}))
    assert texts(pool, "source") == ["one", "two"]
    order = PromptMixture(list(pool.parts.values()), shares(1, 1), 1)
    uids = [order.next().prompt_uid for _ in range(4)]
    assert len(set(uids)) == 4
    assert list(itertools.chain(*texts_of(pool))) == ["a", "a"]


@pytest.mark.parametrize("dedupe", [False, True])
def test_prompts_of_several_sources_are_counted_and_those_with_other_answers_too(tmp_path: Path, dedupe: bool) -> None:
    sources = []
    for name, rows in {"one": ["a1", "b2"], "two": ["c3", "d4"], "three": ["a1", "b9", "c3", "e5"]}.items():
        (tmp_path / name).mkdir()
        parts = [{"prompt": prompt, "answer": answer} for prompt, answer in rows]
        sources.append(jsonl(tmp_path / name, *parts, dedupe=dedupe).model_dump() | {"name": name})
    pool = load_train_pool(data_of(*sources))
    found = "3 have a prompt of an earlier source, 1 have another answer than an earlier row with the same prompt"
    assert describe(RunData(pool, {}).pools) == [
        "data.train.0 (one): 2 rows",
        "data.train.1 (two): 2 rows",
        f"data.train.2 (three): 4 rows, {found}",
    ]


def texts_of(pool: Any) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in said(pool)]


def test_held_out_prompts_that_training_asks_in_another_form_are_counted(tmp_path: Path) -> None:
    """They stay: the other form may be meant. But nobody should take their result for one on unseen questions."""
    rows = [{"q": f"q{n}"} for n in range(4)]
    train = jsonl(tmp_path, *rows, prompt="q", answer=None).model_dump()
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(f'{{"q": "{text}"}}\n' for text in ("q0", "q1 ", "new")))
    form = {"kind": "jsonl", "path": str(path), "prompt": "q", "answer": None}
    sources = [
        train | {"name": "a", "system": "Be brief."},
        train | {"name": "b", "template": "Question: {prompt}\nAnswer:"},
    ]
    data = data_of(*sources, eval={"same": form | {"system": "Be brief."}, "other": form})
    pool, held_out = load_pools(data)
    assert (held_out["eval.same"].rows, held_out["eval.same"].left_out, held_out["eval.same"].alike) == (1, 2, 0)
    assert (held_out["eval.other"].rows, held_out["eval.other"].left_out, held_out["eval.other"].alike) == (3, 0, 2)
    line = describe(RunData(pool, held_out).pools)[-1]
    assert line == (
        "data.eval.other: 3 rows, 2 ask what data.train asks with another system message or template, and stay"
    )
    kept = load_pools(data_of(*sources, eval={"other": form}, held_out=False))[1]
    assert kept["eval.other"].alike == 0
