"""Tests whether an engine's adapters have an effect: log-probs of a few tokens, with them and without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_TOKENS = tuple(range(1, 13))
_LEAST = 1e-3
"""Nats by which some log-prob must differ. A probe's adapters change them by much more."""


async def probe_logprobs(engine: AsyncLLM, adapter: LoRARequest | None) -> list[float]:
    """Log-probs of some tokens after the others. `adapter`: None for the model below."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    name = "probe" if adapter is not None else "probe-without"
    final: RequestOutput | None = None
    async for output in engine.generate(tokens_input(list(_TOKENS)), params, name, lora_request=adapter):
        final = output
    if final is None or final.prompt_logprobs is None:
        raise RuntimeError("vLLM returned no log-probs of a probe")
    scores = zip(final.prompt_logprobs, _TOKENS, strict=True)
    return [known[token].logprob for known, token in scores if known is not None]


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether some of the log-probs differ by more than rounding."""
    gaps = (abs(a - b) for a, b in zip(one, other, strict=True))
    return any(gap > _LEAST or math.isnan(gap) for gap in gaps)
