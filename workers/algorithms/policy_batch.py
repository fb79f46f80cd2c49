"""From a micro-batch of a TRAIN table to the inputs of the policy's loss."""

from __future__ import annotations

import torch

from troupe.workers.algorithms.policy_loss import PolicyTokens, token_weights
from troupe.workers.contract.config import PolicyLossConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.models.token_batch import TokenBatch, TokenTable


def policy_tokens(
    table: TokenTable,
    micro_batch: TokenBatch,
    plan: RankPlan,
    config: PolicyLossConfig,
    max_tokens: int,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
) -> PolicyTokens:
    """Inputs of `policy_loss` for one micro-batch.

    The unit of aggregations, and of ratios and weights of a sequence, is the sample: an episode whose history was
    rewritten has several rows and counts once.

    Args:
        table: The TRAIN table that the micro-batch was cut from.
        micro_batch: Rows of the table; with `config.needs_whole_samples` all rows with loss of each sample.
        plan: The rank's plan of the update, which has the totals over all ranks.
        config: The loss.
        max_tokens: Longest response.
        logprobs: [T]: log-probs of the response tokens under the policy, with gradient.
        entropy: [T].

    Raises:
        ValueError: the table has no rollout_logprobs or no advantages.
    """
    rollout_logprobs, advantages = (table.floats(name, micro_batch) for name in ("rollout_logprobs", "advantages"))
    if rollout_logprobs is None or advantages is None:
        raise ValueError("a policy batch needs the columns rollout_logprobs and advantages")
    mask = micro_batch.loss_mask
    sample, sample_tokens = table.samples(micro_batch)
    totals = plan.total_loss_tokens, plan.total_sequences
    return PolicyTokens(
        logprobs=logprobs,
        entropy=entropy,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        weights=token_weights(mask, sample_tokens, config.aggregation, *totals, max_tokens),
        loss_mask=mask,
        sequence=sample,
        old_logprobs=table.floats("old_logprobs", micro_batch),
        ref_logprobs=table.floats("ref_logprobs", micro_batch),
    )
