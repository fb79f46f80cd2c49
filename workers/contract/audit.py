"""Request and answer of an audit's scorer (`workers/audit.py`).

A hypothesis is a way in which log-probs may have been computed, under a key such as `head:bfloat16` or
`positions:response+1`: the kind of cause, and what it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from troupe.workers.contract.config_base import ModelConfig

Floats = npt.NDArray[np.float64]

WHOLE_MODEL = "the whole model"
"""What `weights:` is about if every weight is the previous version's."""
TIED_EMBEDDING = "the tied embedding"
"""What `weights:` is about if the embedding and the head tied to it are the previous version's."""

MISSING, DOUBLED, STALE = "missing", "doubled", "stale"
"""What `adapter:` is about: no adapter, one that counts twice, the one before."""


@dataclass(frozen=True)
class ScoreRequest:
    """Request to score sampled tokens in plain float32 transformers."""

    model: ModelConfig
    """The model of the run: tokenizer, chat template, data type and precision of the head."""
    weights: str
    """Folder with the weights that sampler and trainer must have."""
    previous: str | None
    """Folder with the weights that the engine served before, or None if it was given no others."""
    temperature: float
    thorough: bool
    """Whether to try hypotheses that need separate passes: other positions, types, rotary angles and epsilons, older
    weights, module by module, and other adapters."""
    compare_prompts: bool
    """Whether the prompts are chats as the data has them, so that their tokens can be compared."""
    threads: int = 0
    """Compute threads; 0 keeps the default of the process."""
    adapter: str | None = None
    """Folder of the adapter on `weights` that sampler and trainer must have."""
    previous_adapter: str | None = None
    """Folder of the adapter that the engine served before, or None if it had none with an effect."""


@dataclass(frozen=True)
class PromptDifference:
    """A prompt whose tokens differ from transformers'."""

    prompt_uid: str
    position: int
    """Position of the first token that differs."""
    expected: str
    """Text of transformers' tokens from there on, cut."""
    found: str


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of the same sampled tokens, in nats; each array has an entry per token, in the order of the tables."""

    sampler: Floats
    trainer: Floats
    scorer: Floats
    """In float32, at the run's temperature."""
    rounded: Floats
    """As `scorer`, with the run's data type and head; for a run in float32, in float64."""
    hypotheses: Mapping[str, Floats]
    """By key. -inf: the token cannot be sampled under the hypothesis."""
    draws: Mapping[str, Floats]
    """[tokens, 2], by the keys of hypotheses about the choice of tokens: the log-prob, and the probability of all
    tokens more probable than the sampled one. Unlike in `hypotheses`, the probabilities of a vocabulary sum to 1."""
    temperatures: Floats
    """[G], ascending; the run's own is among them."""
    tempered: Floats
    """[tokens, G]: as `scorer`, at each temperature."""
    above: Floats
    """[tokens, G]: probability of all tokens more probable than the sampled one, at each temperature."""
    engine: tuple[str, ...]
    """Name of the engine that sampled each token."""
    prompts: int
    """Prompts whose tokens were compared."""
    prompt_differences: tuple[PromptDifference, ...]
