"""Score centering: the mean that a policy's scores have under the sampler, read from the policy's logits.

A score is the gradient of a log-prob. Under the policy its mean is 0; under a sampler whose distribution differs it is
a drift without information on the reward, which compounds with every weight update (arXiv 2609.20807).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from troupe.workers.algorithms.policy_loss import sampler_weights
from troupe.workers.contract.algorithm_config import ImportanceConfig

LEAST_MASS = 1e-6
"""Least probability of all other tokens together: what is left of 1 is rounding below it."""
_LEAST_LOGPROB = -1e4


def mean_scores(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, config: ImportanceConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, mass), both [T], of the log-probs [T, k] of the same k tokens under policy and sampler.

    The gradient of `mean` is that of sum_v sg(q_v w_v) log p_v over the vocabulary, p the policy, q the sampler, w the
    importance weight of a token: the expectation of a sampled token's weighted score. Outside of the k tokens q is
    taken to be rho p, rho = (1 - sum q) / (1 - sum p). As sum_v p_v grad log p_v is 0, that leaves
    sum_{v <= k} sg(q_v w(p_v / q_v) - rho w(1 / rho) p_v) log p_v (arXiv 2609.20807, eq. 12): exact if the k tokens
    are the whole vocabulary or q is so outside, else an approximation. `mass`: what the sampler gave to the k tokens.
    """
    with torch.no_grad():
        likeliest = sampler_logprobs.clamp(min=_LEAST_LOGPROB)
        p, q = logprobs.exp(), likeliest.exp()
        mass = q.double().sum(-1, keepdim=True)
        left = (1.0 - mass).clamp(min=LEAST_MASS).log()
        others = (left - (1.0 - p.double().sum(-1, keepdim=True)).clamp(min=LEAST_MASS).log()).to(p.dtype)
        weights, tail = (sampler_weights(ratio, config)[0] for ratio in (logprobs - likeliest, -others))
        coefs = q * weights - others.exp() * tail * p
    return (coefs * logprobs).sum(-1), mass[:, 0].to(p.dtype)


@dataclass(frozen=True)
class SamplerTokens:
    """Reads `mean_scores` at the sampler's likeliest tokens (`LogitsReader`)."""

    ids: torch.Tensor
    """int64 [T, k]."""
    logprobs: torch.Tensor
    """float32 [T, k]."""
    config: ImportanceConfig

    def of(self, chosen: torch.Tensor | slice) -> SamplerTokens:
        """The reader of these tokens."""
        return SamplerTokens(self.ids[chosen], self.logprobs[chosen], self.config)

    def split(self, parts: int) -> Sequence[SamplerTokens]:
        """The readers of the tokens of each part."""
        each = zip(self.ids.tensor_split(parts), self.logprobs.tensor_split(parts), strict=True)
        return [SamplerTokens(ids, logprobs, self.config) for ids, logprobs in each]

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(mean, mass), both [T], of the policy's logits [T, V]."""
        return mean_scores(logits.gather(-1, self.ids) - logits.logsumexp(-1, keepdim=True), self.logprobs, self.config)
