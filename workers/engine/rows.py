"""Rows of the ROLLOUTS table: the output of vLLM or of another source, with the prompt.

A group that runs has the rows of its finished samples, and a group can continue from such samples.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from troupe.workers.agents.interface import Played, RecordedTurns, SampledTurn, Segment
from troupe.workers.contract.environments import OK
from troupe.workers.contract.judges import AnswerToken
from troupe.workers.contract.messages import (
    IDENTITY_NAMES,
    ROLLOUTS,
    SEGMENT,
    TURN_REWARD,
    EpisodeSummary,
    FinishedSamples,
    GroupRequest,
    ReferenceResponse,
    SampleSummary,
)
from troupe.workers.contract.routes import write_routes
from troupe.workers.data.plain_text import response_text
from troupe.workers.data.turn_ends import without_end
from troupe.workers.engine.kept_tokens import kept_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput


T = TypeVar("T")

Rows = list[dict[str, Any]]
"""Rows of the ROLLOUTS table."""
Built = tuple[Sequence[SampleSummary], Rows]
"""The samples of a response or an episode, and their rows."""
_NOT_FINITE = "a log-prob of the response is not finite"
_PROBLEM = "engine: "
_TURN_COLUMNS = [
    *("prompt_uid", "sample_index", "response", "response_ids", "rollout_logprobs", "kept_tokens", "sampler_tokens"),
    *("routes", "weight_versions", "finish_reason", "episode_status"),
]


@dataclass(frozen=True)
class RowBuilder:
    """Builds the rows of one group."""

    engine: str
    """Name of the worker."""
    tokenizer: PreTrainedTokenizerBase
    request: GroupRequest
    prompt: dict[str, Any]
    """The row of the PROMPTS pool."""
    prompt_ids: list[int]
    records: bool = False
    """Whether the tokens that the sampler left to each token are part of the rows."""
    routed: bool = False
    """Whether the experts of each token are part of the rows."""
    top_k: int = 0
    """Number of the sampler's likeliest tokens that are part of the rows, at each token."""

    def sampled(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The row of a response that the engine sampled. Raises RuntimeError if vLLM left something out."""
        turn = sampled_turn(output, self.records, self.routed, self.top_k)
        return self._response(index, list(turn.ids)) | {
            "rollout_logprobs": turn.logprobs,
            "kept_tokens": turn.kept if self.records else None,
            "sampler_tokens": turn.likeliest if self.top_k else None,
            "routes": turn.routes,
            "episode_status": _status(OK, turn),
            "weight_versions": turn.versions,
            "finish_reason": turn.finish_reason,
            "generate_s": turn.generate_s,
            "first_token_s": turn.first_token_s,
        }

    def episode(self, index: int, played: Played, player: str | None = None) -> Rows:
        """The rows of an episode, or of a player's part: one, unless the chat template rewrote its history."""
        # An episode that failed before its first prompt has a row too: the sample is accounted for.
        segments = played.segments or [Segment([0])]
        last, names = len(segments) - 1, TURN_REWARD.names
        turn_rewards = [dict(zip(names, one, strict=True)) for one in played.rewards]
        shared = {
            "finish_reason": played.finish_reason,
            "episode_status": _status(played.status, *played.turns),
            "response": played.response,
            "conversation": json.dumps(played.messages, ensure_ascii=False),
            "generate_s": sum(turn.generate_s for turn in played.turns),
            "first_token_s": played.turns[0].first_token_s if played.turns else 0.0,
        }
        return [
            self._response(index, segment.response_ids)
            | shared
            | {
                "segment": number,
                "player": player,
                "prompt_ids": segment.prompt_ids,
                "rollout_logprobs": segment.logprobs,
                "kept_tokens": segment.kept if self.records else None,
                "sampler_tokens": segment.likeliest if self.top_k else None,
                "routes": segment.routes,
                "loss_mask": segment.loss_mask,
                "weight_versions": segment.versions,
                "turns": segment.turns,
                "turn_rewards": turn_rewards if number == last else [],
            }
            for number, segment in enumerate(segments)
        ]

    def turns(self, index: int, recorded: RecordedTurns) -> Rows:
        """The rows of an episode that is not finished; see `FinishedSamples`."""
        return [
            self._response(index, list(turn.ids))
            | {
                "segment": number,
                "prompt_ids": [],
                "rollout_logprobs": turn.logprobs,
                "kept_tokens": turn.kept if self.records else None,
                "sampler_tokens": turn.likeliest if self.top_k else None,
                "routes": turn.routes,
                "episode_status": _status(OK, turn),
                "response": request,
                "weight_versions": turn.versions,
                "finish_reason": turn.finish_reason,
                "generate_s": turn.generate_s,
                "first_token_s": turn.first_token_s,
            }
            for number, (request, turn) in enumerate(recorded.by_request.items())
        ]

    def candidate(self, index: int, ids: list[int]) -> dict[str, Any]:
        """The row of an answer from another source: no engine sampled it, so it has no log-probs and no versions."""
        return self._response(index, ids) | {
            "rollout_logprobs": [math.nan] * len(ids),
            "weight_versions": [],
            "finish_reason": "stop",
            "generate_s": 0.0,
            "first_token_s": 0.0,
        }

    def of_reference(self, index: int, response: ReferenceResponse) -> dict[str, Any]:
        """The row of a response of the reference: a candidate that an engine of another model sampled."""
        given = ("engine", "finish_reason", "generate_s", "first_token_s")
        return self.candidate(index, list(response.ids)) | {name: vars(response)[name] for name in given}

    def _response(self, index: int, ids: list[int]) -> dict[str, Any]:
        """The columns of a row that do not depend on who wrote the response."""
        return {
            "prompt_uid": self.request.prompt_uid,
            "sample_index": index,
            "segment": 0,
            "attempt": self.request.attempt,
            "prompt_ids": self.prompt_ids,
            "response_ids": ids,
            "loss_mask": [True] * len(ids),
            "turns": [{"name": "assistant", "start": 0, "end": len(ids)}] if ids else [],
            "episode_status": OK,
            "response": response_text(self.tokenizer, without_end(self.tokenizer, ids)),
            "messages": self.prompt["messages"],
            "conversation": "",
            "turn_rewards": [],
            "answer": self.prompt["answer"],
            "metadata": self.prompt["metadata"],
            "source": self.prompt["source"],
            "player": None,
            "engine": self.engine,
        }


def _status(status: str, *turns: SampledTurn) -> str:
    """The status of a sample: a sample with a turn that cannot be trained has failed."""
    return next((_PROBLEM + turn.problem for turn in turns if turn.problem), OK) if status == OK else status


def sampled_turn(output: RequestOutput, records: bool = False, routed: bool = False, top_k: int = 0) -> SampledTurn:
    """The engine's sampled turn; `records`: with the tokens that the sampler left; `routed`: with the experts; `top_k`:
    with so many of the likeliest tokens. Raises RuntimeError."""
    completion = output.outputs[0]
    timing = output.metrics
    if timing is None or completion.finish_reason is None:
        raise RuntimeError("vLLM returned no timings, or an unfinished response")
    logprobs = _sampled_logprobs(completion)
    kept, problem = kept_tokens(completion) if records else ((), "")
    return SampledTurn(
        ids=list(completion.token_ids),
        logprobs=logprobs,
        versions=_version_spans(completion),
        finish_reason=completion.finish_reason,
        kept=kept,
        likeliest=_likeliest(flat_logprobs(completion), top_k) if top_k else (),
        routes=_routes(output) if routed else None,
        problem=problem if all(map(math.isfinite, logprobs)) else _NOT_FINITE,
        cached_tokens=output.num_cached_tokens or 0,
        generate_s=max(0.0, timing.last_token_ts - timing.queued_ts),
        first_token_s=max(0.0, timing.first_token_ts - timing.queued_ts),
    )


def _routes(output: RequestOutput) -> bytes:
    """The experts of all tokens that the engine ran: the last one of the response is only sampled."""
    completion, prompt = output.outputs[0], output.prompt_token_ids or []
    tokens, routes = len(prompt) + len(completion.token_ids) - 1, completion.routed_experts
    if routes is None or len(routes) != tokens:
        found = "no experts" if routes is None else f"the experts of {len(routes)} tokens"
        raise RuntimeError(f"vLLM returned {found}; the sequence has {tokens} that it ran")
    return write_routes(routes)


def flat_logprobs(completion: CompletionOutput) -> FlatLogprobs:
    """Log-probabilities, in nats, of the sampled tokens, each followed by those in its place that were asked for."""
    from vllm.logprobs import FlatLogprobs

    flat = completion.logprobs
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(completion.token_ids):
        raise RuntimeError("vLLM did not return one log-probability per sampled token")
    return flat


def _likeliest(flat: FlatLogprobs, top_k: int) -> list[bytes]:
    """`SAMPLER_TOKENS` of each token. The sampled one is the first in its place, and again among the likeliest."""
    found = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        if end - start != 1 + top_k:
            raise RuntimeError(f"vLLM returned {end - start} log-probs in a token's place instead of {1 + top_k}")
        ids, logprobs = flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end]
        found.append(np.array(ids, np.int32).tobytes() + np.array(logprobs, np.float32).tobytes())
    return found


def answer_tokens(logprobs: FlatLogprobs, tokenizer: PreTrainedTokenizerBase) -> tuple[AnswerToken, ...]:
    """The tokens of an answer, with the likeliest ones in their places; tokens of the same text count together."""
    tokens = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        places = dict(zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True))
        by_text: dict[str, float] = {}
        for token, logprob in places.items():
            text = str(tokenizer.decode([token]))
            by_text[text] = float(np.logaddexp(by_text.get(text, -math.inf), logprob))
        tokens.append(AnswerToken(str(tokenizer.decode([logprobs.token_ids[start]])), by_text))
    return tuple(tokens)


def _sampled_logprobs(completion: CompletionOutput) -> list[float]:
    flat = flat_logprobs(completion)
    return [flat.logprobs[start] for start in flat.start_indices]


def _version_spans(completion: CompletionOutput) -> list[dict[str, int]]:
    spans = completion.weight_versions
    if spans is None:
        raise RuntimeError("vLLM did not report the weight versions of a response")
    return [{"version": int(span.version), "start": span.start, "end": span.end} for span in spans]


def sample_summary(
    rows: Rows, version: int, played: Played | None = None, outcome: float | None = None
) -> SampleSummary:
    """Summary of a sample from its rows; `version` is the engine's, for a sample without tokens."""
    versions = [span["version"] for row in rows for span in row["weight_versions"]] or [version]
    lengths = tuple(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    return SampleSummary(
        sample_index=rows[0]["sample_index"],
        prompt_tokens=len(rows[0]["prompt_ids"]),
        response_tokens=sum(len(row["response_ids"]) for row in rows),
        finish_reason=rows[0]["finish_reason"],
        oldest_version=min(versions),
        newest_version=max(versions),
        status=rows[0]["episode_status"],
        segments=lengths if len(lengths) > 1 else (),
        episode=played
        and EpisodeSummary(
            turns=len(played.turns),
            sampled_tokens=sum(len(turn.ids) for turn in played.turns),
            engine_prompt_tokens=played.prompt_tokens,
            cached_tokens=sum(turn.cached_tokens for turn in played.turns),
            environment_s=played.environment_s,
            cut_observations=played.cut_observations,
            compactions=played.compactions,
            restarts=played.restarts,
            info=dict(played.info),
            outcome=outcome,
        ),
        player=rows[0]["player"] or "",
    )


def episode_samples(builder: RowBuilder, index: int, played: Played, players: Sequence[str], version: int) -> Built:
    """The samples of an episode from index `index` on: one, or one for each of the `players` that the policy plays."""
    if not players:
        rows = builder.episode(index, played)
        return [sample_summary(rows, version, played)], rows
    summaries, rows = list[SampleSummary](), Rows()
    for number, player in enumerate(players, index):
        own = played.sample(player)
        part = builder.episode(number, own, player)
        summaries.append(sample_summary(part, version, own, played.outcome(player)))
        rows += part
    return summaries, rows


@dataclass(frozen=True, eq=False)
class RunningGroup(Generic[T]):
    """A group whose samples an engine generates."""

    request: GroupRequest
    tasks: Mapping[int, asyncio.Task[T]]
    """The task of each sample, by its index; of an episode of several players, by the first one's."""
    build: Callable[[int, T], Built]
    """Summaries and rows of what a finished task has sampled."""
    earlier: pa.Table | None = None
    """Rows of `request.finished`."""
    open_rows: Callable[[int], Rows] = lambda index: []
    """Rows of what the unfinished sample of an index keeps of itself; see `FinishedSamples`."""

    def finished(self) -> tuple[FinishedSamples, pa.Table]:
        """The samples that are finished now, including `request.finished`, and their ROLLOUTS table."""
        done = {i: task for i, task in self.tasks.items() if task.done() and not task.cancelled()}
        built = [self.build(i, task.result()) for i, task in done.items() if task.exception() is None]
        summaries = (*self.request.finished, *(summary for own, _ in built for summary in own))
        rows = [row for _, own in built for row in own]
        turns = [row for i, task in self.tasks.items() if not task.done() for row in self.open_rows(i)]
        found = FinishedSamples(self.request.prompt_uid, self.request.attempt, summaries, len(turns))
        return found, merged(self.request, self.earlier, rows + turns)


def recorded_turns(request: GroupRequest, earlier: pa.Table | None) -> dict[int, RecordedTurns]:
    """The recorded turns of the request's unfinished samples that have some, by index; `earlier`: see `merged`."""
    found: dict[int, list[tuple[str, SampledTurn]]] = {}
    missing = set(request.missing)
    for row in [] if earlier is None else earlier.select(_TURN_COLUMNS).to_pylist():
        if row["prompt_uid"] != request.prompt_uid or row["sample_index"] not in missing:
            continue
        turn = SampledTurn(
            ids=row["response_ids"],
            logprobs=row["rollout_logprobs"],
            versions=row["weight_versions"],
            finish_reason=row["finish_reason"],
            kept=row["kept_tokens"] or (),
            likeliest=row["sampler_tokens"] or (),
            routes=row["routes"],
            problem="" if row["episode_status"] == OK else row["episode_status"].removeprefix(_PROBLEM),
        )
        found.setdefault(row["sample_index"], []).append((row["response"], turn))
    return {index: RecordedTurns(turns) for index, turns in found.items()}


def merged(request: GroupRequest, finished: pa.Table | None, rows: Rows) -> pa.Table:
    """The ROLLOUTS table of a group, by sample and segment, of new and finished rows. Raises ValueError."""
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    if finished is None:
        return table
    wanted = {sample.sample_index for sample in request.finished}
    keys = zip(finished["prompt_uid"].to_pylist(), finished["sample_index"].to_pylist(), strict=True)
    own = finished.filter(pa.array([uid == request.prompt_uid and index in wanted for uid, index in keys], pa.bool_()))
    if missing := wanted.difference(own["sample_index"].to_pylist()):
        raise ValueError(f"{request.prompt_uid}: no rows of the finished samples {sorted(missing)}")
    attempt = IDENTITY_NAMES.index("attempt")
    own = own.set_column(attempt, ROLLOUTS.field(attempt), pa.repeat(pa.scalar(request.attempt, pa.int32()), len(own)))
    whole = pa.concat_tables([own.cast(ROLLOUTS), table])
    places = list(zip(whole["sample_index"].to_pylist(), whole[SEGMENT.name].to_pylist(), strict=True))
    return whole.take(pa.array(sorted(range(len(places)), key=places.__getitem__), pa.int64()))
