"""Processes of trainers' ranks."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_IMPORTED_AHEAD = [
    *("troupe.workers.policy", "troupe.workers.critic", "deepspeed", "torch._dynamo", "tests.real.models"),
    *("transformers.models.llama.modeling_llama", "tests.workers.models.test_token_batch"),
]
"""What every rank imports, which takes six seconds."""


def rank_context() -> ForkServerContext:
    """Starts ranks as forks of a process that has imported what they need, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_AHEAD)
    return context
