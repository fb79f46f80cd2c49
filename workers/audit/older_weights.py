"""Older weights instead of a model's current ones, module by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from troupe.workers.contract.audit import TIED_EMBEDDING, WHOLE_MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OlderWeights:
    """The weights of two versions of a model, in groups: a layer, the embedding, the output head, ...

    A tied output head is a separate group: an engine may hold a copy of it that is older than the embedding.
    """

    def __init__(self, model: PreTrainedModel, older: PreTrainedModel) -> None:
        """Unties the heads of both models."""
        self._tied = _untie(model)
        _untie(older)
        self._weights = dict(model.named_parameters())
        self._older = dict(older.named_parameters())
        self._groups = _groups(self._weights)
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
        if self._tied and head in self._groups and embedding in self._groups:
            self._groups[TIED_EMBEDDING] = [*self._groups[embedding], *self._groups[head]]

    def changed(self) -> list[str]:
        """The groups whose weights differ between the versions, the whole model last; none if all are equal."""
        changed = [
            group
            for group, names in self._groups.items()
            if any(not torch.equal(self._weights[name], self._older[name]) for name in names)
        ]
        return [*changed, WHOLE_MODEL] if changed else []

    @contextmanager
    def in_place(self, group: str) -> Iterator[None]:
        """Inside the block the model has the older weights of a group."""
        names = list(self._weights) if group == WHOLE_MODEL else self._groups[group]
        self._swap(names)
        try:
            yield
        finally:
            self._swap(names)

    def _swap(self, names: list[str]) -> None:
        for name in names:
            own, older = self._weights[name], self._older[name]
            own.data, older.data = older.data, own.data


def _untie(model: PreTrainedModel) -> bool:
    """Untie the output head; returns whether it was tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return False
    if head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    return True


def _groups(weights: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Names of weights by module: a numbered layer is one group."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        group = ".".join(parts[:-1] if number is None else parts[: number + 1])
        groups.setdefault(group, []).append(name)
    return groups
