"""Recording of the tokens that vLLM's sampler leaves to each sampled token, as it applies them.

vLLM masks the logits of the others with -inf, in place, before it samples and before it takes the log-probs
(`processed_logprobs`). The finite ones are the set that the token was sampled from, whichever kernel chose it. Its
model runner V2 (on GPUs) returns such sets (`return_sampling_mask`); its runner V1 (on the CPU) is made to return them
the same way, with the tokens and their log-probs: a request that is preempted, stopped or aborted has the sets of its
tokens. Either packs them on the device into a bit for each token and copies them without a wait.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from troupe.workers.contract.kept_tokens import bitmap_words, keeps, write_kept

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

logger = logging.getLogger(__name__)

_GATHER = 0x0102040810204080
"""Eight bytes of 0 or 1 times this have their bits in the highest byte, the first in the lowest one."""


def recording_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """vLLM's own scheduler, which passes on what `record_kept_tokens` records (vLLM calls this by its name). The
    setting of vLLM would also refuse runner V1 and, of each request, a temperature of 0 and no top-k."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = chosen(vllm_config=vllm_config, **arguments)
    scheduler.return_sampling_mask = True
    return scheduler


def record_kept_tokens(runner: Any) -> None:
    """Make a model runner return the sets with its outputs; called once in each process of an engine. An error ends
    no engine: that step's tokens have no sets, as without requests for log-probs under runner V1. Raises
    RuntimeError for a runner whose sampler is not known."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if type(runner.sampler) is SamplerV2:
        vars(runner.sampler).update(return_sampling_mask=True, use_flashinfer=False)  # as vLLM's setting does
        masks: Any = SamplingMaskTensors
        masks.tolists = _sets_of_v2
    elif isinstance(runner, GPUModelRunner) and type(runner.sampler) is Sampler:
        _record_v1(runner)
    else:
        raise RuntimeError(f"the tokens that {type(runner).__name__} leaves to a sample cannot be recorded")


def _sets_of_v2(masks: SamplingMaskTensors, _sampled: Any = None) -> SamplingMaskLists | None:
    """The lists that runner V2 returns instead of ones that hold all tokens if all were left."""
    with _errors_logged():
        bits = masks.packed_mask.numpy()
        bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
        bits[masks.counts.numpy() == 0] = 0  # not written if a request got no token
        return _sets(bits, masks.vocab_size)


def _record_v1(runner: Any) -> None:
    """Wrap the functions of a runner V1 that sample and that return the output of a step."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    sampler = runner.sampler
    sample, sample_tokens = sampler.sample, runner.sample_tokens
    last: list[tuple[torch.Tensor, int]] = []

    def recorded_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = sample(*args, **kwargs)
        if logprobs is not None:
            with _errors_logged():
                # On a GPU this copies to pinned memory, without waiting for it: vLLM's own copies, for which it waits
                # before it reads an output, come after it.
                last[:] = [(_packed(logprobs).to("cpu", non_blocking=True), logprobs.shape[1])]
        return sampled, logprobs

    def recorded_tokens(*args: Any, **kwargs: Any) -> Any:
        last.clear()
        output = sample_tokens(*args, **kwargs)
        if last:
            add = partial(_add_sets, *last.pop())
            if isinstance(output, AsyncGPUModelRunnerOutput):
                vars(output)["get_output"] = lambda read=output.get_output: add(read())
            else:
                add(output)
        return output

    vars(sampler)["sample"] = recorded_sample
    vars(runner)["sample_tokens"] = recorded_tokens


@contextmanager
def _errors_logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("the tokens that the sampler left cannot be recorded")


def _packed(logprobs: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, a multiple of 4]: a bit for each token, 1 where its log-prob is finite, on the same device."""
    rows, vocabulary = logprobs.shape
    kept = logprobs.new_zeros(rows, 32 * (bitmap_words(vocabulary) - 1), dtype=torch.bool)
    torch.gt(logprobs, -torch.inf, out=kept[:, :vocabulary])
    return kept.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def _add_sets(packed: torch.Tensor, vocabulary: int, output: ModelRunnerOutput) -> ModelRunnerOutput:
    """Give an output the sets of its tokens, one for each request: vLLM's scheduler would end the engine with fewer."""
    with _errors_logged():
        if len(packed) < len(output.req_ids):
            raise ValueError(f"{len(packed)} sets for the tokens of {len(output.req_ids)} requests")
        output.sampling_masks = _sets(packed.numpy(), vocabulary)
    return output


def _sets(packed: npt.NDArray[np.uint8], vocabulary: int) -> SamplingMaskLists:
    """Sets in the form of vLLM's own; words replace ids."""
    from vllm.v1.outputs import SamplingMaskLists

    return SamplingMaskLists(*write_kept(packed.view(np.uint32), vocabulary))


def kept_tokens(completion: CompletionOutput) -> tuple[list[bytes], str]:
    """The words of each sampled token of a response, and why they are unknown (each is empty then), or ""."""
    mask, ids = completion.sampling_mask, completion.token_ids
    if mask is None or len(mask.token_ids) != len(ids):
        return [b""] * len(ids), "the tokens that the sampler left were not recorded; the engine's log may say why"
    for token, words in zip(ids, mask.token_ids, strict=True):
        if not keeps(words, token):
            return [b""] * len(ids), f"token {token} is not among those that the sampler left to it"
    return [np.array(words, np.int32).tobytes() for words in mask.token_ids], ""
