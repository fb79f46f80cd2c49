"""Algorithms of a user's own, as tests name them: right ones, and ones with a mistake each."""

from __future__ import annotations

import torch

from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.algorithms.custom import CustomAlgorithm, GroupRewards, LossTokens, TokenLoss

NUMBER = 3


def _ratio(tokens: LossTokens) -> torch.Tensor:
    return (tokens.logprobs - tokens.old_logprobs).exp()


def _group_mean(batch: SampledTokens) -> torch.Tensor:
    groups = int(batch.groups.max()) + 1
    means = torch.stack([batch.rewards[batch.groups == group].mean() for group in range(groups)])
    return (batch.rewards - means[batch.groups])[batch.sequence]


def mean_baseline(scale: float = 1.0) -> CustomAlgorithm:
    """dr_grpo's advantage and an unclipped ratio."""

    def loss(tokens: LossTokens) -> TokenLoss:
        return TokenLoss(-tokens.advantages * _ratio(tokens) * scale, {"far": (_ratio(tokens) - 1).abs() > 0.04})

    return CustomAlgorithm(base="dr_grpo", advantage=_group_mean, loss=loss, keep_group=_not_all_equal)


def _not_all_equal(group: GroupRewards) -> bool:
    return len(set(group.rewards)) > 1


detached = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(-tokens.advantages * _ratio(tokens).detach() * tokens.logprobs), stops_gradient=True
)
detached_by_mistake = CustomAlgorithm(loss=detached.loss)
pulls_to_reference = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(
        -tokens.advantages * _ratio(tokens) + 0.5 * (tokens.logprobs - tokens.ref_logprobs) ** 2  # pyright: ignore[reportOperatorIssue]
    )
)
divides_by_zero = CustomAlgorithm(advantage=lambda batch: (batch.rewards / (batch.rewards.std()))[batch.sequence])
by_position = CustomAlgorithm(advantage=lambda batch: torch.arange(len(batch.rollout_logprobs)).double())
own_advantage = CustomAlgorithm(advantage=_group_mean)
per_sample = CustomAlgorithm(advantage=lambda batch: batch.rewards)
overflows = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(-tokens.advantages * (20 * tokens.logprobs).abs().exp().exp())
)
mixes_sequences = CustomAlgorithm(loss=lambda tokens: TokenLoss(-_ratio(tokens) * tokens.logprobs.mean()))
sees_masked = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(-_ratio(tokens) * torch.bincount(tokens.sequence)[tokens.sequence])
)
no_gradient = CustomAlgorithm(loss=lambda tokens: TokenLoss(tokens.advantages))
needs_reference = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(tokens.logprobs - tokens.ref_logprobs)  # pyright: ignore[reportOperatorIssue]
)
corrected_twice = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(-tokens.advantages * (tokens.logprobs - tokens.rollout_logprobs).exp())
)
corrected_alone = CustomAlgorithm(base="raft", loss=corrected_twice.loss)
drops_far_tokens = CustomAlgorithm(
    loss=lambda tokens: TokenLoss(
        -tokens.advantages * _ratio(tokens) * ((tokens.old_logprobs - tokens.rollout_logprobs).abs() < 0.5)
    )
)
reshapes = CustomAlgorithm(
    advantage=lambda batch: (batch.rewards.view(2, -1) - batch.rewards.view(2, -1).mean(1, keepdim=True)).flatten()[
        batch.sequence
    ]
)
alone_is_nan = CustomAlgorithm(
    advantage=lambda batch: torch.cat(
        [
            (own - own.mean()) / (own.std() + 1e-4)
            for group in batch.groups.unique()
            if len(own := batch.rewards[batch.groups == group])
        ]
    )[batch.groups.argsort(stable=True).argsort()][batch.sequence]
)
by_length = CustomAlgorithm(
    advantage=lambda batch: (batch.rewards / batch.lengths - (batch.rewards / batch.lengths).mean())[batch.sequence]
)
vague_filter = CustomAlgorithm(keep_group=lambda group: len(group.rewards))  # pyright: ignore[reportArgumentType]
ordered_filter = CustomAlgorithm(keep_group=lambda group: group.rewards[0] > 0)
nothing = CustomAlgorithm()
other_base = CustomAlgorithm(base="grp", loss=detached.loss)
