"""Divergences between the policy and a teacher over more than the sampled token.

Both are compared beside the policy's own logits, of which a chunk of tokens exists at a time. A teacher is known either
by its likeliest tokens, which its worker computed (`TopTokens`, `TopTeacher`), or by the hidden states from which its
output head computes logits in this process (`WholeTeacher`, several of them `WholeTeachers`).

A truncated support has one more outcome: all other tokens together. Merging outcomes never raises a divergence of this
kind, so the result is a lower bound of the divergence over the whole vocabulary: biased, but without a loss only where
both policies agree on every outcome.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import pyarrow as pa
import torch

from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.messages import SQUARE_SUMS, TEACHER_TOKENS

LEAST_LOGPROB = -1e4
"""A log-prob with probability 0, whose product with any probability is finite."""


def divergence(student: torch.Tensor, teacher: torch.Tensor, config: DistillConfig) -> torch.Tensor:
    """Divergence of each token, in nats, [T], of log-probs [T, n] of the same n outcomes.

    With s and t the probabilities under student and teacher: `reverse`: KL(s || t) (MiniLLM, arXiv 2306.08543).
    `forward`: KL(t || s). `jensen_shannon`: beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s (GKD,
    arXiv 2306.13649, eq. 1). `skewed`: KL(t || alpha t + (1 - alpha) s) (DistiLLM, arXiv 2402.03898, sec. 3.1).
    """
    student, teacher = student.clamp(min=LEAST_LOGPROB), teacher.clamp(min=LEAST_LOGPROB)
    match config.divergence:
        case "reverse":
            return _kl(student, teacher)
        case "forward":
            return _kl(teacher, student)
        case "skewed":
            return _kl(teacher, _mixture(teacher, student, config.alpha))
        case "jensen_shannon":
            mixture, beta = _mixture(teacher, student, config.beta), config.beta
            return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[T]: KL(first || second) of log-probs [T, n]."""
    return (first.exp() * (first - second)).sum(-1)


def _mixture(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """Log-probs of the mixture that has this share of the first distribution."""
    return torch.logaddexp(first + math.log(share), second + math.log1p(-share))


def bucketed(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, k + 1]: log-probs of the tokens `ids` [T, k] and all others together, of logits [T, V]. Raises ValueError."""
    if ids.shape[-1] >= logits.shape[-1]:
        raise ValueError(f"algorithm.distill.k must be less than the vocabulary, {logits.shape[-1]} tokens")
    if len(ids) and int(ids.max()) >= logits.shape[-1]:
        raise ValueError(f"the teacher names token {int(ids.max())}, and the policy has only {logits.shape[-1]}")
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), others], -1) - logits.logsumexp(-1, keepdim=True)


class LogitsReader(Protocol):
    """Reads more from the logits of response tokens than the log-prob of the sampled one."""

    def of(self, chosen: torch.Tensor | slice) -> LogitsReader:
        """The reader of these tokens."""
        ...

    def split(self, parts: int) -> Sequence[LogitsReader]:
        """Readers of this many parts of the tokens, divided as `torch.tensor_split` does."""
        ...

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors [T, ...] from float32 logits [T, V], which are divided by the temperature."""
        ...


class ColumnReader(ABC):
    """Reads every token alike. Its tensors become columns beside the scored log-probs."""

    fields: ClassVar[tuple[pa.Field, ...]]

    def of(self, chosen: torch.Tensor | slice) -> Self:
        return self

    def split(self, parts: int) -> Sequence[Self]:
        return [self] * parts

    @abstractmethod
    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A tensor [T, n] for each field; see `LogitsReader.read`."""


class SquareSums(ColumnReader):
    """Reads the sum of the squared probabilities, float32 [T, 1]."""

    fields = (SQUARE_SUMS,)

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (((2.0 * logits).logsumexp(-1, keepdim=True) - 2.0 * logits.logsumexp(-1, keepdim=True)).exp(),)


@dataclass(frozen=True)
class TopTokens(ColumnReader):
    """Reads the `k` likeliest tokens, int64 [T, k], and `bucketed` log-probs, float32 [T, k + 1]."""

    fields = TEACHER_TOKENS
    k: int

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = logits.topk(min(self.k, logits.shape[-1])).indices
        return ids, bucketed(logits, ids).clamp(min=LEAST_LOGPROB)


def top_tokens(k: int) -> TopTokens | None:
    """The reader of the `k` likeliest tokens, or None if `k` is 0."""
    return TopTokens(k) if k else None


@dataclass(frozen=True)
class TopTeacher:
    """Reads the divergences from n teachers over each one's likeliest tokens: their weighted sum. Losses, not
    probabilities are mixed: `forward` and `reverse` then have the gradient of the divergence from the teachers'
    arithmetic or geometric mean, but over the support of each."""

    ids: torch.Tensor
    """int64 [T, n, k]."""
    logprobs: torch.Tensor
    """float32 [T, n, k + 1]: the last is of all other tokens together."""
    weights: torch.Tensor
    """float32 [T, n]."""
    config: DistillConfig

    def of(self, chosen: torch.Tensor | slice) -> TopTeacher:
        """The teacher at these tokens."""
        return TopTeacher(self.ids[chosen], self.logprobs[chosen], self.weights[chosen], self.config)

    def split(self, parts: int) -> Sequence[TopTeacher]:
        """The teacher at the tokens of each part."""
        each = (one.tensor_split(parts) for one in (self.ids, self.logprobs, self.weights))
        return [TopTeacher(ids, own, weights, self.config) for ids, own, weights in zip(*each, strict=True)]

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The divergences [T] of the student's float32 logits [T, V]."""
        each = zip(self.ids.unbind(1), self.logprobs.unbind(1), self.weights.unbind(1), strict=True)
        parts = [weights * divergence(bucketed(logits, ids), own, self.config) for ids, own, weights in each]
        return (torch.stack(parts).sum(0),)


@dataclass(frozen=True)
class WholeTeacher:
    """Reads the divergence from a teacher whose logits are computed along with the student's."""

    states: torch.Tensor
    """[T, ...]: what `logits` takes, of the tokens that this worker has."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """The teacher's logits [T, V or more], before the temperature; those beyond the student's V are padding."""
    temperature: float
    config: DistillConfig

    def of(self, chosen: torch.Tensor | slice) -> WholeTeacher:
        """Itself: a teacher in this process has the tokens that the student has."""
        return self

    def split(self, parts: int) -> Sequence[WholeTeacher]:
        """The teacher at the tokens of each part."""
        return [
            WholeTeacher(states, self.logits, self.temperature, self.config)
            for states in self.states.tensor_split(parts)
        ]

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The divergences [T] of the student's float32 logits [T, V]."""
        with torch.no_grad():
            teacher = self.logits(self.states)[:, : logits.shape[-1]].to(logits.dtype) / self.temperature
        if self.config.support == "full":
            return (divergence(logits.log_softmax(-1), teacher.log_softmax(-1), self.config),)
        ids = logits.detach().topk(min(self.config.k, logits.shape[-1])).indices
        return (divergence(bucketed(logits, ids), bucketed(teacher, ids), self.config),)


@dataclass(frozen=True)
class WholeTeachers:
    """Reads the divergences from n teachers whose logits are computed along with the student's: their weighted sum."""

    teachers: Sequence[WholeTeacher]
    weights: torch.Tensor
    """float32 [T, n]."""

    def of(self, chosen: torch.Tensor | slice) -> WholeTeachers:
        """The teachers at these tokens: their own states are of this worker's tokens already."""
        return WholeTeachers(self.teachers, self.weights[chosen])

    def split(self, parts: int) -> Sequence[WholeTeachers]:
        """The teachers at the tokens of each part."""
        each, weights = [one.split(parts) for one in self.teachers], self.weights.tensor_split(parts)
        return [WholeTeachers([one[part] for one in each], own) for part, own in enumerate(weights)]

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The divergences [T] of the student's float32 logits [T, V]. A teacher without a weight computes nothing."""
        found = logits.new_zeros(len(logits))
        for teacher, weights in zip(self.teachers, self.weights.unbind(-1), strict=True):
            if weights.any():
                found = found + weights * teacher.read(logits)[0]
        return (found,)
