"""A reward function that fails in a real run with a version of lag: what must hold is read from what the run leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.helpers import GRPO, SLOW, SLOW_SAMPLES, Run, balanced, running, trajectories

FUNCTION = '''
from pathlib import Path

HERE = Path(__file__).parent


def judge(response, answer, metadata):
    """Every fourth length fails, and everything does once the file `always` is there."""
    if (HERE / "always").exists():
        raise RuntimeError("this judge is tired")
    if len(response) % 4 == 0:
        raise ValueError("this judge takes no such length")
    return float(len(response))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file are written."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def judged(folder: Path) -> Iterator[Run]:
    """Some steps with a reward function that often raises, one version of lag; then it always does."""
    judges = folder / "judges"
    judges.mkdir()
    (judges / "failing_judge.py").write_text(FUNCTION)
    overrides = (
        *SLOW,
        *("roles.reward.functions=[{name: 'failing_judge:judge'}]", "schedule.max_staleness=1"),
        # Few samples at a time: the engine is in the middle of the next batch when the weights change.
        *("roles.rollout.max_num_seqs=4", "failures.max_failed_fraction=1"),
    )
    with running(Run(folder, GRPO, *overrides, name="judged", env={"PYTHONPATH": str(judges)})) as run:
        run.until_step(4)
        (judges / "always").touch()
        run.wait()
        yield run


def test_a_reward_that_raises_drops_the_sample_and_counts_it(judged: Run) -> None:
    dropped = 0
    for line in judged.metrics:
        rows = trajectories(judged.out, line["step"]).to_pylist()
        failed = [row for row in rows if row["status"] != "ok"]
        assert line["failed_samples"] == len(failed)
        assert {len(row["response"]) % 4 for row in failed} <= {0}
        assert all(row["reward"] is None for row in failed)
        assert all("ValueError" in row["status"] and "no such length" in row["status"] for row in failed)
        dropped += len(failed)
        assert balanced(line)
        assert line["ledger/dropped"] >= dropped
        assert line["ledger/trained"] == SLOW_SAMPLES * line["step"] - dropped
    assert dropped > 0


def test_a_reward_that_always_raises_stops_the_run_and_says_why(judged: Run) -> None:
    assert judged.process.returncode == 1
    assert len(judged.complaint) == 1, judged.told
    assert "more than failures.max_failed_fraction allows" in judged.complaint[0]
    assert "this judge is tired" in judged.complaint[0]
    assert judged.left_over() == []


def test_one_version_of_lag_is_used_and_never_passed(judged: Run) -> None:
    lags, swapped = set(), 0
    for line in judged.metrics:
        assert line["staleness/max"] <= 1
        for row in trajectories(judged.out, line["step"]).to_pylist():
            versions = [span["version"] for span in row["weight_versions"]]
            lags |= {line["step"] - 1 - version for version in versions}
            swapped += len(versions) > 1
            assert versions == sorted(versions)
    assert lags == {0, 1}, lags
    assert swapped > 0  # weights changed in the middle of a response
