"""Console output: plain lines without a terminal, a live display that restores the screen in one."""

from __future__ import annotations

import io
import logging
import math
import sys
import threading
import time
from collections.abc import Callable

import pytest

from troupe.orchestrator.telemetry.console import COLUMNS, Console, cell, format_value

STEP = {"kind": "train", "reward/mean": 0.25, "response_tokens/mean": 30.4, "policy/kl_ref": math.nan}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; a minute on a busy machine."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class TerminalStream(io.StringIO):
    """A stream that reports itself as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_terminal_with_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_terminal_a_step_is_one_plain_line() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.start("a [red]name", 40)
    console.phase("generate", 3, 16)
    console.message("held-out [bold] " + "x" * 200)
    console.step(1, STEP)
    console.step(2, {})
    console.finish({"steps": 2, "accuracy": 0.123456, "tokens": 3e6})
    assert stream.getvalue().splitlines() == [
        "a [red]name: 40 steps",
        "held-out [bold] " + "x" * 200,
        "step 1/40  reward 0.250  KL nan  length 30",
        "step 2/40",
        "steps     2",
        "accuracy  0.1235",
        "tokens    3000000",
        "time      0 s",
    ]


def test_the_divergence_shown_is_that_of_the_batch() -> None:
    """An update's own is by the estimator of the loss, which for k1 may be negative."""
    stream = io.StringIO()
    console = Console(stream)
    console.start("a", 2)
    console.step(1, {"policy/kl_ref": -0.5, "kl_ref": 0.25})
    console.step(2, {"policy/kl_ref": -0.5})
    console.close()
    assert stream.getvalue().splitlines()[1:] == ["step 1/2  KL 0.2500", "step 2/2  KL -0.5000"]


class FullDisk(io.StringIO):
    """A stream that cannot be written, as standard output on a full disk or a pipe whose reader has ended."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_an_output_that_cannot_be_written_ends_no_run() -> None:
    console = Console(FullDisk(), quiet_s=0.01)
    console.start("name", 40)
    console.step(1, STEP)
    console.message("held-out")
    time.sleep(0.05)  # the thread that breaks silences writes too
    console.step(2, STEP)
    console.finish({"steps": "2"})


def test_without_a_terminal_a_long_phase_is_reported_at_intervals() -> None:
    stream = io.StringIO()
    console = Console(stream, quiet_s=0.02)
    console.start("name", 40)
    console.step(2, STEP)
    console.phase("generate", 3, 16, unit="groups")
    wait_for(lambda: stream.getvalue().count("generate 3/16 groups\n") >= 2)
    console.close()
    start, step, first, second, *_ = stream.getvalue().splitlines()
    assert (start, step.split()[:2]) == ("name: 40 steps", ["step", "2/40"])
    assert first == second == "step 3/40: generate 3/16 groups", "a phase that has just begun has no seconds"
    console = Console(stream := io.StringIO(), quiet_s=0.02)
    console.start("name", 40)
    console.phase("weight sync")
    console._phase_started -= 3.0
    wait_for(lambda: "weight sync for 3 s\n" in stream.getvalue())
    console.close()


def test_a_start_says_which_workers_it_waits_for() -> None:
    stream = io.StringIO()
    console = Console(stream, quiet_s=0.02)
    console.start("name", 40)
    console.phase("start workers", 1, 3, "policy-0, rollout-0")
    wait_for(lambda: "waiting for" in stream.getvalue())
    console.close()
    assert "start workers 1/3, waiting for policy-0, rollout-0\n" in stream.getvalue()


def test_a_step_says_how_long_the_run_still_takes_and_the_end_what_bounded_it() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.start("name", 40)
    for step in range(1, 11):
        seconds = {"seconds/step": 30.0, "seconds/generate": 18.0, "seconds/update": 9.0}
        console.step(step, {"reward/mean": step / 10, **seconds})
    console.finish({})
    text = stream.getvalue()
    assert "step 10/40  reward 1.000  generate s 18.0  update s 9.0  15 min left" in text
    assert "learning    reward 0.2 to 0.9: rises\n" in text
    assert "60% waiting for samples, 30% training\n" in text
    assert "bottleneck  engines\n" in text


def test_a_step_without_an_update_says_so() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.start("name", 40)
    console.step(1, {"reward/mean": 0.0, "updates": 0.0})
    console.step(2, {"reward/mean": 0.5, "updates": 1.0})
    console.step(3, {"reward/mean": 0.6, "updates": 2.0, "policy/empty_updates": 1.0, "policy/kl_exact": 0.0})
    console.step(4, {"reward/mean": 0.7, "updates": 2.0, "policy/empty_updates": 1.0, "policy/loss": 0.0})
    console.close()
    assert stream.getvalue().splitlines()[1:] == [
        "step 1/40  reward 0.000  no update: no sample has an advantage",
        "step 2/40  reward 0.500",
        "step 3/40  reward 0.600  no update: no sample has an advantage",
        "step 4/40  reward 0.700",
    ]


def test_a_run_that_prints_steps_prints_no_progress_between_them() -> None:
    stream = io.StringIO()
    console = Console(stream, quiet_s=3600)
    console.start("name", 40)
    console.phase("generate", 3, 16)
    for step in range(3):
        console.step(step, {})
    console.close()
    assert "generate" not in stream.getvalue()


def test_a_closed_console_prints_no_progress() -> None:
    stream = io.StringIO()
    console = Console(stream, quiet_s=0.01)
    console.start("name", 40)
    console.phase("generate", 3, 16)
    console.close()
    wait_for(lambda: not any(thread.name == "console" for thread in threading.enumerate()))
    before = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == before


def test_in_a_terminal_the_display_shows_phase_and_steps_and_restores_the_screen() -> None:
    stream = TerminalStream()
    console = Console(stream)
    console.start("name", 40)
    console.phase("generate", 3, 16)
    console.step(7, STEP)
    console.message("held-out [bold] 0.5")
    console.finish({"accuracy": 0.5})
    text = stream.getvalue()
    assert "generate 3/16" in text
    assert "step 7/40" in text
    assert "0.250" in text
    assert "held-out [bold] 0.5" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden once and shown again"
    assert "accuracy" in text.rpartition("\x1b[?25h")[2]


def test_log_lines_appear_above_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    real = io.StringIO()
    monkeypatch.setattr(sys, "stderr", real)
    monkeypatch.setattr(sys, "__stderr__", real)
    handler = logging.StreamHandler(real)
    logging.getLogger().addHandler(handler)
    stream = TerminalStream()
    console = Console(stream)
    try:
        console.start("name", 40)
        logging.getLogger("orchestrator").error("an engine died")
        console.close()
        assert handler.stream is real
    finally:
        logging.getLogger().removeHandler(handler)
        console.close()
    assert "an engine died" in stream.getvalue()
    assert real.getvalue() == ""


def test_cells_and_values_are_formatted() -> None:
    reward = COLUMNS[0]
    assert cell({"reward/mean": 1}, reward) == "1.000"
    assert cell({"reward/mean": "high"}, reward) == cell({}, reward) == "-"
    assert [format_value(v) for v in (1.0, 0.00012345, "x", 12, math.inf, math.nan)] == [
        "1",
        "0.0001234",
        "x",
        "12",
        "inf",
        "nan",
    ]


class Gone(TerminalStream):
    """A terminal that has been closed meanwhile."""

    gone = False

    def write(self, text: str, /) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_terminal_that_is_gone_and_a_stream_that_lacks_a_character_end_no_run() -> None:
    stream = Gone()
    console = Console(stream)
    console.start("a", 2)
    stream.gone = True
    console.message("one")
    console.step(1, STEP)
    console.finish({"steps": 1})
    for other in (io.TextIOWrapper(io.BytesIO(), encoding="ascii"), io.StringIO()):
        console = Console(other)
        console.start("a", 2)
        console.message("漢")
        if isinstance(other, io.StringIO):
            other.close()
        console.step(1, STEP)
        console.finish({"steps": 1})
