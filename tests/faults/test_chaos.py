"""What the runs under random faults compare with a run without faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.faults.chaos import NOTHING, Broken, Ended, _check
from tests.faults.soak import order_of_roles
from tests.orchestrator.insight.test_replay import kept_step
from troupe.orchestrator.training.step_record import REPLAY, STEP, folder_of
from troupe.workers.contract.messages import KEPT_BATCH
from troupe.workers.data.kept_tables import write_tables

LINE = {"ledger/dispatched": 1.0, "ledger/trained": 1.0, "ledger/dropped": 0.0, "ledger/in_flight": 0.0}


def ended(out: Path, attempt: int = 0, advantage: float = 0.5, weights: str = "w1", loss: float = 0.1) -> Ended:
    """A run of two steps whose first was kept."""
    folder = folder_of(out / REPLAY, 1)
    folder.mkdir(parents=True)
    samples = {"prompt_uid": ["a"], "attempt": [attempt], "advantages": [[advantage, float("nan")]]}
    files = write_tables(folder, {KEPT_BATCH: pa.table(samples)})
    (folder / STEP).write_text(kept_step(1, files=files, after={"policy": weights}).model_dump_json())
    lines = [LINE | {"step": step, "policy/loss": loss} for step in (1, 2)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 2, "eval": 1.0}]))
    return Ended.of(out)


def test_a_run_whose_samples_took_other_tries_is_that_without_faults(tmp_path: Path) -> None:
    healthy = ended(tmp_path / "healthy")
    assert [*healthy.digests] == [1] and len(healthy.lines) == 2
    _check("ppo", ended(tmp_path / "faulty", attempt=3), healthy)


@pytest.mark.parametrize(
    ("part", "change"),
    [("advantages", {"advantage": 0.25}), ("weights of the policy", {"weights": "w9"}), ("policy/loss", {"loss": 0.2})],
)
def test_a_step_that_differs_is_named_with_what_differs(tmp_path: Path, part: str, change: dict[str, Any]) -> None:
    healthy, faulty = ended(tmp_path / "healthy"), ended(tmp_path / "faulty", **change)
    with pytest.raises(Broken, match=f"step 1 differs from a run without faults: {{'{part}'"):
        _check("ppo", faulty, healthy)
    _check("ppo", faulty, NOTHING)


def test_kills_hit_every_role_before_any_is_hit_again() -> None:
    roles = ["policy", "critic", "reward", "engine"]
    order = order_of_roles(roles, 10, seed=17)
    assert [sorted(order[at : at + 4]) for at in (0, 4)] == [sorted(roles)] * 2 and len({*order[8:]}) == 2
    assert order[:4] != order[4:8]
