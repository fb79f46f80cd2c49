"""A reward function that fails in a real run with `max_staleness: 1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.real.commands import ENDLESS, ENDLESS_SAMPLES_PER_STEP, GRPO, Run, ledger_balances, running, trajectories

FUNCTION = '''
from pathlib import Path

HERE = Path(__file__).parent


def judge(response, answer, metadata):
    """Raise for lengths divisible by four, and always once the file `always` exists."""
    if (HERE / "always").exists():
        raise RuntimeError("the judge is unavailable")
    if len(response) % 4 == 0:
        raise ValueError("unsupported length")
    return float(len(response))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of the run."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[Run]:
    """A run with `max_staleness: 1` whose reward function fails for some samples, and after some steps for all."""
    judges = folder / "judges"
    judges.mkdir()
    (judges / "failing_judge.py").write_text(FUNCTION)
    overrides = (
        *ENDLESS,
        *("roles.reward.functions=[{name: 'failing_judge:judge'}]", "schedule.max_staleness=1"),
        # Few concurrent samples: generating a batch takes longer than an update, so weights change meanwhile.
        *("roles.rollout.max_num_seqs=2", "failures.max_failed_fraction=1"),
    )
    with running(Run(folder, GRPO, *overrides, name="failing", env={"PYTHONPATH": str(judges)})) as run:
        # How far generation and training overlap depends on the machine's load. Of the last two steps the samples may
        # not be written; older ones were looked at before.
        run.wait_until(lambda: _updated_in_flight(run, run.metrics[-6:-2]), "a response with two weight versions")
        (judges / "always").touch()
        run.wait()
        yield run


def test_a_reward_that_raises_drops_the_sample_and_counts_it(failing: Run) -> None:
    dropped = 0
    for line in failing.metrics:
        rows = trajectories(failing.out, line["step"]).to_pylist()
        failed = [row for row in rows if row["status"] != "ok"]
        replaced = line["dispatched_samples"] - len(rows)  # samples of groups that failed as a whole
        assert replaced >= 0 and line["failed_samples"] == len(failed) + replaced
        assert {len(row["response"]) % 4 for row in failed} <= {0}
        assert all(row["reward"] is None for row in failed)
        assert all("ValueError" in row["status"] and "unsupported length" in row["status"] for row in failed)
        dropped += len(failed)
        assert ledger_balances(line)
        assert line["ledger/dropped"] >= dropped
        assert line["ledger/trained"] == ENDLESS_SAMPLES_PER_STEP * line["step"] - dropped
    assert dropped > 0


def test_a_reward_that_always_raises_stops_the_run_with_its_error(failing: Run) -> None:
    assert failing.process.returncode == 1
    assert len(failing.error_lines) == 1, failing.output
    assert "more than failures.max_failed_fraction allows" in failing.error_lines[0]
    assert "the judge is unavailable" in failing.error_lines[0]
    assert failing.leftover_processes() == []


def test_staleness_reaches_its_bound_and_never_exceeds_it(failing: Run) -> None:
    staleness = set()
    for line in failing.metrics:
        assert line["staleness/max"] <= 1
        for row in trajectories(failing.out, line["step"]).to_pylist():
            versions = [span["version"] for span in row["weight_versions"]]
            staleness |= {line["step"] - 1 - version for version in versions}
            assert versions == sorted(versions)
    assert staleness == {0, 1}, staleness
    assert _updated_in_flight(failing, failing.metrics)


def _updated_in_flight(run: Run, lines: Sequence[Mapping[str, float]]) -> bool:
    """Whether a response of these steps continues across a weight update."""
    rows = (row for line in lines for row in trajectories(run.out, int(line["step"])).to_pylist())
    return any(len(row["weight_versions"]) > 1 for row in rows)
