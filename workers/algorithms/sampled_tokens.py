"""What advantage estimators see of a batch: the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Iterator
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

    sources: tuple[str, ...] = ()
    """[N] name of the source of each sample's prompt, within which batch-wide statistics are computed; if empty, they
    are computed over all samples."""

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of the source, bool [N]: its samples) for each part with separate statistics; one without a name if
        they are computed over all samples."""
        if not self.sources:
            yield "", torch.ones(len(self.rewards), dtype=torch.bool)
        for name in dict.fromkeys(self.sources):
            yield name, torch.tensor([own == name for own in self.sources])

    @property
    def sequence(self) -> torch.Tensor:
        """int64 [T]: the sample each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def with_loss(self) -> torch.Tensor:
        """bool [T]: tokens of the samples that are not masked."""
        masked = torch.zeros(len(self.lengths), dtype=torch.bool) if self.masked is None else self.masked
        return ~masked[self.sequence]
