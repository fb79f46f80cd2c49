"""Runs on a mixture of sources against fakes: what each source is sampled and scored with, counts and resumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakePolicy, FakeTable, FaultyReward
from tests.orchestrator.data.test_prompts import pool_of
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.data.mixture import prompt_order
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.runs.checkpoints import after_round
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.training import updates
from troupe.orchestrator.training.micro_batches import plan_update
from troupe.workers.contract.messages import PrepareRequest, RankPlan, RewardSummary, ScoreSummary, TrainSummary

STEPS, GROUPS = 6, 5
TRAIN: list[dict[str, Any]] = [
    {"name": "math", "kind": "jsonl", "path": "m.jsonl", "weight": 3.0, "group_size": 6, "solved_at": 1.0},
    {
        "name": "chat",
        "kind": "jsonl",
        "path": "c.jsonl",
        "weight": 1.0,
        "rewards": [{"name": "length"}],
        "max_tokens": 7,
    },
]
SIZES = {"math": 6, "chat": 4}


class BySource(FaultyReward):
    """Half of the samples of math are solved; those of chat earn 10 and 30. Fails sample 0 of every chat-e0 group."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, str] = {}
        """Name of the reward functions, by group."""

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        uid = rollouts.uids[0]
        self.asked[uid] = rewards
        math = uid.startswith("math")
        values: list[float | None] = [float(i % 2) if math else 10.0 + 20.0 * (i % 2) for i in range(rollouts.samples)]
        statuses = ["ok"] * rollouts.samples
        if uid.startswith("chat-e0"):
            values[0], statuses[0] = None, "it failed"
        components = {"exact_match" if math else "length": tuple(values)}
        return RewardSummary(uid, rollouts.attempt, tuple(statuses), tuple(values), components), FakeTable(
            "rewards", (uid,)
        )


def run_of(
    out: Path, *, resume: bool = False, staleness: int = 0, curriculum: dict[str, Any] | None = None
) -> RolloutRun:
    run = RolloutRun(
        out,
        resume=resume,
        data={"train": TRAIN, "curriculum": curriculum},
        schedule={"steps": STEPS, "max_staleness": staleness},
        checkpoint={"every_steps": 1},
    )
    run.reward = BySource()
    run.mixed_rows = (9, 5)
    return run


def parts_of(*rows: int) -> Pool:
    """A pool of the sources, as a run has it."""
    return replace(pool_of(sum(rows)), parts=dict(zip(SIZES, map(pool_of, rows), strict=True)))


def trained(run: RolloutRun) -> list[list[str]]:
    """Groups of every batch, in order."""
    return [list(dict.fromkeys(uid for uid, _ in keep)) for keep in run.policies[0].prepared]


def of_machine(name: str) -> bool:
    return name.startswith(("seconds/", "utilisation/", "memory/")) or name.endswith("_per_s") or name == "time"


def lines(run: RolloutRun) -> list[dict[str, float]]:
    return [{name: v for name, v in line.items() if not of_machine(name)} for line in run.lines()]


def test_each_source_is_sampled_and_scored_as_it_says(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    outcome = run.run()
    batches = trained(run)
    names = [uid.partition("-")[0] for batch in batches for uid in batch]
    assert names.count("math") == pytest.approx(0.75 * STEPS * GROUPS, abs=1)
    assert isinstance(run.reward, BySource)
    asked = run.reward.asked
    assert {uid.partition("-")[0]: key for uid, key in asked.items()} == {"math": "", "chat": "data.train.1"}
    keep = [one for batch in run.policies[0].prepared for one in batch]
    for batch in batches:
        for uid in batch:
            source, failed = uid.partition("-")[0], uid.startswith("chat-e0")
            assert sum(own == uid for own, _ in keep) == SIZES[source] - failed
    requests = [request for engine in run.engines for request in engine.served]
    assert {request.prompt_uid.partition("-")[0]: request.max_tokens for request in requests} == {
        "math": None,
        "chat": 7,
    }
    samples = sum(SIZES[name] for name in names)
    assert outcome.ledger["dispatched"] == samples


class Student(FakePolicy):
    """Notes what it is taught: the tables of teachers of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[list[FakeTable]] = []
        self.weights: list[Mapping[str, Mapping[str, float]]] = []

    async def teacher_logprobs(self, plan: RankPlan, name: str, *rollouts: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        _, table = await super().teacher_logprobs(plan, name, *rollouts)
        return ScoreSummary(0, {("math-e0-r1", 2): "inf"} if "math-e0-r1" in table.uids else {}), table

    async def prepare(self, request: PrepareRequest, *tables: object) -> tuple[TrainSummary, FakeTable]:
        found = [table for table in tables if isinstance(table, FakeTable) and table.kind.startswith("teacher.")]
        self.lessons.append(found)
        self.weights.append(request.teachers)
        return await super().prepare(request, *tables)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_policy_teaches_the_samples_of_its_sources_before_the_updates_of_their_step(
    tmp_path: Path, staleness: int
) -> None:
    """One teacher has no finite score of a sample, which is dropped under its name."""
    run = run_of(tmp_path, staleness=staleness)
    roles = run.spec.roles.model_dump()
    roles["policy"]["ema_decay"] = 0.9
    roles["teacher"] = {
        "average": {"colocate_with": "policy", "average": True, "sources": ["math"]},
        "informed": {"colocate_with": "policy", "prompt": "{prompt}!", "sources": ["chat"]},
    }
    run.change(roles=roles, algorithm={"name": "gkd", "group_size": 4})
    student = Student()
    run.policies = [student]
    outcome = run.run()
    assert len(student.lessons) == STEPS and outcome.drop_reasons["teacher.average: inf"] == 1
    updates = len(student.learned) // STEPS
    for step, (tables, batch) in enumerate(zip(student.lessons, trained(run), strict=True)):
        taught = {table.kind: set(table.uids) for table in tables}
        by_source = {name: {uid for uid in batch if uid.startswith(name)} for name in ("math", "chat")}
        assert taught.get("teacher.average", set()) == by_source["math"]
        assert taught.get("teacher.informed", set()) == by_source["chat"]
        assert {table.versions for table in tables} == {(updates * step,)}


class Hearing(Student):
    """Of each group one sample has no feedback."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, list[tuple[int, int]]] = {}
        """(tables, groups) of each call, by teacher."""
        self.untaught: list[Mapping[str, frozenset[tuple[str, int]]]] = []

    async def teacher_logprobs(self, plan: RankPlan, name: str, *tables: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        groups = {uid for table in tables for uid in table.uids}
        self.heard.setdefault(name, []).append((len(tables), len(groups)))
        _, table = await FakePolicy.teacher_logprobs(self, plan, name, *tables)
        return ScoreSummary(0, untaught=tuple((uid, 1) for uid in dict.fromkeys(table.uids))), table

    async def prepare(self, request: PrepareRequest, *tables: object) -> tuple[TrainSummary, FakeTable]:
        self.untaught.append(request.untaught)
        return await super().prepare(request, *tables)


def test_samples_without_feedback_are_named_to_the_batch_for_their_teacher_alone(tmp_path: Path) -> None:
    """The teacher that reads feedback gets the rewards of its groups; they stay in the batch, without its loss."""
    run = run_of(tmp_path)
    roles = run.spec.roles.model_dump()
    roles["reward"]["functions"] = [{"name": "tests.fakes:speaks"}]
    roles["teacher"] = {
        "hears": {"colocate_with": "policy", "prompt": "{prompt} {feedback}", "sources": ["math"]},
        "plain": {"colocate_with": "policy", "prompt": "{prompt}!"},
    }
    run.change(roles=roles, algorithm={"name": "gkd", "group_size": 4})
    run.policies = [student := Hearing()]
    outcome = run.run()
    assert len(student.untaught) == STEPS and set(outcome.drop_reasons) == {"reward: it failed"}
    assert all(tables == 2 * groups for tables, groups in student.heard["teacher.hears"])
    assert all(tables == groups for tables, groups in student.heard["teacher.plain"])
    for untaught, batch in zip(student.untaught, trained(run), strict=True):
        assert untaught == {"teacher.hears": {(uid, 1) for uid in batch if uid.startswith("math")}}


def test_a_source_without_a_teacher_is_trained_beside_one_that_has_one(tmp_path: Path) -> None:
    """The batch says so, also one without a taught sample: with no word of teachers the reference would be one."""
    run = run_of(tmp_path)
    itself = {"colocate_with": "policy", "prompt": "{prompt}!", "sources": ["chat"], "weight": 0.5}
    roles = run.spec.roles.model_dump() | {"teacher": {"itself": itself}}
    run.change(roles=roles, algorithm={"name": "grpo", "group_size": 4, "distill": {"coef": 1.0, "k": 8}})
    run.policies = [student := Student()]
    run.run()
    assert len(student.weights) == STEPS
    for tables, weights, batch in zip(student.lessons, student.weights, trained(run), strict=True):
        assert weights == {uid: {"teacher.itself": 0.5} if uid.startswith("chat") else {} for uid in batch}
        assert {uid for table in tables for uid in table.uids} == {uid for uid in batch if uid.startswith("chat")}
    taught = [any(weights.values()) for weights in student.weights]
    assert any(taught) and len({uid for weights in student.weights for uid in weights}) == STEPS * GROUPS


def test_samples_of_a_source_are_episodes_unless_it_says_otherwise(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.change(data={"train": [TRAIN[0], TRAIN[1] | {"environment": "none"}]})
    run.change(roles={**run.spec.roles.model_dump(), "environment": {"name": "guess_number"}})
    run.run()
    requests = [request for engine in run.engines for request in engine.served]
    asked = {(request.prompt_uid.partition("-")[0], request.environment) for request in requests}
    assert asked == {("math", ""), ("chat", None)}


def test_samples_of_a_source_are_episodes_in_the_environment_that_it_names(tmp_path: Path) -> None:
    """So are those of a held-out set; the others are single responses."""
    run = run_of(tmp_path)
    environments = {"guess": {"name": "guess_number"}, "single": {"name": "single_turn"}}
    run.change(roles={**run.spec.roles.model_dump(), "environment": environments})
    held_out = {"kind": "jsonl", "path": "e.jsonl"}
    sets = {"hard": held_out | {"environment": "single"}, "easy": held_out}
    run.change(data={"train": [TRAIN[0] | {"environment": "guess"}, TRAIN[1]], "eval": sets})
    run.run()
    requests = [request for engine in run.engines for request in engine.served]
    asked = {(request.prompt_uid.partition("-")[0], request.environment) for request in requests}
    assert asked == {("math", "guess"), ("chat", None)}
    assert {one.name: one.environment for one in held_out_sets(run.spec)} == {"hard": "single", "easy": None}


def test_metrics_are_reported_by_source(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    batches, counts = trained(run), {name: {"dispatched": 0, "trained": 0, "dropped": 0} for name in SIZES}
    for number, (line, batch) in enumerate(zip(run.lines(), batches, strict=True)):
        for name, size in SIZES.items():
            own = [uid for uid in batch if uid.startswith(name)]
            failed = sum(uid.startswith("chat-e0") for uid in own)
            counts[name]["trained"] += len(own) * size - failed
            assert line[f"source/{name}/share"] == len(own) / GROUPS
            assert line[f"source/{name}/trained"] == counts[name]["trained"]
        assert line["source/math/reward"] == line["source/math/pass_rate"] == 0.5
        assert "source/chat/pass_rate" not in line
        chat = [uid for uid in batch if uid.startswith("chat")]
        if chat:
            values = [v for uid in chat for v in ([30.0, 10.0, 30.0] if "-e0" in uid else [10.0, 30.0, 10.0, 30.0])]
            assert line["source/chat/reward"] == pytest.approx(sum(values) / len(values))
            assert line["reward/length/mean"] == pytest.approx(sum(values) / len(values))
        assert line["reward/exact_match/mean"] == 0.5
        total = {what: sum(line[f"source/{name}/{what}"] for name in SIZES) for what in ("dispatched", "dropped")}
        # Slots of the next step are opened before the metrics of this one are written.
        assert total["dispatched"] == line["ledger/dispatched"]
        assert total["dropped"] == line["ledger/dropped"]
        assert number < STEPS
    last = run.lines()[-1]
    assert last["source/chat/dispatched"] == last["source/chat/trained"] + last["source/chat/dropped"]
    assert last["source/chat/dropped"] > 0 and last["source/math/dropped"] == 0


@pytest.mark.parametrize("curriculum", [None, {"decay": 1.0, "solved_at": 30.0}])
def test_a_resumed_run_draws_and_counts_what_the_uninterrupted_run_did(
    tmp_path: Path, curriculum: dict[str, Any] | None
) -> None:
    whole = run_of(tmp_path / "whole", curriculum=curriculum)
    whole.run()
    first = run_of(tmp_path / "parts", curriculum=curriculum)
    first.run_until(3)
    second = run_of(tmp_path / "parts", resume=True, curriculum=curriculum)
    second.run()
    resumed_at = STEPS - len(trained(second))
    assert resumed_at >= 3
    assert trained(first)[:resumed_at] + trained(second) == trained(whole)
    ours = [{k: v for k, v in line.items() if k.startswith(("source/", "curriculum/"))} for line in lines(second)]
    theirs = [{k: v for k, v in line.items() if k.startswith(("source/", "curriculum/"))} for line in lines(whole)]
    assert ours == theirs


def test_asynchronous_runs_count_by_source_what_the_ledger_counts(tmp_path: Path) -> None:
    run = run_of(tmp_path, staleness=2)
    outcome = run.run()
    last = run.lines()[-1]
    for what in ("dispatched", "trained", "dropped"):
        assert sum(last[f"source/{name}/{what}"] for name in SIZES) == outcome.ledger[what]


@pytest.mark.parametrize("own", [True, False])
def test_truncated_samples_of_a_source_carry_no_loss_where_it_says_so(tmp_path: Path, own: bool) -> None:
    """The setting of a source is used in place of the algorithm's, either way."""
    run = run_of(tmp_path)
    run.change(algorithm={"mask_truncated": not own})
    run.change(data={"train": [TRAIN[0], TRAIN[1] | {"mask_truncated": own}]})
    for engine in run.engines:
        engine.truncated = frozenset({1})
    run.run()
    masked = [uid.partition("-")[0] for step in run.policies[0].masked for uid, _ in step]
    assert masked and set(masked) == {"chat" if own else "math"}
    for line, batch in zip(run.lines(), trained(run), strict=True):
        assert line["masked_samples"] == sum(uid.startswith("chat" if own else "math") for uid in batch)


def test_batch_statistics_are_taken_within_sources_unless_the_spec_says_otherwise(tmp_path: Path) -> None:
    run = run_of(tmp_path / "within")
    run.change(data={"train": [TRAIN[0], TRAIN[1] | {"algorithm": {"clip_high": 0.3}}]})
    run.run()
    policy = run.policies[0]
    for keep, sources, losses in zip(policy.prepared, policy.sources, policy.algorithms, strict=True):
        assert sources == {uid: uid.partition("-")[0] for uid, _ in keep}
        assert losses == {uid: source for uid, source in sources.items() if source == "chat"}
    over_all = run_of(tmp_path / "over")
    over_all.change(algorithm={"by_source": False})
    over_all.run()
    assert over_all.policies[0].sources == over_all.policies[0].algorithms == [{}] * STEPS


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_rows_of_a_sample_stay_together_if_the_loss_of_a_source_needs_them(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[bool] = set()

    def noted(*args: Any, whole_samples: bool, **options: Any) -> list[RankPlan]:
        asked.add(whole_samples)
        return plan_update(*args, whole_samples=whole_samples, **options)

    run = run_of(tmp_path)
    run.change(data={"train": [TRAIN[0], TRAIN[1] | {"algorithm": {"loss": loss}}]}, algorithm={"kl_states": 0})
    monkeypatch.setattr(updates, "plan_update", noted)
    run.run()
    assert asked == {loss == "gspo"}


class OftenAlike(BySource):
    """The samples of every second row have equal rewards, which is no signal."""

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        summary, table = await super().score(rollouts, rewards, vote)
        if int(rollouts.uids[0].partition("-r")[2]) % 2:
            summary = replace(summary, rewards=(1.0,) * rollouts.samples, statuses=("ok",) * rollouts.samples)
        return summary, table


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_further_round_draws_none_of_the_prompts_that_were_replaced(tmp_path: Path, staleness: int) -> None:
    """The runs of two rounds draw together what one order draws, also if the first one draws more than it trains."""
    runs: list[RolloutRun] = []
    for number in (1, 2):
        run = run_of(tmp_path / str(number), staleness=staleness)
        run.change(algorithm={"dynamic_sampling": 50}, data={"skip": 3 if number == 1 else 3 + STEPS * GROUPS})
        if number == 2:
            run.spec = after_round(run.spec, tmp_path / "1")
        run.reward, run.mixed_rows = OftenAlike(), (90, 90)
        run.run()
        runs.append(run)
    first, second = (list(run.reward.asked) for run in runs if isinstance(run.reward, OftenAlike))
    assert len(first) > STEPS * GROUPS and runs[1].spec.data.skip == 3 + len(first)
    order = prompt_order(runs[0].spec, parts_of(90, 90))
    assert {*first, *second} == {order.next().prompt_uid for _ in range(len(first) + len(second))}
    assert len({*first, *second}) == len(first) + len(second)


def test_a_further_round_without_a_known_order_keeps_what_was_planned(tmp_path: Path) -> None:
    run = run_of(tmp_path, curriculum={"solved_at": 1.0})
    run.run()
    assert after_round(run.spec, tmp_path) is run.spec and after_round(run.spec, tmp_path / "none") is run.spec
