"""The command line of grpo_step."""

from __future__ import annotations

import pytest

from benchmarks.grpo_step import parse as parse_grpo


def test_trl_needs_fixed_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_grpo(["--trl"]).trl
    with pytest.raises(SystemExit):
        parse_grpo(["--trl", "--lengths", "natural"])
    assert "fixed" in capsys.readouterr().err
