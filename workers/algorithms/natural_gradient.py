"""The maths of TRPO's step: products with a Jacobian and the Fisher matrix, and the conjugate gradient method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def tangent(outputs: torch.Tensor, inputs: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> torch.Tensor:
    """How `outputs` change as `inputs` move in these directions: J v, of the shape of `outputs`, by two backward passes
    (J^T u is linear in u, and the derivative of v^T J^T u by u is J v). The graph of `outputs` is kept."""
    cotangent = torch.zeros_like(outputs, requires_grad=True)
    products = torch.autograd.grad(outputs, inputs, cotangent, create_graph=True, allow_unused=True)
    reached = [(product, d) for product, d in zip(products, directions, strict=True) if product is not None]
    if not reached:
        return torch.zeros_like(outputs)
    used, along = zip(*reached, strict=True)
    return torch.autograd.grad(used, cotangent, along, materialize_grads=True)[0]


def fisher_of_logits(logits: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """(diag(p) - p p^T) v of each row of [T, vocabulary], p = softmax(logits): the Fisher matrix of a categorical
    distribution, the Hessian of KL(p || softmax(z)) by z where z is `logits`."""
    shares = torch.softmax(logits, -1)
    moved = shares * directions
    return moved - shares * moved.sum(-1, keepdim=True)


def conjugate_gradients(
    product: Callable[[torch.Tensor], torch.Tensor],
    target: torch.Tensor,
    iterations: int,
    dot: Callable[[torch.Tensor, torch.Tensor], float],
    tolerance: float = 1e-10,
) -> torch.Tensor:
    """The solution x of A x = target, for v -> A v of a positive definite A, after at most so many iterations. Ends
    earlier if the squared residual is below `tolerance` times the target's, or rounding leaves no curvature."""
    solution, residual, direction = torch.zeros_like(target), target.clone(), target.clone()
    square = dot(residual, residual)
    goal = tolerance * square
    for _ in range(iterations):
        if square <= goal:
            break
        image = product(direction)
        curvature = dot(direction, image)
        if not curvature > 0.0:
            break
        length = square / curvature
        solution.add_(direction, alpha=length)
        residual.add_(image, alpha=-length)
        before, square = square, dot(residual, residual)
        direction.mul_(square / before).add_(residual)
    return solution
