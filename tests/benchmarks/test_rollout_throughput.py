"""Checks, command line and combined runs of rollout_throughput."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import rollout_throughput
from benchmarks.rollout_throughput import PRODUCT, ThroughputGate, measure_repeatedly
from benchmarks.support.harness import (
    NotCorrect,
    Report,
    Turn,
)
from benchmarks.support.workload import (
    Group,
    group,
    response_lengths,
)
from tests.benchmarks.settings import SETTINGS

GROUPS = [group(SETTINGS, uid, row, [1, 2]) for row, uid in enumerate(("p0", "p1"))]


def test_gate_refuses_other_work() -> None:
    good = [[1, 2, 3]] * 4
    gate = ThroughputGate(SETTINGS)
    gate.turn(PRODUCT, GROUPS, good)
    gate.turn("LLM", GROUPS, good)
    gate.totals()
    assert gate.checks["tokens sampled"] == "troupe 12, LLM 12"
    with pytest.raises(NotCorrect, match="3 sequences"):
        gate.turn("LLM", GROUPS, good[:3])
    with pytest.raises(NotCorrect, match="other lengths"):
        gate.turn("LLM", GROUPS, [*good[:3], [1]])
    natural = ThroughputGate(replace(SETTINGS, lengths="natural"))
    natural.turn(PRODUCT, GROUPS, good)
    natural.turn("LLM", GROUPS, [[1]] * 4)
    with pytest.raises(NotCorrect, match="different amounts"):
        natural.totals()


async def test_gate_refuses_other_tokens() -> None:
    async def first(one: Group, greedy: bool) -> list[list[int]]:
        return [[one.row, int(greedy)]]

    async def second(one: Group, greedy: bool) -> list[list[int]]:
        return [[one.row, 1]]

    groups, gate = [Group("a", 1, (1,), 1, 1)], ThroughputGate(SETTINGS)
    await gate.same_tokens(groups, {PRODUCT: first, "LLM": first})
    assert gate.checks
    with pytest.raises(NotCorrect, match="greedy=False"):
        await gate.same_tokens(groups, {PRODUCT: first, "LLM": second})


TAIL = replace(SETTINGS, lengths="long-tail", max_tokens=64, samples=8)


def groups(count: int) -> list[Group]:
    return [group(TAIL, f"p{row}", row, [1]) for row in range(count)]


def test_gate_wants_every_sample_to_have_its_own_length() -> None:
    settings = replace(TAIL, groups=2)
    work = groups(2)
    right = [[7] * length for one in work for length in response_lengths(settings, one)]
    gate = ThroughputGate(settings)
    gate.turn(PRODUCT, work, right)
    with pytest.raises(NotCorrect, match="other lengths"):
        gate.turn(PRODUCT, work, right[::-1])
    with pytest.raises(NotCorrect, match="other lengths"):
        gate.turn(PRODUCT, work, [*right[:-1], right[-1] + [7]])


def test_the_turns_of_several_runs_count_together() -> None:
    def report(*bare: float) -> Report:
        taken = {name: [Turn(s, 10.0, s, 0.0) for s in bare] for name in ("LLM.generate", "AsyncLLM")}
        taken["AsyncLLM"] = [replace(turn, wall_s=1.5) for turn in taken["AsyncLLM"]]
        return Report("sampling", taken | {PRODUCT: taken["AsyncLLM"]}, "LLM.generate", {"a": "b"})

    runs = iter([report(1.0), report(2.0), report(3.0)])
    together = measure_repeatedly(3, lambda: next(runs), ("LLM.generate", "AsyncLLM"))
    assert [turn.wall_s for turn in together.taken["LLM.generate"]] == [1.0, 2.0, 3.0]
    assert together.baseline == "AsyncLLM", "the better one of all turns, not of the first run"
    assert together.checks == {"run 1, a": "b", "run 2, a": "b", "run 3, a": "b"}
    alone = report(1.0)
    assert measure_repeatedly(1, lambda: alone, ("LLM.generate",)) is alone
    with pytest.raises(SystemExit):
        rollout_throughput.parse(["--runs", "0"])


def test_on_a_gpu_there_is_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout_throughput.parse(["--device", "cuda"]).device == "cuda"
    with pytest.raises(SystemExit):
        rollout_throughput.parse(["--device", "cuda", "--engines", "2"])
    assert "one engine" in capsys.readouterr().err
