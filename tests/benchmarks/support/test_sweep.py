"""`--sweep`: parsing, points and results files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rollout_throughput
from benchmarks.support.sweep import parse_sweep, points, results_path


def test_a_sweep_is_every_combination() -> None:
    assert points([]) == [{}]
    assert parse_sweep("max-tokens=16,32") == ("max_tokens", (16, 32))
    assert points([("concurrency", (16, 32)), ("engines", (1, 2))]) == [
        {"concurrency": 16, "engines": 1},
        {"concurrency": 16, "engines": 2},
        {"concurrency": 32, "engines": 1},
        {"concurrency": 32, "engines": 2},
    ]
    point = {"max_tokens": 16, "engines": 2}
    assert results_path(Path("out/one.json"), point) == Path("out/one-max-tokens-16-engines-2.json")
    assert results_path(Path("out/one.json"), {}) == Path("out/one.json") and results_path(None, point) is None


@pytest.mark.parametrize("wrong", ["concurrency", "concurrency=", "concurrency=a", "seed=1,2", "device=1", "=1"])
def test_a_sweep_of_something_else_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rollout_throughput.parse(["--sweep", wrong])
    assert wrong in capsys.readouterr().err
