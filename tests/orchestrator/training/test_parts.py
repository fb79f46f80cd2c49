"""The states of a run's parts in its checkpoints, of this and of the earlier format."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.orchestrator.test_best_checkpoint import EvaluatedRun, run_of
from troupe.orchestrator.training.checkpoint import CheckpointError, CheckpointStore
from troupe.orchestrator.training.parts import FORMAT, RunPart, UpdatedStep, close_parts, states_of

EARLIER = json.loads((Path(__file__).parent / "earlier_run" / "format_1.json").read_text())
"""The state after step 2 of `penalised_run`, which the version before the parts wrote."""
PENALTY = {"coef": 0.5, "target": 0.1}


def penalised_run(out: Path, steps: int, resume: bool = False) -> EvaluatedRun:
    """A run with an adaptive penalty and a best checkpoint: a state of every part."""
    run = run_of(out, 0.1, 0.8, 0.3, 0.2, resume=resume, patience=9)
    run.change(schedule={"steps": steps})
    run.change(algorithm={"name": "ppo_penalty", "kl_states": 12, "kl_old": PENALTY})
    run.policies[0].divergences = [0.2, 0.2]
    return run


def saved_state(out: Path, step: int) -> dict[str, Any]:
    return json.loads((out / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())


def write_state(out: Path, step: int, state: dict[str, Any]) -> None:
    """Replace the state in a checkpoint by another one."""
    store = CheckpointStore(out / "checkpoints", 2)
    store.commit(store.begin_again(step), state)


def test_a_run_resumes_from_a_checkpoint_of_the_earlier_format(tmp_path: Path) -> None:
    """It ends with the state of a run that this version has stopped and resumed."""
    for name in ("now", "earlier"):
        penalised_run(tmp_path / name, 2).run()
    now = saved_state(tmp_path / "now", 2)
    assert now["format"] == FORMAT and states_of(now) == states_of(EARLIER)
    write_state(tmp_path / "earlier", 2, EARLIER)
    for name in ("now", "earlier"):
        again = penalised_run(tmp_path / name, 3, resume=True)
        again.run()
        assert again.policies[0].kl_old_coefs == [2.0]
        assert again.controller.parts.best.state.without_gain == 2
    ended = saved_state(tmp_path / "earlier", 3)
    assert ended == saved_state(tmp_path / "now", 3)
    assert ended["parts"]["penalty"]["kl_old_coef"] == 4.0


def test_a_part_resumes_with_its_state_and_starts_anew_without(tmp_path: Path) -> None:
    """A version without the part wrote a checkpoint without its state."""
    for name, penalty in (("with", [2.0]), ("without", [0.5])):
        penalised_run(tmp_path / name, 2).run()
        state = saved_state(tmp_path / name, 2)
        if name == "without":
            del state["parts"]["penalty"]
            write_state(tmp_path / name, 2, state)
        again = penalised_run(tmp_path / name, 3, resume=True)
        again.run()
        assert again.policies[0].kl_old_coefs == penalty
        assert again.controller.parts.best.state.without_gain == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"format": 3}, "another version of Troupe wrote it"), ({"parts": {"best": {"metric": 1}}}, "metric")],
)
def test_a_state_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    penalised_run(tmp_path, 2).run()
    write_state(tmp_path, 2, saved_state(tmp_path, 2) | changes)
    with pytest.raises(CheckpointError, match=why):
        penalised_run(tmp_path, 3, resume=True).run()


def test_a_part_does_nothing_by_itself() -> None:
    assert asyncio.run(RunPart().after_step(cast("UpdatedStep", None), {"loss": 1.0})) == {}


def test_every_part_is_closed_after_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    class Broken(RunPart):
        async def close(self) -> None:
            closed.append("broken")
            raise OSError("disk")

    class Sound(RunPart):
        async def close(self) -> None:
            closed.append("sound")

    asyncio.run(close_parts([Sound(), Broken(), Sound()]))
    assert closed == ["sound", "broken", "sound"] and "closing Broken failed" in caplog.text
