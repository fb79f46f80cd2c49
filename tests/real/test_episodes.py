"""Episodes on a real engine and real environment processes: exact tokens, one turn against the plain path, updates."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from tests.real.rollout_helpers import (
    chat,
    load_model,
    named_weights,
    perturb,
    prompt_table,
    reference_logprobs,
    rollout_config,
    sampling_config,
)
from troupe.workers.contract.config import EnvironmentConfig, EpisodeConfig
from troupe.workers.contract.environments import EnvironmentGone, EpisodeReply, Message, Observation, Row
from troupe.workers.contract.messages import ROLLOUTS, GroupRequest
from troupe.workers.environment import EnvironmentWorker
from troupe.workers.rollout import RolloutWorker
from troupe.workers.weights.file import WeightPublisher

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = prompt_table(chat("Name a colour."), chat("What is 2 + 3?"), chat("Count to ten, slowly."))
REQUEST = GroupRequest(prompt_uid="p0", row=0, attempt=2, samples=4, seed=11, environment="")
HERE = "tests.workers.agents.environments.misbehaving"
BOUNDS = EpisodeConfig(max_turns=4, truncated_turns="continue", turn_timeout_s=5.0, episode_timeout_s=60.0)


class LocalLink:
    """The link to one environment worker in this process, which may be replaced."""

    def __init__(self, worker: EnvironmentWorker) -> None:
        self.worker = worker
        self.open: set[asyncio.Task[None]] = set()

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        return "environment-0", await self.worker.begin(episode, row)

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        return await self.worker.step(episode, message)

    def end(self, worker: str, episode: str) -> None:
        task = asyncio.ensure_future(self.worker.end(episode))
        self.open.add(task)
        task.add_done_callback(self.open.discard)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tiny_model: Path) -> AsyncIterator[RolloutWorker]:
    """One engine for all tests of this file."""
    worker = RolloutWorker(rollout_config(tiny_model, 12).model_copy(update={"episodes": {"": BOUNDS}}), "rollout-0")
    await worker.start()
    yield worker
    await worker.close()


async def rows(
    worker: RolloutWorker,
    environment: str,
    bounds: EpisodeConfig = BOUNDS,
    request: GroupRequest = REQUEST,
    finished: pa.Table | None = None,
    **args: Any,
) -> list[dict[str, Any]]:
    """The rows of a group played in an environment; checks that the environment's processes end."""
    shared = bounds.model_dump()
    environments = EnvironmentWorker(
        EnvironmentConfig(name=environment, args=args, episodes=3, **shared), "environment-0"
    )
    await environments.start()
    before = worker.generation.config
    worker.generation.config = before.model_copy(update={"episodes": {"": bounds}})
    try:
        await worker.connect_environments("", LocalLink(environments))
        summary, table = await worker.generate(request, PROMPTS, finished)
        assert table.schema.equals(ROLLOUTS, check_metadata=True)
        assert [length for sample in summary.samples for length in sample.row_lengths] == [
            len(row["prompt_ids"]) + len(row["response_ids"]) for row in table.to_pylist()
        ]
        return table.to_pylist()
    finally:
        worker.generation.config = before
        pid = environments._processes.pid
        await environments.close()
        assert pid is not None and not psutil.pid_exists(pid)


async def test_one_turn_is_the_plain_path_bit_by_bit(worker: RolloutWorker) -> None:
    played = await rows(worker, "single_turn", EpisodeConfig())
    _, table = await worker.generate(replace(REQUEST, environment=None), PROMPTS)
    for own, plain in zip(played, table.to_pylist(), strict=True):
        assert json.loads(own.pop("conversation"))[-1] == {"role": "assistant", "content": plain["response"]}
        assert plain.pop("conversation") == ""
        for timing in ("generate_s", "first_token_s"):
            del own[timing], plain[timing]
        assert own == plain


async def test_an_interrupted_episode_continues_with_its_turns(
    worker: RolloutWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group is interrupted while the environment considers the second of three turns, and continues elsewhere."""
    gate, asked, three = tmp_path / "gate", list[int](), replace(REQUEST, samples=3)  # the environment holds three
    bounds = BOUNDS.model_copy(update={"turn_timeout_s": 60.0})
    sample = worker.generation._sample

    async def counted(request: GroupRequest, index: int, ids: list[int], limits: Any = None) -> Any:
        asked.append(limits.number)
        return await sample(request, index, ids, limits)

    monkeypatch.setattr(worker.generation, "_sample", counted)
    interrupted = asyncio.create_task(rows(worker, f"{HERE}:Gated", bounds, three, gate=str(gate)))
    while not (found := await worker.finished_samples())[0] or found[0][0].turns < 6:
        assert not interrupted.done()
        await asyncio.sleep(0.02)
    (progress,), table = found
    assert progress.samples == () and Counter(asked) == {0: 3, 1: 3}
    interrupted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await interrupted
    asked.clear()
    gate.touch()
    three = replace(three, attempt=3)
    again = await rows(worker, f"{HERE}:Gated", bounds, three, table, gate=str(gate))
    assert Counter(asked) == {2: 3}
    whole = await rows(worker, f"{HERE}:Gated", bounds, three, gate=str(gate))
    of_the_batch = ("generate_s", "first_token_s", "rollout_logprobs")  # the last to round-off
    assert [{k: v for k, v in row.items() if k not in of_the_batch} for row in again] == [
        {k: v for k, v in row.items() if k not in of_the_batch} for row in whole
    ]
    recorded = {(row["sample_index"], row["segment"]): row["rollout_logprobs"] for row in table.to_pylist()}
    for row in again:
        spans = [turn for turn in row["turns"] if turn["name"] == "assistant"][:2]
        for number, turn in enumerate(spans):
            own = row["rollout_logprobs"][turn["start"] : turn["end"]]
            assert own == recorded[row["sample_index"], number]


async def test_the_tokens_of_every_turn_are_those_that_the_engine_sampled(
    worker: RolloutWorker, tiny_model: Path
) -> None:
    """The whole row, rendered for transformers at once, gives the log-probs that vLLM gave turn by turn."""
    played = await rows(worker, f"{HERE}:Echo")
    model = load_model(tiny_model)
    for row in played:
        mask = torch.tensor(row["loss_mask"])
        assert [turn["name"] for turn in row["turns"]] == ["assistant", "environment"] * 2 + ["assistant"]
        assert mask.sum() == 36 and (~mask).sum() > 10
        expected = reference_logprobs(model, row, 0.7)
        assert torch.allclose(torch.tensor(row["rollout_logprobs"])[mask], expected[mask], atol=2e-4)
        assert torch.tensor(row["rollout_logprobs"])[~mask].count_nonzero() == 0
        assert [span["reward"] for span in row["turn_rewards"]] == [0.25, 0.25, 1.0]
        ends = [turn["end"] for turn in row["turns"] if turn["name"] == "assistant"]
        assert [span["end"] for span in row["turn_rewards"]] == ends
        covered = sorted(place for span in row["weight_versions"] for place in range(span["start"], span["end"]))
        assert covered == mask.nonzero().flatten().tolist()
    assert len({tuple(row["response_ids"]) for row in played}) == REQUEST.samples
    again = await rows(worker, f"{HERE}:Echo")
    assert [row["response_ids"] for row in again] == [row["response_ids"] for row in played], (
        "a seed gives the same turns"
    )


async def test_later_turns_compute_only_what_is_new(worker: RolloutWorker) -> None:
    summary = None
    environments = EnvironmentWorker(EnvironmentConfig(name=f"{HERE}:Echo", args={"turns": 4}), "environment-0")
    await environments.start()
    try:
        await worker.connect_environments("", LocalLink(environments))
        summary, _ = await worker.generate(replace(REQUEST, samples=1, seed=5), PROMPTS)
    finally:
        await environments.close()
    episode = summary.samples[0].episode
    assert episode is not None and episode.turns == 4
    # Blocks of 32 tokens: of every later prompt, all whole blocks of the turn before are in the cache.
    assert episode.cached_tokens > episode.engine_prompt_tokens / 2


async def test_the_choices_of_an_agents_request_are_rows_with_the_engines_tokens(
    worker: RolloutWorker, tiny_model: Path
) -> None:
    bounds = BOUNDS.model_copy(update={"turn_timeout_s": 30.0})
    args = {"function": "tests.workers.agents.environments.agents:three_choices"}
    played = await rows(worker, "agent", bounds, replace(REQUEST, samples=2), **args)
    assert [(row["sample_index"], row["segment"]) for row in played] == [(i, n) for i in range(2) for n in range(3)]
    assert {row["episode_status"] for row in played} == {"ok"}
    model = load_model(tiny_model)
    for row in played:
        expected = reference_logprobs(model, row, 0.7)
        assert torch.allclose(torch.tensor(row["rollout_logprobs"]), expected, atol=2e-4)
    assert len({tuple(row["prompt_ids"]) for row in played}) == 1, "all choices have the request's prompt"
    assert len({tuple(row["response_ids"]) for row in played}) == 6, "and are sampled independently"


async def test_a_call_that_a_request_forces_is_sampled_among_the_permitted_tokens(
    worker: RolloutWorker, tiny_model: Path
) -> None:
    bounds = BOUNDS.model_copy(update={"turn_timeout_s": 60.0})
    args = {"function": "tests.workers.agents.environments.agents:picks"}
    before = worker.generation.config
    worker.generation.config = before.model_copy(update={"turn_forms": True})
    try:
        played = await rows(worker, "agent", bounds, replace(REQUEST, samples=2), **args)
    finally:
        worker.generation.config = before
    model = load_model(tiny_model)
    for row in played:
        assert (row["episode_status"], row["segment"]) == ("ok", 0), "the result of a call continues the row"
        assert [span["reward"] for span in row["turn_rewards"]] == [1.0]
        forced, _, free = row["turns"]
        gained = torch.tensor(row["rollout_logprobs"]) - reference_logprobs(model, row, 0.7)
        assert (gained[forced["start"] : forced["end"]] > -2e-4).all(), "probabilities among fewer tokens are higher"
        assert gained[forced["start"] : forced["end"]].sum() > 1.0
        assert gained[free["start"] : free["end"]].abs().max() < 2e-4, "a turn without a form has the policy's own"
    refused = await rows(worker, "agent", bounds, replace(REQUEST, samples=1), **args)
    assert "set algorithm.importance.mode to truncate or mask" in refused[0]["episode_status"]


class Talk:
    """An environment of three turns, which updates the engine after the first turn of five episodes."""

    def __init__(self, update: Callable[[], Awaitable[object]]) -> None:
        self.update: Callable[[], Awaitable[object]] | None = update
        self.turns: Counter[str] = Counter()

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        return "environment-0", EpisodeReply(Observation(row.messages))

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        self.turns[episode] += 1
        if len(self.turns) == 5 and self.update is not None:
            update, self.update = self.update, None
            await update()
        if self.turns[episode] == 3:
            return EpisodeReply(Observation(done=True, reward=1.0))
        return EpisodeReply(Observation([{"role": "user", "content": "Go on."}]))

    def end(self, worker: str, episode: str) -> None:
        raise AssertionError(f"{episode} was cut short")


async def test_an_update_in_the_middle_of_episodes_records_the_version_of_every_token(
    worker: RolloutWorker, tiny_model: Path, tmp_path: Path
) -> None:
    """Turns before, across and after the update: every sampled token has the log-prob of its recorded version."""
    old, new = load_model(tiny_model), load_model(tiny_model)
    for kind in ("self_attn", "mlp", "embed_tokens"):
        perturb(new, kind)
    versions = iter((1, 2))

    async def load(model: PreTrainedModel) -> None:
        version = next(versions)
        publisher = WeightPublisher(lambda: named_weights(model), tmp_path, f"test-{version}")
        published = publisher.publish(version)
        assert published is not None
        await worker.update_weights(published)
        publisher.close()

    bounds = EpisodeConfig(max_turns=4, truncated_turns="continue", turn_timeout_s=60.0, episode_timeout_s=200.0)
    config = worker.generation.config
    worker.generation.config = config.model_copy(update={"episodes": {"": bounds}})
    try:
        await worker.connect_environments("", Talk(lambda: load(new)))
        with sampling_config(worker, max_tokens=240):
            # The last group is amid its first turn when five other episodes have ended theirs, and for long.
            lengths = enumerate((80, 80, 240))
            groups = [GroupRequest(f"p{n}", n, 0, samples=3, seed=n, environment="", max_tokens=m) for n, m in lengths]
            generated = await asyncio.gather(*(worker.generate(group, PROMPTS) for group in groups))
    finally:
        worker.generation.config = config
        await load(old)
    rows = [row for _, table in generated for row in table.to_pylist()]
    assert len(rows) == 9 and {row["episode_status"] for row in rows} == {"ok"}
    across = 0
    for row in rows:
        seen = torch.full((len(row["response_ids"]),), -1)
        for span in row["weight_versions"]:
            seen[span["start"] : span["end"]] = span["version"]
        mask = torch.tensor(row["loss_mask"])
        assert torch.equal(seen >= 0, mask), "exactly the sampled tokens have a version"
        assert seen[mask].unique().tolist() == [0, 1]
        expected = torch.where(seen == 0, *(reference_logprobs(model, row, 0.7) for model in (old, new)))
        assert torch.allclose(torch.tensor(row["rollout_logprobs"])[mask], expected[mask], atol=1e-3)
        turns = [seen[turn["start"] : turn["end"]] for turn in row["turns"] if turn["name"] == "assistant"]
        across += sum(len(turn.unique()) == 2 for turn in turns)
    assert across, "the update came in the middle of a turn of some episode"


@pytest.mark.parametrize("fault", ["raises", "hangs", "exits", "crashes", "eats", "nothing", "nan"])
async def test_a_fault_costs_its_samples_and_says_where(worker: RolloutWorker, fault: str) -> None:
    bounds = BOUNDS.model_copy(update={"turn_timeout_s": 2.0 if fault == "hangs" else 30.0})
    for row in await rows(worker, f"{HERE}:Faulty", bounds, replace(REQUEST, samples=2), fault=fault):
        assert row["episode_status"].startswith("environment: turn 2: step: ")
        assert "the last turn: " in row["episode_status"]
        assert len(row["response_ids"]) == len(row["loss_mask"]) > 24, "what was sampled is in the table"


async def test_episodes_start_again_when_their_worker_dies(worker: RolloutWorker) -> None:
    """All episodes of a worker that dies in their middle are played again on another one; none is lost."""
    config = EnvironmentConfig(name=f"{HERE}:Echo", args={"turns": 4}, **BOUNDS.model_dump())
    first, second = (EnvironmentWorker(config, f"environment-{i}") for i in range(2))
    await asyncio.gather(first.start(), second.start())
    link = LocalLink(first)

    class Dying(LocalLink):
        async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
            asked = self.worker
            begun = await super().begin(episode, row, timeout_s)
            if asked is not self.worker:  # it died meanwhile
                raise EnvironmentGone("environment-0 has died")
            return begun

        async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
            if self.worker is first:
                await first.close()
                link.worker = self.worker = second
                raise EnvironmentGone("environment-0 has died")
            return await super().step(worker, episode, message, timeout_s)

    link = Dying(first)
    try:
        await worker.connect_environments("", link)
        summary, table = await worker.generate(REQUEST, PROMPTS)
    finally:
        await second.close()
    assert [sample.status for sample in summary.samples] == ["ok"] * REQUEST.samples
    restarts = [sample.episode.restarts for sample in summary.samples if sample.episode is not None]
    assert sum(restarts) >= 1 and table.num_rows == REQUEST.samples
