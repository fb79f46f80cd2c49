"""The table of a benchmark."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from tests.orchestrator.insight.bench.measured import point, result
from troupe.orchestrator.commands.bench_table import advice, render, show
from troupe.orchestrator.insight.bench.results import Result

WORKERS, SEQS = "roles.rollout.workers", "roles.rollout.max_num_seqs"


def results() -> list[Result]:
    """Three points that were measured, and one that was not."""
    return [
        result({WORKERS: 1, SEQS: 32}, waiting=32.0),
        result({WORKERS: 2, SEQS: 32}, seconds=1.25),
        result({WORKERS: 2, SEQS: 64}, preemptions=7),
        Result(point({WORKERS: 4, SEQS: 64}), None, "no room"),
    ]


def text(width: int) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    console.print(render(results(), width))
    return console.export_text()


def test_a_wide_terminal_has_a_row_for_each_point() -> None:
    lines = [line.split() for line in text(400).splitlines() if line.strip()]
    assert lines[0][:3] == ["point", "tok/s", "/engine"]
    assert [(line[1], line[3], line[4]) for line in lines if line[0] == "workers"] == [
        ("1,", "32", "640"), ("2,", "32", "1024"), ("2,", "64", "1280"), ("4,", "64", "-")
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 100])
def test_a_narrow_terminal_has_a_row_for_each_number_and_cuts_nothing(width: int) -> None:
    shown = text(width)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    preempted = [line.split()[-1] for line in shown.splitlines() if "preempted" in line]
    assert shown.count("max_num_seqs") == 4 and preempted == ["0", "0", "14", "-"]


def test_the_text_says_what_to_change_and_which_point_is_fastest() -> None:
    lines = list(advice(results(), 2))
    assert "    roles.rollout.max_num_seqs: 64" in lines and "    roles.rollout.kv_cache_gib: 0.2" in lines
    assert any(line.startswith("workers 4, max_num_seqs 64: not measured: ") for line in lines)
    assert lines[-3:] == ["fastest: 1280 tokens/s with", f"    {WORKERS}: 2", f"    {SEQS}: 64"]


def test_points_whose_batches_overlap_are_equals_and_a_length_is_no_setting() -> None:
    first, second = (result({WORKERS: workers}) for workers in (1, 2))
    assert first.measures is not None and second.measures is not None
    rate = first.measures.tokens_per_s
    first = replace(first, measures=replace(first.measures, slowest_batch=0.9 * rate, fastest_batch=1.1 * rate))
    second = replace(second, measures=replace(second.measures, tokens_per_s=0.95 * rate, fastest_batch=rate))
    assert list(advice([first, second], 2))[-1] == "    no slower, as far as its batches show: workers 2"
    assert second.measures is not None
    slower = replace(second.measures, tokens_per_s=0.8 * rate, fastest_batch=0.85 * rate)
    assert "no slower" not in list(advice([first, replace(second, measures=slower)], 2))[-1]
    lengths = [result({"sampling.max_tokens": tokens}) for tokens in (16, 32)]
    assert not any(line.startswith("fastest") for line in advice(lengths, 2))


def test_the_fastest_setting_is_named_for_each_length() -> None:
    swept = [
        result({"sampling.max_tokens": tokens, SEQS: slots}, seconds=seconds)
        for tokens, slots, seconds in ((16, 32, 1.0), (16, 64, 2.0), (32, 32, 4.0), (32, 64, 3.0))
    ]
    lines = list(advice(swept, 2))
    said = {line.partition(": ")[0]: after.strip() for line, after in pairwise(lines) if line.startswith("fastest")}
    assert said == {"fastest of max_tokens 16": f"{SEQS}: 32", "fastest of max_tokens 32": f"{SEQS}: 64"}


def test_an_interrupted_sweep_names_the_points_it_did_not_reach(capsys: pytest.CaptureFixture[str]) -> None:
    measured, left = results()[:1], [point({WORKERS: workers}) for workers in (8, 16)]
    show(measured, 2, [measured[0].point, *left])
    assert "interrupted before: workers 8; workers 16" in capsys.readouterr().out
    show(measured, 2, [measured[0].point])
    assert "interrupted" not in capsys.readouterr().out
