"""A resumed run samples nothing again that was finished, wherever it was stopped; damaged pieces are left out."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fakes import FakeTable, FaultyEngine, fake_spec
from tests.orchestrator import test_controller
from tests.orchestrator.test_controller import RolloutRun, WritingReward
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.rollouts import kept_samples, source
from troupe.orchestrator.rollouts.kept_samples import GROUPS, fingerprint, read_samples
from troupe.orchestrator.training.checkpoint import MANIFEST, SAMPLES, Checkpoint, CheckpointStore, verify
from troupe.workers.contract.messages import FinishedSamples, GroupRequest, GroupSummary, SampleSummary

SLOW: dict[str, Mapping[str, Any]] = {
    "schedule": {"steps": 6, "prompts_per_step": 3, "max_staleness": 2, "step_timeout_s": 60.0},
    "checkpoint": {"every_steps": 1},
}
GROUP_SIZE = 4


class OneByOne(FaultyEngine):
    """Finishes the samples of a group one after another, as an engine does, and counts them."""

    def __init__(self, name: str, rng: random.Random, stop: asyncio.Event) -> None:
        super().__init__(name, rng)
        self.rng = rng
        self.stop = stop
        self.ended = False
        """Whether it has answered for the last time: the run saves and exits."""
        self.sampled: Counter[tuple[str, int]] = Counter()
        """How often each sample (prompt_uid, sample_index) was finished."""
        self.running: dict[GroupRequest, list[SampleSummary]] = {}

    async def generate(
        self, request: GroupRequest, prompts: object, finished: FakeTable | None = None
    ) -> tuple[GroupSummary, FakeTable]:
        assert (finished is None) == (not request.finished)
        assert finished is None or (finished.kind == "rollouts" and request.prompt_uid in finished.uids)
        return await self._sample(request)

    async def finished_samples(self) -> tuple[tuple[FinishedSamples, ...], FakeTable]:
        self.ended = self.stop.is_set()
        found = tuple(FinishedSamples(r.prompt_uid, r.attempt, tuple(done)) for r, done in self.running.items() if done)
        return found, FakeTable("rollouts", tuple(one.prompt_uid for one in found))

    async def _sample(self, request: GroupRequest) -> tuple[GroupSummary, FakeTable]:
        done = self.running[request] = list(request.finished)
        try:
            for index in request.missing:
                oldest = self.version
                await asyncio.sleep(self.rng.expovariate(1 / self.mean_s))
                if self.ended:
                    await asyncio.sleep(3600)
                done.append(SampleSummary(index, 10, 5, "stop", oldest, self.version))
                self.sampled[request.prompt_uid, index] += 1
        finally:
            del self.running[request]
        samples = tuple(sorted(done, key=lambda sample: sample.sample_index))
        table = FakeTable("rollouts", (request.prompt_uid,), request.attempt, (0, 0), request.samples)
        return GroupSummary(request.prompt_uid, request.attempt, self.name, samples, 0.0), table


def slow_run(out: Path, seed: int, resume: bool = False, **sections: Mapping[str, Any]) -> RolloutRun:
    run = RolloutRun(out, 1, resume, **(SLOW | sections))
    run.engines = [OneByOne(f"rollout-{i}", random.Random(10 * seed + i), run.stop) for i in range(2)]
    return run


def sampled(*runs: RolloutRun) -> Counter[tuple[str, int]]:
    """How often each sample was finished, over several runs."""
    engines = [engine for run in runs for engine in run.engines if isinstance(engine, OneByOne)]
    return sum((engine.sampled for engine in engines), Counter[tuple[str, int]]())


def stop_after(run: RolloutRun, samples: int) -> RunOutcome:
    """Run, and ask it to stop once so many samples are finished."""

    async def stopped() -> RunOutcome:
        controller = await run.start()
        running = asyncio.create_task(controller.run())
        while sampled(run).total() < samples:
            await asyncio.sleep(0.001)
        run.stop.set()
        return await running

    return asyncio.run(stopped())


def newest(out: Path) -> Checkpoint:
    found = CheckpointStore(out / "checkpoints", 2).latest()
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_finished_sample_is_sampled_again_wherever_a_run_is_stopped(tmp_path: Path, seed: int) -> None:
    """The run is stopped at random moments, three times; then it finishes."""
    rng, runs = random.Random(seed), list[RolloutRun]()
    for number in range(3):
        run = slow_run(tmp_path, 3 * seed + number, resume=number > 0)
        stop_after(run, rng.randint(1, 15))
        runs.append(run)
    last = slow_run(tmp_path, 99, resume=True)
    outcome = last.run()
    assert outcome.steps_done == 6
    counts = sampled(*runs, last)
    assert set(counts.values()) == {1}
    assert len(counts) == 6 * 3 * GROUP_SIZE == outcome.ledger["trained"] == outcome.ledger["dispatched"]
    assert max(line["staleness/max"] for line in last.lines()) <= 2


class TurnByTurn(OneByOne):
    """Finishes no sample before the run stops, but turns of all."""

    def __init__(self, name: str, rng: random.Random, stop: asyncio.Event) -> None:
        super().__init__(name, rng, stop)
        self.given: dict[str, FakeTable | None] = {}

    async def generate(
        self, request: GroupRequest, prompts: object, finished: FakeTable | None = None
    ) -> tuple[GroupSummary, FakeTable]:
        if not request.finished:  # else the group was finished, but not scored yet
            self.given.setdefault(request.prompt_uid, finished)
        return await self._sample(request)

    async def finished_samples(self) -> tuple[tuple[FinishedSamples, ...], FakeTable]:
        self.ended = self.stop.is_set()
        found = tuple(FinishedSamples(request.prompt_uid, request.attempt, (), turns=2) for request in self.running)
        return found, FakeTable("rollouts", tuple(one.prompt_uid for one in found))


def test_the_turns_of_episodes_that_nobody_finished_go_on_in_the_resumed_run(tmp_path: Path) -> None:
    runs = [slow_run(tmp_path, 0), slow_run(tmp_path, 1, resume=True)]
    for number, run in enumerate(runs):
        run.engines = [TurnByTurn(f"rollout-{i}", random.Random(10 * number + i), run.stop) for i in range(2)]
    stop_after(runs[0], 3 * GROUP_SIZE)
    kept = json.loads((newest(tmp_path).path / SAMPLES / GROUPS).read_text())["groups"]
    open_groups = {group["prompt_uid"] for group in kept if group["finished"] and group["finished"]["turns"]}
    assert open_groups and runs[1].run().ledger["trained"] == 6 * 3 * GROUP_SIZE
    given = {uid: table for engine in runs[1].engines for uid, table in cast(TurnByTurn, engine).given.items()}
    assert {uid for uid, table in given.items() if table is not None} == open_groups
    assert all(uid in table.uids for uid, table in given.items() if table is not None)


def test_a_resumed_run_names_why_a_kept_sample_has_no_reward(tmp_path: Path) -> None:
    """A model without a finite score of it, and not a reward function."""
    outcomes, written = list[RunOutcome](), WritingReward()
    for resume in (False, True):
        run = slow_run(tmp_path, 3, resume, failures={"max_failed_fraction": 1.0})
        run.change(output={"trajectories": True})
        run.reward = written
        run.policies[0].not_finite = {(f"e{epoch}-r{row}", 1): "inf" for epoch in range(9) for row in range(30)}
        outcomes.append(run.run() if resume else stop_after(run, 5 * 3 * GROUP_SIZE))
    assert run.taken_over > 0
    assert outcomes[1].drop_reasons == {"policy: inf": 6 * 3}
    assert [len(unscored) for unscored in written.unscored] == [3] * 6


def test_a_run_that_keeps_none_samples_them_again(tmp_path: Path) -> None:
    """What the test above would find without kept samples; the counts of the ledger are right there too."""
    run = slow_run(tmp_path, 0, checkpoint={"every_steps": 1, "samples_mib": 0})
    stop_after(run, 2 * 3 * GROUP_SIZE - 1)
    again = slow_run(tmp_path, 1, resume=True, checkpoint={"every_steps": 1, "samples_mib": 0})
    outcome = again.run()
    assert again.taken_over == 0 and not (newest(tmp_path).path / SAMPLES).exists()
    assert max(sampled(run, again).values()) == 2
    assert outcome.ledger["trained"] == 6 * 3 * GROUP_SIZE


def killed_after(run: RolloutRun, samples: int) -> None:
    """Run, and end it once so many samples are finished: nothing is saved then, as after SIGKILL."""

    async def killed() -> None:
        controller = await run.start()
        task = asyncio.create_task(controller.run())
        while sampled(run).total() < samples:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(killed())


def killed_and_resumed(out: Path, seed: int, **checkpoint: Any) -> tuple[int, int]:
    """Kills a run at a random moment and resumes it.

    Returns:
        Samples that were finished and sampled again, and those that the checkpoint had kept; checks both.
    """
    steps, fields = 12, {"every_steps": 1, **checkpoint}
    schedule, per_step = {**SLOW["schedule"], "steps": steps}, 3 * GROUP_SIZE
    first = slow_run(out, seed, checkpoint=fields, schedule=schedule)
    for policy in first.policies:  # updates take longer than sampling: groups wait for their batch
        policy.update_s = 0.03
    killed_after(first, random.Random(seed).randint(4 * per_step, 9 * per_step))
    found, before, kept = newest(out), set(sampled(first)), set[tuple[str, int]]()
    if (groups := found.path / SAMPLES / GROUPS).exists():
        for group in json.loads(groups.read_text())["groups"]:
            finished = (group["finished"] or group["summary"])["samples"]
            kept |= {(group["prompt_uid"], sample["sample_index"]) for sample in finished}
    again = slow_run(out, seed + 1000, resume=True, checkpoint=fields, schedule=schedule)
    assert again.run().ledger["trained"] == steps * per_step
    assert again.taken_over == len(kept) and kept <= before
    thrown = before & set(sampled(again))
    assert not kept & thrown and max(sampled(first, again).values()) <= 2
    assert len(thrown) == len(before) - found.step * per_step - len(kept)
    return len(thrown), len(kept)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_kill_throws_away_only_what_was_finished_after_the_last_checkpoint(
    tmp_path: Path, *, async_save: bool
) -> None:
    """At random moments of a run whose engines are ahead; without kept samples, all open groups are sampled again."""
    found = [killed_and_resumed(tmp_path / f"{seed}", seed, async_save=async_save) for seed in range(4)]
    assert sum(kept for _, kept in found) > 0
    _, none = killed_and_resumed(tmp_path / "none", 4, async_save=async_save, samples_mib=0)
    assert none == 0


def stopped_run(out: Path, table: str = "rollouts", *, critic: bool = False) -> tuple[RolloutRun, Checkpoint]:
    """A run that was stopped with finished samples, and a table of this kind, in its newest checkpoint."""
    for seed in range(20):
        run = slow_run(out / str(seed), seed, roles={"critic": {}} if critic else {})
        stop_after(run, 20 + seed)
        found = newest(run.out)
        groups = found.path / SAMPLES / GROUPS
        if groups.exists() and any(table in group["tables"] for group in json.loads(groups.read_text())["groups"]):
            return run, found
    raise AssertionError(f"no checkpoint had {table} of open groups")


def test_a_stop_adds_samples_to_a_checkpoint_that_is_written_already(tmp_path: Path) -> None:
    """Only samples, state and manifest are new: the trainers' files are the same files."""
    run, found = stopped_run(tmp_path)
    kept = json.loads((found.path / SAMPLES / GROUPS).read_text())["groups"]
    assert kept and verify(found.path).damaged == frozenset()
    counts = sampled(run)
    trained = 3 * found.step * GROUP_SIZE
    in_checkpoint = sum(len((group["finished"] or group["summary"])["samples"]) for group in kept)
    assert in_checkpoint == counts.total() - trained


@pytest.mark.parametrize("damage", ["a byte", "missing", "groups.json"])
def test_a_damaged_piece_is_left_out_with_a_message(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, found = stopped_run(tmp_path)
    folder = found.path / SAMPLES
    groups = json.loads((folder / GROUPS).read_text())["groups"]
    victim = folder / (GROUPS if damage == "groups.json" else next(iter(groups[0]["tables"].values()))["file"])
    if damage == "missing":
        victim.unlink()
    else:
        content = victim.read_bytes()
        victim.write_bytes(content[:10] + bytes([content[10] ^ 1]) + content[11:])
    assert newest(run.out).damaged == {f"{SAMPLES}/{victim.name}"}
    again = slow_run(run.out, 99, resume=True)
    outcome = again.run()
    total = sum(len((group["finished"] or group["summary"])["samples"]) for group in groups)
    assert again.taken_over < total and f"{victim.name} is damaged" in caplog.text
    assert outcome.ledger["trained"] == 6 * 3 * GROUP_SIZE


@pytest.mark.parametrize("columns", [1, ["prompt_uid"]])
def test_samples_with_the_columns_of_another_version_are_sampled_again(
    tmp_path: Path, columns: object, caplog: pytest.LogCaptureFixture
) -> None:
    run, found = stopped_run(tmp_path)
    file = found.path / SAMPLES / GROUPS
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": columns}))
    assert asyncio.run(read_samples(found, run.spec, cast("Any", None))) == []
    assert "another version of Troupe" in caplog.text


@pytest.mark.parametrize(
    ("sections", "usable"),
    [
        ({"sampling": {"temperature": 0.5}}, False),
        ({"roles": {"reward": {"functions": [{"name": "exact_match", "weight": 2.0}]}}}, False),
        ({"roles": {"reward": {"workers": 2, "functions": [{"name": "exact_match"}]}}}, True),
        ({"output": {"replay_steps": 3}}, True),
    ],
)
def test_samples_of_another_sampling_or_reward_are_not_used(sections: dict[str, Any], usable: bool) -> None:
    roles = {"rollout": {}, "policy": {}} | sections.pop("roles", {})
    changed = fake_spec(**sections, roles={"reward": {"functions": [{"name": "exact_match"}]}} | roles)
    assert (fingerprint(changed) == fingerprint(fake_spec())) is usable


def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """It has neither samples nor counts of the scheduler."""
    run, found = stopped_run(tmp_path)
    store = CheckpointStore(run.out / "checkpoints", 2)
    path = store.begin(found.step)
    for folder in ("policy", "model"):
        (found.path / folder).rename(path / folder)
    del found.state["source"]["scheduler"]
    store.commit(path, found.state)
    assert not (found.path / SAMPLES).exists() and (found.path / MANIFEST).exists()
    again = slow_run(run.out, 99, resume=True)
    assert again.run().ledger["trained"] == 6 * 3 * GROUP_SIZE
    assert again.taken_over == 0


def test_a_resumed_run_with_a_smaller_staleness_limit_keeps_to_it(tmp_path: Path) -> None:
    """What would be too old by the time of its batch is sampled again, and groups wait for the slots that are left."""
    run, found = stopped_run(tmp_path)
    again = slow_run(run.out, 99, resume=True, schedule={**SLOW["schedule"], "max_staleness": 0})
    outcome = again.run()
    assert outcome.ledger["trained"] == outcome.ledger["dispatched"] == 6 * 3 * GROUP_SIZE
    assert {line["staleness/max"] for line in again.lines() if line["step"] > found.step} == {0}


def test_values_of_kept_groups_are_those_of_the_critic_that_trains_on_them(tmp_path: Path) -> None:
    run, found = stopped_run(tmp_path, "rewards", critic=True)
    again = slow_run(run.out, 99, resume=True, roles={"critic": {}})
    again.run()
    assert again.taken_over > 0
    for one, steps in ((run, found.step), (again, 6 - found.step)):  # the fakes count from each start
        batches = [list(batch.values()) for batch in one.policies[0].values]
        assert batches == [[[step]] * 3 for step in range(steps)]


def test_groups_whose_values_an_earlier_version_kept_are_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scored them during generation, with critics that have trained since."""
    with monkeypatch.context() as earlier:
        for module in (test_controller, source, kept_samples):
            earlier.setattr(module, "values_at_batch", lambda _: False)
        run, _ = stopped_run(tmp_path, "values", critic=True)
    again = slow_run(run.out, 99, resume=True, roles={"critic": {}})
    assert again.run().ledger["trained"] == 6 * 3 * GROUP_SIZE
    assert again.taken_over == 0
    assert all(len(versions) == 1 for batch in again.policies[0].values for versions in batch.values())


def test_samples_that_another_model_in_the_same_folder_has_scored_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("one")
    reward = {"functions": [{"name": "judge"}], "model": {"path": str(tmp_path)}}
    by_model = fake_spec(roles={"rollout": {}, "policy": {}, "reward": reward})
    judge = {"model": {"path": str(tmp_path)}}
    by_judge = fake_spec(
        roles={"rollout": {}, "policy": {}, "reward": {"functions": [{"name": "judge"}]}, "judge": judge}
    )
    before = [fingerprint(spec) for spec in (by_model, by_judge)]
    assert before == [fingerprint(spec) for spec in (by_model, by_judge)]
    (tmp_path / "model.safetensors").write_text("two")
    assert not {*before} & {fingerprint(spec) for spec in (by_model, by_judge)}
