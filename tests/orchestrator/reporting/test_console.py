"""What the user sees: lines where there is no terminal, a display that leaves a clean screen where there is one."""

from __future__ import annotations

import io
import logging
import math
import sys

import pytest

from orchestrator.console import COLUMNS, Console, cell, figure

STEP = {"kind": "train", "reward/mean": 0.25, "response_tokens/mean": 30.4, "policy/kl_ref": math.nan}


class TerminalStream(io.StringIO):
    """A stream that says it is a terminal."""

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
    ]


def test_in_a_terminal_the_display_shows_phase_and_steps_and_gives_the_screen_back() -> None:
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


def test_logging_goes_above_the_display_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = io.StringIO()
    monkeypatch.setattr(sys, "stderr", real)
    monkeypatch.setattr(sys, "__stderr__", real)
    handler = logging.StreamHandler(real)
    logging.getLogger().addHandler(handler)
    stream = TerminalStream()
    console = Console(stream)
    try:
        console.start("name", 40)
        logging.getLogger("orchestrator").error("an engine is lost")
        console.close()
        assert handler.stream is real
    finally:
        logging.getLogger().removeHandler(handler)
        console.close()
    assert "an engine is lost" in stream.getvalue()
    assert real.getvalue() == ""


def test_cells_and_figures() -> None:
    reward = COLUMNS[0]
    assert cell({"reward/mean": 1}, reward) == "1.000"
    assert cell({"reward/mean": "high"}, reward) == cell({}, reward) == "-"
    assert [figure(v) for v in (1.0, 0.00012345, "x", 12, math.inf, math.nan)] == [
        "1",
        "0.0001234",
        "x",
        "12",
        "inf",
        "nan",
    ]
