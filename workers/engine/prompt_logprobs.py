"""The log-probs that vLLM gives to the tokens of a sequence that it did not sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from troupe.workers.models.prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


async def prompt_logprobs(engine: AsyncLLM, ids: Sequence[int], top_k: int, request_id: str) -> PromptLogprobs | str:
    """The log-probs of a sequence's tokens and of the `top_k` likeliest in their places, or why there are none. vLLM
    samples a token behind the sequence. Raises its errors."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.logprobs import FlatLogprobs
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    found = None
    async for output in engine.generate(tokens_input(list(ids)), params, request_id):
        found = output.prompt_logprobs
    if not isinstance(found, FlatLogprobs):
        return "vLLM returned no log-probs"
    shape = (len(ids) - 1, 1 + top_k)
    if len(found.token_ids) != shape[0] * shape[1]:
        return f"vLLM returned {len(found.token_ids)} log-probs for {len(ids)} tokens"
    given, logprobs = np.asarray(found.token_ids, np.int64), np.asarray(found.logprobs, np.float64)
    return PromptLogprobs(given.reshape(shape), logprobs.reshape(shape))
