"""What bounds a point, and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.orchestrator.insight.bench.measured import BUSY, GRPO, SEQUENCE, point, result
from troupe.orchestrator.insight.bench.bounds import Bound, Kind, best_of, bound_of
from troupe.orchestrator.insight.bench.results import MeasuredBatch, Result, measures_of
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.load import plan_runs, read_document

CORES = 64


def bound(one: Result, others: tuple[Result, ...] = (), cores: int | None = CORES) -> Bound:
    found = bound_of(one, [one, *others], cores)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("settings", "reading", "kind", "lines"),
    [
        ({}, {"preemptions": 3, "most_kv_use": 1.0}, Kind.KV_CACHE, ("roles.rollout.kv_cache_gib: 0.2",)),
        ({}, {"most_kv_use": 0.95, "waiting": 60.0}, Kind.KV_CACHE, ("roles.rollout.kv_cache_gib: 0.3",)),
        ({}, {"waiting": 32.0}, Kind.SLOTS, ("roles.rollout.max_num_seqs: 64",)),
        (
            {},
            {"waiting": 16.0, "prefill_s": 0.1, "decode_s": 0.5},
            Kind.SLOTS,
            ("roles.rollout.max_num_seqs: 64",),
        ),
        ({}, {"running": 8.0}, Kind.TAIL, ("schedule.max_staleness: 1",)),
        ({"schedule.max_staleness": 1}, {"running": 8.0}, Kind.TAIL, ("schedule.prompts_per_step: 8",)),
        ({}, {"running": 4.0, "most_running": 4}, Kind.LOAD, ("schedule.prompts_per_step: 32",)),
        ({"roles.rollout.workers": 4}, {"running": 4.0, "most_running": 4}, Kind.LOAD, ("roles.rollout.workers: 1",)),
        ({}, {"prefill_s": 0.7, "decode_s": 0.3}, Kind.PREFILL, ()),
        (
            {"roles.rollout.enable_prefix_caching": "false"},
            {"prefill_s": 0.7, "decode_s": 0.3},
            Kind.PREFILL,
            ("roles.rollout.enable_prefix_caching: true",),
        ),
        ({}, {"prefill_s": 0.1, "decode_s": 0.2}, Kind.DRIVER, ()),
        ({}, {}, Kind.DECODE, ("roles.rollout.workers: 2",)),
    ],
)
def test_a_bound_is_found_and_its_lines_are_valid_in_the_spec(
    settings: dict[str, Any], reading: dict[str, Any], kind: Kind, lines: tuple[str, ...]
) -> None:
    found = bound(result(settings, **reading))
    assert (found.kind, found.lines) == (kind, lines)
    overrides = [line.replace(": ", "=", 1) for line in lines]
    plan_runs(yaml_reader.override(read_document(GRPO), overrides))  # raises where a line is not valid


def test_advice_knows_the_machine() -> None:
    assert bound(result(), cores=1).lines == ()
    assert "all 1 cores" in bound(result(), cores=1).note
    cluster = bound(result(), cores=None)
    assert cluster.lines == ("roles.rollout.workers: 2",) and cluster.note == "if the cluster has room"


def test_what_another_point_has_tried_without_gain_is_not_advised() -> None:
    field = "roles.rollout.max_num_seqs"
    narrow, wide = result({field: 32}, waiting=32.0), result({field: 64})
    found = bound(narrow, (wide,))
    assert found.kind is Kind.DECODE and f"{field}: 64 gained nothing" in found.why
    still = bound(result({field: 64}, waiting=32.0, most_running=64), (narrow,))
    assert still.kind is Kind.DECODE and f"{field}: 64 gained nothing" in still.why, "so 128 is not advised either"
    faster = result({field: 64}, seconds=0.5)
    assert bound(narrow, (faster,)).lines == (f"{field}: 64",)
    field = "roles.rollout.workers"
    one, two = result({field: 1}), result({field: 2}, seconds=2.0)
    assert bound(one, (two,)).lines == () and "the machine's limit" in bound(one, (two,)).note


def test_batches_that_are_too_short_are_to_be_larger() -> None:
    assert "--prompts" in bound(result({}, prefill_s=0.1, decode_s=0.2)).note


def test_uneven_engines_have_too_few_groups() -> None:
    own = point({"roles.rollout.workers": 2})
    little = replace(BUSY, engine="rollout-1", prefill_s=0.1, decode_s=0.5, sequences=(SEQUENCE,))
    measures = measures_of(own, [MeasuredBatch(1.0, 660, (BUSY, little))])
    found = bound(Result(own, measures))
    assert found.kind is Kind.UNEVEN and found.lines == ("schedule.max_staleness: 1",)


def test_the_fastest_point_is_the_best_and_a_failed_one_has_no_bound() -> None:
    slow, fast = result({"sampling.max_tokens": 4}, seconds=2.0), result({"sampling.max_tokens": 6})
    failed = Result(point({"sampling.max_tokens": 2}), None, "rollout-0 died")
    assert best_of([slow, fast, failed]) is fast
    assert bound_of(failed, [slow, fast, failed], CORES) is None
    assert best_of([failed]) is None
