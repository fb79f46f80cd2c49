"""The opponent that is an earlier version of the policy: which checkpoint plays, and when the judges start with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.orchestrator.spec.test_players import RENEWED, SPEC
from troupe.orchestrator.roles.settings import judge_config
from troupe.orchestrator.runs import opponents
from troupe.orchestrator.runs.opponents import (
    OpponentRenewal,
    fetch_opponent,
    opponent_step,
    weights_digest,
    with_opponent,
)
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.metrics import PhaseTimers
from troupe.orchestrator.training.checkpoint import MODEL, CheckpointError, CheckpointStore
from troupe.orchestrator.training.parts import UpdatedStep
from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.contract.config_base import VerifiedModel


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Checkpoints of the steps 10, 20, 30, 40 and 60; the one of 40 has no model, for its export has failed."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=9)
    store.prepare()
    for step in (10, 20, 30, 40, 60):
        path = store.begin(step)
        if step != 40:
            (path / MODEL).mkdir()
            (path / MODEL / "config.json").write_text(f"{{'step': {step}}}")
            save_file({"weight": np.full(3, step)}, path / MODEL / "model.safetensors")
        store.commit(path, {})
    return store


def test_the_opponent_is_the_last_multiple_with_a_model_before_the_games(store: CheckpointStore) -> None:
    spec = load_rollout_spec(SPEC, RENEWED)
    found = {done: opponent_step(spec, store, done) for done in (0, 20, 21, 40, 41, 60, 61)}
    assert found == {0: 0, 20: 0, 21: 20, 40: 20, 41: 20, 60: 20, 61: 60}
    assert opponent_step(load_rollout_spec(SPEC), store, 61) == 0
    changed, digest = with_opponent(spec, store, 20)
    judge = judge_config(changed)
    assert judge is not None and isinstance(judge.model, VerifiedModel)
    assert (judge.model.path, judge.model.weights_digest) == (str(store.folder(20) / MODEL), digest)
    assert digest != with_opponent(spec, store, 60)[1]
    (store.folder(20) / MODEL / "config.json").write_text("{'step': 21}")
    with pytest.raises(CheckpointError, match=r"renew_every\): model/config.json is not the file that manifest.json"):
        with_opponent(spec, store, 20)


def test_adapters_are_merged_and_the_opponent_before_stays(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that dies while the next opponent is made starts again with the last one."""
    monkeypatch.setattr(opponents, "has_adapters", lambda _: True)
    monkeypatch.setattr(opponents, "write_merged", lambda adapters, target: shutil.copytree(adapters, target))
    spec, merged = load_rollout_spec(SPEC, RENEWED), store.directory.parent / "opponent"
    kept = []
    for step in (10, 20, 20, 60):
        changed, digest = with_opponent(spec, store, step)
        assert changed.models()["roles.judge.model"].path == str(merged / store.folder(step).name)
        assert digest == weights_digest(store.folder(step) / MODEL)
        kept.append([int(path.name.removeprefix("step-")) for path in sorted(merged.iterdir())])
    assert kept == [[10], [10, 20], [10, 20], [20, 60]]


def test_the_opponent_is_fetched_from_the_copies_of_the_run(store: CheckpointStore, tmp_path: Path) -> None:
    remote = RemoteCheckpoints(f"file://{tmp_path}/bucket", "r", keep=9)
    store.protected, store.in_use = frozenset({10}), 20
    remote.claim(store.directory, resumed=False)
    remote.upload(store.folder(60), store.kept)
    assert remote.steps() == [10, 20, 60]
    elsewhere = CheckpointStore(tmp_path / "elsewhere", keep=9)
    elsewhere.prepare()
    fetch_opponent(load_rollout_spec(SPEC, RENEWED), elsewhere, remote, 60)
    assert elsewhere.steps() == [20]
    fetch_opponent(load_rollout_spec(SPEC), elsewhere, remote, 61)
    assert elsewhere.steps() == [20], "no opponent is renewed"


class Judges:
    """The pool and the launcher of judges: notes the models with which they start."""

    names = ("judge-0",)

    def __init__(self) -> None:
        self.next, self.started = "", list[str]()

    def follow(self, spec: RolloutSpec, renewed: tuple[str, ...]) -> None:
        assert renewed == self.names
        self.next = spec.models()["roles.judge.model"].path

    async def renew(self) -> None:
        self.started.append(Path(self.next).parent.name)


async def test_judges_start_once_with_each_opponent_and_not_for_no_further_games(store: CheckpointStore) -> None:
    judges, events = Judges(), EventLog()
    spec = load_rollout_spec(SPEC, [*RENEWED, "schedule.steps=61"])
    part = OpponentRenewal(spec, store, cast("Any", judges), cast("Any", judges), Console(), events)
    in_use = []
    for number in (19, 20, 21, 22, 41, 60, 61):
        await part.after_update(UpdatedStep(number, cast("Any", None), PenaltyState(), (), PhaseTimers()))
        in_use.append(store.in_use)
    assert judges.started == ["step-000020"]
    assert in_use == [0, 0, 20, 20, 20, 20, 60], "what a longer run that resumes plays against is kept"
