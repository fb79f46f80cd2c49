"""Rows of the ROLLOUTS table: the output of vLLM or of another source, with the prompt."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from troupe.workers.agents.interface import Played, SampledTurn, Segment
from troupe.workers.contract.environments import OK
from troupe.workers.contract.messages import EpisodeSummary, GroupRequest, SampleSummary
from troupe.workers.data.response_text import response_text
from troupe.workers.data.turn_ends import without_end
from troupe.workers.engine.kept_tokens import kept_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.outputs import CompletionOutput, RequestOutput


_NOT_FINITE = "a log-prob of the response is not finite"


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

    def sampled(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The row of a response that the engine sampled. Raises RuntimeError if vLLM left something out."""
        turn = sampled_turn(output, self.records)
        return self._response(index, list(turn.ids)) | {
            "rollout_logprobs": turn.logprobs,
            "kept_tokens": turn.kept if self.records else None,
            "episode_status": _status(OK, turn),
            "weight_versions": turn.versions,
            "finish_reason": turn.finish_reason,
            "generate_s": turn.generate_s,
            "first_token_s": turn.first_token_s,
        }

    def episode(self, index: int, played: Played) -> list[dict[str, Any]]:
        """The rows of an episode: one, unless the chat template rewrote its history."""
        # An episode that failed before its first prompt has a row too: the sample is accounted for.
        segments = played.segments or [Segment([0])]
        last = len(segments) - 1
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
                "prompt_ids": segment.prompt_ids,
                "rollout_logprobs": segment.logprobs,
                "kept_tokens": segment.kept if self.records else None,
                "loss_mask": segment.loss_mask,
                "weight_versions": segment.versions,
                "turns": segment.turns,
                "turn_rewards": [{"end": end, "reward": r} for end, r in played.rewards] if number == last else [],
            }
            for number, segment in enumerate(segments)
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
            "engine": self.engine,
        }


def _status(status: str, *turns: SampledTurn) -> str:
    """The status of a sample: a sample with a turn that cannot be trained has failed."""
    return next((f"engine: {turn.problem}" for turn in turns if turn.problem), OK) if status == OK else status


def sampled_turn(output: RequestOutput, records: bool = False) -> SampledTurn:
    """The engine's sampled turn for one prompt. Raises RuntimeError if vLLM left something out.

    Args:
        output: Output of vLLM.
        records: Whether the engine recorded the tokens that the sampler left to each one.
    """
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
        problem=problem if all(map(math.isfinite, logprobs)) else _NOT_FINITE,
        cached_tokens=output.num_cached_tokens or 0,
        generate_s=max(0.0, timing.last_token_ts - timing.queued_ts),
        first_token_s=max(0.0, timing.first_token_ts - timing.queued_ts),
    )


def _sampled_logprobs(completion: CompletionOutput) -> list[float]:
    """[response tokens] log-probabilities, in nats, of the sampled tokens."""
    from vllm.logprobs import FlatLogprobs

    flat = completion.logprobs
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(completion.token_ids):
        raise RuntimeError("vLLM did not return one log-probability per sampled token")
    return [flat.logprobs[start] for start in flat.start_indices]


def _version_spans(completion: CompletionOutput) -> list[dict[str, int]]:
    spans = completion.weight_versions
    if spans is None:
        raise RuntimeError("vLLM did not report the weight versions of a response")
    return [{"version": int(span.version), "start": span.start, "end": span.end} for span in spans]


def episode_summary(rows: list[dict[str, Any]], played: Played, version: int) -> SampleSummary:
    """Summary of an episode from its rows. `version`: current version of the engine, for one without tokens."""
    versions = [span["version"] for row in rows for span in row["weight_versions"]] or [version]
    lengths = tuple(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    return SampleSummary(
        sample_index=rows[0]["sample_index"],
        prompt_tokens=len(rows[0]["prompt_ids"]),
        response_tokens=played.response_tokens,
        finish_reason=played.finish_reason,
        oldest_version=min(versions),
        newest_version=max(versions),
        status=rows[0]["episode_status"],
        segments=lengths if len(lengths) > 1 else (),
        episode=EpisodeSummary(
            turns=len(played.turns),
            sampled_tokens=sum(len(turn.ids) for turn in played.turns),
            engine_prompt_tokens=played.prompt_tokens,
            cached_tokens=sum(turn.cached_tokens for turn in played.turns),
            environment_s=played.environment_s,
            cut_observations=played.cut_observations,
            restarts=played.restarts,
            info=dict(played.info),
        ),
    )


def sample_summary(row: dict[str, Any], version: int) -> SampleSummary:
    """Summary of one row. `version`: current version of the engine, for a response without tokens."""
    versions = [span["version"] for span in row["weight_versions"]] or [version]
    return SampleSummary(
        sample_index=row["sample_index"],
        prompt_tokens=len(row["prompt_ids"]),
        response_tokens=len(row["response_ids"]),
        finish_reason=row["finish_reason"],
        oldest_version=min(versions),
        newest_version=max(versions),
        status=row["episode_status"],
    )
