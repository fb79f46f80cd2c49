"""Routes of tokens through experts, and tables with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedModel

from troupe.workers.contract.messages import ROUTES, TRAIN


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def own_routes(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """int64 [tokens, layers, k]: what the model's routers choose by themselves."""
    found: list[torch.Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, out: found.append(out[-1])) for one in routers(model)]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return torch.stack([one.view(ids.numel(), -1) for one in found], 1)


def train_table(prompts: list[list[int]], responses: list[list[int]], routes: Sequence[bytes | None]) -> pa.Table:
    """A TRAIN table of samples of one group."""
    columns: dict[str, Any] = {name: [None] * len(prompts) for name in TRAIN.names}
    columns |= {"prompt_uid": ["0-0"] * len(prompts), "sample_index": range(len(prompts)), "prompt_ids": prompts}
    columns |= {"attempt": [0] * len(prompts), "segment": [0] * len(prompts), "response_ids": responses}
    columns |= {"loss_mask": [[True] * len(one) for one in responses], ROUTES.name: routes}
    zeros = [[0.0] * len(one) for one in responses]
    columns |= {"rollout_logprobs": zeros, "advantages": zeros}
    known = [name for name in columns if columns[name][0] is not None or name == ROUTES.name]
    return pa.table({name: pa.array(list(columns[name]), TRAIN.field(name).type) for name in known})
