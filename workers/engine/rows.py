"""Rows of the ROLLOUTS table: what vLLM returns, or what another source wrote, beside the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.contract.messages import GroupRequest, SampleSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.outputs import CompletionOutput, RequestOutput


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

    def sampled(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The row of a response that the engine sampled. Raises RuntimeError if vLLM left something out."""
        completion = output.outputs[0]
        timing = output.metrics
        if timing is None:
            raise RuntimeError(f"{self.engine}: vLLM returned no timings")
        return self._response(index, list(completion.token_ids)) | {
            "rollout_logprobs": _sampled_logprobs(completion),
            "weight_versions": _version_spans(completion),
            "finish_reason": completion.finish_reason,
            "generate_s": max(0.0, timing.last_token_ts - timing.queued_ts),
            "first_token_s": max(0.0, timing.first_token_ts - timing.queued_ts),
        }

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
            "attempt": self.request.attempt,
            "prompt_ids": self.prompt_ids,
            "response_ids": ids,
            "loss_mask": [True] * len(ids),
            "turns": [{"name": "assistant", "start": 0, "end": len(ids)}] if ids else [],
            "response": self.tokenizer.decode(ids, skip_special_tokens=True),
            "messages": self.prompt["messages"],
            "answer": self.prompt["answer"],
            "metadata": self.prompt["metadata"],
            "engine": self.engine,
        }


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
    )
