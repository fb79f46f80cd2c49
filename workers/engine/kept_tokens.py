"""Recording of the tokens that vLLM's sampler leaves to each sampled token, as it applies them.

vLLM masks the logits of the others with -inf, in place, before it samples and before it takes the log-probs
(`processed_logprobs`). What is finite there is the set that the token was sampled from, whatever kernel chose it. vLLM
returns such sets (`return_sampling_mask`) from one of its two model runners, for a top-k alone, and refuses greedy
requests then. Here its other runner, the one of the CPU, gives them on the way that vLLM has for them, with the tokens
and their log-probs: a request that is preempted, stopped or aborted has the sets of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from troupe.workers.contract.kept_tokens import Words, keeps, write_kept

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import SamplingMaskLists


def recording_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """vLLM's own scheduler, which passes on what `record_kept_tokens` records (vLLM calls this by its name).

    The setting of vLLM would also refuse the runner and, of each request, a temperature of 0 and no top-k.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = chosen(vllm_config=vllm_config, **arguments)
    scheduler.return_sampling_mask = True
    return scheduler


def record_kept_tokens(runner: Any) -> None:
    """Have a model runner return the sets with its outputs; called once, in each process of an engine.

    Raises:
        RuntimeError: it is another runner than the one whose sampler is known.
    """
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    sampler: Any = runner.sampler
    if not (isinstance(runner, GPUModelRunner) and type(sampler) is Sampler):
        raise RuntimeError(f"the tokens that {type(runner).__name__} leaves to a sample cannot be recorded")
    sample, sample_tokens = sampler.sample, runner.sample_tokens
    last: list[SamplingMaskLists] = []

    def recorded_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = sample(*args, **kwargs)
        if logprobs is None:
            raise RuntimeError("vLLM's sampler returned no log-probs")
        last[:] = [_as_lists(write_kept((logprobs > -torch.inf).cpu().numpy()))]
        return sampled, logprobs

    def recorded_tokens(*args: Any, **kwargs: Any) -> Any:
        last.clear()
        output = sample_tokens(*args, **kwargs)
        if last:
            inner = output._model_runner_output if isinstance(output, AsyncGPUModelRunnerOutput) else output
            inner.sampling_masks = last.pop()
        return output

    vars(sampler)["sample"] = recorded_sample
    vars(runner)["sample_tokens"] = recorded_tokens


def _as_lists(rows: Sequence[Words]) -> SamplingMaskLists:
    """One row for each request of a step, in the form of vLLM's own sets; words are instead of ids."""
    from vllm.v1.outputs import SamplingMaskLists

    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return SamplingMaskLists(np.concatenate([np.empty(0, np.int32), *rows]), offsets)


def kept_tokens(completion: CompletionOutput) -> list[bytes]:
    """The words of each sampled token of a response.

    Raises:
        RuntimeError: vLLM did not return the sets, or a token is not in its own.
    """
    mask = completion.sampling_mask
    if mask is None or len(mask.token_ids) != len(completion.token_ids):
        raise RuntimeError("vLLM did not return the tokens that it left to each sampled token")
    for token, words in zip(completion.token_ids, mask.token_ids, strict=True):
        if not keeps(words, token):
            raise RuntimeError(f"vLLM sampled token {token}, which is not among those that it left to it")
    return [np.array(words, np.int32).tobytes() for words in mask.token_ids]
