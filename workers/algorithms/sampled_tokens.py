"""What advantage estimators see of a batch: the tokens that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SampledTokens:
    """One batch of N samples with T tokens sampled by the policy in total."""

    rewards: torch.Tensor
    """float64 [N]."""
    groups: torch.Tensor
    """int64 [N]: number of the sample's group, from 0."""
    lengths: torch.Tensor
    """int64 [N]: tokens of each sample."""
    rollout_logprobs: torch.Tensor
    """[T]."""
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    values: torch.Tensor | None
    prompt_rows: tuple[int, ...] = ()
    """Row of the prompt pool of each group (smooth_group)."""
    greedy_rewards: torch.Tensor | None = None
    """float64 [N]: reward of the greedy response to the sample's prompt (greedy baseline)."""
    steps: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Process rewards: (rewards float64 [M], tokens up to the step's end int64 [M], sample number int64 [M])."""
    masked: torch.Tensor | None = None
    """bool [N]: samples without loss. Other samples are compared with them, but whitening leaves their tokens out."""

    @property
    def sequence(self) -> torch.Tensor:
        """int64 [T]: the sample each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def with_loss(self) -> torch.Tensor:
        """bool [T]: tokens of the samples that are not masked."""
        masked = torch.zeros(len(self.lengths), dtype=torch.bool) if self.masked is None else self.masked
        return ~masked[self.sequence]
