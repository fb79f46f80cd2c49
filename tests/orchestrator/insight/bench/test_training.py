"""Trainers alone, from made-up measurements. Real ones: `tests/real/test_wheel.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from tests.orchestrator.insight.bench.measured import TRAINED, result
from troupe.orchestrator.commands.bench_table import balance, render_trainers
from troupe.orchestrator.insight.bench.batches import GroupLengths, train_batch
from troupe.orchestrator.insight.bench.trainers import TrainedStep, trainer_measures
from troupe.workers.contract.messages import TRAIN, GroupSummary, Peak, SampleSummary


def step(*tokens_per_s: float, **others: float) -> TrainedStep:
    metrics = {f"policy/{name}": value for name, value in others.items()}
    return TrainedStep(1.0, [metrics | {"policy/tokens_per_s": rate} for rate in tokens_per_s])


def test_sequences_have_the_lengths_of_the_samples_and_of_the_rows_of_an_episode() -> None:
    whole = SampleSummary(0, 10, 4, "stop", 0, 0)
    episode = SampleSummary(1, 10, 30, "stop", 0, 0, segments=(25, 40))
    group = GroupLengths.of(GroupSummary("p", 0, "rollout-0", (whole, episode), 1.0))
    assert group == GroupLengths(10, (4, 15, 30)) and group.tokens == 30 + 49


def test_a_batch_trains_every_token_of_its_rows() -> None:
    summary, table = train_batch([GroupLengths(5, (3, 1)), GroupLengths(2, (7,))], 11, seed=1)
    assert [(row.tokens, row.loss_tokens, row.prompt_tokens, row.group) for row in summary.rows] == [
        (8, 3, 5, 0), (6, 1, 5, 0), (9, 7, 2, 1)
    ]  # fmt: skip
    assert table.schema == TRAIN and [len(ids) for ids in table["response_ids"].to_pylist()] == [3, 1, 7]
    first, second, _ = table["prompt_ids"].to_pylist()
    assert first == second, "the samples of a group share their prompt"
    assert max(max(ids) for ids in table["response_ids"].to_pylist()) < 11
    assert all(advantage != 0 for row in table["advantages"].to_pylist() for advantage in row)


def test_the_tokens_of_all_workers_count_and_a_step_is_the_mean_of_its_updates() -> None:
    steps = [step(100.0, 300.0, padding=0.1), step(10.0, 10.0, padding=0.3), step(900.0, 900.0, padding=0.2)]
    found = trainer_measures("policy", 2, steps, Peak(5, 7))
    assert (found.tokens_per_s, found.padding, found.mfu) == (400.0, 0.2, None)
    assert (found.host_bytes, found.gpu_bytes) == (5, 7)
    assert trainer_measures("policy", 1, [step(1.0, padding=0.0, mfu=0.4)], Peak(0)).mfu == 0.4


@pytest.mark.parametrize("width", [40, 200])
def test_the_tables_fit_any_terminal_and_leave_out_what_was_not_measured(width: int) -> None:
    console = Console(width=width, record=True, force_terminal=False)
    console.print(render_trainers(TRAINED, width))
    shown = console.export_text()
    assert "…" not in shown and "9000" in shown and "MFU" not in shown and "GPU" not in shown
    with_mfu = replace(TRAINED, trainers=(replace(TRAINED.trainers[0], mfu=0.314),))
    console.print(render_trainers(with_mfu, width))
    assert "31.4%" in console.export_text()


def test_the_measured_rates_say_who_would_wait_and_with_which_ratio_nobody() -> None:
    """32 sequences of 20 tokens in a second, a sixteenth of it their drain; and an update."""
    line = balance([result()], replace(TRAINED, step_s=0.625))
    assert "1.6 s in turn and 0.9 s with max_staleness 1: engines wait 0% of it, trainers 33%" in line
    assert "samples are 1.0 versions old; 3 : 2 engines to policy workers" in line
    slow = balance([result()], replace(TRAINED, step_s=1.875))
    assert "engines wait 50% of it, trainers 0%" in slow and "1 : 2 engines" in slow
