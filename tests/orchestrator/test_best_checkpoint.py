"""The best checkpoint, and the end of a run that no longer gains."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import fake_spec
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.library import model_of
from troupe.orchestrator.rollouts.evaluation_log import described_sets, settings_of
from troupe.orchestrator.runs.checkpoints import SavedRun, best_step, saved_run
from troupe.orchestrator.spec.derived.digests import evaluation_digest, plays_and_judges, reward_digest
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import BestConfig
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import states_of
from troupe.orchestrator.training.state import BestState
from troupe.workers.contract.reward_config import RewardFunctionConfig

DATA = {"train": {"kind": "jsonl", "path": "train"}, "eval": {"kind": "jsonl", "path": "eval"}}


class Values:
    """An evaluation with these values by step."""

    def __init__(self, *values: float | None) -> None:
        self.values = values
        self.steps: list[int] = []

    async def run(self, step: int, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        self.steps.append(step)
        value = self.values[step]
        return {"eval/prompts": 4.0} | ({} if value is None else {"eval/reward": value})


class EvaluatedRun(RolloutRun):
    """A run that keeps the newest checkpoint only."""

    def open_store(self) -> tuple[CheckpointStore, Checkpoint | None, Ledger]:
        store, found, ledger = super().open_store()
        store.keep = 1
        return store, found, ledger


def run_of(out: Path, *values: float | None, resume: bool = False, **checkpoint: Any) -> EvaluatedRun:
    """A run of as many steps as there are values after the first, evaluated before the first step and after each."""
    fields = {"every_steps": 0, "keep": 1, "best": {"metric": "eval/reward"}} | checkpoint
    run = EvaluatedRun(
        out,
        resume=resume,
        schedule={"steps": len(values) - 1},
        checkpoint=fields,
        evaluation={"every_steps": 1},
        data=DATA,
        failures={"failed_saves": 3},
    )
    run.evaluator = Values(*values)
    return run


def steps_of(out: Path) -> list[int]:
    return CheckpointStore(out / "checkpoints", 1).steps()


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Step 2 is the best one: later steps neither replace nor remove it. Step 1 was the best one before."""
    outcome = run_of(tmp_path, 0.1, 0.3, 0.5, 0.2, 0.4).run()
    assert steps_of(tmp_path) == [2, 4]
    assert best_step(tmp_path / "checkpoints") == 2
    assert (outcome.stopped, outcome.ended_early) == (False, "")
    assert outcome.summary(tmp_path)["best checkpoint"] == "step 2, eval/reward 0.5"
    assert model_of(tmp_path, best=True) == tmp_path / "checkpoints" / "step-000002" / "model"
    with pytest.raises(UsageError, match="not both"):
        model_of(tmp_path, step=4, best=True)


def test_several_best_ones_and_the_lowest_value(tmp_path: Path) -> None:
    best = {"metric": "eval/reward", "mode": "min", "keep": 2}
    run_of(tmp_path, 0.0, 0.3, 0.5, 0.2, 0.4, 0.6, best=best).run()
    assert steps_of(tmp_path) == [1, 3, 5]
    assert best_step(tmp_path / "checkpoints") == 3


def test_the_run_ends_normally_after_evaluations_without_a_gain(tmp_path: Path) -> None:
    """Equal is no gain. A resumed run is complete, unless it is given more patience."""
    run = run_of(tmp_path, 0.1, 0.3, 0.3, 0.2, 0.4, 0.5, patience=2)
    outcome = run.run()
    assert (outcome.steps_done, outcome.stopped) == (3, False)
    assert outcome.ended_early == "no gain of eval/reward in 2 evaluations (checkpoint.patience)"
    assert outcome.summary(tmp_path)["steps"] == f"3 ({outcome.ended_early})"
    assert steps_of(tmp_path) == [1, 3]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1] | {"how": "finished", "detail": outcome.ended_early} == events[-1]
    assert saved_run(run.spec, tmp_path) == SavedRun(3, True, outcome.ended_early)
    again = run_of(tmp_path, 0.1, 0.3, 0.3, 0.2, 0.4, 0.5, resume=True, patience=3)
    assert not saved_run(again.spec, tmp_path).complete
    assert again.run().steps_done == 5
    assert steps_of(tmp_path) == [5]  # the best and the newest one
    assert again.evaluator.steps == [4, 5]  # type: ignore[union-attr]


def test_the_model_before_training_is_no_checkpoint_but_has_to_be_surpassed(tmp_path: Path) -> None:
    outcome = run_of(tmp_path, 0.9, 0.3, 0.4, 0.5, patience=2).run()
    assert outcome.steps_done == 2
    assert best_step(tmp_path / "checkpoints") == 2


def test_a_resumed_run_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    values = (0.1, 0.8, 0.3, 0.2, 0.4, 0.5)
    first = run_of(tmp_path, *values, patience=9)
    first.change(schedule={"steps": 3})
    first.run()
    assert steps_of(tmp_path) == [1, 3]
    again = run_of(tmp_path, *values, resume=True, patience=9)
    again.run()
    assert steps_of(tmp_path) == [1, 5]
    assert again.controller.parts.best.state.without_gain == 4


def test_another_metric_forgets_the_best_ones(tmp_path: Path) -> None:
    first = run_of(tmp_path, 0.1, 0.8, 0.3, 0.2)
    first.change(schedule={"steps": 2})
    first.run()
    run_of(tmp_path, 0.1, 0.8, 0.3, 0.2, resume=True, best={"metric": "eval/reward", "mode": "min"}).run()
    assert steps_of(tmp_path) == [3]


def test_an_evaluation_without_the_metric_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All of its samples have failed, or the value is not finite."""
    run = run_of(tmp_path, 0.1, 0.3, None, math.nan, 0.2, patience=2)
    assert run.run().steps_done == 4
    assert "step 2: the evaluation has no eval/reward" in caplog.text
    assert run.controller.parts.best.state.without_gain == 1
    assert steps_of(tmp_path) == [1, 4]


def test_a_best_checkpoint_that_is_not_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = CheckpointStore.commit

    def failing(self: CheckpointStore, path: Path, state: dict[str, Any]) -> Any:
        if path.name.endswith("2"):
            raise CheckpointError(28, "no space left", str(path))
        return commit(self, path, state)

    monkeypatch.setattr(CheckpointStore, "commit", failing)
    run_of(tmp_path, 0.1, 0.3, 0.5, 0.2, best={"metric": "eval/reward", "keep": 2}).run()
    assert steps_of(tmp_path) == [1, 3]
    assert best_step(tmp_path / "checkpoints") == 1


def test_a_run_without_best_has_no_best_checkpoint(tmp_path: Path) -> None:
    run_of(tmp_path, 0.1, 0.3, best=None).run()
    with pytest.raises(CheckpointError, match=r"keeps no best checkpoint \(checkpoint\.best\)"):
        best_step(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        best_step(tmp_path / "nothing")


def test_states_of_earlier_versions_have_no_best_evaluations() -> None:
    assert BestState.model_validate(states_of({"memory": {"kl_old_coef": 0.5}})["best"]) == BestState()


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["max", "min"]),
)
def test_the_state_after_any_evaluations(values: list[float], keep: int, mode: Any) -> None:
    """Against a sort of all of them."""
    state = BestState().of(BestConfig(metric="m", mode=mode, keep=keep))
    for step, value in enumerate(values):
        state = state.seen(step, value, keep)
    sign = 1 if mode == "max" else -1
    ranked: list[tuple[float, int]] = sorted((-sign * value, step) for step, value in enumerate(values) if step)
    assert [one.step for one in state.steps] == [step for _, step in ranked[:keep]]
    assert state.value == sign * max(sign * value for value in values)
    first: Mapping[float | None, int] = {value: step for step, value in reversed([*enumerate(values)])}
    assert state.without_gain == len(values) - 1 - first[state.value]


def test_a_best_step_that_cannot_be_saved_does_not_cost_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = CheckpointStore.commit

    def full(store: CheckpointStore, path: Path, state: dict[str, Any]) -> Checkpoint:
        if state["step"] == 2:
            store.discard(path)
            raise CheckpointError(errno.ENOSPC, "no space left", str(path))
        return commit(store, path, state)

    monkeypatch.setattr(CheckpointStore, "commit", full)
    run_of(tmp_path, 0.1, 0.5, 0.6, 0.4, 0.3).run()
    assert steps_of(tmp_path) == [1, 4]
    assert best_step(tmp_path / "checkpoints") == 1


def test_evaluations_that_were_made_otherwise_are_not_compared(tmp_path: Path) -> None:
    """A harder set, or another reward, would keep a step the best one for ever."""
    config = BestConfig(metric="eval/reward")
    state = BestState().of(config, "a").seen(1, 0.8, keep=1)
    assert state.of(config, "a") == state and state.of(config) == state
    assert state.of(config, "b") == BestState(metric="eval/reward", held_out="b")
    known = state.of(config, "a", "rows")  # a checkpoint of an earlier version does not say on which rows
    assert known == state.model_copy(update={"rows": "rows"}) and known.of(config, "a", "rows") == known
    assert known.of(config, "a", "others").steps == ()
    run, other = run_of(tmp_path, 0.1, 0.2), run_of(tmp_path, 0.1, 0.2, every_steps=1)
    assert evaluation_digest(run.spec) == evaluation_digest(other.spec)
    changed = run.spec.model_copy(update={"evaluation": run.spec.evaluation.model_copy(update={"prompts": 3})})  # type: ignore[union-attr]
    assert evaluation_digest(changed) != evaluation_digest(run.spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"stop": ["."]}},
        {"sampling": {"structured": {"regex": "a+"}}},
        {"data": {"held_out": False}},
        {"model": {"chat_template": "none"}},
        {"roles": {"environment": {"name": "guess_number"}}},
    ],
)
def test_whatever_changes_evaluations_makes_them_incomparable(changes: Any) -> None:
    assert evaluation_digest(fake_spec(**changes)) != evaluation_digest(fake_spec())


def test_what_the_policy_sees_of_an_environment_decides_its_results() -> None:
    """Digests of runs with the default are those of earlier versions."""
    game = {"name": "guess_number"}
    digests = [
        evaluation_digest(fake_spec(roles={"environment": game | {"max_observation_chars": most}}))
        for most in (5, 6, 20_000)
    ]
    assert len({*digests}) == 3
    assert digests[2] == evaluation_digest(fake_spec(roles={"environment": game}))
    assert evaluation_digest(named(most=5)) != evaluation_digest(named())
    assert "max_observation_chars" not in plays_and_judges(named(), held_out_sets(named())[0])["played_in"]


def test_how_long_a_reward_may_take_is_no_other_reward() -> None:
    """A longer timeout forgets no best checkpoint."""

    def spec(timeout_s: float) -> RolloutSpec:
        functions = [{"name": "letter_share", "timeout_s": timeout_s}]
        held_out = {"a": {"kind": "jsonl", "path": "e", "rewards": functions}, "b": {"kind": "jsonl", "path": "e"}}
        return fake_spec(data={"eval": held_out}, evaluation={}, roles={"reward": {"functions": functions}})

    one, other = spec(5.0), spec(99.0)
    assert evaluation_digest(one) == evaluation_digest(other)
    assert reward_digest(one) == reward_digest(other)
    pool: Any = SimpleNamespace(digest="rows")
    sets = [described_sets(each, {"eval.a": pool, "eval.b": pool}) for each in (one, other)]
    assert sets[0] != sets[1] and settings_of(sets[0]) == settings_of(sets[1])


def named(
    high: int = 10, question: str = "is {response} right?", judge: str = "judge", spare: int = 1, most: int = 20_000
) -> Any:
    """A spec with a held-out set in a named environment and another one that a judge scores."""
    games = {"name": "guess_number", "args": {"high": high}, "max_observation_chars": most}
    train = [{"name": "a", "kind": "jsonl", "path": "t", "environment": "games", "rewards": [{"name": "environment"}]}]
    held_out = {"games": train[0] | {"path": "e"}, "plain": {"kind": "jsonl", "path": "e"}}
    del held_out["games"]["name"]
    spare_game = {"name": "guess_number", "args": {"low": spare}}
    return fake_spec(
        data={"train": [*train, train[0] | {"name": "b", "environment": "spare"}], "eval": held_out},
        evaluation={"every_steps": 1},
        roles={
            "environment": {"games": games, "spare": spare_game},
            "judge": {"model": {"path": judge}},
            "reward": {"functions": [{"name": "judge", "args": {"question": question}}]},
        },
    )


def test_the_environment_and_the_judge_of_a_held_out_set_decide_its_results() -> None:
    """An environment that only training plays in does not."""
    spec = named()
    assert evaluation_digest(named(spare=2)) == evaluation_digest(spec)
    for changed in (named(high=20), named(judge="other"), named(question="is {response} short?")):
        assert evaluation_digest(changed) != evaluation_digest(spec)
    games, plain = held_out_sets(spec)
    assert plays_and_judges(spec, games)["played_in"]["args"] == {"high": 10}
    assert plays_and_judges(spec, plain)["judged_by"]["model"]["path"] == "judge"
    assert "judged_by" not in plays_and_judges(spec, games) and "played_in" not in plays_and_judges(spec, plain)


def rewarded_by(model: Path) -> RolloutSpec:
    held_out = {"a": {"kind": "jsonl", "path": "e"}}
    return fake_spec(
        data={"eval": held_out}, evaluation={}, roles={"reward": {"functions": [], "model": {"path": str(model)}}}
    )


@pytest.mark.parametrize("make", [rewarded_by, lambda model: named(judge=str(model))])
@pytest.mark.parametrize("changed", ["config.json", "model.safetensors"])
def test_other_content_at_the_same_path_makes_results_incomparable(
    make: Callable[[Path], RolloutSpec], changed: str, tmp_path: Path
) -> None:
    """A judge or reward model that was trained further in its place. Large files are read in blocks all over them."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    pool: Any = SimpleNamespace(digest="rows")
    pools: dict[str, Any] = dict.fromkeys(["eval.a", "eval.games", "eval.plain"], pool)

    def digests() -> tuple[str, ...]:
        spec = make(tmp_path)
        return evaluation_digest(spec), reward_digest(spec), settings_of(described_sets(spec, pools))

    before = digests()
    os.utime(weights, (0, 0))
    assert digests() == before
    (tmp_path / "config.json").write_text("[]" if changed == "config.json" else "{}")
    if changed == "model.safetensors":
        weights.write_bytes(bytes(1 << 20) + bytes(reversed(range(256))) * (1 << 12) + bytes(1 << 20))
    assert all(now != then for now, then in zip(digests(), before, strict=True))


def test_the_content_of_a_chat_template_is_part_of_how_a_run_evaluates(tmp_path: Path) -> None:
    template, digests = tmp_path / "chat.jinja", set[str]()
    for text in ("{{ a }}", "{{ b }}"):
        template.write_text(text)
        digests.add(evaluation_digest(fake_spec(model={"chat_template": str(template)})))
    assert len(digests) == 2


def test_the_digest_of_evaluations_is_that_of_earlier_versions() -> None:
    """Checkpoints hold it: with another one a resumed run would forget its best steps."""
    spec = fake_spec(sampling={"temperature": 0.5}, roles={"rollout": {"workers": 2}})
    of_functions = RewardFunctionConfig.model_fields.keys() - {"normalize"}
    fields: Any = {
        "data": {"eval"},
        "evaluation": {"prompts", "sampling", "solved_at"},
        "sampling": {"max_tokens"},
        "roles": {"reward": {"functions": {"__all__": of_functions}, "model": True, "model_weight": True}},
    }
    content = json.dumps(spec.model_dump(mode="json", include=fields), sort_keys=True)
    assert evaluation_digest(spec) == hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
