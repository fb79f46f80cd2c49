"""TRPO's update of a policy: a natural gradient step with a line search (arXiv 1502.05477, appendix C)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from troupe.workers.algorithms.natural_gradient import conjugate_gradients, fisher_of_logits, tangent
from troupe.workers.algorithms.policy_loss import exact_kl
from troupe.workers.contract.algorithm_config import NaturalGradientConfig
from troupe.workers.contract.config_base import Device
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.ragged import Ragged
from troupe.workers.models.token_batch import TokenBatch, filler_batch
from troupe.workers.training.deepspeed_engine import Forward, StepResult
from troupe.workers.training.group import all_reduce
from troupe.workers.training.optimizer import gradient_norm, pieces
from troupe.workers.training.rank import OutputT, Work

Measure = Callable[[torch.Tensor], tuple[float, float]]
"""From flat parameters to (mean KL(old || new), how much lower the loss is)."""

logger = logging.getLogger(__name__)


class NaturalGradient:
    """Moves the parameters of a module, which every rank holds whole and in float32. Methods are collective.

    With the gradient g of the loss and the Fisher matrix F, the mean over the tokens that the policy sampled, conjugate
    gradients solve (F + damping I) x = g. The step -sqrt(2 max_kl / x^T F x) x has the divergence `max_kl` to second
    order. It is shortened until the loss is lower and the exact mean KL(old || new) within `max_kl`: only then are the
    parameters written."""

    def __init__(self, module: CausalLogprobs, config: NaturalGradientConfig, device: Device) -> None:
        """Raises ValueError if the model cannot be differentiated twice."""
        self._module = module
        self._config = config
        self._device: Device = device
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._head = [p for p in module.head_parameters if p.requires_grad]
        embedding = module.model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.sparse = False  # a sparse gradient has no derivative
        self._require_products()

    def step(
        self, work: Sequence[Work[OutputT]], loss_of: Callable[[Forward, Work[OutputT]], torch.Tensor]
    ) -> StepResult:
        """One update on the sum over micro-batches and ranks of `loss_of(forward, work)`; the learning rate of the
        result is the factor on x. Nothing moves if the gradient is not finite, or no length of the step passes."""
        gradient, loss, batches = self._gradient(work, loss_of)
        norm = gradient_norm([gradient])
        if not math.isfinite(norm) or not math.isfinite(loss):
            return StepResult(math.inf, 0.0, skipped=True)
        tokens = self._sum(len(batch.positions) for batch in batches)

        def damped(vector: torch.Tensor) -> torch.Tensor:
            return self._fisher_product(batches, vector, tokens).add_(vector, alpha=self._config.damping)

        direction = conjugate_gradients(damped, gradient, self._config.cg_iterations, self._dot)
        curvature = self._dot(direction, self._fisher_product(batches, direction, tokens))
        rate = math.sqrt(2.0 * self._config.max_kl / curvature) if curvature > 0.0 else 0.0

        @torch.no_grad()
        def measure(candidate: torch.Tensor) -> tuple[float, float]:
            with self._replaced(candidate):
                moved_loss = self._sum(float(compute(self._module)[1].loss) for compute in work)
            divergence = self._sum(self._divergence(batch, candidate) for batch in batches)
            return divergence / max(tokens, 1.0), loss - moved_loss

        length, metrics = self._search(direction.mul_(-rate), measure)
        return StepResult(norm, rate * length, skipped=False, metrics=metrics)

    def _gradient(
        self, work: Sequence[Work[OutputT]], loss_of: Callable[[Forward, Work[OutputT]], torch.Tensor]
    ) -> tuple[torch.Tensor, float, list[TokenBatch]]:
        """(flat gradient, loss), both of all micro-batches and ranks, and the states at which this rank's policy
        sampled."""
        total, losses, batches = self._zeros(), [], []

        def keeping(compute: Work[OutputT], forward: Forward) -> tuple[TokenBatch, OutputT]:
            batch, output = compute(forward)
            batches.append(batch.sampled())
            return batch, output

        for compute in work:
            loss = loss_of(self._module, lambda forward, compute=compute: keeping(compute, forward))
            losses.append(float(loss.detach()))
            total += _flat(torch.autograd.grad(loss, self._parameters, materialize_grads=True))
        dist.all_reduce(total)
        return total, self._sum(losses), batches

    def _search(self, step: torch.Tensor, measure: Measure) -> tuple[float, dict[str, float]]:
        """(share of the step that was taken, 0 if it was rejected; metrics)."""
        start = _flat([parameter.detach() for parameter in self._parameters])
        length, metrics = 1.0, {"step_length": 0.0, "surrogate_gain": 0.0, "kl_step": 0.0, "rejected_steps": 1.0}
        for attempt in range(self._config.attempts):
            candidate = torch.add(start, step, alpha=length)
            divergence, gain = measure(candidate)
            if attempt == 0:
                metrics["kl_proposed"] = divergence
            # A number that is not finite passes neither comparison.
            if gain > 0.0 and divergence <= self._config.max_kl:
                for parameter, values in self._shaped(candidate):
                    parameter.data.copy_(values)
                found = {"step_length": length, "surrogate_gain": gain, "kl_step": divergence, "rejected_steps": 0.0}
                return length, metrics | found
            length *= self._config.backtrack
        logger.warning("the step is rejected: no length lowers the loss and is within max_kl")
        return 0.0, metrics

    def _divergence(self, batch: TokenBatch, candidate: torch.Tensor) -> float:
        """KL(old || new), summed over the states of a batch, a chunk of logits at a time."""
        module, total = self._module, 0.0
        old_states, kept = module.predictors(batch)
        with self._replaced(candidate):
            new_states, _ = module.predictors(batch)
        for old_part, new_part, left in _chunks(module.chunks, kept, old_states, new_states):
            old = module.sampled_logits(old_part, left).log_softmax(-1)
            with self._replaced(candidate):
                new = module.sampled_logits(new_part, left).log_softmax(-1)
            total += float(exact_kl(old, new).double().sum())
        return total

    def _fisher_product(self, batches: Sequence[TokenBatch], vector: torch.Tensor, tokens: float) -> torch.Tensor:
        """F `vector`, the mean over the states of the batches of all ranks."""
        total, directions = self._zeros(), dict(self._shaped(vector))
        with sdpa_kernel(SDPBackend.MATH):  # the gradients of torch's fast kernels have no derivative
            for batch in batches:
                total += self._product_of(batch, directions)
        dist.all_reduce(total)
        return total.div_(max(tokens, 1.0))

    def _product_of(self, batch: TokenBatch, along: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """sum_t J_t^T (diag(p_t) - p_t p_t^T) J_t v over the states of a batch, J_t the Jacobian of their logits. The
        logits are computed a chunk at a time."""
        module, parameters, head = self._module, self._parameters, self._head
        states, kept = module.predictors(batch)
        moved_states = tangent(states, parameters, list(along.values()))
        of_states, of_head = [], {parameter: torch.zeros_like(parameter) for parameter in head}
        for part, moved, left in _chunks(module.chunks, kept, states.detach(), moved_states):
            inputs = [part.requires_grad_(), *head]
            logits = module.sampled_logits(part, left)
            moved_logits = tangent(logits, inputs, [moved, *(along[parameter] for parameter in head)])
            by_logits = fisher_of_logits(logits.detach(), moved_logits)
            by_part, *by_head = torch.autograd.grad(logits, inputs, by_logits, materialize_grads=True)
            of_states.append(by_part)
            for total, found in zip(of_head.values(), by_head, strict=True):
                total += found
        found = torch.autograd.grad(states, parameters, torch.cat(of_states), materialize_grads=True)
        return _flat([of + of_head[p] if p in of_head else of for p, of in zip(parameters, found, strict=True)])

    def _require_products(self) -> None:
        """Raise ValueError if the model has no second derivative, tried on a few tokens."""
        ids = torch.arange(4)
        batch = replace(
            filler_batch(), input_ids=ids[None], attention_mask=torch.ones(1, 4, dtype=torch.int64), positions=ids
        )
        try:
            self._fisher_product([batch.to(self._parameters[0].device)], self._zeros(), 4.0)
        except (RuntimeError, NotImplementedError) as error:
            kind = type(self._module.model).__name__
            raise ValueError(f"{kind} has no second derivative, which trpo's products need: {error}") from error

    def _shaped(self, vector: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Every parameter, and its part of a flat vector."""
        parts = vector.split([parameter.numel() for parameter in self._parameters])
        return ((parameter, part.view_as(parameter)) for parameter, part in zip(self._parameters, parts, strict=True))

    @contextmanager
    def _replaced(self, vector: torch.Tensor) -> Iterator[None]:
        """The module has a flat vector's values as its parameters in the block, without a copy."""
        own = [parameter.data for parameter in self._parameters]
        try:
            for parameter, values in self._shaped(vector):
                parameter.data = values
            yield
        finally:
            for parameter, values in zip(self._parameters, own, strict=True):
                parameter.data = values

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(sum(p.numel() for p in self._parameters), device=self._parameters[0].device)

    def _sum(self, values: Iterable[float]) -> float:
        return all_reduce({"sum": sum(values)}, self._device, "sum")["sum"]

    def _dot(self, left: torch.Tensor, right: torch.Tensor) -> float:
        """The product of two vectors, equal on all ranks: one that stopped alone would leave the others waiting."""
        own = sum(float(torch.dot(a.double(), b.double())) for a, b in zip(pieces(left), pieces(right), strict=True))
        return all_reduce({"dot": own}, self._device, "max")["dot"]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _chunks(
    count: int, kept: Ragged | None, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Ragged | None]]:
    """Parts of two tensors [T, ...], and of the tokens that were left to each state."""
    one, other = (tensor.tensor_split(count) for tensor in tensors)
    return zip(one, other, [None] * count if kept is None else kept.split(count), strict=True)
