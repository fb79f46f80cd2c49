"""Joining and preparing a batch: values by hand, any order and partition, and every refusal by name."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch

from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.messages import (
    REWARDS,
    ROLLOUTS,
    SQUARE_SUMS,
    TEACHER_TOKENS,
    TRAIN,
    PrepareRequest,
    token_scores,
)
from troupe.workers.models.ragged import ragged

GROUP = AdvantageConfig(estimator="group", normalize_by_std=False)
Key = tuple[str, int]


def rollout_table(keys: list[Key], lengths: list[int], attempt: int = 0, **columns: Sequence[object]) -> pa.Table:
    data = {
        "prompt_uid": [uid for uid, _ in keys],
        "sample_index": [index for _, index in keys],
        "attempt": [attempt] * len(keys),
        "segment": [0] * len(keys),
        "prompt_ids": [[1, 2] for _ in keys],
        "response_ids": [list(range(length)) for length in lengths],
        "rollout_logprobs": [[-1.0] * length for length in lengths],
        "kept_tokens": [None] * len(keys),
        "sampler_tokens": [None] * len(keys),
        "routes": [None] * len(keys),
        "loss_mask": [[True] * length for length in lengths],
        "weight_versions": [[] for _ in keys],
        "turns": [[] for _ in keys],
        "turn_rewards": [[] for _ in keys],
        "generate_s": [0.0] * len(keys),
        "first_token_s": [0.0] * len(keys),
    } | columns
    text = [""] * len(keys)
    return pa.Table.from_pydict({name: data.get(name, text) for name in ROLLOUTS.names}, schema=ROLLOUTS)


def reward_table(keys: list[Key], rewards: Sequence[float | None], attempt: int = 0) -> pa.Table:
    data = {
        "prompt_uid": [uid for uid, _ in keys],
        "sample_index": [index for _, index in keys],
        "attempt": [attempt] * len(keys),
        "status": ["timeout" if reward is None else "ok" for reward in rewards],
        "reward": rewards,
        "components": [[] for _ in keys],
        "reward_spans": [[] for _ in keys],
        "feedback": [None] * len(keys),
    }
    return pa.Table.from_pydict(data, schema=REWARDS)


def scores(column: str, keys: list[Key], values: list[list[float]]) -> pa.Table:
    schema = token_scores(column)
    data = {"prompt_uid": [u for u, _ in keys], "sample_index": [i for _, i in keys], "attempt": [0] * len(keys)}
    return pa.Table.from_pydict(data | {"segment": [0] * len(keys), column: values}, schema=schema)


KEYS: list[Key] = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
LENGTHS = [2, 1, 0, 3]


def with_components(rewards: pa.Table, components: Sequence[Sequence[tuple[Any, ...]]]) -> pa.Table:
    """A rewards table with (name, value, weight, whether it is normalized) of each sample's components."""
    index, names = rewards.schema.get_field_index("components"), ("name", "value", "weight", "normalize")
    given = [[dict(zip(names, one, strict=False)) for one in own] for own in components]
    return rewards.set_column(index, REWARDS.field(index), pa.array(given, REWARDS.field(index).type))


def group_tables() -> list[pa.Table]:
    return [rollout_table(KEYS, LENGTHS), reward_table(KEYS, [1.0, 0.0, 2.0, 2.0])]


def test_group_advantages_and_summary() -> None:
    summary, table = prepare(GROUP, PrepareRequest(tuple(KEYS)), group_tables())
    assert table.schema.equals(TRAIN, check_metadata=True)
    assert table.column("advantages").to_pylist() == [[0.5, 0.5], [-0.5], [], [0.0, 0.0, 0.0]]
    assert table.column("reward").to_pylist() == [1.0, 0.0, 2.0, 2.0]
    assert table.column("old_logprobs").null_count == table.column("returns").null_count == 4
    assert [row.tokens for row in summary.rows] == [4, 3, 2, 5]
    assert [row.loss_tokens for row in summary.rows] == LENGTHS
    assert [row.has_signal for row in summary.rows] == [True, True, False, False]


def test_keep_gives_rows_and_order_and_its_own_groups() -> None:
    keep: list[Key] = [("b", 1), ("a", 0)]
    _, table = prepare(GROUP, PrepareRequest(tuple(keep)), group_tables())
    assert list(zip(table["prompt_uid"].to_pylist(), table["sample_index"].to_pylist(), strict=True)) == keep
    # Alone in their groups: nothing to compare with.
    assert table.column("advantages").to_pylist() == [[0.0, 0.0, 0.0], [0.0, 0.0]]


def test_a_dropped_sample_needs_no_reward() -> None:
    tables = [rollout_table(KEYS, LENGTHS), reward_table(KEYS, [1.0, 0.0, None, 2.0])]
    _, table = prepare(GROUP, PrepareRequest(tuple(KEYS[:2])), tables)
    assert table.num_rows == 2
    with pytest.raises(ValueError, match=r"b\[0\].*no reward: timeout"):
        prepare(GROUP, PrepareRequest(tuple(KEYS)), tables)


def test_any_order_and_partition() -> None:
    expected = prepare(
        GROUP,
        PrepareRequest(tuple(KEYS)),
        [*group_tables(), scores("ref_logprobs", KEYS, [[-1.5] * n for n in LENGTHS])],
    )
    pieces = [
        table.slice(row, 1)
        for table in [*group_tables(), scores("ref_logprobs", KEYS, [[-1.5] * n for n in LENGTHS])]
        for row in range(4)
    ]
    random.Random(5).shuffle(pieces)
    summary, table = prepare(GROUP, PrepareRequest(tuple(KEYS)), pieces)
    assert table.equals(expected[1]) and summary == expected[0]


def test_what_the_engine_recorded_of_the_tokens_is_part_of_the_batch() -> None:
    """Those that the sampler left, and the experts."""
    left, routes = [[b"\1\0\0\0", b""], None, [], [b"\2\0\0\0"] * 3], [b"a", None, b"c", b"d"]
    rollouts = rollout_table(KEYS, LENGTHS, kept_tokens=left, routes=routes)
    tables = [rollouts, reward_table(KEYS, [1.0, 0.0, 2.0, 2.0])]
    _, table = prepare(GROUP, PrepareRequest(tuple(reversed(KEYS))), tables)
    assert table["kept_tokens"].to_pylist() == left[::-1]
    assert table["routes"].to_pylist() == routes[::-1]


def test_a_teachers_tokens_are_part_of_the_batch_and_a_failed_one_is_named() -> None:
    """Beside `ref_logprobs` come two tokens for each response token, and one log-prob more."""
    none = AdvantageConfig(estimator="none")

    def prepared(broken: float) -> pa.Table:
        table = scores("ref_logprobs", KEYS, [[-1.5] * n for n in LENGTHS])
        ids = [list(range(number, number + 2 * n)) for number, n in enumerate(LENGTHS)]
        logprobs = [[-1.0] * (3 * n) for n in LENGTHS]
        logprobs[3][4] = broken
        for field, values in zip(TEACHER_TOKENS, (ids, logprobs), strict=True):
            table = table.append_column(field, pa.array(values, field.type))
        summary, train = prepare(none, PrepareRequest(tuple(reversed(KEYS))), [*group_tables(), table])
        assert not any(row.has_signal for row in summary.rows)
        assert train["teacher_ids"].to_pylist() == ids[::-1]
        return train

    assert prepared(-2.0)["teacher_logprobs"].to_pylist()[0][4] == -2.0
    uid, index = KEYS[3][:2]
    with pytest.raises(ValueError, match=re.escape(f"sample {uid}[{index}]: teacher_logprobs has nan")):
        prepared(math.nan)


def test_the_optimal_token_baseline_reads_the_policys_square_sums_of_its_tokens() -> None:
    """Two samples of a group, of which one has a second token: by hand, 1 - 2 exp(log-prob) + sum of squares."""
    keys, half = KEYS[:2], math.log(0.5)
    tables = [rollout_table(keys, [2, 1]), reward_table(keys, [1.0, 3.0])]
    old = scores("old_logprobs", keys, [[half, half], [math.log(0.25)]])
    config = AdvantageConfig(estimator="returns", baseline="optimal_token")
    with pytest.raises(ValueError, match="needs old_logprobs and square_sums"):
        prepare(config, PrepareRequest(tuple(keys)), [*tables, old])
    old = old.append_column(SQUARE_SUMS, pa.array([[0.5, 0.5], [0.25]], SQUARE_SUMS.type))
    _, train = prepare(config, PrepareRequest(tuple(keys)), [*tables, old])
    baseline = (0.5 * 1.0 + 0.75 * 3.0) / 1.25
    assert train["advantages"].to_pylist() == [
        pytest.approx([1.0 - baseline, 1.0], abs=1e-6),
        pytest.approx([3.0 - baseline], abs=1e-6),
    ]


def teacher_table(name: str, keys: list[Key], seed: int, k: int = 2) -> pa.Table:
    """Scores of a teacher: its log-probs, `k` tokens and their log-probs, at random."""
    lengths, chance = [LENGTHS[KEYS.index(key)] for key in keys], random.Random(seed)
    table = scores(name, keys, [[-chance.random() for _ in range(n)] for n in lengths])
    ids = [[chance.randrange(50) for _ in range(k * n)] for n in lengths]
    logprobs = [[-chance.random() for _ in range((k + 1) * n)] for n in lengths]
    for field, values in zip(TEACHER_TOKENS, (ids, logprobs), strict=True):
        table = table.append_column(field, pa.array(values, field.type))
    return table


def test_each_sample_has_the_teachers_of_its_prompt_each_with_its_weight() -> None:
    """In any order: prompt a has both teachers, b the second; log-probs, tokens and KL by hand."""
    weights = {"a": {"teacher.one": 0.25, "teacher.two": 2.0}, "b": {"teacher.two": 3.0}}
    order: list[Key] = [("b", 1), ("a", 1), ("b", 0), ("a", 0)]
    given = {
        "teacher.two": teacher_table("teacher.two", KEYS[::-1], 2),
        "teacher.one": teacher_table("teacher.one", KEYS[:2], 1),
    }
    request = PrepareRequest(tuple(order), teachers=weights)
    summary, train = prepare(AdvantageConfig(estimator="distill"), request, [*group_tables(), *given.values()])
    rows = {
        name: {(row["prompt_uid"], row["sample_index"]): row for row in table.to_pylist()}
        for name, table in given.items()
    }
    for key, row in zip(order, train.to_pylist(), strict=True):
        own = dict(sorted(weights[key[0]].items(), reverse=True))  # in the order of the samples, as the tokens are
        gaps = [
            sum(own[name] * (rows[name][key][name][t] + 1.0) for name in own) for t in range(LENGTHS[KEYS.index(key)])
        ]
        assert row["advantages"] == pytest.approx(gaps, rel=1e-6)
        assert row["teacher_weights"] == [*own.values(), *[0.0] * (2 - len(own))]
        for column, width in (("teacher_ids", 2), ("teacher_logprobs", 3)):
            tokens = torch.tensor(row[column]).view(-1, 2, width)
            for place, name in enumerate(own):
                assert tokens[:, place].flatten().tolist() == pytest.approx(rows[name][key][column])
            assert tokens.isfinite().all()
        assert row["ref_logprobs"] is None
    for name, table in given.items():
        gap = [x + 1.0 for own in table[name].to_pylist() for x in own]
        assert summary.metrics[f"kl_{name}"] == pytest.approx(
            sum(math.exp(x) - 1 - x for x in gap) / len(gap), rel=1e-5
        )
    assert "kl_ref" not in summary.metrics
    for left_out in given:
        with pytest.raises(ValueError, match=re.escape(f"no table of {left_out} was given")):
            prepare(
                AdvantageConfig(estimator="distill"),
                request,
                [*group_tables(), *(given[n] for n in given if n != left_out)],
            )
    short = {**given, "teacher.two": teacher_table("teacher.two", KEYS[1:], 2)}
    with pytest.raises(ValueError, match=re.escape("sample a[0] is missing from teacher.two")):
        prepare(AdvantageConfig(estimator="distill"), request, [*group_tables(), *short.values()])


def test_a_sample_without_feedback_is_not_taught_by_the_teacher_that_reads_it() -> None:
    """`a[1]` has another teacher, and `b[1]` none: no loss, though its row stays. They are counted."""
    one, both = {"teacher.one": 0.5}, {"teacher.one": 0.5, "teacher.two": 2.0}
    untaught = frozenset({("a", 1), ("b", 1), ("gone", 0)})
    request = PrepareRequest(
        tuple(KEYS), teachers={"a": both, "b": one}, untaught={"teacher.one": untaught, "teacher.none": frozenset()}
    )
    given = [
        teacher_table("teacher.one", [key for key in KEYS if key not in untaught], 1),
        teacher_table("teacher.two", KEYS[:2], 2),
    ]
    summary, train = prepare(AdvantageConfig(estimator="distill"), request, [*group_tables(), *given])
    first, second = ({(r["prompt_uid"], r["sample_index"]): r for r in table.to_pylist()} for table in given)
    expected = [
        [0.5 * (first["a", 0]["teacher.one"][t] + 1) + 2 * (second["a", 0]["teacher.two"][t] + 1) for t in range(2)],
        [2 * (second["a", 1]["teacher.two"][0] + 1)],
        [],
        [0.0, 0.0, 0.0],
    ]
    weights = train.column("teacher_weights").to_pylist()
    assert [pytest.approx(own, rel=1e-6) for own in expected] == train.column("advantages").to_pylist()
    assert [sorted(own) for own in weights] == [[0.5, 2.0], [0.0, 2.0], [0.0, 0.5], [0.0, 0.0]]
    assert (summary.metrics["untaught_teacher.one"], summary.metrics["untaught_teacher.none"]) == (2, 0)
    nobody = replace(request, teachers=dict.fromkeys("ab", one), untaught={"teacher.one": frozenset(KEYS)})
    summary, train = prepare(AdvantageConfig(estimator="distill"), nobody, group_tables())
    assert not any(map(any, train.column("advantages").to_pylist())) and "kl_teacher.one" not in summary.metrics
    assert not any(map(any, train.column("teacher_weights").to_pylist()))


def test_loss_mask_leaves_tokens_out() -> None:
    mask: list[list[object]] = [[True, False], [True], [], [False, False, True]]
    tables = [rollout_table(KEYS, LENGTHS, loss_mask=mask), reward_table(KEYS, [1.0, 0.0, 0.0, 4.0])]
    summary, table = prepare(GROUP, PrepareRequest(tuple(KEYS)), tables)
    assert table.column("advantages").to_pylist() == [[0.5, 0.0], [-0.5], [], [0.0, 0.0, 2.0]]
    assert [row.loss_tokens for row in summary.rows] == [1, 1, 0, 1]


def test_gae_with_kl_by_hand() -> None:
    keys: list[Key] = [("a", 0)]
    mask: list[list[object]] = [[True, False, True]]
    tables = [
        rollout_table(keys, [3], loss_mask=mask),
        reward_table(keys, [9.0]),
        scores("values", keys, [[0.5, 77.0, 0.25]]),
        scores("old_logprobs", keys, [[-1.0, -8.0, -2.0]]),
        scores("ref_logprobs", keys, [[-1.5, -8.0, -1.0]]),
    ]
    config = AdvantageConfig(estimator="gae", gamma=0.9, gae_lambda=0.8, whiten=False, kl_coef=0.1, reward_clip=5.0)
    summary, table = prepare(config, PrepareRequest(tuple(keys)), tables)
    last = (5.0 + 0.1) - 0.25
    first = -0.05 + 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    assert table.column("advantages").to_pylist()[0] == pytest.approx([first, 0.0, last])
    assert table.column("returns").to_pylist()[0] == pytest.approx([first + 0.5, 0.0, last + 0.25])
    assert table.column("values").to_pylist()[0] == pytest.approx([0.5, 77.0, 0.25])
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert summary.metrics["kl_ref"] == pytest.approx(sum(k3) / 2)
    assert "explained_variance" in summary.metrics


def test_whitening_leaves_returns_alone() -> None:
    values = scores("values", KEYS, [[0.1] * n for n in LENGTHS])
    tables = [*group_tables(), values]
    plain = prepare(AdvantageConfig(estimator="gae", whiten=False), PrepareRequest(tuple(KEYS)), tables)[1]
    white = prepare(AdvantageConfig(estimator="gae", whiten=True), PrepareRequest(tuple(KEYS)), tables)[1]
    assert white.column("returns").equals(plain.column("returns"))
    flat = ragged(white.column("advantages")).values.tolist()
    assert sum(flat) == pytest.approx(0.0, abs=1e-5)
    assert sum(a * a for a in flat) / (len(flat) - 1) == pytest.approx(1.0, abs=1e-4)


def test_refusals_name_the_sample() -> None:
    rollouts, rewards = group_tables()
    good_values = scores("values", KEYS, [[0.0] * n for n in LENGTHS])
    gae = AdvantageConfig(estimator="gae")
    cases: list[tuple[AdvantageConfig, list[Key], list[pa.Table], str]] = [
        (GROUP, [], [rollouts, rewards], "no sample is kept"),
        (GROUP, [("a", 0), ("a", 0)], [rollouts, rewards], "kept twice"),
        (GROUP, [("z", 9)], [rollouts, rewards], r"z\[9\] is missing from rollouts"),
        (GROUP, KEYS, [rollouts, rewards.slice(0, 3)], r"b\[1\] is missing from rewards"),
        (GROUP, KEYS, [rollouts], "no table of rewards"),
        (GROUP, KEYS, [rollouts, rollouts.slice(1, 1), rewards], r"a\[1\] appears twice in rollouts"),
        (GROUP, KEYS, [rollouts, reward_table(KEYS, [1.0] * 4, attempt=1)], r"a\[0\]: rewards is of attempt 1"),
        (GROUP, KEYS, [rollouts, reward_table(KEYS, [1.0, math.nan, 0.0, 0.0])], r"a\[1\]: reward has nan"),
        (gae, KEYS, [rollouts, rewards], "needs values"),
        (gae, KEYS, [rollouts, rewards, good_values.slice(0, 2)], r"b\[0\] is missing from values"),
        (
            gae,
            KEYS,
            [rollouts, rewards, scores("values", KEYS, [[0.0, 0.0], [math.inf], [], [0.0] * 3])],
            r"a\[1\]: values has inf",
        ),
        (
            gae,
            KEYS,
            [rollouts, rewards, scores("values", KEYS, [[0.0], [0.0], [], [0.0] * 3])],
            r"a\[0\]: values has 1 entries for 2 response tokens",
        ),
        (
            gae.model_copy(update={"kl_coef": 0.1}),
            KEYS,
            [rollouts, rewards, good_values],
            "to the reference needs old_logprobs",
        ),
        (
            GROUP,
            KEYS,
            [rollouts, rewards, pa.table({"x": [1]})],
            "neither a rollouts, a rewards nor a token_scores table",
        ),
    ]
    for config, keep, tables, message in cases:
        with pytest.raises(ValueError, match=message):
            prepare(config, PrepareRequest(tuple(keep)), tables)


def test_process_rewards_are_refused_not_ignored() -> None:
    rewards = reward_table(KEYS, [1.0] * 4)
    spans = pa.array([[{"end": 1, "reward": 1.0}], [], [], []], REWARDS.field("reward_spans").type)
    rewards = rewards.set_column(REWARDS.get_field_index("reward_spans"), REWARDS.field("reward_spans"), spans)
    with pytest.raises(ValueError, match="process rewards"):
        prepare(AdvantageConfig(estimator="best_of_group"), PrepareRequest(tuple(KEYS)), [group_tables()[0], rewards])


GDPO = AdvantageConfig(estimator="decoupled_group")


def test_components_of_a_reward_are_normalised_apart_in_each_group() -> None:
    """Group a: `right` and `short` have the same weight in the result, although one varies a hundred times as much.

    Group b belongs to a source with other components, whose equal sums have a signal.
    """
    tables = [
        rollout_table(KEYS, [1, 1, 1, 1]),
        with_components(
            reward_table(KEYS, [100.0, 1.0, 3.0, 3.0]),
            [
                [("right", 100.0, 1.0), ("short", 0.0, 1.0)],
                [("right", 0.0, 1.0), ("short", 1.0, 1.0)],
                [("short", 1.0, 2.0), ("polite", 1.0, 1.0)],
                [("short", 0.0, 2.0), ("polite", 3.0, 1.0)],
            ],
        ),
    ]
    _, table = prepare(GDPO, PrepareRequest(tuple(KEYS)), tables)
    found = [row[0] for row in table["advantages"].to_pylist()]
    deviation = 0.5**0.5  # of two numbers 1 apart
    half = 0.5 / (deviation + 1e-4)
    apart = [50.0 / (100 * deviation + 1e-4) - half, half - 50.0 / (100 * deviation + 1e-4)]
    apart += [2 * half - 1.0 / (2 * deviation + 1e-4), 1.0 / (2 * deviation + 1e-4) - 2 * half]
    spread = (sum(one**2 for one in apart) / 4) ** 0.5
    assert found == pytest.approx([one / (spread + 1e-4) for one in apart], rel=1e-6)
    assert abs(found[0]) < 1e-3 and found[2] == pytest.approx(2**0.5, rel=1e-3)


def test_equal_components_have_no_signal_and_no_rounding_error() -> None:
    same = [[("a", 0.1, 0.3), ("b", 0.7, 1.0)]] * 3
    keys: list[Key] = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    tables = [
        rollout_table(keys, [2] * 5),
        with_components(reward_table(keys, [0.73] * 3 + [0.0, 1.0]), [*same, [("a", 0.0, 0.3)], [("a", 1.0, 0.3)]]),
    ]
    summary, table = prepare(GDPO, PrepareRequest(tuple(keys)), tables)
    assert table["advantages"].to_pylist()[:3] == [[0.0, 0.0]] * 3
    assert [row.has_signal for row in summary.rows] == [False] * 3 + [True] * 2


def test_normalized_components_have_the_statistics_of_all_batches_of_their_source() -> None:
    """`score` of source x: 1 and 3, then 5 and 7 with mean 4 and variance 20/3 of all four. Source y has its own, and
    the component without normalization stays as it is."""
    config = AdvantageConfig(estimator="returns")
    state = AdvantageState()
    sources = {"a": "x", "b": "y"}

    def rewards(scores: list[float]) -> tuple[pa.Table, pa.Table]:
        own = [[("right", 1.0, 1.0, False), ("score", score, 2.0, True)] for score in scores]
        table = reward_table(KEYS, [1.0 + 2.0 * score for score in scores])
        return rollout_table(KEYS, [1, 1, 1, 1]), with_components(table, own)

    for scores_, x, y in (
        ([1.0, 3.0, 10.0, 10.0], (2.0, 2.0**0.5), (10.0, 0.0)),
        ([5.0, 7.0, 10.0, 14.0], (4.0, (20 / 3) ** 0.5), (11.0, 2.0)),
    ):
        summary, table = prepare(config, PrepareRequest(tuple(KEYS), state=state, sources=sources), rewards(scores_))
        state = AdvantageState.model_validate_json(summary.state.model_dump_json())  # as a checkpoint holds it
        pairs = zip(scores_, (x, x, y, y), strict=True)
        expected = [1.0 + 2.0 * (score - mean) / (std + 1e-4) for score, (mean, std) in pairs]
        assert [row[0] for row in table["advantages"].to_pylist()] == pytest.approx(expected, rel=1e-6)
        assert table["reward"].to_pylist() == [1.0 + 2.0 * score for score in scores_]
    assert {name: one.components["score"].count for name, one in state.sources.items()} == {"x": 4, "y": 4}
    shown = {"mean": (4.0, 11.0), "std": ((20 / 3) ** 0.5, 2.0)}
    assert state.normalization() == pytest.approx(
        {f"source/{name}/score/running_{what}": own[n] for n, name in enumerate("xy") for what, own in shown.items()}
    )
    summary, _ = prepare(config, PrepareRequest(tuple(KEYS)), rewards([1.0, 2.0, 3.0, 4.0]))
    assert summary.state.normalization()["reward/score/running_mean"] == 2.5


def test_rewards_of_steps_are_not_normalized() -> None:
    tables = [
        rollout_table(KEYS, [1] * 4),
        with_components(reward_table(KEYS, [1.0] * 4), [[("a", 1.0, 1.0, True)]] * 4),
    ]
    index = tables[1].schema.get_field_index("reward_spans")
    spans = pa.array([[{"end": 1, "reward": 1.0}]] * 4, REWARDS.field(index).type)
    tables[1] = tables[1].set_column(index, REWARDS.field(index), spans)
    with pytest.raises(ValueError, match="no normalized components"):
        prepare(AdvantageConfig(estimator="returns"), PrepareRequest(tuple(KEYS)), tables)


def test_rewards_without_components_or_weights_are_not_decoupled() -> None:
    """Those of an earlier version have no weights."""
    rows = [[("a", 1.0, None)], [("a", 0.0, None)], [("a", 0.0, 1.0)], [("a", 0.0, 1.0)]]
    for rewards in (group_tables()[1], with_components(group_tables()[1], rows)):
        with pytest.raises(ValueError, match="needs the components of the rewards"):
            prepare(GDPO, PrepareRequest(tuple(KEYS)), [group_tables()[0], rewards])
