"""Tokens per second of episodes in an environment, against the same work without one, on the same engine.

    python -m benchmarks.episode_throughput                  # one turn: against the plain path
    python -m benchmarks.episode_throughput --episode-turns 8 --samples 4 --max-tokens 8   # against a bare loop

One engine serves all contenders in turns. `plain` samples one response to every prompt, as without an environment.
`bare` is what one would write by hand around vLLM's `AsyncLLM`: a coroutine for each sample that samples a turn and
appends the fixed tokens of an observation, without a table, an environment process or anything else. `episodes` is the
product: environment workers in Ray actors, each episode in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support.harness import NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter
from benchmarks.support.workload import Settings, add_settings, encode_prompts, grpo_spec, without_eos
from troupe.workers.agents.environments.base import Environment
from troupe.workers.contract.environments import OK, Message, Observation, Row
from troupe.workers.contract.messages import GroupRequest, GroupSummary, engine_prompt_tokens, sampled_tokens
from troupe.workers.contract.roles import RolloutEngine
from troupe.workers.rollout import RolloutWorker

OBSERVATION = "Go on, please."
TIMEOUT_S = 600.0


class FixedTurns(Environment):
    """Says the same after every turn."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    def start(self, row: Row) -> Observation:
        """The prompt."""
        return Observation(row.messages)

    def step(self, message: Message) -> Observation:
        """The observation, or the end."""
        self._left -= 1
        return Observation([{"role": "user", "content": OBSERVATION}], done=not self._left)


class MeasuredEpisodeRollout(RolloutWorker):
    """The product's worker, which can also do the same work by hand on its engine."""

    async def forget_prompts(self) -> None:
        """Empty the prefix cache: contenders share the engine and the prompts."""
        if not await self.engine.require_open().reset_prefix_cache():
            raise RuntimeError("the engine kept its prefix cache")

    async def without_episodes(self, request: GroupRequest, prompts: Any) -> tuple[GroupSummary, Any]:
        """Sample a group on the plain path."""
        return await self.generate(replace(request, environment=None), prompts)

    async def by_hand(self, request: GroupRequest, prompt_ids: list[int], between: list[int], turns: int) -> list[int]:
        """Sample episodes with nothing around the engine; the number of tokens sampled and of those cached."""
        from vllm.inputs.engine import tokens_input

        engine, numbers = self.engine.require_open(), itertools.count()

        async def episode(index: int) -> tuple[int, int]:
            ids, sampled, cached = list(prompt_ids), 0, 0
            for turn in range(turns):
                params = self.generation.sampling_params(replace(request, seed=request.seed + turn), index)
                final: Any = None
                name = f"bare/{request.prompt_uid}/{next(numbers)}"
                async for output in engine.generate(tokens_input(list(ids)), params, name):
                    final = output
                own = list(final.outputs[0].token_ids)
                ids += [*own, *between]
                sampled, cached = sampled + len(own), cached + (final.num_cached_tokens or 0)
            return sampled, cached

        done = await asyncio.gather(*(episode(index) for index in range(request.samples)))
        return [sum(one) for one in zip(*done, strict=True)]


class EpisodeContenders:
    """The product's path and its baseline, each group by group on one engine."""

    def __init__(self, settings: Settings, turns: int, engine: Any, prompts: Any, added: Sequence[Any]) -> None:
        """`added`: of every prompt, its ids; and the ids between two turns."""
        self._settings, self._turns, self._engine, self._prompts = settings, turns, engine, prompts
        self._prompt_ids, self._between = added
        self._serial = itertools.count()

    def _requests(self, turn: int) -> list[GroupRequest]:
        number, size = self._settings.groups, self._settings.samples
        rows = range(turn * number, (turn + 1) * number)
        return [GroupRequest(f"{next(self._serial)}", row, 0, size, seed=1000 * row, environment="") for row in rows]

    async def _measured(
        self, turn: int, one: Callable[[GroupRequest], Coroutine[Any, Any, tuple[int, int, int]]], sampled_turns: int
    ) -> Turn:
        """A turn from a call for each group, which returns (tokens sampled, cached tokens, tokens of prompts)."""
        await self._engine.forget_prompts.remote()
        requests = self._requests(turn)
        meter = Meter()
        parts = await asyncio.gather(*map(one, requests))
        found = meter.turn(sum(part[0] for part in parts))
        sampled, cached, prompts = (sum(part[place] for part in parts) for place in range(3))
        settings = self._settings
        if sampled != (wanted := settings.groups * settings.samples * settings.max_tokens * sampled_turns):
            raise NotCorrect(f"sampled {sampled} tokens, expected {wanted}")
        return replace(found, figures={"prompt tokens from the cache, share": cached / prompts})

    async def episodes(self, turn: int) -> Turn:
        """The product."""

        async def one(request: GroupRequest) -> tuple[int, int, int]:
            return counts((await self._engine.generate.remote(request, self._prompts))[0])

        return await self._measured(turn, one, self._turns)

    async def plain(self, turn: int) -> Turn:
        """The path of a run without an environment."""

        async def one(request: GroupRequest) -> tuple[int, int, int]:
            return counts((await self._engine.without_episodes.remote(request, self._prompts))[0])

        return await self._measured(turn, one, 1)

    async def bare(self, turn: int) -> Turn:
        """A loop by hand."""
        length, between, size = self._settings.max_tokens, len(self._between), self._settings.samples

        async def one(request: GroupRequest) -> tuple[int, int, int]:
            prompt = self._prompt_ids[request.row]
            sampled, cached = await self._engine.by_hand.remote(request, prompt, self._between, self._turns)
            lengths = [len(prompt) + turn * (length + between) for turn in range(self._turns)]
            return sampled, cached, size * sum(lengths)

        return await self._measured(turn, one, self._turns)


def counts(summary: GroupSummary) -> tuple[int, int, int]:
    """(tokens sampled, tokens from the cache, tokens of prompts) of a group. Raises NotCorrect for a failed sample."""
    for sample in summary.samples:
        if sample.status != OK:
            raise NotCorrect(sample.status)
    sampled = sum(sampled_tokens(summary.samples))
    return sampled, summary.cached_tokens, sum(engine_prompt_tokens(summary.samples))


async def measure(given: argparse.Namespace) -> Report:
    """Start engine and environment, and alternate the contenders. Raises NotCorrect."""
    from benchmarks.support.rollout_setup import started
    from troupe.orchestrator.data.prompts import load_pools
    from troupe.orchestrator.live.diff import changed
    from troupe.workers.data.tokenizer import load_chat_tokenizer, token_ids

    settings, turns, episode_turns = Settings.of(given, lengths="fixed"), given.turns, given.episode_turns
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        needed = settings.groups * (turns + 1)
        spec = grpo_spec(settings, without_eos(settings.model, folder / "model"), turns + 1, needed)
        environment = {
            "name": "benchmarks.episode_throughput:FixedTurns",
            "args": {"turns": episode_turns},
            "episodes": settings.groups * settings.samples,
            "max_turns": episode_turns,
            "truncated_turns": "continue",
            "cpus": 0.1,
        }
        longest = spec.roles.rollout.max_model_len + episode_turns * (settings.max_tokens + 32)
        longer = {"roles.environment": environment, "roles.rollout.max_model_len": longest}
        spec = changed(spec, longer, "episode_throughput")
        running = await stack.enter_async_context(
            started(spec, "rollout", "environment", rollout=MeasuredEpisodeRollout)
        )
        engine = running.workers.engines[0]
        link = running.cluster.environment_link(running.workers.each("environment"), "")
        await engine.handle.call(RolloutEngine.connect_environments, TIMEOUT_S, "", link)
        pool, _ = load_pools(spec.data)
        tokenizer: Any = load_chat_tokenizer(spec.model)
        prompts = encode_prompts(Path(spec.model.path), pool.table, range(needed), longest)
        between = f"<|im_end|>\n<|im_start|>user\n{OBSERVATION}<|im_end|>\n<|im_start|>assistant\n"
        added = (prompts, token_ids(tokenizer, between))
        actor = vars(engine.handle)["actor"]
        own = EpisodeContenders(settings, episode_turns, actor, running.cluster.put(pool.table), added)
        other, baseline = (own.plain, "plain") if episode_turns == 1 else (own.bare, "bare")
        both: dict[str, Callable[[int], Any]] = {baseline: other, "episodes": own.episodes}
        taken = await take_turns(both, turns)
        checks = {"tokens sampled": "as many as asked for in every turn of every contender"}
        return Report("episode_throughput", taken, baseline, checks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("episode_throughput", __doc__, 5)
    defaults = {"groups": 8, "samples": 8, "max_tokens": 32, "concurrency": 64, "engines": 1, "threads": 2}
    add_settings(parser, **defaults, seed=17)
    parser.add_argument("--episode-turns", type=int, default=1, help="turns of the policy in an episode (default: 1)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
